"""Mutilated copies of clients' answers: what a broken or hostile client may send.

Each mutation is a function ``(content, rng, foreign)`` that changes an answer's content in place, or raises
:class:`Unfit` where it has nothing to change. ``foreign`` are other answers, to be spliced in. All draws come from
the ``random.Random`` that is handed in.
"""

from __future__ import annotations

import io
import json
import random
import struct
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import numpy.typing as npt
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from safetensors.numpy import save

from flwr_kd.transport.payload import Payload

NDArray = npt.NDArray[Any]
Mutation = Callable[[RecordDict, random.Random, Sequence[RecordDict]], None]

ARRAYS, COUNT, METRICS = "fitres.parameters", "fitres.num_examples", "fitres.metrics"
FORGED = "x\nWARNING :      all is well\r\x1b[31m\x00\u202e\u2028"
"""Would begin a line of its own in a log, or turn a terminal red."""
LONG = 100_000
TEXTS = ("", "0", "nan", FORGED, "A" * LONG, "é\U0001f600", "'\"\\")
NUMBERS = (
    *(0, 1, -1, 2, 255, 2**31, -(2**31), 2**40, 2**53, 2**53 + 1, 2**63 - 1, -(2**63), 10**400),
    *(0.5, -0.0, 1e-320, 1e15, -1e300, 1.7e308, float("nan"), float("inf"), -float("inf")),
)
SIZES = (0, 1, 2, 3, 7, 2**31, 2**40, 2**62, 2**63 - 1, 2**64, -1, -(2**63))
REASONS = (
    *(None, "", " \n\t\r\n ", FORGED, FORGED[::-1], "r" * 10**6, "\n" * 10**5, "a" + "\u0301" * 400),
    *("<class 'ValueError'>:<'boom'>", "%s %d %(x)s {} {0}", "\ud800", "\x07" * 300),
)


class Unfit(Exception):  # noqa: N818
    """The answer has nothing that this mutation changes."""


def fresh(content: RecordDict) -> RecordDict:
    """Copy the records; their values are never changed in place."""
    return RecordDict({key: type(record)(dict(record)) for key, record in content.items()})  # type: ignore[arg-type]


def mutate(
    content: RecordDict,
    rng: random.Random,
    foreign: Sequence[RecordDict],
    among: Mapping[str, Mutation] | None = None,
) -> str:
    """Change an answer in place by one mutation, sometimes by two; return the names of what was done."""
    table = MUTATIONS if among is None else among
    done: list[str] = []
    wanted = 1 if rng.random() < 0.85 else 2
    for _ in range(1000):
        name = rng.choice(list(table))
        # What one of a family has left need no longer be what another of it can read.
        if any(name.split(":")[0] == other.split(":")[0] for other in done):
            continue
        try:
            table[name](content, rng, foreign)
        except Unfit:
            continue
        done.append(name)
        if len(done) == wanted:
            break
    return " and ".join(done)


def failed(message: Message, reason: str | None, code: int = 2) -> Message:
    """Return an error reply, as Flower sends it of a client that raised."""
    return Message(Error(code, reason), reply_to=message)


# ---------------------------------------------------------------------- bytes


def _cut(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.choice([0, 1, 7, 8, 9, 10, len(data) - 1, rng.randrange(max(len(data), 1))])]


def _flip(data: bytes, rng: random.Random) -> bytes:
    if not data:
        raise Unfit
    found = bytearray(data)
    # Half of them where the header is: in the body of a large array they only change a number.
    reach = min(len(found), 200) if rng.random() < 0.5 else len(found)
    for _ in range(rng.choice([1, 1, 1, 2, 8, 64])):
        found[rng.randrange(reach)] ^= 1 << rng.randrange(8)
    return bytes(found)


def _extend(data: bytes, rng: random.Random) -> bytes:
    return data + rng.choice([b"\0", b" ", rng.randbytes(rng.randint(1, 64)), b"\0" * 4096, data])


