"""A ``Grid`` whose nodes work in processes of this machine, which are forked where that is safe."""

from __future__ import annotations

import atexit
import itertools
import logging
import math
import os
import weakref
from collections.abc import Iterable, Mapping, Sequence
from logging import WARNING
from multiprocessing.connection import wait
from typing import Any

from flwr.app import Error, Message
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode
from flwr.common.logger import log
from flwr.supercore.task_identity import TaskIdentity

from flwr_kd.transport.frames import Segment, join, unpack
from flwr_kd.transport.local_grid import Fault, LocalGrid, failed
from flwr_kd.transport.node_pool import Job, NodeProcess, Pool
from flwr_kd.transport.node_process import Start, packed_state, read_reply
from flwr_kd.wording import warn_once_as

__all__ = ["ProcessGrid"]

_AHEAD, _FAR_AHEAD, _MOST_AHEAD, _HELD_BYTES = 2, 16, 128, 64 * 2**20
"""Messages that are answered before their replies are asked for: two for each process, and up to 16, at most 128 in
all, while their replies take up to 64 MiB. So a slow client delays few others."""
_SHORT_SECONDS = 0.1
"""A process gets its next message while it works if messages take no longer than that."""


class ProcessGrid(LocalGrid):
    """Runs a ClientApp for a number of nodes in processes of this machine.

    A process takes one message after another, from any node. The nodes' states are kept here, so that a process
    that dies costs the reply to the message that it worked on; another takes its place. One that does not reply in
    time is killed. What all nodes are sent is in memory once, and so is each large reply, until it is pulled.

    Parameters
    ----------
    client_app : ClientApp
        As for Flower's simulation.
    num_nodes : int
        Number of nodes; node ids are not 0..N-1, as in Flower.
    workers : int
        Number of processes.
    start_method : str, optional
        ``"fork"`` or ``"spawn"``; the former where it is safe if None. What is spawned must be picklable.
    threads : int
        PyTorch's threads in each process. A forked process must have one.
    node_configs, faults, run_config, seed, work_seconds
        As :class:`~flwr_kd.InlineGrid` takes them. Faults happen in this process.
    """

    def __init__(
        self,
        client_app: ClientApp,
        num_nodes: int,
        *,
        workers: int = 2,
        start_method: str | None = None,
        threads: int = 1,
        node_configs: Sequence[Mapping[str, Any]] | None = None,
        faults: Mapping[int, Fault | Sequence[Fault]] | None = None,
        run_config: Mapping[str, Any] | None = None,
        seed: int = 0,
        work_seconds: float = 0.0,
    ) -> None:
        super().__init__(
            client_app,
            num_nodes,
            workers=workers,
            node_configs=node_configs,
            faults=faults,
            run_config=run_config,
            seed=seed,
            work_seconds=work_seconds,
        )
        start = Start(
            app=client_app,
            nodes={node_id: context.node_config for node_id, context in self.contexts.items()},
            run_id=TaskIdentity.run_id,
            run_config=dict(run_config or {}),
            level=logging.getLogger("flwr").getEffectiveLevel(),
            seed=seed,
            threads=threads,
        )
        processes = min(workers, num_nodes)
        self._pool = Pool(start, processes, start_method, slots=max(_AHEAD * workers, _MOST_AHEAD))
        self._jobs: dict[str, Job] = {}
        self._waiting: dict[str, Job] = {}
        self._states: dict[int, bytes] = {}
        self._largest, self._typical = 1, 0.0
        self._failure: Exception | None = None
        self._pid = os.getpid()
        self._finalizer = weakref.finalize(self, _end, self._pool, self._pid)

    # ------------------------------------------------------------------ Grid

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Take the messages; the processes get them as replies are pulled."""
        self._pushes += 1
        messages = list(messages)
        self._drop_unpulled()
        shared = self._pool.share(messages)
        ids = []
        for message in messages:
            message_id, fault = self._number(message), self._fault(message)
            late = fault is not None and fault.kind == "late"
            job = Job(message, self._pushes + late, fault, shared=shared)
            ids.append(message_id)
            self._jobs[message_id] = job
            if fault is not None and fault.kind in ("silent", "raise"):
                reply = failed(message, RuntimeError("injected fault"))
                self._finish(job, reply if fault.kind == "raise" else None)
            else:
                self._waiting[message_id] = job
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Wait for the replies to these messages, and return those that are there."""
        if self._failure is not None:
            raise self._failure
        wanted = [self._jobs[message_id] for message_id in message_ids if message_id in self._jobs]
        try:
            for job in wanted:
                self._wait(job)
        except BaseException as error:
            # An interrupt, or no process can be started: nobody waits for the others either.
            self.close()
            self._failure = error if isinstance(error, Exception) else None
            raise
        return [self._pulled(job) for job in wanted if job.reply is not None and job.push <= self._pushes]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Send and wait, as Flower's own loop does; a node that never replies costs no waiting here."""
        waiting = list(self.push_messages(list(messages)))
        self.bound(math.inf if timeout is None else timeout)
        return self.pull_messages(waiting)

    def begin(self) -> None:
        """Start the processes, unless they run; the first message does so, too.

        Raises
        ------
        ConfigError
            If this platform has no processes, or what they need cannot be pickled where they are spawned.
        """
        if not self._pool.processes:
            # Before the exit function of multiprocessing, which waits for the processes' end.
            atexit.register(self._finalizer)
            self._pool.begin()

    def close(self) -> None:
        """Kill the processes. A message that comes later starts others."""
        atexit.unregister(self._finalizer)
        _end(self._pool, self._pid)
        self._jobs, self._waiting = {}, {}

    # ------------------------------------------------------------------ what is here

    def _finish(self, job: Job, reply: Message | None) -> None:
        """Note that no more will come for a message."""
        job.done = True
        job.reply = None if reply is None else lambda: reply
        self._pool.release(job)

    def _pulled(self, job: Job) -> Message:
        """Return a reply, and forget it."""
        del self._jobs[job.message.metadata.message_id]
        assert job.reply is not None
        reply, fault = job.reply(), job.fault
        self._free_slot(job)
        if fault is not None and fault.kind == "garbage" and reply.has_content():
            fault.mutilate(reply.content, int(job.message.metadata.message_id.rpartition("-")[2]))
        return reply

    def _free_slot(self, job: Job) -> None:
        if job.slot is not None and job.process is not None:
            job.process.free(job.slot)
        job.slot = None

    def _drop_unpulled(self) -> None:
        """Forget replies that nobody has asked for, and messages whose replies nobody waits for."""
        for message_id, job in list(self._jobs.items()):
            if job.push >= self._pushes - 1 or not (job.done or message_id in self._waiting):
                continue
            self._waiting.pop(message_id, None)
            self._pool.release(job)
            self._free_slot(job)
            del self._jobs[message_id]

    # ------------------------------------------------------------------ processes

    def _wait(self, job: Job) -> None:
        """Wait until nothing more will come for a message. Processes that take too long meanwhile are replaced."""
        while not job.done:
            self._feed(job)
            processes = self._pool.processes
            left = min((process.left(self._seconds) for process in processes), default=math.inf)
            sources = {id(source): process for process in processes for source in _sources(process)}
            ready = wait(
                [source for process in processes for source in _sources(process)],
                None if left == math.inf else max(left, 0.0),
            )
            for process in {id(p): p for p in (sources[id(source)] for source in ready)}.values():
                self._receive(process)
            if not ready:
                for process in list(processes):
                    if process.left(self._seconds) <= 0:
                        self._give_up(process)

    def _feed(self, needed: Job) -> None:
        """Give messages to free processes: the one that is waited for, and some of those that follow."""
        self.begin()
        depth = 2 if Segment.available() and self._typical < _SHORT_SECONDS else 1
        far = min(_FAR_AHEAD * self._workers, _MOST_AHEAD, _HELD_BYTES // self._largest)
        room = max(_AHEAD * self._workers, far)
        held = len(self._jobs) - len(self._waiting)
        busy = {job.node_id for process in self._pool.processes for job in process.jobs}
        first = needed.message.metadata.message_id
        queue = [first] if first in self._waiting else []
        following = (i for i in itertools.islice(self._waiting, room + 1) if i != first)
        for message_id in [*queue, *following]:
            job = self._waiting[message_id]
            process = min(self._pool.processes, key=lambda process: len(process.jobs))
            if len(process.jobs) >= depth or (job is not needed and held >= room):
                return
            if job.node_id not in busy:
                del self._waiting[message_id]
                held += 1
                busy.add(job.node_id)
                self._send(process, job)

    def _send(self, process: NodeProcess, job: Job) -> None:
        state = self._states.get(job.node_id)
        if state is None:
            given = self.contexts[job.node_id].state
            state = b"".join(packed_state(given)) if given else b""
        try:
            process.send(job, state, self._pool.new_slot if Segment.available() else None)
        except OSError:
            # It has ended while it had nothing to do. If not, it may have a part of the message. Another gets it.
            process.kill()
            process.jobs.remove(job)
            self._free_slot(job)
            self._waiting = {job.message.metadata.message_id: job, **self._waiting}
        except Exception as error:
            if job.process is not None:
                raise
            self._finish(job, failed(job.message, error))

    def _receive(self, process: NodeProcess) -> None:
        """Take the next reply of a process, or note that it has ended."""
        try:
            if not process.connection.poll():
                raise EOFError
            frame = process.connection.recv_bytes()
        except (EOFError, OSError):
            self._ended(process)
            return
        take = join(frame)
        about = unpack(take)
        process.begin()
        if "ready" in about:
            process.ready = True
            return
        job = process.jobs.popleft()
        for level, text, once in about["log"]:
            if once is None or warn_once_as(once):
                log(level, "%s", text)
        reply, state = about["reply"], about["state"]
        self._typical += 0.2 * (about["seconds"] - self._typical)
        self._largest = max(self._largest, reply)
        message, slot = job.message, job.slot
        if slot is not None and about["in slot"]:
            if state is not None:
                self._states[job.node_id] = slot.segment.reader(reply)(state)
            job.reply = lambda: read_reply(message, slot.segment.reader())
        else:
            kept = take(reply)
            if state is not None:
                self._states[job.node_id] = take(state)
            job.reply = lambda: read_reply(message, join(kept))
            self._free_slot(job)
        job.done = True
        self._pool.release(job)

    def _ended(self, process: NodeProcess) -> None:
        """Replace a process that has ended. The message that it worked on has an error, others go elsewhere."""
        jobs, ready = list(process.jobs), process.ready
        if not ready:
            process.end()
            raise RuntimeError("a process of the pool ended before it could take a message")
        if jobs:
            job = jobs.pop(0)
            self._free_slot(job)
            self._finish(job, Message(Error(ErrorCode.CLIENT_APP_CRASHED, "it died"), reply_to=job.message))
        self._take_back(process, jobs)

    def _give_up(self, process: NodeProcess) -> None:
        """Replace a process that takes too long. Its message has no reply."""
        job, *jobs = process.jobs
        log(
            WARNING,
            "client %s still works after %g s and is given up: its process is killed",
            self._context(job.message).node_config["partition-id"],
            self._seconds,
        )
        self._free_slot(job)
        self._finish(job, None)
        self._take_back(process, jobs)

    def _take_back(self, process: NodeProcess, jobs: Sequence[Job]) -> None:
        """Replace a process, and let others have the messages with which it has not begun."""
        for job in jobs:
            self._free_slot(job)
            job.process = None
        process.jobs.clear()
        self._waiting = {**{job.message.metadata.message_id: job for job in jobs}, **self._waiting}
        self._pool.replace(process)


def _sources(process: NodeProcess) -> tuple[Any, Any]:
    return process.connection, process.exit


def _end(pool: Pool, pid: int) -> None:
    """End a pool, but not from a process that was forked from the one that has it."""
    if os.getpid() == pid:
        pool.end()
