"""Sends messages and fetches their replies one at a time; tells what an error reply says."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol, runtime_checkable

from flwr.app import Error, Message
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid

from flwr_kd.text import first_line, plain
from flwr_kd.transport.payload import PayloadError

__all__ = ["Delivered", "lifetime", "pair", "pauses", "reason_of", "receive"]


@runtime_checkable
class BoundedGrid(Protocol):
    """A grid whose nodes do not work at the same time, so that each has the timeout for itself."""

    def bound(self, seconds: float) -> None:
        """Set how long a node may work on each message."""


Delivered = Message | PayloadError | None
"""What arrived for a message: a reply; the error that made it unreadable; or None if it did not arrive in time."""
_POLL_FIRST, _POLL_LAST, _POLL_GROWTH = 0.02, 1.0, 1.25
_ATTEMPTS = 3
_FETCH_SECONDS, _FETCH_SECONDS_EACH = 200.0, 2.0
"""Seconds for fetching replies after the last moment at which they may arrive. A SuperLink deletes messages and
their replies once their time to live is over."""
_RAISED = re.compile(r"<class '([\w.]+)'>:<['\"]?(.*?)['\"]?>", re.DOTALL)
_DIED = re.compile(
    r"ray\.exceptions\.(Actor\w+|WorkerCrashedError|OutOfMemoryError)|The actor (is dead|died)"
)


def pauses() -> Iterator[float]:
    """Yield the seconds between two polls, which grow from 0.02 to 1.

    A poll is late by at most a quarter of the time waited, which is idle time at the end of a phase.
    """
    pause = _POLL_FIRST
    while True:
        yield pause
        pause = min(pause * _POLL_GROWTH, _POLL_LAST)


def lifetime(timeout: float, count: int) -> float:
    """Return the time to live in seconds of ``count`` messages whose replies may arrive within a timeout.

    It leaves time to fetch the replies one after another.

    >>> lifetime(3600.0, 100)
    4000.0
    """
    return timeout + _FETCH_SECONDS + _FETCH_SECONDS_EACH * count


def receive(
    grid: Grid, messages: Sequence[Message], timeout: float, *, since_last: bool = False
) -> Iterator[tuple[Message, Delivered]]:
    """Send all messages, then fetch the replies one at a time, in the order of the messages.

    So the order does not depend on which client is faster, and the server holds one reply: the others stay at the
    SuperLink.

    Parameters
    ----------
    grid : Grid
        Flower's, or an :class:`~flwr_kd.InlineGrid`.
    messages : sequence of Message
        Their time to live should be :func:`lifetime`.
    timeout : float
        Seconds within which replies may arrive. One that arrived in time is fetched even after that.
    since_last : bool
        Count the timeout from the last arrival, not from the beginning.

    Yields
    ------
    message, delivered
        Each message with what arrived for it.
    """
    if not messages:
        return
    if isinstance(grid, BoundedGrid):
        grid.bound(timeout)
    pushed = {i for i in grid.push_messages(list(messages)) if i}
    end = time.monotonic() + timeout
    for message in messages:
        message_id, begun = message.metadata.message_id, time.monotonic()
        delivered: Delivered = PayloadError("the message to it could not be sent")
        if message_id in pushed:
            delivered = _pull(grid, message_id, end)
        # A reply that is there at the first poll may have arrived long ago.
        if since_last and delivered is not None and time.monotonic() - begun > _POLL_FIRST:
            end = time.monotonic() + timeout
        yield message, delivered
        # Drop the reference, so that only one reply is in memory.
        del delivered


def _pull(grid: Grid, message_id: str, end: float) -> Delivered:
    """Poll for one reply with growing pauses, at least once, until the time is over."""
    waits, attempts = pauses(), 0
    undecodable: PayloadError | None = None
    while True:
        last = time.monotonic() >= end
        try:
            replies = list(grid.pull_messages([message_id]))
        # Flower decodes here what the client sent, which may raise anything.
        except Exception as error:
            attempts, replies = attempts + 1, []
            undecodable = PayloadError(f"it cannot be fetched: {first_line(error)}")
            last = last or attempts >= _ATTEMPTS
        for reply in replies:
            if reply.metadata.reply_to_message_id == message_id:
                # The SuperLink hands a reply out once. After one that could not be decoded it gives an error.
                return undecodable if undecodable is not None and reply.has_error() else reply
        if last:
            return undecodable
        time.sleep(max(0.0, min(next(waits), end - time.monotonic())))


def pair(messages: Sequence[Message], replies: Iterable[Message]) -> list[tuple[Message, Delivered]]:
    """Pair messages with replies that were fetched elsewhere, in the order of the messages.

    A reply belongs to the message that it names, since the source of an error is the SuperLink. The first reply to
    a message counts.
    """
    by_id: dict[str, Message] = {}
    for reply in replies:
        by_id.setdefault(reply.metadata.reply_to_message_id, reply)
    return [(message, by_id.get(message.metadata.message_id)) for message in messages]


def reason_of(error: Error) -> str:
    r"""Return the most telling line of an error reply: at most some 300 printable characters.

    Flower's text is ``<class 'ValueError'>:<'its message'>``; Ray's is a chain of 2,000 characters whose last line
    is the cause.

    >>> reason_of(Error(2, "<class 'ValueError'>:<'no room\nfor it'>")), reason_of(Error(8, "stopped"))
    ('ValueError: no room', 'its process died')
    """
    text = (error.reason or "").strip()
    if error.code == ErrorCode.CLIENT_APP_CRASHED or _DIED.search(text):
        return "its process died"
    if error.code == ErrorCode.MOD_FAILED_PRECONDITION:
        wrong_kind = (
            "The mods in flwr.clientapp.mod work on clients of flwr_kd.client_app(build, train_mods=[...]), and "
            "those of the same names in flwr.client.mod on a NumPyClient's"
        )
        return f"{plain(text, 200)} {wrong_kind}" if "expects exactly one" in text else plain(text, 300)
    if "secaggplus_configs" in text:
        return "secagg_mod and secaggplus_mod need Flower's SecAgg workflow at the server: remove the mod"
    if error.code == ErrorCode.MESSAGE_UNAVAILABLE:
        return "it did not reply in time, or its reply was lost"
    if error.code == ErrorCode.NODE_UNAVAILABLE:
        return f"its SuperNode is gone ({plain(text, 200)})"
    matched = _RAISED.fullmatch(text)
    kind, message = (matched[1], matched[2]) if matched else ("", text)
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    if not lines:
        return kind or "no reason given"
    chain = "Traceback" in message or "ray::" in message
    return plain(lines[-1].removesuffix("'>") if chain or not kind else f"{kind}: {lines[0]}", 300)