def _noise(data: bytes, rng: random.Random) -> bytes:
    return rng.choice(
        [b"", rng.randbytes(rng.randint(1, 300)), b"\0" * 64, b"\xff" * 64, b"{}", b"\x80\x04N."]
    )


_BYTES: tuple[Callable[[bytes, random.Random], bytes], ...] = (_cut, _flip, _flip, _extend, _noise)


# ---------------------------------------------------------------------- payloads


def encode(
    kind: type[Payload],
    arrays: Mapping[str, NDArray],
    scalars: Mapping[str, Any],
    *,
    schema: str | None = None,
    version: str | None = None,
) -> bytes:
    """Return a payload's bytes without any check of what is in it."""
    metadata = {
        "schema": kind.schema if schema is None else schema,
        "version": str(kind.version) if version is None else version,
        "scalars": json.dumps(dict(scalars)),
    }
    packed = {name: np.ascontiguousarray(value) for name, value in arrays.items()}
    for item in fields(kind):
        spec, value = item.metadata.get("array"), packed.get(item.name)
        # What are no positions cannot be sent as such: it goes as it is.
        if spec is not None and spec.positions and value is not None and _are_positions(value):
            places = np.zeros(int(value[-1]) + 1 if len(value) else 0, dtype=bool)
            places[value] = True
            packed[item.name] = np.packbits(places, bitorder="little")
    return save(packed, metadata=metadata)


def _are_positions(value: NDArray) -> bool:
    if value.dtype != np.int64 or value.ndim != 1:
        return False
    listed = value.tolist()
    return listed == sorted(set(listed)) and all(0 <= each < 10**6 for each in listed)


def safetensors_file(header: str, body: bytes = b"", length: int | None = None) -> bytes:
    """Return a safetensors file with any text as its header, and any claim of that header's length."""
    text = header.encode("utf-8", "surrogatepass")
    return struct.pack("<Q", (len(text) if length is None else length) % 2**64) + text + body


def parts_of(data: bytes) -> tuple[dict[str, Any], bytes]:
    """Return a safetensors file's header and body.

    Raises
    ------
    Unfit
        If it is none.
    """
    try:
        (length,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + length])
    except (struct.error, ValueError):
        raise Unfit from None
    if not isinstance(header, dict):
        raise Unfit
    return header, data[8 + length :]


def payload_of(content: RecordDict) -> bytes:
    """Return an answer's payload.

    Raises
    ------
    Unfit
        If it has none.
    """
    found = content.config_records.get(METRICS, {}).get("payload")
    if not isinstance(found, bytes):
        raise Unfit
    return found


def _payload_bytes(content: RecordDict, rng: random.Random, foreign: Sequence[RecordDict]) -> None:
    changed = rng.choice(_BYTES)(payload_of(content), rng)
    content.config_records[METRICS]["payload"] = changed


