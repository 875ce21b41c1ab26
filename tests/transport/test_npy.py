"""Arrays as bytes: what numpy writes, and readers of untrusted bytes that raise nothing else than PayloadError."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import numpy as np
import pytest
from flwr.app import Array
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from flwr_kd.transport.npy import as_record_array, npy_bytes, read_array, read_npy
from flwr_kd.transport.payload import PayloadError

DTYPES = st.sampled_from(["<f4", "<f8", "<f2", ">f4", "<i8", "|u1", "|b1", "<c8"])
ARRAYS = hnp.arrays(DTYPES, hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4))


def saved(array: Any, version: tuple[int, int] | None = None) -> bytes:
    stream = io.BytesIO()
    np.lib.format.write_array(stream, np.asarray(array), version=version, allow_pickle=False)
    return stream.getvalue()


@given(ARRAYS, st.sampled_from(["as it is", "transposed", "strided", "fortran"]))
@settings(max_examples=200)
def test_what_numpy_writes(array: Any, order: str) -> None:
    if order == "transposed":
        array = array.T
    elif order == "strided" and array.ndim:
        array = array[::2]
    elif order == "fortran":
        array = np.asfortranarray(array)
    data = npy_bytes(array)
    assert data == saved(array)
    flower, ours = Array(np.asarray(array)), as_record_array(array)
    assert [getattr(ours, name) for name in ("dtype", "shape", "stype", "data")] == [
        getattr(flower, name) for name in ("dtype", "shape", "stype", "data")
    ]
    result = read_array("w", ours)
    assert (result.dtype, result.shape) == (array.dtype, array.shape)
    assert result.tobytes() == np.asarray(array).tobytes()


def test_reading_copies_nothing_and_the_result_cannot_be_written_to() -> None:
    data = npy_bytes(np.arange(1000.0))
    result = read_npy("w", data)
    assert not result.flags.writeable
    assert np.shares_memory(result, np.frombuffer(data, np.uint8))


@pytest.mark.parametrize("version", [(1, 0), (2, 0)])
def test_versions_of_the_format(version: tuple[int, int]) -> None:
    assert read_npy("w", saved(np.arange(3), version)).tolist() == [0, 1, 2]


def test_a_header_that_is_too_long_to_be_kept() -> None:
    data = saved(np.arange(3))
    longer = data[:8] + (1000).to_bytes(2, "little") + data[10:127] + b" " * 882 + b"\n" + data[128:]
    assert read_npy("w", longer).tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x93NUMPY",
        b"\x93NUMPY garbage",
        saved(np.arange(3))[:-1],
        saved(np.arange(3)) + b"x",
        saved(np.arange(3), (2, 0))[:40],
        b"\x93NUMPY\x01\x00\x00\x00",
        b"\x93NUMPY\x01\x00\xff\xff" + b" " * 50,
        saved(np.arange(3)).replace(b"(3,)", b"(9,)"),
        saved(np.arange(3)).replace(b"<i8", b"|O8"),
        saved(np.arange(3)).replace(b"(3,)", b"(-3,)"),
    ],
)
@pytest.mark.parametrize("times", [1, 2])
def test_other_bytes(data: bytes, times: int) -> None:
    for _ in range(times):
        with pytest.raises(PayloadError, match="array 'w' is not a numpy array"):
            read_npy("w", data)


def test_python_objects_are_not_written() -> None:
    with pytest.raises(ValueError, match="Python objects"):
        npy_bytes(np.array([None]))


@given(st.data())
@settings(max_examples=300)
def test_mutated_bytes(data: st.DataObject) -> None:
    whole = bytearray(saved(np.arange(6, dtype=np.float32).reshape(2, 3)))
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(PayloadError):
        assert read_npy("w", bytes(whole)).nbytes == 24
