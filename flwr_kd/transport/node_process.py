"""What runs in a process of the pool: it takes messages one after another, and keeps nothing between them.

A node's state comes with its message and goes back with the reply if it has changed. So any process can take any
node, and one that dies loses nothing but the reply to the message that it worked on.
"""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import reduction
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
from flwr.app import ArrayRecord, Context, Error, Message, Metadata, RecordDict
from flwr.clientapp import ClientApp

from flwr_kd.seeding import seed_global_generators
from flwr_kd.transport.frames import (
    Segment,
    Take,
    decode,
    decode_part,
    encode,
    join,
    pack,
    size_of,
    unpack,
)
from flwr_kd.transport.local_grid import answer, failed, identify_process

__all__ = ["SMALL_BYTES", "Start", "packed_state", "read_reply", "work"]

SMALL_BYTES = 32 * 1024
"""Up to this size messages and replies go through the pipe, beyond it through shared memory.

A pipe holds 200 KB: two messages and two replies of this size never fill it, so that neither side waits for the
other.
"""
_FLOWER = "flwr"


@dataclass(frozen=True)
class Start:
    """What a process of the pool needs once; pickled only where processes are not forked.

    Attributes
    ----------
    app : ClientApp
        The nodes'.
    nodes : mapping
        By node id, its config.
    run_id : int
        The run's.
    run_config : mapping
        The run's.
    level : int
        Level of Flower's log.
    seed : int
        Seeds the global generators of this process, which a client may draw from before its training.
    threads : int
        PyTorch's threads in each process.
    """

    app: ClientApp
    nodes: Mapping[int, Mapping[str, Any]]
    run_id: int
    run_config: Mapping[str, Any]
    level: int
    seed: int
    threads: int


def work(start: Start, connection: Connection, alive: Connection, inherited: Sequence[Connection]) -> None:
    """Answer messages until the other end of the connection is closed, or the process that holds it has ended.

    Parameters
    ----------
    start : Start
        What does not change.
    connection : Connection
        To the pool.
    alive : Connection
        At its end when the pool's process has ended, also where that was killed.
    inherited : sequence of Connection
        What a forked process has from the pool, and closes.
    """
    # The first use of PyTorch: a forked process has none of the threads that compute in its parent.
    torch.set_num_threads(start.threads)
    for other in inherited:
        other.close()
    _reset_signals()
    threading.Thread(target=_end_with, args=(alive,), daemon=True, name="flwr-kd-alive").start()
    # What came from the parent is never looked through, nor copied for that.
    gc.freeze()
    identify_process()
    seed_global_generators(start.seed)
    worker = _Worker(start, connection)
    with suppress(EOFError, OSError):
        connection.send_bytes(b"".join(pack({"ready": True})))
        while True:
            worker.answer_next()
    # Neither the parent's functions for the exit nor its threads are this process's.
    os._exit(0)


def _reset_signals() -> None:
    # A terminal sends Ctrl-C to all of its processes: the pool ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in ("SIGTERM", "SIGHUP"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_DFL)
    with suppress(ValueError):
        signal.set_wakeup_fd(-1)


def _end_with(alive: Connection) -> None:
    """End with the pool's process. Processes of another pool may hold the other end of its pipe open."""
    parent = multiprocessing.parent_process()
    sources: list[Any] = [alive]
    if parent is not None:
        with suppress(AttributeError, OSError):
            sources.append(os.pidfd_open(parent.pid))  # type: ignore[arg-type]
    # Else it had ended before, and the descriptor is of another process.
    if parent is None or os.getppid() == parent.pid:
        with suppress(OSError):
            wait(sources)
    os._exit(1)


