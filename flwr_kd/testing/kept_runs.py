"""Runs with which several checks compare theirs: made once for each method."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from flwr_kd.models.reused import ModelPool
from flwr_kd.server.records import KDResult
from flwr_kd.testing.faults import Fault
from flwr_kd.testing.federation import Federation, quiet
from flwr_kd.testing.recording import Case
from flwr_kd.testing.synchronisations import CountingDevice

__all__ = ["FAULTY", "Undisturbed", "counts_by_size", "forget", "raising", "undisturbed"]

FAULTY = 1
"""The partition of the client that fails in round 1 of :func:`raising`."""

_CLIENTS_ON_A_DEVICE = 2


@dataclass(frozen=True)
class Undisturbed:
    """Two rounds with nothing special.

    Attributes
    ----------
    result : KDResult
        The run's result.
    built : int
        Number of models that were built for clients in turn.
    """

    result: KDResult
    built: int


def undisturbed(case: Case) -> Undisturbed:
    """Return two rounds of a method, with as many of torch's threads as there are now."""
    return _undisturbed(case, torch.get_num_threads())


@functools.cache
def _undisturbed(case: Case, threads: int) -> Undisturbed:
    federation = case.federation()
    federation.pool = ModelPool()
    _, result = federation.run()
    return Undisturbed(result, federation.pool.size)


@functools.cache
def raising(case: Case) -> KDResult:
    """Return two rounds of a method in which one client raises in round 1."""
    faults = {FAULTY: Fault("raise", frozenset({1}))}
    with quiet():
        return case.federation().run(grid={"faults": faults})[1]


@functools.cache
def counts_by_size(name: str) -> tuple[CountingDevice, CountingDevice]:
    """Return what two rounds of a method cost on a device, and what they cost with twice as many steps.

    The clients have twice as many samples for it, and there are twice as many public samples. What a phase or an
    epoch costs once is the same in both.
    """
    few, many = CountingDevice(), CountingDevice()
    Federation(name, _CLIENTS_ON_A_DEVICE, samples=24, public=32, counting=few).run()
    Federation(name, _CLIENTS_ON_A_DEVICE, samples=48, public=64, counting=many).run()
    return few, many


def forget() -> None:
    """Forget all runs, for example because a method's code has changed since."""
    _undisturbed.cache_clear()
    raising.cache_clear()
    counts_by_size.cache_clear()
