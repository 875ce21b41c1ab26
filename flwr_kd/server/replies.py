"""What came back in a phase: replies are fetched, checked and handed out one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from logging import WARNING
from typing import Any, ClassVar, Generic, Protocol

from flwr.app import Message
from flwr.common.logger import log

from flwr_kd.server.measurements import BEFORE, GLOBAL_ON_CLIENTS, SHARES
from flwr_kd.server.records import NDArray, Node, Reply, RoundStats
from flwr_kd.text import first_line, plain
from flwr_kd.transport import flower_records
from flwr_kd.transport.delivery import Delivered, reason_of
from flwr_kd.transport.payload import Payload, PayloadError, PayloadT
from flwr_kd.transport.template import ArrayTemplate
from flwr_kd.wording import option

__all__ = [
    "Replies",
    "ReplyChecker",
    "ReplyRules",
    "TooFewReplies",
    "check_shares",
    "checked_arrays",
    "evaluations",
    "read_evaluations",
]

_LARGEST_METRIC = 1e15


class TooFewReplies(Exception):  # noqa: N818
    """Ends the replies of a phase that has too few of them, before anything was changed."""


class Replies(Generic[PayloadT]):
    """The usable replies of one phase, in the order of partition ids; an iterator.

    Each reply is fetched and checked when it is asked for, and none is kept: whoever only sums holds one at a time.

    Parameters
    ----------
    delivered : iterable of (Message, Delivered)
        Each message with what arrived for it.
    check : callable
        Returns the checked reply; None if it cannot be used.
    least : int
        Minimum number of usable replies.

    Attributes
    ----------
    used : list of Reply
        The replies that were handed out, without their arrays and payloads.
    asked : int
        Number of messages that were looked at.

    Raises
    ------
    TooFewReplies
        At the end of the iteration, if fewer than ``least`` were usable.
    """

    def __init__(
        self,
        delivered: Iterable[tuple[Message, Delivered]],
        check: Callable[[Message, Delivered], Reply[PayloadT] | None],
        *,
        least: int = 0,
    ) -> None:
        self._delivered, self._check, self._least = iter(delivered), check, least
        self._first: Reply[PayloadT] | None = None
        self.used: list[Reply[Any]] = []
        self.asked = 0

    def __iter__(self) -> Iterator[Reply[PayloadT]]:
        return self

    def __next__(self) -> Reply[PayloadT]:
        reply, self._first = self._first, None
        return self._fetch() if reply is None else reply

    def look(self) -> bool:
        """Fetch the first usable reply, and say whether there is one; the iteration still begins with it.

        Raises
        ------
        TooFewReplies
            If there is none, and ``least`` is above 0.
        """
        if not self.used:
            self._first = next(self, None)
        return bool(self.used)

    def drain(self) -> None:
        """Go through the replies that were not asked for, so that they are checked and counted like the others."""
        for _ in self:
            pass

    def _fetch(self) -> Reply[PayloadT]:
        for message, delivered in self._delivered:
            self.asked += 1
            reply = self._check(message, delivered)
            if reply is not None:
                self.used.append(Reply(reply.node, [], reply.num_examples, reply.metrics))
                return reply
        if len(self.used) < self._least:
            raise TooFewReplies
        raise StopIteration


class ReplyRules(Protocol):
    """What a method expects in its replies; :class:`~flwr_kd.KDStrategy` documents each member."""

    reply_payloads: ClassVar[Mapping[str, type[Payload]]]
    reply_arrays: ClassVar[frozenset[str]]
    reply_metrics: ClassVar[frozenset[str]]

    @property
    def max_examples(self) -> int:
        """Return the largest sample count with which a client is weighted."""

    def template_of(self, node: Node) -> ArrayTemplate:
        """Return names and shapes of a client's arrays."""

    def payload_dims(self, phase: str, node: Node) -> Mapping[str, int]:
        """Return the sizes that a client's payload must have."""

    def payload_limit(self, phase: str, node: Node) -> int:
        """Return the largest number of bytes that a client's payload can have."""

    def check_reply(self, phase: str, reply: Reply[Any]) -> None:
        """Raise :class:`PayloadError` if a reply breaks a rule of the method's own."""


