"""The processes of a pool as their parent sees them: how they start, what they are sent, and how they end."""

from __future__ import annotations

import itertools
import math
import multiprocessing
import os
import sys
import time
import warnings
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any

import torch
from flwr.app import ArrayRecord, Message

from flwr_kd.checks import ConfigError
from flwr_kd.seeding import derive_seed
from flwr_kd.text import first_line
from flwr_kd.transport.frames import Segment, encode, encode_part, pack, parts_of, size_of
from flwr_kd.transport.local_grid import Fault
from flwr_kd.transport.node_process import SMALL_BYTES, Start, work
from flwr_kd.transport.open_files import allow_open_files
from flwr_kd.wording import option

__all__ = ["Job", "NodeProcess", "Pool", "Shared", "start_method"]

_SHARED_BYTES = 1024
"""A byte string of this size that several messages have is sent once."""
_FILES = 6
"""That are open in the pool's process for each of its processes."""


def start_method() -> str:
    """Return how processes start: forked where that is safe, else spawned.

    A forked process has the parent's data and modules at once. It is not safe once CUDA is in use, nor on macOS;
    Windows has no fork. Where there is a GPU, PyTorch computes no gradient in a forked process once its parent has
    computed one, on any device.

    Raises
    ------
    ConfigError
        If this platform has no processes.
    """
    methods = multiprocessing.get_all_start_methods()
    in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if sys.platform.startswith("linux") and "fork" in methods and not in_use and _has_gradients_in_forks():
        return "fork"
    if "spawn" in methods:
        return "spawn"
    raise ConfigError(
        f"this platform ({sys.platform}) starts no processes: use {option('backend', 'inline')}"
    )


def _has_gradients_in_forks() -> bool:
    """Say whether a process that is forked now can train: a trial, since PyTorch does not say it."""
    if torch.cuda.device_count() == 0:
        return True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        failed = 1
        with suppress(RuntimeError):
            torch.zeros(1, requires_grad=True).sum().backward()  # type: ignore[no-untyped-call]
            failed = 0
        os._exit(failed)
    return os.waitpid(pid, 0)[1] == 0


@dataclass(eq=False)
class Shared:
    """What several messages of a phase have in common: one array record, or one byte string.

    Attributes
    ----------
    key : int
        By which messages name it.
    slot : Slot
        Where it is.
    users : int
        Messages that are not answered yet.
    """

    key: int
    slot: Slot
    users: int


@dataclass(eq=False)
class Slot:
    """A segment of shared memory, with the number by which processes know it."""

    number: int
    segment: Segment


@dataclass(eq=False)
class Job:
    """A message and what has become of it.

    Attributes
    ----------
    push : int
        The number of the push after which the reply can be seen.
    fault : Fault, optional
        What goes wrong with it.
    done : bool
        Whether nothing more will come for it.
    reply : callable, optional
        Returns the reply; None if there is none.
    slot : Slot, optional
        Shared memory that it alone uses, and the process that has it.
    size : int
        Bytes of the reply.
    """

    message: Message
    push: int
    fault: Fault | None = None
    done: bool = False
    reply: Callable[[], Message] | None = None
    shared: Mapping[int, Shared] = field(default_factory=dict)
    slot: Slot | None = None
    process: NodeProcess | None = None
    size: int = 0

    @property
    def node_id(self) -> int:
        """The node that it is for."""
        return self.message.metadata.dst_node_id


class _Exit:
    """A descriptor that can be read once a process has ended, whatever its own children hold open."""

    def __init__(self, pid: int) -> None:
        self._handle = os.pidfd_open(pid)

    def fileno(self) -> int:
        return self._handle

    def close(self) -> None:
        os.close(self._handle)


