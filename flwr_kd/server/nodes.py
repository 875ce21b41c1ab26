"""The clients of a run: which are there, which of them fit, and which are asked again."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping
from logging import INFO, WARNING
from typing import Any, TypeVar

from flwr.common.constant import ErrorCode
from flwr.common.logger import log
from flwr.serverapp import Grid

from flwr_kd.seeding import numpy_generator
from flwr_kd.server.records import HandshakeError, Node
from flwr_kd.text import plain
from flwr_kd.transport import flower_records
from flwr_kd.transport.delivery import lifetime, pauses, reason_of, receive
from flwr_kd.transport.payload import PayloadError

__all__ = ["MEDIANS", "Roster", "draw"]

T = TypeVar("T")
MEDIANS = 10
"""Default of ``max_examples``, in medians of the clients' sample counts.

Ten leaves honest clients what they have: the largest of ten parts by Dirichlet(0.1) is beyond it in 3 of 1,000
draws, by Dirichlet(0.3) in none. One of ten clients of equal sizes has at most 10/19 of the weight.
"""
_NO_BOUND = 2**53
_HANDSHAKE_SECONDS, _SOONEST_HANDSHAKE, _LATEST_HANDSHAKE = 120.0, 1.0, 3600.0
_GRACE_SECONDS = 60.0
_TRIES = 3
_ITS_OWN_FAULT = (ErrorCode.CLIENT_APP_RAISED_EXCEPTION, ErrorCode.LOAD_CLIENT_APP_EXCEPTION)
# The next question would have the same answer: the client's code or settings must change first. Other errors, such
# as those of the disk, the network or the memory, may pass.
_LASTING = (
    *("ConfigError", "DataError", "DatasetError", "PayloadError"),
    *("AssertionError", "AttributeError", "ImportError", "IndexError", "KeyError", "ModuleNotFoundError"),
    *("NameError", "NotImplementedError", "SyntaxError", "TypeError", "ValueError"),
)


class Roster:
    """The clients of one run.

    Parameters
    ----------
    refusal : callable
        Returns why a client cannot take part; None if it can.
    question : mapping
        Scalars that are sent in the handshake.
    timeout : float
        Seconds to wait for clients; for the reply to a handshake at most two minutes.

    Attributes
    ----------
    nodes : dict
        By node id, the clients that fit, and have been connected since their handshake.
    refused, malformed : dict
        By node id, why a client does not fit, or what was wrong with its handshake.
    """

    def __init__(
        self, refusal: Callable[[Node], str | None], question: Mapping[str, Any], timeout: float
    ) -> None:
        self._refusal, self._question, self._timeout = refusal, dict(question), timeout
        self.nodes: dict[int, Node] = {}
        self.refused: dict[int, str] = {}
        self.malformed: dict[int, str] = {}
        self._known: dict[int, Node] = {}
        self._candidates: list[Node] = []
        self._retries: dict[int, tuple[float, float]] = {}
        self._raised: dict[int, tuple[int, str]] = {}
        self._logged: set[tuple[int, str]] = set()
        self._doubles: set[int] = set()
        self._tied = False

    @property
    def most_examples(self) -> int:
        """The largest believable number of training samples: 10 times the median of all accepted clients.

        Of an even number of clients it is the lower of the two medians, so that one of two cannot raise it. Clients
        without samples are not counted. Where no client has any, there is no bound.
        """
        counts = [node.num_examples for node in self._known.values() if node.num_examples]
        return MEDIANS * statistics.median_low(counts) if counts else _NO_BOUND

    def common(
        self,
        kind: Callable[[Node], T],
        node: Node,
        among: Callable[[Node], bool] = lambda _: True,
        shown: Callable[[T], str] = str,
    ) -> T:
        """Return what most clients have.

        The accepted clients are counted. Before any was accepted, all that took part in the first handshakes are
        counted, so that one client alone does not decide.

        Parameters
        ----------
        kind : callable
            Returns what is compared, for example the number of classes.
        node : Node
            Stands for the others where there are none.
        among : callable
            Says which clients are counted.
        shown : callable
            Returns the text of what is compared.

        Raises
        ------
        PayloadError
            If as many clients have one thing as another, so that it cannot be known which of them is wrong.
        """
        nodes = list(self._known.values()) or self._candidates
        counted = [other for other in nodes if among(other)] or [node]
        first, *others = Counter(kind(other) for other in counted).most_common(2)
        if others and others[0][1] == first[1]:
            self._tied = True
            sides = (
                f"{', '.join(str(other) for other in counted if kind(other) == value)}: {plain(shown(value), 100)}"
                for value, _ in (first, *others)
            )
            raise PayloadError(
                f"the clients must be alike, and none are in the majority ({'; '.join(sides)})"
            )
        return first[0]

    def unlike(self, node: Node) -> str | None:
        """Say how a client's numbers of classes and features differ from those of most clients; None if not."""
        classes, features = self.common(
            lambda other: (other.num_classes, other.feature_dim),
            node,
            shown=lambda sizes: f"{sizes[0]} classes and {sizes[1]} features",
        )
        if (node.num_classes, node.feature_dim) != (classes, features):
            return f"{node.num_classes} classes and {node.feature_dim} features, expected {classes} and {features}"
        return None

    def wait(self, grid: Grid, least: int) -> list[Node]:
        """Wait for enough fitting nodes, and return them. In a simulation, none may be registered at first.

        Nodes are validated only once ``least`` of them have replied, so the majority defines what is expected, not
        the first arrival. A node that does not fit does not end the waiting while others may still come: for a
        minute after the last arrival, if ``least`` nodes have come. Nor does a node that raises fewer than three
        times.

        Raises
        ------
        HandshakeError
            If too few fit, and no others come.
        TimeoutError
            If too few come.
        """
        end, waits, logged = time.monotonic() + self._timeout, pauses(), -1
        known: dict[int, Node] = {}
        validated: list[Node] = []
        newest = time.monotonic()
        while True:
            ids = sorted(grid.get_node_ids())
            for node in self._shake_hands(grid, [i for i in ids if i not in known]):
                known[node.node_id] = node
                newest = time.monotonic()
            present = [known[i] for i in ids if i in known]
            late = time.monotonic() >= end
            if present != validated and (late or len(present) + len(self.malformed) >= least):
                self.nodes, self._known, self.refused, validated = {}, {}, {}, present
                self._validate(present)
            nodes = self._present(ids)
            if len(nodes) >= least:
                return nodes
            raised = {i: why for i, (times, why) in self._raised.items() if times >= _TRIES and i in ids}
            refused = {**raised, **self.malformed, **self.refused, **self._claimed_twice(ids)}
            settled = getattr(grid, "complete", False) or time.monotonic() - newest >= _GRACE_SECONDS
            if refused and (late or (settled and len(nodes) + len(refused) >= least)):
                raise HandshakeError(
                    f"{len(nodes)} clients fit, {least} are needed; refused: {_by_reason(refused)}"
                )
            if late:
                raise TimeoutError(
                    f"{len(nodes)} clients came within {self._timeout:g} s, {least} are needed"
                )
            if len(present) != logged:
                log(INFO, "Waiting for clients: %d of %d", len(present), least)
                logged = len(present)
            time.sleep(next(waits))

    def of_round(self, grid: Grid, least: int) -> list[Node]:
        """Return the connected nodes, once they are enough for a round or the timeout is over."""
        end, waits = time.monotonic() + self._timeout, pauses()
        nodes = self.refresh(grid)
        if len(nodes) < least:
            log(WARNING, "%d clients are there, a round needs %d: waiting", len(nodes), least)
        while len(nodes) < least and time.monotonic() < end:
            time.sleep(next(waits))
            nodes = self.refresh(grid)
        return nodes

    def refresh(self, grid: Grid) -> list[Node]:
        """Ask for the ids again, shake hands with new nodes, and return those that fit and are connected."""
        ids = sorted(grid.get_node_ids())
        # A node that was away repeats its handshake: it may have been fixed, or have other data.
        by_id: tuple[dict[int, Any], ...] = (
            self.nodes,
            self.refused,
            self.malformed,
            self._retries,
            self._raised,
        )
        for entries in by_id:
            for gone in entries.keys() - set(ids):
                del entries[gone]
        new = [i for i in ids if i not in self.nodes and i not in self.refused]
        self._validate(self._shake_hands(grid, new))
        return self._present(ids)

    def _shake_hands(self, grid: Grid, ids: list[int]) -> list[Node]:
        """Shake hands with nodes, and return those whose replies are well-formed."""
        now = time.monotonic()
        timeout = min(self._timeout, _HANDSHAKE_SECONDS)
        new = [i for i in ids if i not in self.malformed and self._retries.get(i, (0.0, 0.0))[1] <= now]
        ttl = lifetime(self._timeout, len(new))
        messages = [flower_records.properties_message(i, config=self._question, ttl=ttl) for i in new]
        nodes: list[Node] = []
        # Counted from the last arrival: where many clients share few workers, the last one takes long.
        for message, reply in receive(grid, messages, timeout, since_last=True):
            node_id = message.metadata.dst_node_id
            if reply is None:
                self._ask_again(node_id, f"no reply within {timeout:g} s", timeout)
            elif isinstance(reply, PayloadError):
                self.malformed[node_id] = self._refuse(node_id, str(reply))
            elif reply.has_error() and reply.error.code == ErrorCode.MOD_FAILED_PRECONDITION:
                self.malformed[node_id] = self._refuse(node_id, reason_of(reply.error))
            elif reply.has_error():
                silent, reason = reply.error.code == ErrorCode.MESSAGE_UNAVAILABLE, reason_of(reply.error)
                if reply.error.code in _ITS_OWN_FAULT and _lasts(reason):
                    self.malformed[node_id] = self._refuse(node_id, f"its client failed: {reason}")
                    continue
                if reply.error.code in _ITS_OWN_FAULT:
                    self._raised[node_id] = (self._raised.get(node_id, (0, ""))[0] + 1, plain(reason))
                self._ask_again(node_id, reason, timeout if silent else _SOONEST_HANDSHAKE)
            else:
                try:
                    nodes.append(Node.from_properties(node_id, flower_records.read_properties(reply)))
                    self._raised.pop(node_id, None)
                except PayloadError as error:
                    self.malformed[node_id] = self._refuse(node_id, str(error))
        return nodes

    def _validate(self, candidates: list[Node]) -> None:
        """Accept the nodes that fit, and refuse the others."""
        # The order must not depend on which node replied first, since what the clients have in common decides.
        self._candidates = sorted(candidates, key=lambda node: node.order)
        for node in self._candidates:
            self._tied = False
            refusal = node.refusal or self._refusal(node)
            if refusal is not None:
                # A tie may be resolved by the next client that comes.
                tied = self._tied and not node.refusal
                self.refused[node.node_id] = plain(refusal) if tied else self._refuse(node.node_id, refusal)
                continue
            before = self._known.get(node.key)
            if before is None or before.node_id == node.node_id or before.node_id not in self.nodes:
                self._known[node.key] = node
                if before is not None and before.node_id != node.node_id:
                    log(WARNING, "%s comes in place of node %d", node, before.node_id)
            self.nodes[node.node_id] = node

    def _present(self, ids: list[int]) -> list[Node]:
        """Return the accepted nodes that are connected, one for each partition, in the order of partition ids."""
        present: dict[int, Node] = {}
        for node in self.nodes.values():
            if node.node_id not in ids:
                continue
            # What is kept for a client depends on its key. A node with another's key waits until that one is gone,
            # which after a restart is soon.
            first = present.setdefault(node.key, node)
            if first is not node and node.node_id not in self._doubles:
                self._doubles.add(node.node_id)
                log(WARNING, "%s is left out while node %d has the same partition", node, first.node_id)
        return sorted(present.values(), key=lambda node: node.order)

    def _claimed_twice(self, ids: list[int]) -> dict[int, str]:
        """Return, by node id, which other node has the same partition id; without the first node of each."""
        firsts: dict[int, Node] = {}
        twice = {}
        for node in (node for node in self.nodes.values() if node.node_id in ids):
            first = firsts.setdefault(node.key, node)
            if first is not node:
                twice[node.node_id] = (
                    f"it says that it is partition {node.key}, as node {first.node_id} does: give each SuperNode a "
                    "partition-id of its own"
                )
        return twice

    def _ask_again(self, node_id: int, reason: str, least: float) -> None:
        """Repeat a failed handshake later, after pauses that double: the fault may pass."""
        pause = self._retries.get(node_id, (0.0, 0.0))[0]
        if not pause:
            log(WARNING, "node %d did not complete the handshake, and is asked again: %s", node_id, reason)
        pause = min(max(2 * pause, least), _LATEST_HANDSHAKE)
        self._retries[node_id] = (pause, time.monotonic() + pause)

    def _refuse(self, node_id: int, reason: str) -> str:
        """Log a refusal once, and return its reason in a form that may be shown."""
        shown = plain(reason)
        if (node_id, shown) not in self._logged:
            self._logged.add((node_id, shown))
            log(WARNING, "node %d is refused: %s", node_id, shown)
        return shown


