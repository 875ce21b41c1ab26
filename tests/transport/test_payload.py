"""Payloads: an exact round trip, and a decoder that trusts nothing."""

from __future__ import annotations

import dataclasses
import json
import re
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from safetensors.numpy import save

from flwr_kd.transport.payload import DTYPES, Payload, PayloadError, array

JSON_LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
repeatable = settings(max_examples=60, deadline=None, derandomize=True)


@dataclass(frozen=True, eq=False)
class AnyArray(Payload, schema="test.any"):
    value: np.ndarray = array("*", "...")


@dataclass(frozen=True, eq=False)
class Scalars(Payload, schema="test.scalars"):
    whole: int
    real: float
    flag: bool
    text: str


@dataclass(frozen=True, eq=False)
class Soft(Payload, schema="test.soft", version=3, hint="send fewer rows"):
    probabilities: np.ndarray = array("float32", "N C")
    counts: np.ndarray = array("int64", "C")
    temperature: float = 1.0
    note: str = ""

    def check(self) -> None:
        if self.temperature <= 0:
            raise PayloadError(f"test.soft: field 'temperature' must be > 0, got {self.temperature}")


@dataclass(frozen=True, eq=False)
class Image(Payload, schema="test.image"):
    pixels: np.ndarray = array("*", "N 3 ...")
    scale: np.ndarray = array("float64", "")


def soft(rows: int = 2, classes: int = 4, **changes: Any) -> Soft:
    values: dict[str, Any] = {
        "probabilities": np.full((rows, classes), 1 / classes, dtype=np.float32),
        "counts": np.arange(classes),
    }
    return Soft(**(values | changes))


def raw(header: Any, body: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


def encoded(arrays: dict[str, np.ndarray], scalars: Any = None, **metadata: str) -> bytes:
    """Encode as a peer would that keeps to safetensors, but not to the message."""
    given_ = {"schema": "test.soft", "version": "3", "scalars": json.dumps(scalars)} | metadata
    return save(arrays, metadata=given_)


GOOD = {"probabilities": np.full((2, 4), 0.25, dtype=np.float32), "counts": np.arange(4)}
SCALARS = {"temperature": 1.0, "note": ""}

finite_arrays = st.sampled_from(DTYPES).flatmap(
    lambda dtype: hnp.arrays(
        dtype,
        hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4),
        elements={"allow_nan": False, "allow_infinity": False} if dtype.startswith("float") else None,
    )
)


