"""Sending messages and fetching their answers, one at a time; what an error reply says."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Sequence

from flwr.app import Error, Message
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid

from flwr_kd.text import first_line, plain
from flwr_kd.transport.payload import PayloadError

__all__ = ["Delivered", "lifetime", "pair", "pauses", "reason_of", "receive"]

Delivered = Message | PayloadError | None
"""An answer as it came, or why there is none that can be read; None where none came in time."""
_POLL_FIRST, _POLL_LAST, _POLL_GROWTH = 0.02, 1.0, 1.25
_ATTEMPTS = 3
_FETCH_SECONDS, _FETCH_SECONDS_EACH = 200.0, 2.0
"""How long answers are fetched after the last moment at which they may come: a SuperLink deletes a message with its
answer when its time to live is over."""
_RAISED = re.compile(r"<class '([\w.]+)'>:<['\"]?(.*?)['\"]?>", re.DOTALL)
_DIED = re.compile(
    r"ray\.exceptions\.(Actor\w+|WorkerCrashedError|OutOfMemoryError)|The actor (is dead|died)"
)


def pauses() -> Iterator[float]:
    """Yield the seconds between two looks for something, which grow from 0.02 to 1.

    A look comes too late by a quarter of the time waited at most, which is idle time at the end of a phase.
    """
    pause = _POLL_FIRST
    while True:
        yield pause
        pause = min(pause * _POLL_GROWTH, _POLL_LAST)


def lifetime(timeout: float, count: int) -> float:
    """Return the time to live in seconds of messages whose answers may come within a timeout.

    They are then fetched in turn; ``count`` says how many there are.

    >>> lifetime(3600.0, 100)
    4000.0
    """
    return timeout + _FETCH_SECONDS + _FETCH_SECONDS_EACH * count


def receive(
    grid: Grid, messages: Sequence[Message], timeout: float, *, of_silence: bool = False
) -> Iterator[tuple[Message, Delivered]]:
    """Send all, then fetch the answers one at a time, in the order of the messages.

    So the order does not depend on who is faster, and the server holds one answer: the others stay at the
    SuperLink.

    Parameters
    ----------
    grid : Grid
        Flower's, or an :class:`~flwr_kd.InlineGrid`.
    messages : sequence of Message
        Their time to live should be :func:`lifetime`.
    timeout : float
        Seconds within which answers may come. One that came in time is fetched after that, too.
    of_silence : bool
        The timeout is that of the time in which none comes, and not of all.

    Yields
    ------
    message, answer
        For each message.
    """
    if not messages:
        return
    pushed = {i for i in grid.push_messages(list(messages)) if i}
    end = time.monotonic() + timeout
    for message in messages:
        message_id, asked = message.metadata.message_id, time.monotonic()
        answer: Delivered = PayloadError("the message to it could not be sent")
        if message_id in pushed:
            answer = _pull(grid, message_id, end)
        # One that was there at the first look may have come long ago.
        if of_silence and answer is not None and time.monotonic() - asked > _POLL_FIRST:
            end = time.monotonic() + timeout
        yield message, answer
        # Else it would still be held while the next is fetched.
        del answer


def _pull(grid: Grid, message_id: str, end: float) -> Delivered:
    """Ask for one answer with growing pauses, at least once, until the time is over."""
    waits, attempts = pauses(), 0
    undecodable: PayloadError | None = None
    while True:
        last = time.monotonic() >= end
        try:
            came = list(grid.pull_messages([message_id]))
        # Flower decodes here what the client sent, with whatever error that raises.
        except Exception as error:
            attempts, came = attempts + 1, []
            undecodable = PayloadError(f"it cannot be fetched: {first_line(error)}")
            last = last or attempts >= _ATTEMPTS
        for reply in came:
            if reply.metadata.reply_to_message_id == message_id:
                # The SuperLink hands an answer out once: of one that could not be decoded it has none any more.
                return undecodable if undecodable is not None and reply.has_error() else reply
        if last:
            return undecodable
        time.sleep(max(0.0, min(next(waits), end - time.monotonic())))


def pair(messages: Sequence[Message], replies: Iterable[Message]) -> list[tuple[Message, Delivered]]:
    """Pair messages with replies that somebody else fetched, in the order of the messages.

    By what a reply answers: an error's source is the SuperLink. Of several to one message the first counts.
    """
    by_id: dict[str, Message] = {}
    for reply in replies:
        by_id.setdefault(reply.metadata.reply_to_message_id, reply)
    return [(message, by_id.get(message.metadata.message_id)) for message in messages]


def reason_of(error: Error) -> str:
    r"""Return the line that tells most of an error reply, of at most some 300 printable characters.

    Flower's text is ``<class 'ValueError'>:<'what it said'>``; Ray's is a 2,000-character chain whose last line is
    the cause.

    >>> reason_of(Error(2, "<class 'ValueError'>:<'no room\nfor it'>")), reason_of(Error(8, "stopped"))
    ('ValueError: no room', 'its process died')
    """
    text = (error.reason or "").strip()
    if error.code == ErrorCode.CLIENT_APP_CRASHED or _DIED.search(text):
        return "its process died"
    if error.code == ErrorCode.MESSAGE_UNAVAILABLE:
        return "it did not answer in time, or its answer was lost"
    if error.code == ErrorCode.NODE_UNAVAILABLE:
        return f"its SuperNode is gone ({plain(text, 200)})"
    found = _RAISED.fullmatch(text)
    kind, said = (found[1], found[2]) if found else ("", text)
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    if not lines:
        return kind or "no reason given"
    chain = "Traceback" in said or "ray::" in said
    return plain(lines[-1].removesuffix("'>") if chain or not kind else f"{kind}: {lines[0]}", 300)
