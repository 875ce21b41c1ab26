"""The server half of every method: one loop for rounds, phases, faults, counting and checkpoints.

A method derives from :class:`KDStrategy`, names its phases and overrides a few hooks; no method has a loop of
its own. The class is a Flower ``Strategy``: ``start(...)`` has Flower's signature and returns a ``Result``.
"""

from __future__ import annotations

import io
import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from logging import INFO, WARNING
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from . import wire
from .aggregation import weighted_mean
from .checkpoint import CHECKPOINT, Checkpoint
from .config import ConfigError, MethodConfig
from .exchange import HandshakeError, KDResult, NDArray, Node, Outgoing, Reply, RoundStats
from .payload import MAX_PAYLOAD_BYTES, Payload, PayloadError
from .seeding import numpy_generator
from .wire import ArrayTemplate

__all__ = ["HandshakeError", "KDResult", "KDStrategy", "NDArray", "Node", "Outgoing", "Reply", "RoundStats"]

_POLL_FIRST, _POLL_LAST = 0.02, 1.0
_SHARES = ("local-accuracy", "local-top5")
_LARGEST_METRIC = 1e15
T = TypeVar("T")


class KDStrategy(Strategy):
    """Base of all methods' server halves.

    Parameters
    ----------
    config : MethodConfig, optional
        The method's hyper-parameters; they travel to the clients, which have none of their own.
    fraction_train : float
        Share of the available clients that is drawn per round, in (0, 1]; at least ``min_train_nodes``.
    min_train_nodes : int
        Least number of clients drawn per round.
    min_available_nodes : int
        The run waits for so many fitting clients before round 1.
    fraction_evaluate : float
        Share of the clients that also evaluate the global model on their own test data, in [0, 1]. 0 (the
        default) leaves out the evaluation phase, which costs as much time as training on a real SuperLink.
    seed : int
        Of every random choice on both sides.
    max_payload_bytes : int
        Largest payload that is sent or accepted.
    checkpoint_dir : path, optional
        Arrays and the method's state are written there after every round.
    resume : bool
        Go on after the round of the checkpoint, if there is one.
    on_round : callable, optional
        Called with the :class:`RoundStats` after every round.
    **hyperparameters
        Instead of ``config``: its fields by name, for example ``FedHKD(gamma=0.1)``.

    Raises
    ------
    ConfigError
        If an option or a hyper-parameter is not allowed.
    """

    config_class: ClassVar[type[MethodConfig]] = MethodConfig
    phases: ClassVar[tuple[str, ...]] = ("train",)
    """Phases of a round, in order. A client's method ``phase_<name>`` answers each."""
    reply_payloads: ClassVar[Mapping[str, type[Payload]]] = {}
    """By phase, the payload that an answer must have."""
    reply_arrays: ClassVar[frozenset[str]] = frozenset({"train"})
    """Phases whose answers hold the model's arrays."""
    reply_metrics: ClassVar[frozenset[str]] = frozenset()
    """Metrics of the method's own in its clients' answers, whose means go into the round's train metrics."""
    sends_weights: ClassVar[bool] = True
    """Whether there are global arrays, which every client's model must match."""

    def __init__(
        self,
        config: MethodConfig | None = None,
        *,
        fraction_train: float = 1.0,
        min_train_nodes: int = 1,
        min_available_nodes: int = 2,
        fraction_evaluate: float = 0.0,
        seed: int = 0,
        max_payload_bytes: int = MAX_PAYLOAD_BYTES,
        checkpoint_dir: str | Path | None = None,
        resume: bool = False,
        on_round: Callable[[RoundStats], None] | None = None,
        **hyperparameters: Any,
    ) -> None:
        if config is not None and hyperparameters:
            raise ConfigError(
                f"either config or hyper-parameters, got both (config and {list(hyperparameters)})"
            )
        if config is not None and not isinstance(config, self.config_class):
            raise ConfigError(f"config must be a {self.config_class.__name__}, got {type(config).__name__}")
        self.config = config if config is not None else self.config_class.from_mapping(hyperparameters)
        _in_range("fraction_train", fraction_train, 0.0, 1.0, open_low=True)
        _in_range("fraction_evaluate", fraction_evaluate, 0.0, 1.0)
        for name, value in (
            ("min_train_nodes", min_train_nodes),
            ("min_available_nodes", min_available_nodes),
        ):
            _in_range(name, value, 1, 2**31)
        _in_range("max_payload_bytes", max_payload_bytes, 1, 2**31 - 2**20)
        if resume and checkpoint_dir is None:
            raise ConfigError("resume=True needs checkpoint_dir")
        self.fraction_train, self.fraction_evaluate = fraction_train, fraction_evaluate
        self.min_train_nodes, self.min_available_nodes = min_train_nodes, min_available_nodes
        self.seed, self.max_payload_bytes = seed, max_payload_bytes
        self.checkpoint_dir = None if checkpoint_dir is None else Path(checkpoint_dir)
        self.resume, self.on_round = resume, on_round
        self.template = ArrayTemplate()
        self.stats = RoundStats(0)
        self.num_rounds = 0
        self._nodes: dict[int, Node] = {}
        self._refused: dict[int, str] = {}
        self._doubles: set[int] = set()
        self._candidates: list[Node] = []
        self._timeout = 3600.0
        self._hooked: list[Message] = []
        self._hooked_arrays: ArrayRecord | None = None
        self._present: list[Node] = []
        self._begun = False

    # ------------------------------------------------------------------ hooks for a method's author

    def accept_node(self, node: Node) -> str | None:
        """Say why a client cannot take part; None if it can.

        The base checks, where weights are exchanged, that the client's model has the names and shapes of
        ``initial_arrays``.
        """
        if self.sends_weights and self.template.names:
            return self.template.difference(node.template)
        return None

    def common(
        self, kind: Callable[[Node], T], node: Node, *, among: Callable[[Node], bool] = lambda _: True
    ) -> T:
        """Return what most clients have, for a method whose clients must be alike in it.

        Of those that were accepted; before any was, of all that introduced themselves together, so that one
        client alone does not decide. ``among`` says which of them count. ``node`` stands for them where there are
        none.
        """
        known = [each for each in list(self._nodes.values()) or self._candidates if among(each)] or [node]
        return Counter(kind(each) for each in known).most_common(1)[0][0]

    def begin(self, nodes: list[Node]) -> None:
        """Prepare a run, or what is left of one that is resumed; nothing by default.

        Called once, before the first round, with the clients that are there; :attr:`template` is known.

        Raises
        ------
        ConfigError
            If an option does not go with the clients or the model.
        """

    def select(self, phase: str, server_round: int, nodes: list[Node], answered: list[Node]) -> list[Node]:
        """Return who takes part in a phase.

        The base draws ``fraction_train`` of the nodes for the first phase, and then keeps to those that
        answered the phase before.

        Parameters
        ----------
        phase : str
            One of :attr:`phases`.
        server_round : int
            From 1.
        nodes : list of Node
            All that are there, in the order of partition ids.
        answered : list of Node
            Those that answered the phase before; empty in the first.
        """
        if phase != self.phases[0]:
            return answered
        return self._draw(nodes, self.fraction_train, self.min_train_nodes, "sample", server_round)

    def configure_phase(
        self, phase: str, server_round: int, nodes: list[Node], arrays: ArrayRecord | None
    ) -> Iterable[Outgoing]:
        """Return what each node is sent; the base sends everyone the global arrays."""
        return [Outgoing(node, arrays) for node in nodes]

    def template_of(self, node: Node) -> ArrayTemplate:
        """Return the names and shapes of the arrays that a client sends: :attr:`template`, the global model's.

        For a method whose clients have different models, or that has no global one.
        """
        return self.template

    def payload_dims(self, phase: str, node: Node) -> Mapping[str, int]:
        """Return the sizes that a node's payload must have, by the letters of its fields' shapes."""
        return {"C": node.num_classes, "D": node.feature_dim}

    def check_reply(self, phase: str, reply: Reply) -> None:
        """Raise :class:`PayloadError` where an answer breaks a rule of the method's own."""

    def aggregate_phase(
        self, phase: str, server_round: int, replies: list[Reply], arrays: ArrayRecord | None
    ) -> ArrayRecord | None:
        """Use the answers, in the order of partition ids; return new global arrays, or None to keep the old.

        Not called when nobody answered. The base returns the mean weighted by sample counts.
        """
        if phase not in self.reply_arrays:
            return None
        models, weights = [reply.arrays for reply in replies], [reply.num_examples for reply in replies]
        return self.template.record(weighted_mean(models, weights))

    def finish_round(self, server_round: int, arrays: ArrayRecord | None) -> ArrayRecord | None:
        """End a round in which at least one answer came; return new global arrays, or None to keep them.

        For a method whose phases leave something to be done together. Nothing by default.
        """
        return None

    def state_arrays(self) -> dict[str, NDArray]:
        """Return the method's own state between rounds, as named arrays; nothing by default."""
        return {}

    def load_state_arrays(self, state: Mapping[str, NDArray]) -> None:
        """Take :meth:`state_arrays` back.

        Raises
        ------
        ValueError
            If the state is not this method's.
        """
        if state:
            raise ValueError(f"{type(self).__name__} has no state of its own, got {sorted(state)}")

    # ------------------------------------------------------------------ Flower's interface

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> KDResult:
        """Run all rounds.

        Parameters
        ----------
        grid : Grid
            Flower's, or an :class:`~flwr_kd.inline.InlineGrid`.
        initial_arrays : ArrayRecord
            ``ArrayRecord(model.state_dict())``; empty for a method that exchanges no weights.
        num_rounds : int
            At least 1. With ``resume``, the number of the last round.
        timeout : float
            Seconds that a phase waits for answers; also the messages' time to live.
        train_config, evaluate_config : ConfigRecord, optional
            Further scalars for the clients. Not changed.
        evaluate_fn : callable, optional
            Called with the round (0: before the first) and the global arrays, where there are any. A metric
            named ``accuracy`` becomes the round's global accuracy.

        Returns
        -------
        KDResult
            Flower's ``Result``, and ``rounds``.

        Raises
        ------
        HandshakeError
            If clients do not fit the method and too few remain.
        TimeoutError
            If fewer than ``min_available_nodes`` clients come within ``timeout``.
        """
        _in_range("num_rounds", num_rounds, 1, 2**31)
        _in_range("timeout", timeout, 0.0, float("inf"), open_low=True)
        log(INFO, "Starting %s strategy:", type(self).__name__)
        self.summary()
        self._timeout, self.num_rounds = timeout, num_rounds
        extra = dict(train_config or {})
        result = KDResult()
        arrays: ArrayRecord | None = ArrayRecord(dict(initial_arrays))
        self._begin(initial_arrays)
        first = 1
        if self.resume and (restored := self.load_checkpoint()) is not None:
            last, restored_arrays = restored
            first, arrays = last + 1, restored_arrays or arrays
            log(INFO, "Resuming after round %d", last)
        assert arrays is not None
        result.arrays = arrays
        self._evaluate_at_server(evaluate_fn, first - 1, arrays, result, None)
        self.begin(self._wait_for_nodes(grid))

        for server_round in range(first, num_rounds + 1):
            begun = time.monotonic()
            log(INFO, "[ROUND %d/%d]", server_round, num_rounds)
            self.stats = stats = RoundStats(server_round)
            nodes = self._refresh_nodes(grid)
            answered: list[Node] = []
            train_replies: list[Reply] = []
            for phase in self.phases:
                chosen = self.select(phase, server_round, nodes, answered)
                outgoing = list(self.configure_phase(phase, server_round, chosen, arrays)) if chosen else []
                messages = self._train_messages(phase, server_round, outgoing, extra)
                replies = self._checked(phase, self._exchange(grid, messages), forget=True)
                answered = [reply.node for reply in replies]
                train_replies.extend(replace(reply, arrays=[], payload=None) for reply in replies)
                if phase == self.phases[0]:
                    stats.participants = len(replies)
                if not replies:
                    if outgoing or phase == self.phases[0]:
                        log(WARNING, "round %d, phase %s: no usable answers", server_round, phase)
                    continue
                new = self.aggregate_phase(phase, server_round, replies, arrays)
                arrays = arrays if new is None else new
                # Else it would still be held while the next answers come in.
                del replies
            if train_replies:
                arrays = self.finish_round(server_round, arrays) or arrays
            self._summarise(train_replies, result)
            result.arrays = arrays
            self._evaluate_at_clients(grid, server_round, nodes, arrays, dict(evaluate_config or {}), result)
            stats.seconds = time.monotonic() - begun
            self._evaluate_at_server(evaluate_fn, server_round, arrays, result, stats)
            result.rounds.append(stats)
            self.save_checkpoint(server_round, arrays)
            if self.on_round is not None:
                self.on_round(stats)
        for line in io.StringIO(str(result)):
            log(INFO, "\t%s", line.rstrip("\n"))
        return result

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Build a round's messages; for Flower's own ``Strategy.start`` and its wrappers.

        Raises
        ------
        RuntimeError
            If the method has several phases per round, which only its own ``start`` can run.
        """
        if len(self.phases) > 1:
            raise RuntimeError(
                f"{type(self).__name__} has the phases {', '.join(self.phases)} per round; call its own start()"
            )
        if server_round == 1 or not self._begun:
            self._begin(arrays)
            self.begin(self._wait_for_nodes(grid))
        self.stats = RoundStats(server_round)
        nodes = self._refresh_nodes(grid)
        self._present = nodes
        chosen = self.select(self.phases[0], server_round, nodes, [])
        outgoing = list(self.configure_phase(self.phases[0], server_round, chosen, arrays)) if chosen else []
        self._hooked = self._train_messages(self.phases[0], server_round, outgoing, dict(config))
        self._hooked_arrays = arrays
        return list(self._hooked)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Aggregate a round's answers; the counterpart of :meth:`configure_train`."""
        phase = self.phases[0]
        checked = self._checked(phase, self._pair(self._hooked, replies))
        result = KDResult()
        self.stats.participants = len(checked)
        self._summarise(checked, result)
        if not checked:
            return None, None
        new = self.aggregate_phase(phase, server_round, checked, self._hooked_arrays)
        new = self.finish_round(server_round, new or self._hooked_arrays) or new
        return new, result.train_metrics_clientapp.get(server_round)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Build the evaluation's messages; none unless ``fraction_evaluate`` is above 0."""
        self._hooked = self._evaluate_messages(server_round, self._present, arrays, dict(config))
        return list(self._hooked)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Return the means over clients, weighted by their sample counts; None without answers."""
        return self._mean_evaluation(self._pair(self._hooked, replies))

    def summary(self) -> None:
        """Log hyper-parameters and sampling."""
        values = ", ".join(f"{name}={value}" for name, value in self.config.to_wire().items())
        log(INFO, "\t├──> Hyper-parameters: %s", values)
        log(INFO, "\t├──> Phases: %s", ", ".join(self.phases))
        log(
            INFO,
            "\t└──> Fraction: train (%.2f) | evaluate (%.2f)",
            self.fraction_train,
            self.fraction_evaluate,
        )

    # ------------------------------------------------------------------ nodes

    def _begin(self, arrays: ArrayRecord) -> None:
        self.template = ArrayTemplate.of(arrays)
        if self.sends_weights and not self.template.names:
            raise ConfigError(f"{type(self).__name__} needs initial_arrays: ArrayRecord(model.state_dict())")
        self._nodes, self._refused, self._doubles, self._candidates = {}, {}, set(), []
        # A strategy may be started again; what it learnt in the run before is not this run's.
        self.load_state_arrays({})
        self._begun = True

    def _wait_for_nodes(self, grid: Grid) -> list[Node]:
        """Wait for enough fitting nodes, and return them: in a simulation, none may be registered at first."""
        end, pause, told = time.monotonic() + self._timeout, _POLL_FIRST, -1
        while True:
            nodes = self._refresh_nodes(grid)
            if len(nodes) >= self.min_available_nodes:
                return nodes
            if self._refused:
                reasons = "; ".join(f"node {node}: {why}" for node, why in sorted(self._refused.items()))
                raise HandshakeError(
                    f"{len(nodes)} clients fit, {self.min_available_nodes} are needed; refused: {reasons}"
                )
            if time.monotonic() > end:
                raise TimeoutError(
                    f"{len(nodes)} clients came within {self._timeout:g} s, {self.min_available_nodes} are needed"
                )
            if len(nodes) != told:
                log(INFO, "Waiting for clients: %d of %d", len(nodes), self.min_available_nodes)
                told = len(nodes)
            time.sleep(pause)
            pause = min(pause * 1.5, _POLL_LAST)

    def _refresh_nodes(self, grid: Grid) -> list[Node]:
        """Ask for the ids anew, shake hands with new ones, and return those that fit and are there."""
        ids = sorted(grid.get_node_ids())
        new = [i for i in ids if i not in self._nodes and i not in self._refused]
        config = {**self.config.to_wire(), wire.SEED: self.seed}
        messages = [wire.properties_message(i, config=config, ttl=self._timeout) for i in new]
        candidates: list[Node] = []
        for message, reply in self._exchange(grid, messages):
            node_id = message.metadata.dst_node_id
            try:
                if reply.has_error():
                    # It may be a passing fault: asked again in the next round.
                    log(
                        WARNING,
                        "node %d did not introduce itself: %s",
                        node_id,
                        _last_line(reply.error.reason),
                    )
                    continue
                candidates.append(Node.from_properties(node_id, wire.read_properties(reply)))
            except PayloadError as error:
                self._refuse(node_id, str(error))
        # In one order, whichever answered first, since what the clients have in common decides.
        self._candidates = sorted(candidates, key=lambda node: node.order)
        for node in self._candidates:
            try:
                refusal = self.accept_node(node)
                if refusal is None:
                    self.config.check_classes(node.num_classes)
            except (PayloadError, ConfigError) as error:
                refusal = str(error)
            if refusal is None:
                self._nodes[node.node_id] = node
            else:
                self._refuse(node.node_id, refusal)
        present: dict[int, Node] = {}
        for node in self._nodes.values():
            if node.node_id not in ids:
                continue
            # What is kept for a client goes by its key. One that takes another's waits until that one is gone,
            # which after a restart it soon is.
            first = present.setdefault(node.key, node)
            if first is not node and node.node_id not in self._doubles:
                self._doubles.add(node.node_id)
                log(WARNING, "%s is left out while node %d has the same partition", node, first.node_id)
        return sorted(present.values(), key=lambda node: node.order)

    def _refuse(self, node_id: int, reason: str) -> None:
        self._refused[node_id] = reason
        log(WARNING, "node %d is refused: %s", node_id, reason)

    def _draw(
        self, nodes: list[Node], fraction: float, least: int, purpose: str, server_round: int
    ) -> list[Node]:
        size = min(len(nodes), max(int(len(nodes) * fraction + 1e-9), least))
        if size == len(nodes):
            return nodes
        rng = numpy_generator(self.seed, purpose, server_round)
        return [nodes[i] for i in sorted(rng.choice(len(nodes), size=size, replace=False))]

    # ------------------------------------------------------------------ messages

    def _config(self, phase: str, server_round: int, extra: Mapping[str, Any]) -> dict[str, Any]:
        return {
            **extra,
            **self.config.to_wire(),
            wire.ROUND: server_round,
            wire.PHASE: phase,
            wire.SEED: self.seed,
            wire.MAX_BYTES: self.max_payload_bytes,
            wire.NAMES: json.dumps(self.template.names),
        }

    def _train_messages(
        self, phase: str, server_round: int, outgoing: Sequence[Outgoing], extra: Mapping[str, Any]
    ) -> list[Message]:
        config = self._config(phase, server_round, extra)
        encoded: dict[int, bytes] = {}
        messages = []
        for out in outgoing:
            data = None
            if out.payload is not None:
                # Most methods send everyone the same payload: encode it once.
                if id(out.payload) not in encoded:
                    encoded[id(out.payload)] = out.payload.to_bytes(max_bytes=self.max_payload_bytes)
                data = encoded[id(out.payload)]
            message = wire.train_message(
                out.node.node_id,
                arrays=out.arrays if out.arrays is None else ArrayRecord(dict(out.arrays)),
                config={**config, wire.NAMES: json.dumps(self.template_of(out.node).names), **out.config},
                payload=data,
                ttl=self._timeout,
                group_id=str(server_round),
            )
            self.stats.count(out.node, down=wire.nbytes(message.content))
            messages.append(message)
        return messages

    def _evaluate_messages(
        self, server_round: int, nodes: list[Node], arrays: ArrayRecord, extra: Mapping[str, Any]
    ) -> list[Message]:
        if self.fraction_evaluate == 0 or not self.sends_weights or not nodes:
            return []
        config = self._config("evaluate", server_round, extra)
        chosen = self._draw(nodes, self.fraction_evaluate, 1, "sample-evaluate", server_round)
        messages = [
            wire.evaluate_message(
                node.node_id,
                arrays=ArrayRecord(dict(arrays)),
                config=config,
                ttl=self._timeout,
                group_id=str(server_round),
            )
            for node in chosen
        ]
        for node, message in zip(chosen, messages, strict=True):
            self.stats.count(node, down=wire.nbytes(message.content))
        return messages

    def _exchange(self, grid: Grid, messages: list[Message]) -> list[tuple[Message, Message]]:
        """Send, and poll with growing pauses until all have answered or the time is over."""
        if not messages:
            return []
        waiting = {i for i in grid.push_messages(messages) if i}
        replies: list[Message] = []
        end, pause = time.monotonic() + self._timeout, _POLL_FIRST
        while waiting:
            came = list(grid.pull_messages(waiting))
            replies.extend(came)
            waiting -= {reply.metadata.reply_to_message_id for reply in came}
            if not waiting or time.monotonic() > end:
                break
            pause = _POLL_FIRST if came else min(pause * 1.5, _POLL_LAST)
            time.sleep(max(0.0, min(pause, end - time.monotonic())))
        return self._pair(messages, replies)

    def _pair(self, messages: Sequence[Message], replies: Iterable[Message]) -> list[tuple[Message, Message]]:
        """Pair messages with replies: an error's source is the SuperLink, only what it replies to tells whose."""
        by_id = {message.metadata.message_id: message for message in messages}
        pairs: list[tuple[Message, Message]] = []
        for reply in replies:
            message = by_id.pop(reply.metadata.reply_to_message_id, None)
            if message is not None:
                pairs.append((message, reply))
        for message in by_id.values():
            if message.metadata.dst_node_id in self._nodes:
                self.stats.failures += 1
                log(WARNING, "%s did not answer in time", self._nodes[message.metadata.dst_node_id])
        return pairs

    def _checked(
        self, phase: str, pairs: Iterable[tuple[Message, Message]], *, forget: bool = False
    ) -> list[Reply]:
        """Return the answers that are what the phase expects; drop the others with a warning.

        With ``forget`` each message is emptied once it has been read, so that there is one copy of all knowledge.
        """
        replies = []
        for message, message_back in pairs:
            node = self._nodes[message.metadata.dst_node_id]
            if message_back.has_error():
                self.stats.failures += 1
                log(WARNING, "%s failed: %s", node, _last_line(message_back.error.reason))
                continue
            try:
                replies.append(self._read(phase, node, message_back))
            except PayloadError as error:
                self.stats.failures += 1
                log(WARNING, "the answer of %s is dropped: %s", node, error)
            if forget:
                wire.forget(message_back)
        return sorted(replies, key=lambda reply: reply.node.order)

    def _read(self, phase: str, node: Node, message: Message) -> Reply:
        raw = wire.read_train_reply(message)
        self.stats.count(node, up=raw.nbytes)
        arrays: list[NDArray] = []
        if phase in self.reply_arrays:
            arrays = self.template_of(node).check(raw.arrays)
        elif raw.arrays:
            raise PayloadError(f"{len(raw.arrays)} arrays came back, expected none in phase {phase!r}")
        payload = None
        expected = self.reply_payloads.get(phase)
        if expected is not None:
            if raw.payload is None:
                raise PayloadError(f"{expected.schema}: the payload is missing")
            payload = expected.from_bytes(
                raw.payload, dims=self.payload_dims(phase, node), max_bytes=self.max_payload_bytes
            )
        elif raw.payload is not None:
            raise PayloadError(f"a payload came back, expected none in phase {phase!r}")
        for name in _SHARES:
            if not 0 <= raw.metrics.get(name, 0.0) <= 1:
                raise PayloadError(f"metric {name!r} must be in [0, 1], got {raw.metrics[name]}")
        for name in self.reply_metrics:
            if abs(raw.metrics.get(name, 0.0)) > _LARGEST_METRIC:
                raise PayloadError(
                    f"metric {name!r} must be within ±{_LARGEST_METRIC:g}, got {raw.metrics[name]}"
                )
        reply = Reply(node, arrays, raw.num_examples, raw.metrics, payload)
        self.check_reply(phase, reply)
        return reply

    # ------------------------------------------------------------------ numbers

    def _summarise(self, replies: list[Reply], result: KDResult) -> None:
        """Means over clients: the local accuracy counts each client once, the loss by its samples."""
        for reply in replies:
            found = {k: v for k, v in reply.metrics.items() if k in _SHARES}
            if found:
                self.stats.clients[reply.node.key] = self.stats.clients.get(reply.node.key, {}) | found
        # By client: of several phases, the last that told.
        told = list(self.stats.clients.values())
        accuracies, top5 = ([each[name] for each in told if name in each] for name in _SHARES)
        first: dict[int, Reply] = {}
        for reply in replies:
            first.setdefault(reply.node.key, reply)
        losses = [
            (r.metrics["train-loss"], r.num_examples) for r in first.values() if "train-loss" in r.metrics
        ]
        metrics: dict[str, int | float | list[int] | list[float]] = {}
        if accuracies:
            self.stats.local_accuracy = metrics["local-accuracy"] = float(np.mean(accuracies))
        if top5:
            self.stats.local_top5 = metrics["local-top5"] = float(np.mean(top5))
        if losses:
            weights = np.array([max(weight, 1) for _, weight in losses], dtype=np.float64)
            self.stats.train_loss = metrics["train-loss"] = float(
                np.average([loss for loss, _ in losses], weights=weights)
            )
        for name in sorted(self.reply_metrics):
            values = [reply.metrics[name] for reply in replies if name in reply.metrics]
            if values:
                metrics[name] = float(np.mean(values))
        if metrics:
            result.train_metrics_clientapp[self.stats.server_round] = MetricRecord(metrics)

    def _evaluate_at_clients(
        self,
        grid: Grid,
        server_round: int,
        nodes: list[Node],
        arrays: ArrayRecord,
        extra: Mapping[str, Any],
        result: KDResult,
    ) -> None:
        messages = self._evaluate_messages(server_round, nodes, arrays, extra)
        metrics = self._mean_evaluation(self._exchange(grid, messages))
        if metrics is not None:
            result.evaluate_metrics_clientapp[server_round] = metrics

    def _mean_evaluation(self, pairs: Iterable[tuple[Message, Message]]) -> MetricRecord | None:
        rows: list[tuple[int, dict[str, float]]] = []
        for message, reply in sorted(pairs, key=lambda pair: self._nodes[pair[0].metadata.dst_node_id].order):
            node = self._nodes[message.metadata.dst_node_id]
            try:
                if reply.has_error():
                    raise PayloadError(_last_line(reply.error.reason))
                answer = wire.read_evaluate_reply(reply)
            except PayloadError as error:
                log(WARNING, "the evaluation of %s is dropped: %s", node, error)
                continue
            if answer.num_examples:
                rows.append((answer.num_examples, {"loss": answer.loss, **answer.metrics}))
        if not rows:
            return None
        names = set.intersection(*(set(metrics) for _, metrics in rows))
        weights = [count for count, _ in rows]
        return MetricRecord(
            {name: float(np.average([m[name] for _, m in rows], weights=weights)) for name in sorted(names)}
        )

    def _evaluate_at_server(
        self,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None,
        server_round: int,
        arrays: ArrayRecord,
        result: KDResult,
        stats: RoundStats | None,
    ) -> None:
        if evaluate_fn is None or not self.sends_weights:
            return
        metrics = evaluate_fn(server_round, arrays)
        if metrics is None:
            return
        result.evaluate_metrics_serverapp[server_round] = metrics
        accuracy = metrics.get("accuracy")
        if stats is not None and isinstance(accuracy, int | float):
            stats.global_accuracy = float(accuracy)

    # ------------------------------------------------------------------ checkpoints

    def save_checkpoint(self, server_round: int, arrays: ArrayRecord) -> Path | None:
        """Write global arrays and the method's state, where ``checkpoint_dir`` is set."""
        if self.checkpoint_dir is None:
            return None
        found = Checkpoint(
            type(self).__name__, server_round, self.config.to_wire(), self.seed, arrays, self.state_arrays()
        )
        return found.save(self.checkpoint_dir)

    def load_checkpoint(self) -> tuple[int, ArrayRecord | None] | None:
        """Read the checkpoint: the last round and its arrays; None if there is none.

        Raises
        ------
        ConfigError
            If it was written by another method or version, or has other arrays than ``initial_arrays``.
        """
        if self.checkpoint_dir is None:
            return None
        found = Checkpoint.load(self.checkpoint_dir, type(self).__name__)
        if found is None:
            return None
        if (found.config, found.seed) != (self.config.to_wire(), self.seed):
            log(
                WARNING,
                "the checkpoint was written with other hyper-parameters or another seed: %s, seed %d",
                found.config,
                found.seed,
            )
        if (other := self.template.difference(ArrayTemplate.of(found.arrays))) is not None:
            raise ConfigError(f"{self.checkpoint_dir / CHECKPOINT} does not fit initial_arrays: {other}")
        self.load_state_arrays(found.state)
        if not found.arrays:
            return found.server_round, None
        arrays = {name: value.numpy() for name, value in found.arrays.items()}
        return found.server_round, self.template.record([arrays[name] for name in self.template.names])


def _last_line(reason: str | None) -> str:
    """Return the line that tells most: Ray's text is a 2,000-character chain whose last line is the cause."""
    lines = [line.strip() for line in (reason or "").splitlines() if line.strip()]
    return lines[-1][:300] if lines else "no reason given"


def _in_range(name: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
    fits = isinstance(value, int | float) and not isinstance(value, bool)
    if not fits or not (low < value if open_low else low <= value) or not value <= high:
        raise ConfigError(f"{name} must be in {'(' if open_low else '['}{low:g}, {high:g}], got {value!r}")