class TestRoundTrip:
    @repeatable
    @given(value=finite_arrays)
    def test_arrays_are_exact(self, value: np.ndarray) -> None:
        back = AnyArray.from_bytes(AnyArray(value).to_bytes()).value
        assert (back.dtype, back.shape) == (value.dtype, value.shape)
        assert back.tobytes() == value.tobytes()

    @pytest.mark.parametrize("shape", [(), (0,), (0, 3), (2, 0, 3), (1,), (2, 3)], ids=str)
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_every_dtype_also_scalar_and_empty(self, dtype: str, shape: tuple[int, ...]) -> None:
        sent = AnyArray(np.ones(shape, dtype=dtype))
        back = AnyArray.from_bytes(sent.to_bytes())
        assert (back.value.dtype.name, back.value.shape) == (dtype, shape)
        assert back == sent

    @pytest.mark.parametrize(
        "value",
        [
            np.arange(12.0).reshape(3, 4).T,
            np.arange(12.0)[::-3],
            np.asfortranarray(np.arange(6, dtype=np.int16).reshape(2, 3)),
            np.arange(4, dtype=">i4"),
            np.broadcast_to(np.float32(2.0), (2, 3)),
        ],
        ids=["transposed", "strided", "fortran", "big-endian", "broadcast"],
    )
    def test_memory_layout_does_not_matter(self, value: np.ndarray) -> None:
        back = AnyArray.from_bytes(AnyArray(value).to_bytes()).value
        assert back.shape == value.shape
        np.testing.assert_array_equal(back, value)

    @repeatable
    @given(
        st.integers(-(2**70), 2**70),
        st.floats(allow_nan=False, allow_infinity=False),
        st.booleans(),
        st.text(),
    )
    def test_scalars_are_exact(self, whole: int, real: float, flag: bool, text: str) -> None:
        back = Scalars.from_bytes(Scalars(whole, real, flag, text).to_bytes())
        assert (back.whole, back.real, back.flag, back.text) == (whole, real, flag, text)
        assert np.signbit(back.real) == np.signbit(real)
        assert [type(v) for v in (back.whole, back.real, back.flag, back.text)] == [int, float, bool, str]

    def test_a_whole_number_is_a_float_where_one_is_declared(self) -> None:
        message = soft(temperature=2)
        assert type(message.temperature) is float
        assert Soft.from_bytes(message.to_bytes()) == message

    def test_signed_zeros_are_different_bytes(self) -> None:
        assert AnyArray(np.float32([0.0])) != AnyArray(np.float32([-0.0]))

    def test_equality(self) -> None:
        assert soft() == soft()
        assert soft() != soft(rows=3)
        assert soft() != soft(note="x")
        assert AnyArray(np.zeros(2, np.int32)) != AnyArray(np.zeros(2, np.int64))
        assert AnyArray(np.zeros((1, 2))) != AnyArray(np.zeros((2, 1)))
        assert soft() != "text"

    @repeatable
    @given(value=finite_arrays)
    def test_nbytes_is_the_encoded_size(self, value: np.ndarray) -> None:
        message = AnyArray(value)
        assert message.nbytes == len(message.to_bytes())
        assert value.nbytes < message.nbytes < value.nbytes + 400

    def test_open_ended_and_fixed_axes(self) -> None:
        for shape in [(2, 3), (2, 3, 8, 8), (0, 3, 1)]:
            sent = Image(np.zeros(shape, np.uint8), np.array(0.5))
            assert Image.from_bytes(sent.to_bytes(), dims={"N": shape[0]}) == sent
        for bad in [(2,), (2, 4), (3, 2, 2)]:
            with pytest.raises(PayloadError, match="'pixels' has shape"):
                Image(np.zeros(bad, np.uint8), np.array(0.5))
        with pytest.raises(PayloadError, match=r"'scale' has shape \[1\], expected \[\]"):
            Image(np.zeros((2, 3)), np.array([0.5]))


class TestConstruction:
    @pytest.mark.parametrize(
        ("changes", "text"),
        [
            ({"probabilities": np.zeros((2, 4))}, "'probabilities' has dtype float64, expected float32"),
            ({"probabilities": np.zeros((2, 4), object)}, "'probabilities' has dtype object"),
            ({"probabilities": [[1.0]]}, "'probabilities' must be a numpy array, got list"),
            (
                {"probabilities": np.zeros(4, np.float32)},
                r"'probabilities' has shape \[4\], expected \[N, C\]",
            ),
            ({"counts": np.arange(5)}, r"'counts' has shape \[5\], expected \[C=4\]"),
            ({"probabilities": np.float32([[0, np.nan, np.inf, -np.inf]])}, "3 values that are not finite"),
            ({"temperature": float("nan")}, "'temperature' must be finite, got nan"),
            ({"temperature": float("inf")}, "'temperature' must be finite, got inf"),
            ({"temperature": True}, "'temperature' must be float, got bool"),
            ({"temperature": "1"}, "'temperature' must be float, got str"),
            ({"temperature": np.float32(1)}, "'temperature' must be float, got float32"),
            ({"temperature": 10**400}, "'temperature' is beyond float's range"),
            ({"temperature": -1.0}, "'temperature' must be > 0, got -1.0"),
            ({"note": None}, "'note' must be str, got NoneType"),
        ],
    )
    def test_bad_field(self, changes: dict[str, Any], text: str) -> None:
        with pytest.raises(PayloadError, match=rf"test\.soft.*{text}"):
            soft(**changes)

    @pytest.mark.parametrize(
        ("changes", "field"),
        [
            ({"whole": True}, "whole"),
            ({"whole": 1.0}, "whole"),
            ({"flag": 1}, "flag"),
            ({"text": b"x"}, "text"),
        ],
    )
    def test_kinds_of_scalars_are_not_mixed(self, changes: dict[str, Any], field: str) -> None:
        with pytest.raises(PayloadError, match=f"field '{field}' must be"):
            Scalars(**({"whole": 1, "real": 1.0, "flag": True, "text": ""} | changes))

    def test_declarations_that_cannot_travel(self) -> None:
        with pytest.raises(TypeError, match="complex64"):
            array("complex64", "N")

        @dataclass(frozen=True, eq=False)
        class Wrong(Payload, schema="test.wrong"):
            items: list  # type: ignore[type-arg]

        with pytest.raises(TypeError, match=r"Wrong\.items must be int, float, bool, str"):
            Wrong([1])

    def test_frozen(self) -> None:
        with pytest.raises(dataclasses.FrozenInstanceError):
            soft().note = "changed"  # type: ignore[misc]