class NodeProcess:
    """One process of a pool.

    Attributes
    ----------
    jobs : deque of Job
        What it has been sent, in order. It works on the first.
    ready : bool
        Whether it has started.
    """

    def __init__(self, context: Any, start: Start, alive: Connection, inherited: Sequence[Any]) -> None:
        self.connection, theirs = context.Pipe()
        self.jobs: deque[Job] = deque()
        self.ready, self._begun = False, time.monotonic()
        self._known: set[int] = set()
        self._shared: set[int] = set()
        self._forget: list[int] = []
        self._slots: list[Slot] = []
        self._ended = False
        forked = context.get_start_method() == "fork"
        arguments = (start, theirs, alive, (*inherited, self.connection) if forked else ())
        self._process = context.Process(target=work, args=arguments, name="flwr-kd-node")
        with warnings.catch_warnings():
            # Python warns of forks of a process with threads: their locks. work() takes none of them.
            warnings.simplefilter("ignore", DeprecationWarning)
            try:
                self._process.start()
            except Exception as error:
                self.connection.close()
                theirs.close()
                raise ConfigError(
                    f"a client cannot be built in another process ({first_line(error)}): use "
                    f"{option('backend', 'inline')}"
                ) from error
        theirs.close()
        try:
            self.exit: Any = _Exit(self._process.pid)
        except (AttributeError, OSError):
            # Not on this system: the end is seen once the process's own children have ended as well.
            self.exit = self._process.sentinel

    @property
    def handles(self) -> list[Any]:
        """What a process that is forked from this one closes; nothing once it has been ended."""
        if self._ended:
            return []
        return [self.connection, *([self.exit] if isinstance(self.exit, _Exit) else [])]

    def left(self, seconds: float) -> float:
        """Return what is left of the seconds that it may work on its first job."""
        if not self.jobs or not self.ready:
            return math.inf
        return self._begun + seconds - time.monotonic()

    def begin(self) -> None:
        """Note that it begins with its first job now."""
        self._begun = time.monotonic()

    def send(self, job: Job, state: bytes, new_slot: Callable[[], Slot] | None) -> None:
        """Send a message with its node's state.

        Parameters
        ----------
        job : Job
            What it answers after the jobs before.
        state : bytes
            The node's, packed; empty if it has none.
        new_slot : callable, optional
            Makes shared memory where none is free; None if this system has none.

        Raises
        ------
        OSError
            If the process has ended.
        """
        used: dict[int, Shared] = {}

        def key(part: object) -> int | None:
            shared = job.shared.get(id(part))
            if shared is None:
                return None
            used[shared.key] = shared
            return shared.key

        buffers: list[bytes] = []
        content = encode(job.message.content, buffers, key)
        head = {"metadata": job.message.metadata.__dict__, "content": content, "state": len(state)}
        parts = pack(head, [*buffers, state])
        if new_slot is not None:
            job.slot = self._slots.pop() if self._slots else new_slot()
        in_slot = job.slot is not None and size_of(parts) > SMALL_BYTES
        if job.slot is not None and in_slot:
            job.slot.segment.write(parts)
            parts = []
        new_parts = [part for part in used.values() if part.key not in self._shared]
        slots = {
            slot.number: slot for slot in (job.slot, *(part.slot for part in new_parts)) if slot is not None
        }
        new = [number for number in slots if number not in self._known]
        about = {
            "slot": None if job.slot is None else job.slot.number,
            "in slot": in_slot,
            "new": new,
            "shared": [(part.key, part.slot.number) for part in new_parts],
            "forget": self._forget,
        }
        if not self.jobs:
            self.begin()
        self.jobs.append(job)
        job.process = self
        self._forget = []
        self._shared |= {part.key for part in new_parts}
        self._known |= set(new)
        self.connection.send_bytes(b"".join([*pack(about), *parts]))
        for number in new:
            reduction.send_handle(self.connection, slots[number].segment.handle, self._process.pid)

    def forget(self, shared: Shared) -> None:
        """Have it forget what no message needs any more."""
        if shared.key in self._shared:
            self._shared.discard(shared.key)
            self._forget.append(shared.key)

    def free(self, slot: Slot) -> None:
        """Take back shared memory that one of its jobs has used."""
        if self._ended:
            slot.segment.close()
        else:
            self._slots.append(slot)

    def kill(self) -> None:
        """Kill it; its end is seen later, as that of any process that dies."""
        if not self._ended:
            self._process.kill()

    def end(self) -> None:
        """Kill it if it runs, and wait for its end."""
        if self._ended:
            return
        self._process.kill()
        self._process.join()
        self._ended = True
        for slot in self._slots:
            slot.segment.close()
        self._slots = []
        self.connection.close()
        if isinstance(self.exit, _Exit):
            self.exit.close()
        self._process.close()