def _payload_header(content: RecordDict, rng: random.Random, foreign: Sequence[RecordDict]) -> None:
    header, body = parts_of(payload_of(content))
    fields = [name for name in header if name != "__metadata__"]
    if not fields:
        raise Unfit
    name = rng.choice(fields)
    data: bytes | None = None
    match rng.randrange(12):
        case 0:
            other = rng.choice([*fields, "__metadata__", "", FORGED, "n" * 5000, "schema"])
            header[other] = header.pop(name)
        case 1:
            del header[name]
        case 2:
            header[rng.choice(["extra", FORGED, "e" * 5000])] = dict(header[name])
        case 3:
            known = ["F16", "F32", "F64", "BF16", "I8", "I64", "U8", "U64", "BOOL", "F8_E4M3", "C64"]
            header[name]["dtype"] = rng.choice([*known, FORGED, "D" * 5000, "", None, 5, ["F32"]])
        case 4:
            shape = list(header[name]["shape"])
            huge = [rng.choice(SIZES) for _ in range(rng.randint(0, 4))]
            odd = [[0] + [2**31] * 62, [1] * 65, [1] * 5000, [1.5], ["2"], None, 5, [[2]], [2**62, 4, 0]]
            header[name]["shape"] = rng.choice(
                [shape[::-1], shape[:-1], [*shape, 1], [0, *shape], huge, *odd]
            )
        case 5:
            first, last = header[name]["data_offsets"]
            odd_ones = [
                [last, first],
                [first, last + 1],
                [first + 1, last],
                [0, 2**63],
                [0, 2**64],
                [-1, last],
            ]
            header[name]["data_offsets"] = rng.choice(
                [*odd_ones, [0, 0], [first], [], None, [0.5, 1], ["0", "1"]]
            )
        case 6:
            where = rng.choice(["schema", "version"])
            header["__metadata__"][where] = rng.choice([*TEXTS, "2", "1 ", "-1", "fedavg.model", None, 1])
        case 7:
            _other_scalars(header, rng)
        case 8:
            odd_metadata = [{}, None, [], "text", {"schema": None}, {"a": {"b": "c"}}, {FORGED: FORGED}]
            header["__metadata__"] = rng.choice(odd_metadata)
        case 9:
            # JSON allows a name twice, and readers differ in which they take.
            text = json.dumps(header)
            again = json.dumps({rng.choice([name, "__metadata__"]): rng.choice([header[name], {}, None])})
            data = safetensors_file(text[:-1] + "," + again[1:], body)
        case 10:
            depth = rng.choice([100, 1000, 20000])
            texts = [
                "[" * depth,
                '{"a":' * depth,
                '{"__metadata__":' + "[" * depth,
                "{" * depth,
                '{"a":[' * depth,
            ]
            data = safetensors_file(rng.choice(texts), body)
        case _:
            length = rng.choice([0, 1, 7, 2**20, 2**32, 2**62, 2**63, 2**64 - 1])
            data = safetensors_file(json.dumps(header), body, length)
    if data is None:
        data = safetensors_file(json.dumps(header), body)
    content.config_records[METRICS]["payload"] = data


def _other_scalars(header: dict[str, Any], rng: random.Random) -> None:
    metadata = header["__metadata__"]
    try:
        scalars = json.loads(metadata.get("scalars", "{}"))
    except (ValueError, AttributeError):
        raise Unfit from None
    odd = ["", "[]", "null", "3", '"text"', "{" * 1000, "[" * 100_000, '{"num_classes": NaN}', "{}", "{}{}"]
    odd += [
        '{"num_classes": 1e400}',
        '{"num_classes": ' + "9" * 4000 + "}",
        '{"num_classes": ' + "9" * 5000 + "}",
    ]
    if scalars and rng.random() < 0.6:
        name = rng.choice(list(scalars))
        scalars[name] = rng.choice([*NUMBERS, True, None, [], {}, "4", FORGED, "A" * 5000])
        metadata["scalars"] = json.dumps(scalars)
    elif rng.random() < 0.5:
        scalars[rng.choice(["extra", FORGED, "s" * 5000, "classes", "index"])] = 1
        metadata["scalars"] = json.dumps(scalars)
    else:
        metadata["scalars"] = rng.choice(odd)


def _payload_values(content: RecordDict, rng: random.Random, foreign: Sequence[RecordDict]) -> None:
    """Change numbers behind the header, which stays right."""
    header, body = parts_of(payload_of(content))
    numbers = {"F32": "<f4", "F16": "<f2", "I64": "<i8", "U8": "u1", "F64": "<f8"}
    fields = [
        n for n, v in header.items() if n != "__metadata__" and v["data_offsets"][0] < v["data_offsets"][1]
    ]
    if not fields:
        raise Unfit
    spec = header[rng.choice(fields)]
    first, last = spec["data_offsets"]
    values = np.frombuffer(body[first:last], dtype=numbers[spec["dtype"]]).copy()
    kinds = FLOATS if values.dtype.kind == "f" else WHOLE
    with np.errstate(all="ignore"):
        chosen = [np.array(rng.choice(kinds)).astype(values.dtype) for _ in range(3)]
    match rng.randrange(5):
        case 0:
            values[:] = chosen[0]
        case 1:
            rng.shuffle(values)
        case 2:
            values[:] = values[rng.randrange(len(values))]
        case _:
            for value in chosen:
                values[rng.randrange(len(values))] = value
    data = safetensors_file(json.dumps(header), body[:first] + values.tobytes() + body[last:])
    content.config_records[METRICS]["payload"] = data