class TestDecoding:
    def test_peer_without_our_encoder(self) -> None:
        assert Soft.from_bytes(encoded(GOOD, SCALARS), dims={"N": 2, "C": 4}) == soft()

    @pytest.mark.parametrize(
        ("data", "text"),
        [
            (encoded(GOOD, SCALARS, schema="test.hard"), "expected this message, got 'test.hard'"),
            (encoded(GOOD, SCALARS, schema="x" * 10_000), "x{80}'$"),
            (encoded(GOOD, SCALARS, version="2"), "expected schema version 3, got 2"),
            (encoded(GOOD, SCALARS, version="3.0"), "expected schema version 3, got 3.0"),
            (encoded({"counts": GOOD["counts"]}, SCALARS), r"missing \['probabilities'\]"),
            (encoded(GOOD, {"note": ""}), r"missing \['temperature'\]"),
            (encoded({**GOOD, "more": GOOD["counts"]}, SCALARS), r"not expected \['more'\]"),
            (encoded(GOOD, {**SCALARS, "more": 1}), r"not expected \['more'\]"),
            (encoded(GOOD, {**SCALARS, "counts": 1}), "scalars are not a mapping of their own"),
            (encoded(GOOD, [1]), "scalars are not a mapping"),
            (encoded(GOOD, scalars="x"), "scalars are not a mapping"),
            (encoded(GOOD, **{"scalars": "[" * 100_000}), "scalars are not a mapping"),
            (encoded(GOOD, **{"scalars": "{"}), "scalars are not a mapping"),
            (encoded({"probabilities": GOOD["probabilities"]}, {**SCALARS, "counts": 3}), "must be a numpy array"),
            (encoded({**GOOD, "note": GOOD["counts"]}, {"temperature": 1.0}), "'note' must be str, got ndarray"),
            (encoded({**GOOD, "counts": np.arange(4.0)}, SCALARS), "'counts' has dtype float64, expected int64"),
            (encoded({**GOOD, "counts": np.arange(3)}, SCALARS), r"'counts' has shape \[3\], expected \[C=4\]"),
            (encoded(GOOD, {**SCALARS, "temperature": float("nan")}), "'temperature' must be finite"),
            (encoded(GOOD, {**SCALARS, "temperature": 10**400}), "'temperature' is beyond float's range"),
            (encoded(GOOD, {**SCALARS, "temperature": "1"}), "'temperature' must be float, got str"),
            (encoded(GOOD, {**SCALARS, "temperature": -1}), "'temperature' must be > 0"),
            (encoded({**GOOD, "probabilities": np.full((2, 4), np.nan, np.float32)}, SCALARS), "8 values that are"),
        ],
    )  # fmt: skip
    def test_not_this_message(self, data: bytes, text: str) -> None:
        with pytest.raises(PayloadError, match=text):
            Soft.from_bytes(data)

    def test_sizes_the_receiver_knows(self) -> None:
        with pytest.raises(PayloadError, match=r"'probabilities' has shape \[2, 4\], expected \[N=2, C=10\]"):
            Soft.from_bytes(soft().to_bytes(), dims={"C": 10})
        with pytest.raises(PayloadError, match=r"expected \[N=5, C"):
            Soft.from_bytes(soft().to_bytes(), dims={"N": 5})

    @pytest.mark.parametrize("value", [None, "text", 3, [1], memoryview(b"x")])
    def test_not_bytes(self, value: Any) -> None:
        with pytest.raises(PayloadError, match=f"must be bytes, got {type(value).__name__}"):
            Soft.from_bytes(value)

    def test_bytearray_is_bytes(self) -> None:
        assert Soft.from_bytes(bytearray(soft().to_bytes())) == soft()  # type: ignore[arg-type]

    @pytest.mark.parametrize("dtype", ["BF16", "F8_E4M3", "C64"])
    def test_dtypes_of_safetensors_that_numpy_lacks(self, dtype: str) -> None:
        size = {"BF16": 2, "F8_E4M3": 1, "C64": 8}[dtype]
        meta = {"schema": "test.any", "version": "1", "scalars": "{}"}
        header = {"__metadata__": meta, "value": {"dtype": dtype, "shape": [1], "data_offsets": [0, size]}}
        text = f"'value' has dtype {dtype}, not supported"
        if dtype == "C64":  # unknown to the older safetensors
            text += "|not a safetensors message"
        with pytest.raises(PayloadError, match=text):
            AnyArray.from_bytes(raw(header, bytes(size)))

    @pytest.mark.parametrize(
        ("shape", "size"),
        [
            ([1] * 65, 4),
            ([0, 2**64 - 1], 0),
            ([0, 2**40, 2**40], 0),
            ([2**62, 0], 0),
            ([-1], 4),
            ([2**40], 4),
        ],
    )
    def test_impossible_shapes(self, shape: list[int], size: int) -> None:
        meta = {"schema": "test.any", "version": "1", "scalars": "{}"}
        header = {"__metadata__": meta, "value": {"dtype": "F32", "shape": shape, "data_offsets": [0, size]}}
        with pytest.raises(PayloadError, match=r"impossible shape|not a safetensors message"):
            AnyArray.from_bytes(raw(header, bytes(size)))

    @pytest.mark.parametrize(
        "data",
        [
            b"",
            b"\xff" * 8,
            raw({}),
            raw(b"null"),
            raw(b"[" * 50_000),
            raw({"__metadata__": None}),
            raw({"__metadata__": {"schema": 3}}),
            raw(b'{"__metadata__": {}, "__metadata__": {"schema": "test.soft"}}'),
            raw(b'{"__metadata__": {"schema": "\xff"}}'),
        ],
    )
    def test_not_safetensors(self, data: bytes) -> None:
        with pytest.raises(PayloadError, match=r"not a safetensors message|expected this message"):
            Soft.from_bytes(data)

    def test_truncated_anywhere(self) -> None:
        data = soft().to_bytes()
        for end in range(len(data)):
            with pytest.raises(PayloadError):
                Soft.from_bytes(data[:end])
        with pytest.raises(PayloadError):
            Soft.from_bytes(data + b"\0")

    @repeatable
    @given(data=st.binary(max_size=300))
    def test_any_bytes(self, data: bytes) -> None:
        for given_ in (data, raw(data), raw({"__metadata__": {"schema": "test.soft"}}, data)):
            with pytest.raises(PayloadError):
                Soft.from_bytes(given_)

    @settings(max_examples=400, deadline=None, derandomize=True)
    @given(edits=st.lists(st.tuples(st.integers(0, 10_000), st.binary(max_size=3)), min_size=1, max_size=4))
    def test_mutated_bytes_are_refused_or_valid(self, edits: list[tuple[int, bytes]]) -> None:
        data = soft(note="hello").to_bytes()
        for place, new in edits:
            place %= len(data)
            data = data[:place] + new + data[place + len(new) :]
        try:
            message = Soft.from_bytes(data)
        except PayloadError:
            return
        assert message.probabilities.dtype == np.float32
        assert message.probabilities.shape[1:] == message.counts.shape
        assert np.isfinite(message.probabilities).all()
        assert Soft.from_bytes(message.to_bytes()) == message

    @repeatable
    @given(
        scalars=JSON_LEAVES
        | st.fixed_dictionaries({"temperature": JSON_LEAVES, "note": JSON_LEAVES | st.lists(JSON_LEAVES)})
        | st.dictionaries(st.sampled_from(["temperature", "note", "counts"]), JSON_LEAVES)
    )
    def test_any_scalars(self, scalars: Any) -> None:
        data = encoded(GOOD, scalars)
        try:
            message = Soft.from_bytes(data)
        except PayloadError:
            return
        assert set(scalars) == {"temperature", "note"}
        assert (message.temperature, message.note) == (scalars["temperature"], scalars["note"])


