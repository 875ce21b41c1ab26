"""Errors of experiments, in a module that needs nothing else."""

from __future__ import annotations

__all__ = ["AttackError", "SimulationError"]


class SimulationError(RuntimeError):
    """The server failed, so that there is no result."""


class AttackError(SimulationError):
    """An attack raised an error, so that the run does not show what the attack does."""
