"""Keeps freed memory in the process, where the C library would return it to the system after each training step."""

from __future__ import annotations

import ctypes
import functools
import os
import sys

__all__ = ["SETTINGS", "keep_freed_memory"]

SETTINGS = {"MALLOC_MMAP_THRESHOLD_": 2**25, "MALLOC_TRIM_THRESHOLD_": 2**26}
"""What glibc is told, by the names of its environment variables: keep what is freed, up to 64 MiB."""
_OPTIONS = {"MALLOC_MMAP_THRESHOLD_": -3, "MALLOC_TRIM_THRESHOLD_": -1}  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD


@functools.cache
def keep_freed_memory() -> bool:
    """Let glibc keep what this process frees, up to 64 MiB, once; return whether it was done.

    By default glibc returns the memory of each layer's output to the system and requests it again in the next step,
    which took up to a fifth of a CNN's training. Nothing is done where the user has set it otherwise
    (``MALLOC_TRIM_THRESHOLD_``, ``MALLOC_MMAP_THRESHOLD_``, ``GLIBC_TUNABLES``), and with another C library.

    Examples
    --------
    >>> keep_freed_memory() == keep_freed_memory()
    True
    """
    if not sys.platform.startswith("linux") or {*SETTINGS, "GLIBC_TUNABLES"} & os.environ.keys():
        return False
    try:
        library = ctypes.CDLL(None)
        library.gnu_get_libc_version  # noqa: B018
        mallopt = library.mallopt
    except (OSError, AttributeError):
        return False
    return all(mallopt(_OPTIONS[name], value) == 1 for name, value in SETTINGS.items())
