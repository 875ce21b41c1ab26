"""Checks of files and folders before they are read: reading a pipe or a device would not end."""

from __future__ import annotations

import stat
from pathlib import Path

from flwr_kd.checks import DataError

__all__ = ["check_data_dir", "check_regular"]

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def check_regular(path: Path) -> None:
    """Raise DataError if a path, or what it links to, is no regular file.

    Raises
    ------
    DataError
        For a folder, pipe, socket or device.
    OSError
        If there is no such file, or it cannot be looked up.
    """
    kind = stat.S_IFMT(path.stat().st_mode)
    if kind != stat.S_IFREG:
        raise DataError(f"{str(path)!r} cannot be read: it is {_KINDS.get(kind, 'no file')}, expected a file")


def check_data_dir(data_dir: str | Path | None, dataset: str) -> None:
    """Raise DataError if the folder for data files is named and is no folder."""
    if data_dir is None:
        return
    path = Path(data_dir).expanduser()
    if not path.is_dir():
        problem = "is no folder" if path.exists() else "does not exist"
        raise DataError(
            f"data-dir {str(path)!r} {problem}; it must be the folder that has the files of {dataset!r}; for a "
            "data set that is downloaded an empty one will do"
        )
