"""Mutations of a reply's arrays: their bytes, their headers and their numbers."""

from __future__ import annotations

import io
import random
import struct
import warnings
from collections.abc import Callable, Sequence

import numpy as np
from flwr.app import Array, ArrayRecord, RecordDict

from flwr_kd.testing.hostile_values import (
    BYTES,
    FLOATS,
    FORGED,
    SIZES,
    WHOLE,
    Mutation,
    NDArray,
    Unfit,
)
from flwr_kd.testing.reply_parts import arrays_of, put
from flwr_kd.transport.flower_records import layout_of

__all__ = ["MODELS", "as_array", "npy", "npy_file"]


def npy(value: NDArray, *, allow_pickle: bool = False) -> bytes:
    """Return an array as Flower sends it."""
    stream = io.BytesIO()
    np.save(stream, value, allow_pickle=allow_pickle)
    return stream.getvalue()


def npy_file(
    header: str, body: bytes = b"", *, version: bytes = b"\x01\x00", length: int | None = None
) -> bytes:
    """Return an npy file with any text as its header, and any claim of that header's length."""
    text = header.encode("utf-8", "surrogatepass")
    size = len(text) if length is None else length
    claimed = struct.pack("<H", size % 2**16) if version == b"\x01\x00" else struct.pack("<I", size % 2**32)
    return b"\x93NUMPY" + version + claimed + text + body


def as_array(data: bytes) -> Array:
    """Return bytes as an Array, which need not be one."""
    return Array(dtype="float32", shape=(1,), stype="numpy.ndarray", data=data)


def _array_of(content: RecordDict, rng: random.Random) -> tuple[ArrayRecord, str]:
    record = arrays_of(content)
    names = [name for name in record if name != "_empty"]
    if not names:
        raise Unfit
    return record, rng.choice(names)


def _array_bytes(content: RecordDict, rng: random.Random, foreign: Sequence[RecordDict]) -> None:
    record, name = _array_of(content, rng)
    record[name] = as_array(rng.choice(BYTES)(record[name].data, rng))


def _array_header(content: RecordDict, rng: random.Random, foreign: Sequence[RecordDict]) -> None:
    record, name = _array_of(content, rng)
    try:
        value = record[name].numpy()
    except Exception:  # a second mutation of the same array
        raise Unfit from None
    body, shape = value.tobytes(), value.shape
    descr, order, text = f"'{value.dtype.str}'", "False", ""
    version, length = b"\x01\x00", None
    match rng.randrange(7):
        case 0:
            kinds = [
                "'<f8'",
                "'<f2'",
                "'|O'",
                "'>f4'",
                "'<c8'",
                "'|V0'",
                "'<U1'",
                "'<M8[s]'",
                "'|b1'",
                "'<g'",
            ]
            kinds += [
                "''",
                "None",
                "5",
                "'" + "f" * 5000 + "'",
                "[('a', '<f4')]",
                "[('\\x1b[31m', '|O')]",
                "'<f4\x1b'",
            ]
            kinds += ["('<f4', (1000000000,))", "'f4,i4'", "[('a', '<f4', (2**20,))]"]
            descr = rng.choice(kinds)
        case 1:
            order = rng.choice(["True", "1", "None", "'False'", "not True"])
        case 2:
            odd = [
                (0, *[2**31] * 40),
                (1,) * 65,
                (-1,),
                (-1, -1),
                (True,),
                (2**70,),
                (2**40,),
                shape[::-1],
                (),
                (0,),
            ]
            shape = rng.choice([*odd, tuple(rng.choice(SIZES) for _ in range(rng.randint(1, 4)))])
        case 3:
            depth = rng.choice([50, 500, 5000])
            nested = ["(" * depth, "[" * depth, "-" * depth + "1", "{1:" * depth, "(" * depth + ")" * depth]
            text = rng.choice(
                [*nested, "{}", "[]", "", "\0", "{'descr': '<f4'}", "__import__('os')", FORGED, "{*[]}"]
            )
        case 4:
            version = rng.choice([b"\x02\x00", b"\x03\x00", b"\x00\x00", b"\x01\x01", b"\xff\xff"])
        case 5:
            length = rng.choice([0, 1, 10, 2**15, 2**16 - 1])
        case _:
            version, length = b"\x02\x00", rng.choice([2**31, 2**32 - 1, 10_001])
    if not text:
        text = f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape!r}, }}"
        if rng.random() < 0.1:
            text = text[:-2] + rng.choice(["'extra': 1}", "'shape': (1,)}", "} # " + FORGED, "}" + "\n" * 50])
    record[name] = as_array(npy_file(text, body, version=version, length=length))


