"""Result files: ``result.json`` in a folder, written as a whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from flwr_kd.files import write_atomically
from flwr_kd.results.errors import ResultError, ResultExistsError
from flwr_kd.results.schema import Comparison
from flwr_kd.wording import option

__all__ = ["FILE_NAME", "check_free", "load", "save"]

FILE_NAME = "result.json"
"""Name of the result inside the directory given to :func:`save`."""
_WAYS = {"force": "overwrite it", "resume": "add methods or seeds to it"}


def check_free(directory: Path, *, force: bool, ways: Sequence[str] = ("force",)) -> None:
    """Check that a result can be saved in a directory, before the work that makes it.

    Parameters
    ----------
    directory : Path
        Need not exist.
    force : bool
        Whether an existing result may be overwritten.
    ways : sequence of str
        The caller's options for a directory that has a result, for the error.

    Raises
    ------
    ResultExistsError
        If the directory has a result and ``force`` is false.
    ResultError
        If the directory, or one above it, is a file.
    """
    directory = Path(directory)
    for folder in (directory, *directory.parents):
        if folder.is_dir():
            break
        if os.path.lexists(folder):
            raise ResultError(f"directory {str(directory)!r}: {str(folder)!r} is not a directory")
    target = directory / FILE_NAME
    if target.is_dir():
        raise ResultError(f"directory {str(directory)!r}: {str(target)!r} is itself a directory")
    if os.path.lexists(target) and not force:
        hints = "".join(f"{_WAYS[name]} with {option(name)}, or " for name in ways)
        raise ResultExistsError(f"{str(target)!r} exists: {hints}choose another folder")


def save(comparison: Comparison, directory: Path, *, force: bool = False) -> Path:
    """Write the result to ``directory / "result.json"``: all of it or nothing.

    Parameters
    ----------
    comparison : Comparison
        What to write.
    directory : Path
        Made if it does not exist.
    force : bool
        Whether an existing result may be overwritten.

    Returns
    -------
    Path
        The file.

    Raises
    ------
    ResultExistsError
        If the directory has a result and ``force`` is false.
    ResultError
        If the directory, or one above it, is a file.
    """
    directory = Path(directory)
    check_free(directory, force=force)
    target = directory / FILE_NAME
    write_atomically(target, f"{comparison.to_json()}\n".encode(), mode=0o666)
    return target


def load(path: Path) -> Comparison:
    """Read a result from a directory that :func:`save` wrote to, or from the file itself.

    Raises
    ------
    FileNotFoundError
        If there is none.
    ResultError
        If it is not a result of a schema version that this version reads; the message names the file.
    """
    path = Path(path)
    file = path / FILE_NAME if path.is_dir() else path
    try:
        return Comparison.from_json(file.read_bytes())
    except ResultError as error:
        raise ResultError(f"{file}: {error}") from None