class _Lines(logging.Handler):
    """Keeps what Flower's logger is given, for the pool's process to log."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[int, str, str | None]] = []

    def emit(self, record: logging.LogRecord) -> None:
        try:
            # With the traceback, if there is one.
            text = self.format(record)
        except Exception:
            # As in any handler, a mistake in a call of the logger does not reach the caller.
            self.handleError(record)
        else:
            self.lines.append((record.levelno, text, getattr(record, "once", None)))

    def take(self) -> list[tuple[int, str, str | None]]:
        lines, self.lines = self.lines, []
        return lines


class _Worker:
    def __init__(self, start: Start, connection: Connection) -> None:
        self._start, self._connection, self._pid = start, connection, os.getpid()
        self._segments: dict[int, Segment] = {}
        self._shared: dict[int, ArrayRecord | bytes] = {}
        self._log = _Lines()
        logger = logging.getLogger(_FLOWER)
        logger.handlers, logger.filters, logger.propagate = [self._log], [], False
        logger.setLevel(start.level)

    def answer_next(self) -> None:
        """Take the next message, and send the reply."""
        frame = join(self._connection.recv_bytes())
        about = unpack(frame)
        for number in about["new"]:
            self._segments[number] = Segment(reduction.recv_handle(self._connection))
        for key in about["forget"]:
            self._shared.pop(key, None)
        for key, number in about["shared"]:
            self._shared[key] = decode_part(self._segments[number].reader())
        slot = None if about["slot"] is None else self._segments[about["slot"]]
        take = slot.reader() if slot is not None and about["in slot"] else frame
        message, content, context = self._read(take)
        begun = time.perf_counter()
        try:
            reply, state = answer(self._start.app, message, content, context)
        except KeyboardInterrupt as error:
            # The client's own: a signal does not reach this process.
            reply, state = failed(message, error), context.state
        if os.getpid() != self._pid:
            # A fork that the client's code has made and not ended: the pool waits for one reply.
            os._exit(0)
        self._send(message, reply, None if _same(state, context.state) else state, slot, begun)
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()

    def _read(self, take: Take) -> tuple[Message, RecordDict, Context]:
        head = unpack(take)
        content = decode(head["content"], take, self._shared.__getitem__)
        state = RecordDict()
        if head["state"]:
            stored = join(take(head["state"]))
            state = decode(unpack(stored), stored)
        metadata = Metadata.__new__(Metadata)
        metadata.__dict__.update(head["metadata"])
        message = Message(RecordDict(), dst_node_id=0, message_type="train")
        message.__dict__["_metadata"] = metadata
        node_id = metadata.dst_node_id
        context = Context(
            run_id=self._start.run_id,
            node_id=node_id,
            node_config=dict(self._start.nodes[node_id]),
            state=state,
            run_config=dict(self._start.run_config),
        )
        return message, content, context

    def _send(
        self,
        message: Message,
        reply: Message,
        state: RecordDict | None,
        slot: Segment | None,
        begun: float,
    ) -> None:
        try:
            parts, kept = packed_reply(reply), [] if state is None else packed_state(state)
            size, kept_size = size_of(parts), size_of(kept)
            in_slot = slot is not None and size + kept_size > SMALL_BYTES
            if slot is not None and in_slot:
                slot.write([*parts, *kept])
                parts, kept = [], []
        except Exception as error:
            why = TypeError(f"its reply or state cannot be sent: {type(error).__name__}: {error}")
            parts, kept, in_slot = packed_reply(failed(message, why)), [], False
            size, kept_size = size_of(parts), 0
        about = {
            "reply": size,
            "state": kept_size or None,
            "log": self._log.take(),
            "seconds": time.perf_counter() - begun,
            "in slot": in_slot,
        }
        self._connection.send_bytes(b"".join([*pack(about), *parts, *kept]))


def packed_reply(reply: Message) -> list[bytes]:
    """Return the frame of a reply; its metadata follow from the message's."""
    buffers: list[bytes] = []
    if reply.has_error():
        return pack({"error": [int(reply.error.code), reply.error.reason]})
    return pack({"content": encode(reply.content, buffers)}, buffers)


def read_reply(message: Message, take: Take) -> Message:
    """Return the reply to a message."""
    head = unpack(take)
    if "error" in head:
        code, reason = head["error"]
        return Message(Error(code, reason), reply_to=message)
    return Message(decode(head["content"], take), reply_to=message)


def packed_state(state: RecordDict) -> list[bytes]:
    """Return the frame of a node's state."""
    buffers: list[bytes] = []
    return pack(encode(state, buffers), buffers)


def _same(state: RecordDict, before: RecordDict) -> bool:
    """Say whether a call has left a node's state as it was: it would have put other objects in place of the old."""
    if state is before:
        return True
    if list(state) != list(before):
        return False
    for name, record in state.items():
        other = before[name]
        if type(record) is not type(other) or list(record) != list(other):
            return False
        if isinstance(record, ArrayRecord):
            if any(array.data is not other[key].data for key, array in record.items()):  # type: ignore[union-attr]
                return False
        elif not all(_same_value(value, other[key]) for key, value in record.items()):
            return False
    return True


def _same_value(value: Any, before: Any) -> bool:
    """Say whether two entries of a record are the same: 1, 1.0 and True are equal, and so are 0.0 and -0.0."""
    if value is before:
        return True
    if type(value) is not type(before):
        return False
    if isinstance(value, list):
        return len(value) == len(before) and all(map(_same_value, value, before))
    return repr(value) == repr(before) if isinstance(value, float) else bool(value == before)
