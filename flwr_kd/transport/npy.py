"""Arrays as the bytes that Flower's records hold: numpy's npy format, read without a copy and written with one."""

from __future__ import annotations

import functools
import io
import math
from typing import Any

import numpy as np
import numpy.typing as npt
from flwr.app import Array

from flwr_kd.transport.payload import PayloadError

__all__ = ["as_record_array", "npy_bytes", "read_array", "read_npy"]

NDArray = npt.NDArray[Any]
Header = tuple[tuple[int, ...], bool, np.dtype[Any]]
_STYPE, _VERSION = "numpy.ndarray", b"\x01\x00"
_LONGEST_CACHED = 256
"""Bytes of a header that is kept, so that headers that a client made up cost no memory."""
_READERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


def npy_bytes(array: NDArray) -> bytes:
    """Return what ``numpy.save`` writes.

    >>> len(npy_bytes(np.zeros(3, np.float32)))
    140
    """
    array = np.asarray(array)
    if array.dtype.hasobject:
        raise ValueError("arrays of Python objects are not allowed")
    fortran = array.flags.f_contiguous and not array.flags.c_contiguous
    header = _header_bytes(array.dtype, array.shape, fortran)
    if not (array.flags.c_contiguous or fortran):
        array = np.ascontiguousarray(array)
    flat = (array.T if fortran else array).reshape(-1)
    return header + (flat.view(np.uint8).data if flat.size else b"")


def as_record_array(array: NDArray) -> Array:
    """Return an array as an entry of an ``ArrayRecord``; the same as Flower's ``Array(array)``."""
    array = np.asarray(array)
    return Array(str(array.dtype), array.shape, _STYPE, npy_bytes(array))


def read_array(name: str, value: Array) -> NDArray:
    """Read an entry of an ``ArrayRecord``; see :func:`read_npy`."""
    return read_npy(name, value.data)


def read_npy(name: str, data: bytes) -> NDArray:
    """Read an array, which cannot be written to, without a copy.

    Nothing is allocated for the shape that a header claims, as numpy's own reader would.

    Parameters
    ----------
    name : str
        For the error's text.
    data : bytes
        As :func:`npy_bytes` and ``numpy.save`` write it.

    Raises
    ------
    PayloadError
        If it is anything else, or the array is one of Python objects.

    Examples
    --------
    >>> read_npy("bias", npy_bytes(np.float32([1, 2])))
    array([1., 2.], dtype=float32)
    """
    try:
        # Where version 1.0 has the length of its header.
        end = 10 + int.from_bytes(data[8:10], "little")
        if data[6:8] == _VERSION and end <= _LONGEST_CACHED:
            (shape, fortran, dtype), start = _short_header(data[:end]), end
        else:
            (shape, fortran, dtype), start = _header(data)
        # Not a stream's buffer, which would be a copy.
        body = memoryview(data)[start:]
        if len(body) != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"{len(body)} bytes for shape {shape} of {dtype}")
        flat = np.frombuffer(body, dtype=dtype, count=math.prod(shape))
        return flat.reshape(shape, order="F" if fortran else "C")
    except Exception as error:  # numpy's header parser lets IndexError, TokenError and others out
        text = str(error).splitlines()[0][:120] if str(error) else type(error).__name__
        raise PayloadError(f"array {name[:80]!r} is not a numpy array ({text})") from None


def _header(data: bytes) -> tuple[Header, int]:
    """Return what a header says, and where the values begin."""
    stream = io.BytesIO(data)
    shape, fortran, dtype = _READERS[np.lib.format.read_magic(stream)](stream)
    if dtype.hasobject:
        raise ValueError("Python objects are not allowed")
    return (shape, fortran, dtype), stream.tell()


@functools.lru_cache(maxsize=1024)
def _short_header(data: bytes) -> Header:
    header, end = _header(data)
    if end != len(data):
        raise ValueError(f"a header of {end} bytes, {len(data)} expected")
    return header


@functools.lru_cache(maxsize=1024)
def _header_bytes(dtype: np.dtype[Any], shape: tuple[int, ...], fortran: bool) -> bytes:
    stream = io.BytesIO()
    header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": fortran, "shape": shape}
    np.lib.format.write_array_header_1_0(stream, header)
    return stream.getvalue()