class ReplyChecker:
    """Reads what clients sent, and drops with one warning what cannot be used.

    Parameters
    ----------
    rules : ReplyRules
        The strategy.

    Attributes
    ----------
    capped : set of int
        Keys of the clients that were warned about for their sample counts.
    """

    def __init__(self, rules: ReplyRules) -> None:
        self._rules = rules
        self.capped: set[int] = set()

    def check(self, phase: str, node: Node, delivered: Delivered, stats: RoundStats) -> Reply[Any] | None:
        """Return the reply if it is what the phase expects; else log why not, count a failure, and return None.

        The message is emptied once it has been read, so that there is one copy of what it held.
        """
        reply = None
        if delivered is None:
            log(WARNING, "%s did not reply in time", node)
        elif isinstance(delivered, PayloadError):
            log(WARNING, "the reply of %s is dropped: %s", node, plain(str(delivered)))
        elif delivered.has_error():
            log(WARNING, "%s failed: %s", node, reason_of(delivered.error))
        else:
            try:
                reply = self.read(phase, node, delivered, stats)
            except PayloadError as error:
                log(WARNING, "the reply of %s is dropped: %s", node, plain(str(error)))
            # An error that no check foresaw must not cost the other clients their round either.
            except Exception as error:
                kind = type(error).__name__
                log(WARNING, "the reply of %s is dropped: unexpected %s: %s", node, kind, first_line(error))
            flower_records.forget(delivered)
        if reply is None:
            stats.failures += 1
        return reply

    def read(self, phase: str, node: Node, message: Message, stats: RoundStats) -> Reply[Any]:
        """Return a message's checked reply, its sample count capped at the handshake's and at ``max_examples``.

        The method's own check gets the count without ``max_examples``, by which nothing is refused.

        Raises
        ------
        PayloadError
            If the message is not what the phase expects.
        """
        raw = flower_records.read_train_reply(message, message_api=node.message_api)
        stats.count(node, up=raw.nbytes, knowledge=raw.knowledge_nbytes)
        arrays = self._arrays(phase, node, raw)
        payload = self._payload(phase, node, raw.payload)
        self._check_metrics(raw.metrics)
        believed = min(raw.num_examples, node.num_examples)
        reply: Reply[Any] = Reply(node, arrays, believed, raw.metrics, payload)
        self._rules.check_reply(phase, reply)
        most = self._rules.max_examples
        if raw.num_examples > min(believed, most) and node.key not in self.capped:
            self.capped.add(node.key)
            self._warn_of_count(node, raw.num_examples, most)
        return replace(reply, num_examples=min(believed, most))

    def _warn_of_count(self, node: Node, claimed: int, most: int) -> None:
        if most < node.num_examples:
            why = f"the bound is {option('max_examples', most)}"
        else:
            why = f"it said {node.num_examples} in the handshake"
        log(
            WARNING,
            "%s claims %d samples, and counts as %d: %s",
            node,
            claimed,
            min(most, node.num_examples),
            why,
        )

    def _arrays(self, phase: str, node: Node, raw: flower_records.TrainReply) -> list[NDArray]:
        if phase in self._rules.reply_arrays:
            return checked_arrays(self._rules.template_of(node), raw)
        if raw.arrays:
            raise PayloadError(f"{len(raw.arrays)} arrays came back, expected none in phase {phase!r}")
        return []

    def _payload(self, phase: str, node: Node, data: bytes | None) -> Payload | None:
        expected = self._rules.reply_payloads.get(phase)
        if expected is None:
            if data is not None:
                raise PayloadError(f"a payload came back, expected none in phase {phase!r}")
            return None
        if data is None:
            raise PayloadError(f"{expected.schema}: the payload is missing")
        return expected.from_bytes(
            data, dims=self._rules.payload_dims(phase, node), max_bytes=self._rules.payload_limit(phase, node)
        )

    def _check_metrics(self, metrics: Mapping[str, float]) -> None:
        check_shares(metrics)
        for name in self._rules.reply_metrics:
            if abs(metrics.get(name, 0.0)) > _LARGEST_METRIC:
                raise PayloadError(
                    f"metric {name!r} must be within ±{_LARGEST_METRIC:g}, got {metrics[name]}"
                )


def checked_arrays(template: ArrayTemplate, raw: flower_records.TrainReply) -> list[NDArray]:
    """Return a reply's arrays in the template's order, checked; see :meth:`ArrayTemplate.check`."""
    return template.check(raw.arrays if raw.names is None else template.in_order(raw.arrays, raw.names))


def check_shares(metrics: Mapping[str, float]) -> None:
    """Raise :class:`PayloadError` if an accuracy is not in [0, 1]."""
    for name in (*SHARES, BEFORE, *GLOBAL_ON_CLIENTS):
        if not 0 <= metrics.get(name, 0.0) <= 1:
            raise PayloadError(f"metric {name!r} must be in [0, 1], got {metrics[name]}")


def read_evaluations(
    delivered: Iterable[tuple[Node, Delivered]],
    *,
    check: Callable[[Mapping[str, float]], None] = lambda metrics: None,
    failed: Callable[[], None] = lambda: None,
) -> Iterator[tuple[Node, flower_records.EvaluateReply]]:
    """Yield each client's evaluation. One that cannot be used is dropped with a warning, and ``failed`` is called.

    An evaluation of 0 samples is left out. ``check`` may raise :class:`PayloadError`.
    """
    for node, reply in delivered:
        try:
            if reply is None:
                raise PayloadError("it did not reply in time")
            if isinstance(reply, PayloadError):
                raise reply
            if reply.has_error():
                raise PayloadError(reason_of(reply.error))
            evaluation = flower_records.read_evaluate_reply(reply, message_api=node.message_api)
            check(evaluation.metrics)
        except PayloadError as error:
            failed()
            log(WARNING, "the evaluation of %s is dropped: %s", node, plain(str(error)))
            continue
        if evaluation.num_examples:
            yield node, evaluation


def evaluations(
    delivered: Iterable[tuple[Node, Delivered]], stats: RoundStats, *, max_examples: int
) -> list[tuple[int, dict[str, float]]]:
    """Return the sample count, loss and metrics of each client that evaluated the global model.

    A reply that cannot be used counts as a failure; see :func:`read_evaluations`. A client counts for no more test
    samples than it said in the handshake, and for no more than ``max_examples``.
    """

    def failed() -> None:
        stats.failures += 1

    return [
        (min(reply.num_examples, node.num_test_examples, max_examples), {"loss": reply.loss, **reply.metrics})
        for node, reply in read_evaluations(delivered, failed=failed)
    ]
