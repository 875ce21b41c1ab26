"""Independent parts of a computation on several cores, with numbers that do not depend on how many there are."""

from __future__ import annotations

import _thread
import copy
import itertools
import os
import queue
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from types import TracebackType
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from flwr_kd.inputs import Inputs
from flwr_kd.learning.device import one_thread

__all__ = ["Copies", "Cores", "available_cores", "draws_at_random"]

_HELD, _LOOK_SECONDS, _ENDING_SECONDS = 4, 0.001, 1.0
T = TypeVar("T")
R = TypeVar("R")


def available_cores() -> int:
    """Return the number of cores that this process may use: ``OMP_NUM_THREADS`` if it is set, as for PyTorch."""
    chosen = os.environ.get("OMP_NUM_THREADS", "")
    if chosen.isdecimal() and int(chosen):
        return int(chosen)
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class Cores:
    """A number of cores, on which independent parts of a computation run at the same time.

    Each part is computed with one thread of PyTorch, also on one core, and results come in the order of the parts:
    what is computed depends on how the work is divided, and not on the number of cores.

    Parameters
    ----------
    count : int, optional
        At least 1. If None, as many as PyTorch uses threads in the calling thread. With 1 the parts run in the
        calling thread.

    Raises
    ------
    ValueError
        If the number is below 1.

    Examples
    --------
    >>> with Cores(2) as cores:
    ...     cores.map(torch.square, [torch.tensor(3), torch.tensor(4)])
    [tensor(9), tensor(16)]
    """

    def __init__(self, count: int | None = None) -> None:
        self.count = torch.get_num_threads() if count is None else count
        if self.count < 1:
            raise ValueError(f"the number of cores must be at least 1, got {count}")
        self._started = 0
        self._tasks: queue.SimpleQueue[tuple[_Job[Any, Any], int] | None] = queue.SimpleQueue()
        self._ended: queue.SimpleQueue[None] = queue.SimpleQueue()

    def __enter__(self) -> Cores:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the threads, and wait for their end; another :meth:`map` starts new ones."""
        started, self._started = self._started, 0
        if started:
            self._tasks.put(None)
        for _ in range(started):
            # Python may raise a thread's SystemExit in one that it just starts, which then never begins to work.
            with suppress(queue.Empty):
                self._ended.get(timeout=_ENDING_SECONDS)
        self._tasks = queue.SimpleQueue()

    def map(self, call: Callable[[T], R], parts: Iterable[T]) -> list[R]:
        """Return a call's results for all parts, in their order.

        Gradients are enabled in each call, as in any new thread of PyTorch, whatever the caller's mode is.

        If a call raises, parts that have not begun are left out, those that run are waited for, and the exception
        of the first part that raised is raised here. So it is with an exception, such as an interrupt, that reaches
        the calling thread.
        """
        parts = list(parts)
        # Setting the number of threads may restart a pool of PyTorch's own.
        with nullcontext() if torch.get_num_threads() == 1 else one_thread():
            if self.count == 1 or len(parts) < 2:
                with torch.enable_grad():
                    return [call(part) for part in parts]
            return self._map(_Job(call, parts))

    def _map(self, job: _Job[T, R]) -> list[R]:
        try:
            self._start(min(self.count, len(job.parts)))
            for number in range(len(job.parts)):
                self._tasks.put((job, number))
            while len(job.finished) < len(job.parts):
                job.signal.get()
        except BaseException:
            job.abandoned = True
            while job.running:
                time.sleep(_LOOK_SECONDS)
            raise
        if job.errors:
            raise job.errors[min(job.errors)]
        return [job.results[number] for number in range(len(job.parts))]

    def stream(self, call: Callable[[T], R], parts: Iterable[T]) -> Iterator[R]:
        """Yield what :meth:`map` returns, and hold a few parts per core in memory at a time."""
        rest = iter(parts)
        while taken := list(itertools.islice(rest, _HELD * self.count)):
            yield from self.map(call, taken)

    def _start(self, count: int) -> None:
        while self._started < count:
            # Not threading.Thread nor concurrent.futures: their locks are of Python code, in which an interrupt of
            # the calling thread can leave one locked for ever.
            _thread.start_new_thread(_work, (self._tasks, self._ended))
            self._started += 1


class _Job(Generic[T, R]):
    """A call on several parts. Threads only add to what it holds, and so need no lock."""

    def __init__(self, call: Callable[[T], R], parts: Sequence[T]) -> None:
        self.parts, self.abandoned = parts, False
        self.running: set[int] = set()
        self.finished: list[int] = []
        self.results: dict[int, R] = {}
        self.errors: dict[int, BaseException] = {}
        self.signal: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._call = call

    def run(self, number: int) -> None:
        """Compute a part, unless the job is given up."""
        self.running.add(number)
        try:
            if not self.abandoned:
                self.results[number] = self._call(self.parts[number])
        except BaseException as error:
            self.errors[number], self.abandoned = error, True
        finally:
            self.running.discard(number)
            self.finished.append(number)
            self.signal.put(None)


def _work(
    tasks: queue.SimpleQueue[tuple[_Job[Any, Any], int] | None], ended: queue.SimpleQueue[None]
) -> None:
    torch.set_num_threads(1)
    while (task := tasks.get()) is not None:
        job, number = task
        job.run(number)
        # Drop the references, so that nothing of the job is held until the next one.
        del task, job
    # For the others.
    tasks.put(None)
    ended.put(None)


class Copies:
    """Copies of a model, one for each part that runs at the same time: a forward pass may change its module.

    Parameters
    ----------
    model : nn.Module
        It is one of the copies, and the only one where parts run one after another. If it cannot be copied, the
        parts take turns with it.
    cores : Cores
        Where the parts run.
    parts : int
        Number of parts; there are no more copies than that.
    shared : bool
        Whether the copies have the model's own tensors, so that they follow its training, and not tensors of their
        own, into which other weights can be loaded.

    Examples
    --------
    >>> model, cores = nn.Linear(1, 1), Cores(2)
    >>> copies = Copies(model, cores, parts=5, shared=True)
    >>> with copies.taken() as one, copies.taken() as other:
    ...     one is other, one.weight is other.weight is model.weight
    (False, True)
    """

    def __init__(self, model: nn.Module, cores: Cores, *, parts: int, shared: bool = False) -> None:
        self._free: queue.SimpleQueue[nn.Module] = queue.SimpleQueue()
        self._free.put(model)
        tensors = [*model.parameters(), *model.buffers()] if shared else []
        for _ in range(min(cores.count, parts) - 1):
            try:
                self._free.put(copy.deepcopy(model, {id(tensor): tensor for tensor in tensors}))
            except Exception:  # Any attribute of a user's module may fail to be copied, in its own way.
                return

    @contextmanager
    def taken(self) -> Iterator[nn.Module]:
        """Return a model that no other part uses within the block."""
        model = self._free.get()
        try:
            yield model
        finally:
            self._free.put(model)


@torch.no_grad()
def draws_at_random(model: nn.Module, x: Inputs) -> bool:
    """Return whether a pass in eval mode draws from PyTorch's global generator, whose state does not change.

    Threads would draw in an order that is not fixed, so that such models must run in one. The model is left in eval
    mode.

    Examples
    --------
    >>> draws_at_random(nn.Dropout(), torch.ones(1, 2))
    False
    >>> draws_at_random(nn.FractionalMaxPool2d(2, output_size=1), torch.ones(1, 1, 2, 2))
    True
    """
    model.eval()
    before = torch.get_rng_state()
    model(x)
    drawn = not torch.equal(torch.get_rng_state(), before)
    torch.set_rng_state(before)
    return drawn