class Pool:
    """A number of processes, each of which can be replaced, and the memory that they share.

    Parameters
    ----------
    start : Start
        What each process is given.
    count : int
        Number of processes.
    method : str, optional
        ``"fork"`` or ``"spawn"``; :func:`start_method` if None.
    slots : int
        Replies that may be in shared memory at the same time.
    """

    def __init__(self, start: Start, count: int, method: str | None = None, *, slots: int = 0) -> None:
        self._start, self._count, self._method, self._most_slots = start, count, method, slots
        self._numbers, self._keys, self._starts = itertools.count(), itertools.count(), itertools.count()
        self._segments: weakref.WeakSet[Segment] = weakref.WeakSet()
        self._free: list[Slot] = []
        self._shared: dict[int, Shared] = {}
        self._alive: tuple[Connection, Connection] | None = None
        self.processes: list[NodeProcess] = []

    def begin(self) -> None:
        """Start the processes, unless they run."""
        if not self.processes:
            allow_open_files(_FILES * self._count + self._most_slots, self._count)
        while len(self.processes) < self._count:
            self.processes.append(self._started())

    def replace(self, process: NodeProcess) -> None:
        """End a process, and start another in its place."""
        place = self.processes.index(process)
        process.end()
        self.processes[place] = self._started()

    def end(self) -> None:
        """Kill all processes, and free the memory."""
        for process in self.processes:
            process.end()
        self.processes = []
        for slot in (*self._free, *(shared.slot for shared in self._shared.values())):
            slot.segment.close()
        self._free, self._shared = [], {}
        if self._alive is not None:
            for connection in self._alive:
                connection.close()
        self._alive = None

    def new_slot(self) -> Slot:
        """Return new shared memory."""
        segment = Segment()
        self._segments.add(segment)
        return Slot(next(self._numbers), segment)

    def share(self, messages: Iterable[Message]) -> dict[int, Shared]:
        """Write what several messages have in common to shared memory; return it by the identity of each object."""
        if not Segment.available():
            return {}
        parts: dict[int, ArrayRecord | bytes] = {}
        uses: Counter[int] = Counter()
        for message in messages:
            for part in parts_of(message.content, _SHARED_BYTES):
                parts[id(part)] = part
                uses[id(part)] += 1
        shared = {}
        for identity, count in uses.items():
            part = parts[identity]
            if count > 1 and part:
                slot = self._free.pop() if self._free else self.new_slot()
                slot.segment.write(encode_part(part))
                each = Shared(next(self._keys), slot, count)
                shared[identity] = self._shared[each.key] = each
        return shared

    def release(self, job: Job) -> None:
        """Note that a job needs nothing any more of what it shares with others."""
        for part in parts_of(job.message.content, _SHARED_BYTES) if job.shared else ():
            shared = job.shared.get(id(part))
            if shared is None:
                continue
            shared.users -= 1
            if shared.users == 0 and self._shared.pop(shared.key, None) is not None:
                self._free.append(shared.slot)
                for process in self.processes:
                    process.forget(shared)
        job.shared = {}

    def _started(self) -> NodeProcess:
        context: Any = multiprocessing.get_context(self._method or start_method())
        if self._alive is None:
            self._alive = context.Pipe(duplex=False)
        reader, writer = self._alive
        inherited: list[Any] = [writer, *self._segments]
        for process in self.processes:
            inherited += process.handles
        start = replace(self._start, seed=derive_seed(self._start.seed, "process", next(self._starts)))
        return NodeProcess(context, start, reader, inherited)