class TestSize:
    def test_too_large_at_the_sender(self) -> None:
        message = soft(rows=2**17, classes=4)
        with pytest.raises(PayloadError) as caught:
            message.to_bytes(max_bytes=2**20)
        assert str(caught.value) == (
            "test.soft: 2.0 MiB is more than max_payload_bytes = 1.0 MiB; largest field 'probabilities' "
            "[131072, 4] has 2.0 MiB; send fewer rows"
        )
        assert len(message.to_bytes(max_bytes=None)) > 2**21
        assert message.nbytes > 2**21

    def test_limit_is_inclusive_of_the_arrays(self) -> None:
        message = AnyArray(np.zeros(1000, np.uint8))
        assert AnyArray.from_bytes(message.to_bytes(max_bytes=1000), max_bytes=1000) == message
        with pytest.raises(PayloadError, match="largest field 'value'") as caught:
            message.to_bytes(max_bytes=999)
        assert str(caught.value).endswith("MiB")  # no hint where the message has none

    def test_too_large_at_the_receiver(self) -> None:
        data = AnyArray(np.zeros(2**20 + 500, np.uint8)).to_bytes()
        with pytest.raises(PayloadError, match=f"{len(data)} bytes is more than max_payload_bytes = 100"):
            AnyArray.from_bytes(data, max_bytes=100)
        assert AnyArray.from_bytes(data, max_bytes=None).value.size == 2**20 + 500