def _by_reason(refused: Mapping[int, str]) -> str:
    """Return the refused nodes as text, those with the same reason together."""
    nodes: dict[str, list[int]] = {}
    for node, why in sorted(refused.items()):
        nodes.setdefault(why, []).append(node)
    return "; ".join(
        f"node{'s' if len(ids) > 1 else ''} {', '.join(map(str, ids))}: {why}" for why, ids in nodes.items()
    )


def _lasts(reason: str) -> bool:
    """Say whether an error of a client is of a kind that stays until the client is changed.

    >>> _lasts("flwr_kd.checks.ConfigError: data-path must be absolute"), _lasts("OSError: not mounted yet")
    (True, False)
    """
    return reason.partition(":")[0].rpartition(".")[2] in _LASTING


def draw(
    nodes: list[Node], fraction: float, least: int, seed: int, purpose: str, server_round: int
) -> list[Node]:
    """Draw a share of the nodes at random, in their order, from (seed, purpose, round).

    Parameters
    ----------
    nodes : list of Node
        In the order of partition ids, so that the draw does not depend on Flower's node ids.
    fraction : float
        In [0, 1]; the number of nodes is rounded down.
    least : int
        Minimum number of nodes, as far as there are that many.
    """
    size = min(len(nodes), max(int(len(nodes) * fraction + 1e-9), least))
    if size == len(nodes):
        return nodes
    rng = numpy_generator(seed, purpose, server_round)
    return [nodes[i] for i in sorted(rng.choice(len(nodes), size=size, replace=False))]
