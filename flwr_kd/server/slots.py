"""Blocks of bytes of one size in a file without a name, which is gone when the process ends, however it ends."""

from __future__ import annotations

import heapq
import mmap
import os
import tempfile
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from flwr_kd.server.tensor_file import MappedBytes

__all__ = ["Slot", "SlotFile"]

NDArray = npt.NDArray[Any]


class SlotFile:
    """A file of slots. A slot whose last reference is gone is used again.

    One file descriptor serves all slots, and the file takes disk space only where something was written.

    Parameters
    ----------
    size : int
        Bytes of a slot.
    folder : Path, optional
        Where the file is; made if it does not exist. The system's folder for temporary files if None.
    """

    def __init__(self, size: int, folder: Path | None = None) -> None:
        # Whole pages: giving back those of one slot takes nothing of another.
        self.size = -(-max(size, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        self._folder = folder
        self._file: IO[bytes] | None = None
        self._mapping: mmap.mmap | None = None
        self._used = self._capacity = 0
        self.free: list[int] = []

    def new(self) -> Slot:
        """Return a slot, whose content is anything.

        Raises
        ------
        OSError
            If the file cannot be made.
        """
        if self._file is None:
            if self._folder is not None:
                self._folder.mkdir(parents=True, exist_ok=True)
            self._file = tempfile.TemporaryFile(buffering=0, dir=self._folder)  # noqa: SIM115
        if self.free:
            return Slot(self, heapq.heappop(self.free))
        self._used += 1
        if self._used > self._capacity:
            self._capacity = max(2 * self._capacity, 16)
            self._file.truncate(self._capacity * self.size)
        return Slot(self, self._used - 1)

    def write(self, at: int, data: NDArray) -> None:
        """Write bytes ``[n]`` at a place in the file.

        Raises
        ------
        OSError
            If they cannot be written, for example on a full disk.
        """
        assert self._file is not None
        view = data.data
        self._file.seek(at)
        try:
            while view.nbytes:
                view = view[self._file.write(view) or 0 :]
        except OSError as error:
            where = tempfile.gettempdir() if self._folder is None else self._folder
            raise OSError(
                error.errno,
                f"{error.strerror}: the clients' models are kept in {where}; choose a folder with more space by "
                "checkpoint_dir or, without checkpoints, by the environment's TMPDIR",
            ) from error

    def read(self, at: int, nbytes: int) -> NDArray:
        """Return bytes ``[n]`` of the file."""
        assert self._file is not None
        data = np.empty(nbytes, np.uint8)
        view = data.data
        self._file.seek(at)
        while view.nbytes:
            count: int = self._file.readinto(view)  # type: ignore[attr-defined]
            if not count:
                raise OSError("the file of the clients' models was cut")
            view = view[count:]
        return data

    def mapped(self, at: int, nbytes: int, keeper: object) -> NDArray:
        """Return bytes ``[n]`` that stay in the file until they are looked at."""
        assert self._file is not None
        if self._mapping is None or len(self._mapping) < at + nbytes:
            # Arrays of an earlier mapping keep it.
            length = os.fstat(self._file.fileno()).st_size
            self._mapping = mmap.mmap(self._file.fileno(), length, access=mmap.ACCESS_READ)
        return np.asarray(MappedBytes(self._mapping, at, nbytes, keeper))

    def __deepcopy__(self, memo: dict[int, object]) -> SlotFile:
        return self


class Slot:
    """A slot. It is written to only before anyone else knows of it, so that copies may share it."""

    def __init__(self, file: SlotFile, index: int) -> None:
        self._file, self._index = file, index

    def write(self, start: int, data: NDArray) -> None:
        """Write bytes ``[n]``; see :meth:`SlotFile.write`."""
        self._file.write(self._index * self._file.size + start, data)

    def read(self, start: int, nbytes: int) -> NDArray:
        """Return bytes ``[n]``."""
        return self._file.read(self._index * self._file.size + start, nbytes)

    def mapped(self, nbytes: int) -> NDArray:
        """Return the first bytes ``[n]``, which stay in the file until they are looked at, and keep the slot."""
        return self._file.mapped(self._index * self._file.size, nbytes, self)

    def __deepcopy__(self, memo: dict[int, object]) -> Slot:
        return self

    def __del__(self) -> None:
        heapq.heappush(self._file.free, self._index)
