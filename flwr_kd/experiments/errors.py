"""Errors of experiments, in a module that needs nothing else."""

from __future__ import annotations

__all__ = ["SimulationError"]


class SimulationError(RuntimeError):
    """The server failed, so that there is no result."""