def _array_values(content: RecordDict, rng: random.Random, foreign: Sequence[RecordDict]) -> None:
    """Replace one array, or all, by a well-formed one with other numbers, of another type or order."""
    record, name = _array_of(content, rng)
    change = rng.choice(list(VALUES))
    for each in list(record) if rng.random() < 0.2 else [name]:
        if each == "_empty":
            continue
        try:
            value = record[each].numpy()
        except Exception:  # a second mutation of the same array
            raise Unfit from None
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the casts of numbers beyond a type are what is wanted
            changed = VALUES[change](value, rng)
            record[each] = as_array(npy(changed, allow_pickle=changed.dtype.hasobject))


def _one(value: NDArray, number: float | int, rng: random.Random) -> NDArray:
    changed = value.copy().reshape(-1)
    if not changed.size:
        raise Unfit
    changed[rng.randrange(changed.size)] = np.array(number).astype(changed.dtype)
    return changed.reshape(value.shape)


VALUES: dict[str, Callable[[NDArray, random.Random], NDArray]] = {
    "one": lambda a, r: _one(a, r.choice(FLOATS if a.dtype.kind == "f" else WHOLE), r),
    "all": lambda a, r: np.full_like(a, r.choice(FLOATS if a.dtype.kind == "f" else WHOLE)),
    "largest": lambda a, r: np.full_like(
        a, np.finfo(a.dtype).max if a.dtype.kind == "f" else np.iinfo(a.dtype).max
    ),
    "least": lambda a, r: np.full_like(
        a, np.finfo(a.dtype).min if a.dtype.kind == "f" else np.iinfo(a.dtype).min
    ),
    "negated": lambda a, r: -a,
    "float64": lambda a, r: a.astype("<f8"),
    "beyond float32": lambda a, r: np.full(a.shape, r.choice([1e39, -1e300, 1.7e308])),
    "float16": lambda a, r: a.astype("<f2"),
    "longdouble": lambda a, r: a.astype(np.longdouble),
    "swapped": lambda a, r: a.astype(a.dtype.newbyteorder(">")),
    "Fortran": lambda a, r: np.asfortranarray(a),
    "whole": lambda a, r: a.astype(r.choice(["i8", "u8", "i1", "?"])),
    "complex": lambda a, r: a.astype("c8"),
    "objects": lambda a, r: a.astype(object),
    "text": lambda a, r: a.astype("U8"),
    "records": lambda a, r: np.zeros(a.shape, dtype=[("a", "<f4"), ("\x1b[31m", "<i4")]),
    "times": lambda a, r: np.zeros(a.shape, dtype=r.choice(["M8[s]", "m8[D]"])),
    "none": lambda a, r: a.reshape(-1)[:0],
    "no rows": lambda a, r: np.zeros((0, *a.shape), dtype=a.dtype),
    "flat": lambda a, r: a.reshape(-1),
    "transposed": lambda a, r: a.T,
    "an axis more": lambda a, r: a[None],
    "many axes": lambda a, r: np.zeros((0, *[9_999_999] * 2, *[1] * 60), dtype=a.dtype),
    "a row less": lambda a, r: a[:-1] if a.ndim else a.reshape(1)[:0],
    "scalar": lambda a, r: np.array(0, dtype=a.dtype),
}


def _another_number_of_arrays(content: RecordDict, rng: random.Random, foreign: Sequence[RecordDict]) -> None:
    where = layout_of(content).sent_arrays
    if where not in content.array_records:
        raise Unfit
    arrays = dict(content.array_records[where])
    names = list(arrays)
    match rng.randrange(6):
        case 0:
            for name in rng.sample(names, rng.randint(0, len(names))):
                del arrays[name]
        case 1:
            arrays |= {
                f"more{i}": Array(np.zeros(i, dtype=np.float32)) for i in range(rng.choice([1, 2, 200]))
            }
        case 2:
            arrays = {name: arrays[name] for name in rng.sample(names, len(names))}
        case 3:
            arrays = {name: arrays[rng.choice(names)] for name in names} | {"_empty": as_array(b"")}
        case 4:
            arrays = {rng.choice(["", FORGED, "n" * 5000]) + str(i): a for i, a in enumerate(arrays.values())}
            arrays[rng.choice([FORGED, "n" * 5000])] = as_array(b"no array")
        case _:
            others = [dict(arrays_of(other)) for other in foreign if other.array_records]
            arrays = rng.choice(others) if others else {}
    put(content, where, ArrayRecord(arrays))


MODELS: dict[str, Mutation] = {
    "arrays: bytes": _array_bytes,
    "arrays: header": _array_header,
    "arrays: values": _array_values,
    "arrays: values, again": _array_values,
    "arrays: number": _another_number_of_arrays,
}
"""By name."""
