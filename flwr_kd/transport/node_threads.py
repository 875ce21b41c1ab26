"""Threads in which the nodes of an in-process grid work, so that one that never ends can be left behind."""

from __future__ import annotations

import contextvars
import ctypes
import queue
import threading
import time
from collections.abc import Callable

import torch

__all__ = ["Job", "NodeThreads", "ask_to_end"]

_ENDING_SECONDS = 1.0


class Job:
    """A call that a thread makes.

    Attributes
    ----------
    abandoned : bool
        Whether nobody waits for it any more: what it does does not count.
    error : BaseException or None
        What the call raised.
    """

    def __init__(self, call: Callable[[Job], None]) -> None:
        self.abandoned = False
        self.error: BaseException | None = None
        self._call: Callable[[Job], None] | None = call
        self._context, self._torch_threads = contextvars.copy_context(), torch.get_num_threads()
        self._begun: float | None = None
        self._thread: int | None = None
        self._done = threading.Event()

    @property
    def done(self) -> bool:
        """Whether the call has ended."""
        return self._done.is_set()

    def run(self) -> None:
        """Make the call."""
        # The reference is dropped: a call holds its messages, and the grid that made it.
        call, self._call = self._call, None
        self._begun, self._thread = time.monotonic(), threading.get_ident()
        try:
            if torch.get_num_threads() != self._torch_threads:
                torch.set_num_threads(self._torch_threads)
            if call is not None:
                self._context.run(call, self)
        except BaseException as error:
            self.error = error
        finally:
            self._thread = None
            self._done.set()

    def left(self, seconds: float) -> float:
        """Return what is left of the seconds that the call may take; all of them before it has begun."""
        return seconds if self._begun is None else self._begun + seconds - time.monotonic()

    def wait(self, seconds: float) -> bool:
        """Wait for the end of the call, and return whether it has ended."""
        return self._done.wait(min(max(seconds, 0.0), threading.TIMEOUT_MAX))

    def end(self) -> None:
        """Give the call up, and ask its thread to end."""
        self.abandoned = True
        thread = self._thread
        if thread is not None:
            ask_to_end(thread)


class NodeThreads:
    """A number of threads that take jobs in turn. The end of the process does not wait for them.

    Parameters
    ----------
    count : int
        Number of threads.
    """

    def __init__(self, count: int) -> None:
        self._count, self._threads = count, 0
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._open: set[Job] = set()

    def submit(self, call: Callable[[Job], None]) -> Job:
        """Have a thread make a call as soon as one is free."""
        job = Job(call)
        self._open = {other for other in self._open if not other.done} | {job}
        if self._threads < self._count:
            self._start()
        self._jobs.put(job)
        return job

    def abandon(self, job: Job) -> None:
        """Give up a job on which a thread works; another thread takes the place of that one, which goes on.

        It is not asked to end: an import that is broken off would be of no use to the rest of the process.
        """
        self._open.discard(job)
        job.abandoned = True
        self._threads -= 1
        self._start()

    def close(self) -> None:
        """End the threads that wait for jobs, and ask those that work to end, for which it waits a second."""
        jobs = [job for job in self._open if not job.done]
        for job in jobs:
            job.end()
        for _ in range(self._threads):
            self._jobs.put(None)
        self._open, self._threads, self._jobs = set(), 0, queue.SimpleQueue()
        end = time.monotonic() + _ENDING_SECONDS
        for job in jobs:
            job.wait(end - time.monotonic())

    def _start(self) -> None:
        self._threads += 1
        threading.Thread(target=_work, args=(self._jobs,), daemon=True, name="flwr-kd-node").start()


def ask_to_end(thread: int) -> None:
    """Raise SystemExit in a thread, before its next step of Python code.

    Python cannot end a thread. A step that never returns, for example a call into C, is not reached.

    Parameters
    ----------
    thread : int
        Its identifier, as from :func:`threading.get_ident`.
    """
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(SystemExit))


def _work(jobs: queue.SimpleQueue[Job | None]) -> None:
    while (job := jobs.get()) is not None:
        job.run()
        if job.abandoned:
            return
        # Drop the reference, so that nothing of the call is held until the next one.
        del job
