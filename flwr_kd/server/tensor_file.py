"""Named arrays in a safetensors file that is written and read without all of it being in memory at once."""

from __future__ import annotations

import json
import mmap
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import safe_open

from flwr_kd.files import write_atomically
from flwr_kd.transport.payload import SAFETENSORS_DTYPES

__all__ = ["MappedBytes", "forget_pages", "pieces", "read_tensors", "write_tensors"]

NDArray = npt.NDArray[Any]
_NAMES = {name: code for code, name in SAFETENSORS_DTYPES.items()}
_PIECE = 4 * 2**20
"""Bytes of an array that are looked at or written at once."""


class MappedBytes:
    """A part of a file as numpy sees it: ``np.asarray(mapped)`` are its bytes, which cannot be written to.

    Parameters
    ----------
    mapping : mmap
        Of the file, to read from.
    start, nbytes : int
        Which part.
    keeper : object, optional
        Lives as long as an array of these bytes does.
    """

    def __init__(self, mapping: mmap.mmap, start: int, nbytes: int, keeper: object = None) -> None:
        self._mapping, self._keeper = mapping, keeper
        self._address = np.frombuffer(mapping, np.uint8).__array_interface__["data"][0]
        self.__array_interface__ = {
            "version": 3,
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (self._address + start, True),
        }

    def forget(self, address: int, nbytes: int) -> None:
        """Give the pages of some bytes back; they are read from the file when they are next looked at."""
        if hasattr(mmap, "MADV_DONTNEED"):
            start = address - self._address
            first = start - start % mmap.PAGESIZE
            self._mapping.madvise(mmap.MADV_DONTNEED, first, start + nbytes - first)


def forget_pages(array: NDArray) -> None:
    """Give back the memory with which a contiguous array of a mapped file was read; nothing for other arrays."""
    owner: Any = array
    while isinstance(owner, np.ndarray):
        owner = owner.base
    if isinstance(owner, MappedBytes) and array.nbytes:
        owner.forget(array.__array_interface__["data"][0], array.nbytes)


def pieces(array: NDArray) -> Iterator[NDArray]:
    """Yield an array's values in turn, some megabytes at a time ``[n]``; of a mapped file no more is in memory."""
    flat = np.ascontiguousarray(array).reshape(-1)
    step = max(_PIECE // max(flat.itemsize, 1), 1)
    for start in range(0, flat.size, step):
        piece = flat[start : start + step]
        yield piece
        forget_pages(piece)


def write_tensors(path: Path, tensors: Mapping[str, NDArray], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file, all of it or nothing, piece by piece.

    Parameters
    ----------
    path : Path
        The file.
    tensors : mapping
        Of numbers and bool; their order is that in which they are read.
    metadata : mapping
        Texts.
    """
    # Large items first, so that each array begins where its dtype may.
    order = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    offsets, end = {}, 0
    for name in order:
        offsets[name] = [end, end + tensors[name].nbytes]
        end += tensors[name].nbytes
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    for name, value in tensors.items():
        code = _NAMES[value.dtype.name]
        header[name] = {"dtype": code, "shape": list(value.shape), "data_offsets": offsets[name]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)

    def parts() -> Iterator[bytes | memoryview]:
        yield struct.pack("<Q", len(text)) + text
        for name in order:
            for piece in pieces(tensors[name]):
                yield piece.view(np.uint8).data

    write_atomically(path, parts())


def read_tensors(path: Path) -> tuple[dict[str, str], dict[str, NDArray]]:
    """Return a safetensors file's metadata and its arrays, which stay in the file until they are looked at.

    The arrays cannot be written to. They stay what they are if the file is replaced.

    Raises
    ------
    SafetensorError, OSError
        If the file cannot be read, or is not of that format.
    """
    # It checks the header: names, dtypes, shapes and places.
    with safe_open(path, framework="numpy") as file:
        metadata = dict(file.metadata() or {})
    with path.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        header: dict[str, Any] = json.loads(stream.read(length))
        mapping = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        data = np.asarray(MappedBytes(mapping, 8 + length + begin, end - begin))
        tensors[name] = _of_bytes(data, np.dtype(SAFETENSORS_DTYPES[entry["dtype"]]), tuple(entry["shape"]))
    return metadata, tensors


def _of_bytes(data: NDArray, dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray:
    """Return bytes as an array, without a copy where its dtype may begin there."""
    aligned = data.__array_interface__["data"][0] % dtype.alignment == 0
    values: NDArray = (data if aligned else data.copy()).view(dtype).reshape(shape)
    return values
