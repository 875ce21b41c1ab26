"""Errors of results, in a module that needs nothing else."""

from __future__ import annotations

__all__ = ["ResultError", "ResultExistsError"]


class ResultError(ValueError):
    """A result holds, or a result file contains, what is not allowed."""


class ResultExistsError(FileExistsError):
    """A result exists already, and must not be overwritten."""