def _payload_of_others(content: RecordDict, rng: random.Random, foreign: Sequence[RecordDict]) -> None:
    """Put another method's or phase's payload in the place of this one's, whole or in part."""
    others = [
        each
        for other in foreign
        for each in other.config_records.get(METRICS, {}).values()
        if isinstance(each, bytes)
    ]
    if not others or METRICS not in content.config_records:
        raise Unfit
    other = rng.choice(others)
    mine = content.config_records[METRICS].get("payload")
    if isinstance(mine, bytes) and rng.random() < 0.6:
        at = rng.randrange(len(mine) + 1)
        other = mine[:at] + other[rng.choice([at, rng.randrange(len(other) + 1)]) :]
    content.config_records[METRICS]["payload"] = other


def _payload_of_another_kind(content: RecordDict, rng: random.Random, foreign: Sequence[RecordDict]) -> None:
    if METRICS not in content.config_records:
        raise Unfit
    record = content.config_records[METRICS]
    if "payload" in record and rng.random() < 0.3:
        del record["payload"]
        return
    record["payload"] = rng.choice(["text", 5, 1.5, True, [b"a", b"b"], [], ["a"], FORGED])


# ---------------------------------------------------------------------- arrays

FLOATS = (
    *(
        float("nan"),
        float("inf"),
        -float("inf"),
        3e38,
        -3e38,
        1e-45,
        -1.0,
        -0.0,
        0.0,
        1.0,
        0.5,
        65504.0,
        65520.0,
    ),
    *(1e30, 1e19, -1e-6, 1.01, 2.0),
)
WHOLE = (0, 1, -1, 2, 3, 4, 5, 255, 2**31, 2**40, 2**40 + 1, 2**53, 2**62, 2**63 - 1, -(2**63), -(2**63) + 5)


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
    record = content.array_records.get(ARRAYS, ArrayRecord())
    names = [name for name in record if name != "_empty"]
    if not names:
        raise Unfit
    return record, rng.choice(names)


def _array_bytes(content: RecordDict, rng: random.Random, foreign: Sequence[RecordDict]) -> None:
    record, name = _array_of(content, rng)
    record[name] = as_array(rng.choice(_BYTES)(record[name].data, rng))


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
            found = VALUES[change](value, rng)
            record[each] = as_array(npy(found, allow_pickle=found.dtype.hasobject))


def _one(value: NDArray, number: float | int, rng: random.Random) -> NDArray:
    found = value.copy().reshape(-1)
    if not found.size:
        raise Unfit
    found[rng.randrange(found.size)] = np.array(number).astype(found.dtype)
    return found.reshape(value.shape)


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
    if ARRAYS not in content.array_records:
        raise Unfit
    record = content.array_records[ARRAYS]
    arrays = dict(record)
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
            others = [dict(other.array_records[ARRAYS]) for other in foreign if ARRAYS in other.array_records]
            arrays = rng.choice(others) if others else {}
    _put(content, ARRAYS, ArrayRecord(arrays))


# ---------------------------------------------------------------------- records and numbers