# ---------------------------------------------------------------------- positions, which travel as bits


@dataclass(frozen=True, eq=False)
class Placed(Payload, schema="test.placed", version=1):
    places: np.ndarray = array("int64", "K", positions=True)
    values: np.ndarray = array("float32", "K D")


@given(st.sets(st.integers(0, 5000), max_size=60))
def test_positions_come_back_as_they_were(places: set[int]) -> None:
    chosen = np.array(sorted(places), dtype=np.int64)
    sent = Placed(chosen, np.zeros((len(chosen), 2), dtype=np.float32))
    came = Placed.from_bytes(sent.to_bytes(), dims={"K": len(chosen)})
    assert came == sent
    assert came.places.dtype == np.int64


def test_positions_take_a_bit_for_each_place() -> None:
    def size(count: int) -> int:
        return Placed(np.arange(count), np.zeros((count, 0), dtype=np.float32)).nbytes

    # Numbers in the container's header have some digits more.
    assert 1000 <= size(16_000) - size(8_000) < 1020


@pytest.mark.parametrize(
    ("places", "text"),
    [
        ([2, 1], "must ascend from 0, each position once"),
        ([1, 1], "must ascend from 0, each position once"),
        ([-1, 1], "must ascend from 0, each position once"),
        ([-(2**63), 2**63 - 1], "must ascend from 0, each position once"),
        ([0, 2**31], "must be below 2^31, got 2147483648"),
    ],
)
def test_what_are_no_positions_is_refused(places: list[int], text: str) -> None:
    with pytest.raises(PayloadError, match=rf"field 'places' {re.escape(text)}"):
        Placed(np.array(places), np.zeros((2, 1), dtype=np.float32))


@pytest.mark.parametrize(
    ("bits", "text"),
    [
        (np.array([0, 1]), r"field 'places' came as int64 \[2\], expected bits, uint8 \[bytes\]"),
        (np.zeros((1, 1), dtype=np.uint8), r"came as uint8 \[1, 1\], expected bits"),
        (np.array([7], dtype=np.uint8), r"field 'places' has 3 positions, expected 2"),
        (np.zeros(1, dtype=np.uint8), r"field 'places' has 0 positions, expected 2"),
        # 128 MiB of positions, were they unpacked before they are counted.
        (np.full(2 * 1024**2, 255, dtype=np.uint8), r"has 16777216 positions, expected 2"),
    ],
)
def test_bits_that_do_not_fit_are_refused(bits: np.ndarray, text: str) -> None:
    data = save(
        {"places": bits, "values": np.zeros((2, 1), dtype=np.float32)},
        metadata={"schema": "test.placed", "version": "1"},
    )
    with pytest.raises(PayloadError, match=text):
        Placed.from_bytes(data)


def test_positions_have_one_axis() -> None:
    for dtype, shape in (("int32", "K"), ("int64", "K D"), ("*", "K")):
        with pytest.raises(TypeError, match="positions must be int64 with one axis"):
            array(dtype, shape, positions=True)
