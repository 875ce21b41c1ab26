"""Files that are written completely or not at all."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

__all__ = ["write_atomically"]


def write_atomically(path: Path, data: bytes, *, mode: int = 0o600, sync: bool = True) -> None:
    """Write a file so that a reader sees either the old or the new content, even after a crash.

    Parameters
    ----------
    path : Path
        Its folder is made if it does not exist.
    data : bytes
        All of the file.
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
            file.write(data)
            file.flush()
            if sync:
                os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