def _another_record(content: RecordDict, rng: random.Random, foreign: Sequence[RecordDict]) -> None:
    names = list(content)
    if not names:
        raise Unfit
    name = rng.choice([ARRAYS, COUNT, METRICS, *names])
    match rng.randrange(6):
        case 0:
            content.pop(name, None)
        case 1:
            record = content.pop(name, ConfigRecord())
            _put(
                content, rng.choice([*names, "fitres", "", FORGED, "r" * 5000, "evaluateres.metrics"]), record
            )
        case 2:
            _put(content, name, rng.choice([ConfigRecord, MetricRecord, ArrayRecord])())
        case 3:
            for each in names:
                del content[each]
            for i in range(rng.choice([0, 1, 5])):
                content[rng.choice([FORGED, "r" * 5000, "records"]) + str(i)] = MetricRecord({"a": i})
        case 4:
            if not foreign:
                raise Unfit
            other = fresh(rng.choice(foreign))
            for each in list(other) if rng.random() < 0.5 else [name]:
                if each in other:
                    _put(content, each, other[each])
        case _:
            odd = {"num_examples": rng.choice(["12", True, 12]), "payload": b"", "a": [1, 2]}
            _put(content, name, ConfigRecord(odd))


def _put(content: RecordDict, name: str, record: Any) -> None:
    content.pop(name, None)  # Flower warns of a record that takes the place of one of another type
    content[name] = record


def _another_metric(content: RecordDict, rng: random.Random, foreign: Sequence[RecordDict]) -> None:
    if METRICS not in content.config_records:
        raise Unfit
    record = content.config_records[METRICS]
    known = [name for name in record if name != "payload"]
    names = [
        *known,
        "train-loss",
        "local-accuracy",
        "local-top5",
        "state-lost",
        "distill-loss",
        "finetune-loss",
    ]
    name = rng.choice([*names, "", FORGED, "m" * LONG])
    values = [
        *NUMBERS,
        *NUMBERS,
        *TEXTS,
        True,
        False,
        b"",
        b"\xff" * 300,
        [],
        [1, 2],
        [float("nan")],
        ["a"] * 3,
    ]
    record[name] = rng.choice(values)


def _another_count(content: RecordDict, rng: random.Random, foreign: Sequence[RecordDict]) -> None:
    counts: list[Any] = [*NUMBERS, [], [1] * 2000, [1.5], 3.0]
    name = "num_examples" if rng.random() < 0.9 else rng.choice(["", FORGED, "num-examples"])
    _put(content, COUNT, MetricRecord({name: rng.choice(counts)}))


PAYLOADS: dict[str, Mutation] = {
    "payload: bytes": _payload_bytes,
    "payload: header": _payload_header,
    "payload: header, again": _payload_header,
    "payload: values": _payload_values,
    "payload: another's": _payload_of_others,
    "payload: another kind": _payload_of_another_kind,
}
MODELS: dict[str, Mutation] = {
    "arrays: bytes": _array_bytes,
    "arrays: header": _array_header,
    "arrays: values": _array_values,
    "arrays: values, again": _array_values,
    "arrays: number": _another_number_of_arrays,
}
OTHERS: dict[str, Mutation] = {
    "records": _another_record,
    "metrics": _another_metric,
    "count": _another_count,
}
MUTATIONS = PAYLOADS | MODELS | OTHERS


# ---------------------------------------------------------------------- handshake

