"""Records as frames: in memory, and in shared memory."""

from __future__ import annotations

import math
import os
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from flwr_kd.transport import frames
from flwr_kd.transport.frames import Segment, SharedMemoryError, decode, encode, join, pack, size_of, unpack

needs_segments = pytest.mark.skipif(not Segment.available(), reason="this system has no memfd")
CONTENT = RecordDict(
    {
        "arrays": ArrayRecord([np.arange(6.0).reshape(2, 3), np.zeros((0, 2)), np.array(1.5, np.float32)]),
        "garbage": ArrayRecord({"a": Array(dtype="", shape=(), stype="numpy.ndarray", data=b"\x93NUMPY")}),
        "metrics": MetricRecord({"n": 3, "loss": 0.1, "many": [1.5, -math.inf], "none": []}),
        "config": ConfigRecord(
            {
                "text": "\u00e4\ud800",
                "yes": True,
                "no": 0,
                "bytes": b"\x00\xff",
                "lists": [b"", b"xy"],
                "big": 2**70,
            }
        ),
        "empty": ConfigRecord(),
    }
)


def packed(content: RecordDict) -> list[bytes]:
    buffers: list[bytes] = []
    return pack(encode(content, buffers), buffers)


def test_records_are_the_same_in_memory() -> None:
    parts = packed(CONTENT)
    take = join(b"before" + b"".join(parts), 6)
    again = decode(unpack(take), take)
    assert again == CONTENT
    assert list(again) == list(CONTENT)
    assert [type(value) for value in again.config_records["config"].values()] == [
        type(value) for value in CONTENT.config_records["config"].values()
    ]
    assert size_of(parts) == len(b"".join(parts))


@needs_segments
def test_records_are_the_same_in_shared_memory() -> None:
    segment = Segment()
    segment.write([bytes(10_000)])
    assert segment.write(packed(CONTENT)) == size_of(packed(CONTENT))
    take = Segment(os.dup(segment.handle)).reader()
    # The reader's own copy of the descriptor may be closed: it keeps what it reads from.
    assert decode(unpack(take), take) == CONTENT
    segment.close()
    segment.close()


def test_floats_that_are_numpys_and_numbers_that_are_not() -> None:
    content = RecordDict({"m": MetricRecord({"loss": np.float64(0.1), "nan": math.nan})})
    take = join(b"".join(packed(content)))
    metrics = decode(unpack(take), take).metric_records["m"]
    assert metrics["loss"] == 0.1
    assert math.isnan(metrics["nan"])  # type: ignore[arg-type]


def test_what_is_shared_is_named_and_not_repeated() -> None:
    common, payload = ArrayRecord([np.ones(1000)]), bytes(2000)
    content = RecordDict({"a": common, "c": ConfigRecord({"payload": payload, "own": b"x" * 2000})})
    parts = list(frames.parts_of(content, 1000))
    assert [part is common or part is payload for part in parts] == [True, True, False]
    keys = {id(common): 7, id(payload): 8}
    buffers: list[bytes] = []
    encoded = encode(content, buffers, lambda part: keys.get(id(part)))
    assert size_of(buffers) == 2000
    shared: dict[int, Any] = {}
    for key, part in ((7, common), (8, payload)):
        shared[key] = frames.decode_part(join(b"".join(frames.encode_part(part))))
    again = decode(encoded, join(b"".join(buffers)), shared.__getitem__)
    assert again == content
    # A copy for each message, of entries that are the same objects.
    assert again["a"] is not shared[7]
    assert again.array_records["a"]["0"] is shared[7]["0"]


@needs_segments
def test_what_is_missing_and_what_cannot_be_written_are_errors() -> None:
    segment = Segment()
    segment.write([b"abc"])
    with pytest.raises(EOFError, match="2 bytes are missing in shared memory"):
        segment.reader(2)(3)
    segment.close()
    with pytest.raises(SharedMemoryError, match="cannot be written to"):
        segment.write([b"abc"])
