"""The system's limit of open files, which shared memory and the pipes of processes count against."""

from __future__ import annotations

import os
import sys
from contextlib import suppress

from flwr_kd.checks import ConfigError
from flwr_kd.wording import option

__all__ = ["allow_open_files"]

_SPARE = 64
"""For all else that a run opens: data sets, results, checkpoints."""


def allow_open_files(count: int, workers: int) -> None:
    """Let this process open that many more files than it has open: raise its soft limit up to the hard one.

    Nothing is done where the system has no such limit, or does not say how many files are open.

    Parameters
    ----------
    count : int
        What the pool of processes opens.
    workers : int
        Number of processes, for the error's text.

    Raises
    ------
    ConfigError
        If the hard limit is too low.
    """
    if not sys.platform.startswith("linux"):
        return
    import resource

    try:
        needed = len(os.listdir("/proc/self/fd")) + count + _SPARE
    except OSError:
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ConfigError(
            f"workers={workers} need up to {needed} open files, and the system allows {hard}: raise the limit by "
            f"`ulimit -n {needed}`, or use {option('backend', 'inline')}"
        )
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