_ODD: tuple[Any, ...] = (
    *(-1, 2**53, 2**63 - 1, 10**400, 0.5, float("nan"), -float("inf"), True, b"", [], [1] * 2000, "[" * LONG),
    *TEXTS,
)
_SHAPES = (
    *(
        "[]",
        "[0]",
        "[-1]",
        "[1.5]",
        "[true]",
        "[2]",
        "[9]",
        "[8, 1]",
        "[1099511627775]",
        "[1099511627776]",
        "8",
        "{}",
    ),
    *(
        "[8, 1, 1, 1, 1, 1, 1, 1]",
        "[8, 1, 1, 1, 1, 1, 1, 1, 1]",
        json.dumps([2**39] * 8),
        "[NaN]",
        "[8" + "0" * 5000 + "]",
    ),
    *(json.dumps([1] * 10_000), '["8"]', "null", "[" * 100_000),
)
_TEMPLATES = (
    *(
        "[]",
        "[[], [], []]",
        "[[], []]",
        "{}",
        "null",
        "[1, 2, 3]",
        '[["a"], ["float32"], [[1]]]',
        "[" * 100_000,
    ),
    *('[["a"], ["float32"], [["' + "Z" * 5000 + '"]]]', '[["a"], ["object"], [[1]]]', '[["a"], [], []]'),
    json.dumps([["n" * 5000], ["float32"], [[1]]]),
    json.dumps([[FORGED], ["float32"], [[1]]]),
    json.dumps([["a"], [FORGED], [[1]]]),
    json.dumps([["a"] * 3, ["d" * 5000] * 3, [[1]] * 3]),
    json.dumps([[f"a{i}" for i in range(2000)], ["float32"] * 2000, [[1]] * 2000]),
    '[["a"], ["float32"], [[' + "9" * 5000 + "]]]",
    '[["a"], ["float32"], [[1e400]]]',
    '[["a"], ["float32"], [[NaN]]]',
)
_SPECIAL: dict[str, tuple[Any, ...]] = {
    "partition-id": (0, 1, 2, 3, 4, 2**53 - 1, 2**53, -1),
    "num-examples": (0, 1, 2**31, 2**53 - 1, 2**53),
    "num-test-examples": (0, 1, 2**31, 2**53 - 1),
    "num-classes": (0, 1, 2, 3, 5, 2**17, 2**29, 2**31, 2**53 - 1),
    "feature-shape": _SHAPES,
    "arrays": _TEMPLATES,
    "num-public-examples": (0, 1, 31, 33, 2**40),
    "public-digest": ("", "a" * 64, "A" * 128, "A" * 129, "../x", "é" * 64),
    "sector": ("", "a", "0", 0, -5, 2**63 - 1, 1.5, "s" * 100, "s" * 101, FORGED),
    "refusal": ("", "no", FORGED, "r" * 5000, 5, True),
}
PROPERTIES = tuple(_SPECIAL)


def properties(honest: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Return handshakes with one property replaced or left out, each with its name, and some with all replaced."""
    found: list[tuple[str, dict[str, Any]]] = []
    for name in PROPERTIES:
        found.append((f"without {name}", {k: v for k, v in honest.items() if k != name}))
        for value in (*_SPECIAL[name], *_ODD):
            found.append(
                (
                    f"{name}={str(type(value)) if isinstance(value, bytes) else _brief(value)}",
                    {**honest, name: value},
                )
            )
        template = honest.get("arrays")
        if name == "arrays" and isinstance(template, str):
            found += [(f"arrays: {what}", {**honest, name: text}) for what, text in _near(template)]
    for i, name in enumerate(("", FORGED, "p" * 5000)):
        found.append((f"unknown property {i}", {**honest, name: FORGED}))
    found.append(("nothing", {}))
    return found


def _near(template: str) -> list[tuple[str, str]]:
    names, dtypes, shapes = json.loads(template)
    if not names:
        return []
    return [
        ("reversed", json.dumps([names[::-1], dtypes[::-1], shapes[::-1]])),
        ("one less", json.dumps([names[1:], dtypes[1:], shapes[1:]])),
        ("one twice", json.dumps([[*names, names[0]], [*dtypes, dtypes[0]], [*shapes, shapes[0]]])),
        ("float64", json.dumps([names, ["float64"] * len(names), shapes])),
        ("bool", json.dumps([names, ["bool"] * len(names), shapes])),
        ("negative", json.dumps([names, dtypes, [[-size for size in shape] for shape in shapes]])),
        ("long", json.dumps([names, dtypes, [[10**4000, *shape] for shape in shapes]])),
        ("many axes", json.dumps([names, dtypes, [[1] * 5000 for _ in shapes]])),
    ]


def _brief(value: Any) -> str:
    try:
        return repr(value)[:40]
    except ValueError:  # a whole number of too many digits
        return type(value).__name__
