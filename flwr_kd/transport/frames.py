"""Flower's records as bytes, between processes of one program.

A frame is a head in JSON and byte strings after it, so that arrays and payloads are neither copied into a larger
message nor parsed, and nothing is unpickled. Frames of any size can go through a :class:`Segment` of shared memory.
"""

from __future__ import annotations

import functools
import json
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from flwr_kd.transport.records import entries, record_of

__all__ = [
    "Segment",
    "SharedMemoryError",
    "decode",
    "decode_part",
    "encode",
    "encode_part",
    "join",
    "pack",
    "parts_of",
    "size_of",
    "unpack",
]

_LENGTH = struct.Struct("<Q")
_JSON = json.JSONEncoder(separators=(",", ":"))
_KINDS: dict[str, Any] = {"metrics": MetricRecord, "config": ConfigRecord}
Take = Callable[[int], bytes]
"""Returns the next bytes of a frame."""


def pack(head: Any, buffers: Sequence[bytes] = ()) -> list[bytes]:
    """Return the parts of a frame, in order; ``head`` is a value of JSON."""
    text = _JSON.encode(head).encode()
    return [_LENGTH.pack(len(text)), text, *buffers]


def size_of(parts: Sequence[bytes]) -> int:
    """Return the number of bytes of a frame."""
    return sum(len(part) for part in parts)


def unpack(take: Take) -> Any:
    """Return a frame's head; what is taken after it are its byte strings."""
    return json.loads(take(_LENGTH.unpack(take(_LENGTH.size))[0]))


def join(frame: bytes, start: int = 0) -> Take:
    """Return what takes the bytes of a frame that is in memory, from ``start`` on."""
    position = start

    def take(count: int) -> bytes:
        nonlocal position
        position += count
        return frame[position - count : position]

    return take


class SharedMemoryError(Exception):
    """The system has no more shared memory."""


class Segment:
    """A file in memory alone, which other processes can be given; it is gone when all of them have closed it.

    Parameters
    ----------
    handle : int, optional
        The descriptor of one that another process has made; a new one if None.

    Raises
    ------
    SharedMemoryError
        If there is no more memory, or too many files are open.
    """

    handle = -1

    def __init__(self, handle: int | None = None) -> None:
        try:
            self.handle = os.memfd_create("flwr-kd") if handle is None else handle
        except OSError as error:
            raise SharedMemoryError(f"no shared memory can be made: {error}") from error

    @staticmethod
    @functools.cache
    def available() -> bool:
        """Say whether this system has such files: Linux has, unless a sandbox forbids them."""
        try:
            Segment().close()
        except (AttributeError, SharedMemoryError):
            return False
        return True

    def write(self, parts: Sequence[bytes]) -> int:
        """Write a frame from the beginning, over what was there, and return its size.

        Raises
        ------
        SharedMemoryError
            If there is not enough memory.
        """
        position = 0
        for part in parts:
            view = memoryview(part)
            while view:
                try:
                    written = os.pwrite(self.handle, view, position)
                except OSError as error:
                    raise SharedMemoryError(f"shared memory cannot be written to: {error}") from error
                view, position = view[written:], position + written
        return position

    def reader(self, start: int = 0) -> Take:
        """Return what takes the bytes of a frame, from ``start`` on."""
        position = start

        def take(count: int) -> bytes:
            nonlocal position
            parts = []
            while count:
                # One call reads at most 2 GiB, and nearly always all of it.
                parts.append(os.pread(self.handle, count, position))
                if not parts[-1]:
                    raise EOFError(f"{count} bytes are missing in shared memory")
                position, count = position + len(parts[-1]), count - len(parts[-1])
            return parts[0] if len(parts) == 1 else b"".join(parts)

        return take

    def close(self) -> None:
        """Close it in this process."""
        if self.handle >= 0:
            os.close(self.handle)
        self.handle = -1

    __del__ = close


def encode(
    content: RecordDict, buffers: list[bytes], shared: Callable[[object], int | None] = lambda part: None
) -> list[Any]:
    """Return records as a value of JSON, and append their byte strings to ``buffers``.

    Parameters
    ----------
    content : RecordDict
        Records of Flower's types.
    buffers : list of bytes
        Gets what :func:`decode` takes, in this order.
    shared : callable
        Returns the key of an array record or a byte string that is sent apart; None for all others.
    """
    encoded: list[Any] = []
    for name, record in entries(content).items():
        key = shared(record)
        if key is not None:
            encoded.append([name, "shared", key])
        elif isinstance(record, ArrayRecord):
            encoded.append([name, "arrays", _encode_arrays(record, buffers)])
        else:
            kind = "metrics" if isinstance(record, MetricRecord) else "config"
            values = {key: _encode_value(value, buffers, shared) for key, value in entries(record).items()}
            encoded.append([name, kind, values])
    return encoded


def decode(encoded: Sequence[Any], take: Take, shared: Callable[[int], Any] = lambda key: None) -> RecordDict:
    """Return the records that :func:`encode` was given."""
    content = RecordDict()
    for name, kind, values in encoded:
        if kind == "shared":
            # Entries that are the same objects are decoded once by who reads them.
            content[name] = record_of(ArrayRecord, entries(shared(values)))
        elif kind == "arrays":
            content[name] = _decode_arrays(values, take)
        else:
            decoded = {
                key: _decode_value(value, take, shared) if isinstance(value, dict) else value
                for key, value in values.items()
            }
            content[name] = record_of(_KINDS[kind], decoded)
    return content


def encode_part(part: ArrayRecord | bytes) -> list[bytes]:
    """Return the frame of what many messages share."""
    if isinstance(part, bytes):
        return pack(len(part), [part])
    buffers: list[bytes] = []
    return pack(_encode_arrays(part, buffers), buffers)


def decode_part(take: Take) -> ArrayRecord | bytes:
    """Return what :func:`encode_part` was given."""
    head = unpack(take)
    return take(head) if isinstance(head, int) else _decode_arrays(head, take)


def parts_of(content: RecordDict, least: int) -> Iterator[ArrayRecord | bytes]:
    """Yield what of a message others may share: its arrays, and byte strings of at least that size."""
    for record in entries(content).values():
        if isinstance(record, ArrayRecord):
            yield record
        else:
            yield from (
                value
                for value in entries(record).values()
                if isinstance(value, bytes) and len(value) >= least
            )


def _encode_arrays(record: ArrayRecord, buffers: list[bytes]) -> list[Any]:
    arrays = entries(record)
    buffers += [array.data for array in arrays.values()]
    return [
        [key, array.dtype, list(array.shape), array.stype, len(array.data)] for key, array in arrays.items()
    ]


def _decode_arrays(values: Sequence[Any], take: Take) -> ArrayRecord:
    arrays = {
        key: Array(dtype=dtype, shape=tuple(shape), stype=stype, data=take(size))
        for key, dtype, shape, stype, size in values
    }
    return record_of(ArrayRecord, arrays)


def _encode_value(value: Any, buffers: list[bytes], shared: Callable[[object], int | None]) -> Any:
    if isinstance(value, bytes):
        key = shared(value)
        if key is not None:
            return {"shared": key}
        buffers.append(value)
        return {"size": len(value)}
    if isinstance(value, list) and value and isinstance(value[0], bytes):
        buffers += value
        return {"sizes": [len(each) for each in value]}
    return value


def _decode_value(value: dict[str, Any], take: Take, shared: Callable[[int], Any]) -> Any:
    if "shared" in value:
        return shared(value["shared"])
    if "size" in value:
        return take(value["size"])
    return [take(size) for size in value["sizes"]]
