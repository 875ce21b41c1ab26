"""Files that are written completely or not at all."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable
from pathlib import Path

__all__ = ["write_atomically"]


def write_atomically(
    path: Path, data: bytes | Iterable[bytes | memoryview], *, mode: int = 0o600, sync: bool = True
) -> None:
    """Write a file so that a reader sees either the old or the new content, even after a crash.

    Parameters
    ----------
    path : Path
        Its folder is made if it does not exist.
    data : bytes or iterable of bytes
        All of the file, or its parts in turn, which need not be in memory together.
    mode : int
        Permissions of the file, less those that the process's umask takes away; for its owner only by default.
    sync : bool
        Wait until the disk has it. Without, it outlives the process, also one that is killed, but not the machine.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        handle = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(handle, "wb") as file:
            for part in [data] if isinstance(data, bytes) else data:
                file.write(part)
            file.flush()
            if sync:
                os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
