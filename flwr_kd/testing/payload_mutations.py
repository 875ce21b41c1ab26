"""Mutations of a reply's payload: its bytes, its header and the numbers behind it."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
from flwr.app import RecordDict
from safetensors.numpy import save

from flwr_kd.testing.hostile_values import (
    BYTES,
    FLOATS,
    FORGED,
    NUMBERS,
    SIZES,
    TEXTS,
    WHOLE,
    Mutation,
    NDArray,
    Unfit,
)
from flwr_kd.testing.reply_parts import metrics_of, set_payload
from flwr_kd.transport.flower_records import layout_of
from flwr_kd.transport.payload import Payload

__all__ = ["PAYLOADS", "encode", "parts_of", "payload_of", "safetensors_file"]


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
    for item in fields(kind):  # type: ignore[arg-type]
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
    record = content.config_records.get(layout_of(content).knowledge)
    found = None if record is None else record.get("payload")
    if not isinstance(found, bytes):
        raise Unfit
    return found


def _payload_bytes(content: RecordDict, rng: random.Random, foreign: Sequence[RecordDict]) -> None:
    changed = rng.choice(BYTES)(payload_of(content), rng)
    set_payload(content, changed)


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
            odd_metadata: list[Any] = [
                {},
                None,
                [],
                "text",
                {"schema": None},
                {"a": {"b": "c"}},
                {FORGED: FORGED},
            ]
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
    set_payload(content, data)


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
            order = list(range(len(values)))
            rng.shuffle(order)
            values[:] = values[order]
        case 2:
            values[:] = values[rng.randrange(len(values))]
        case _:
            for value in chosen:
                values[rng.randrange(len(values))] = value
    data = safetensors_file(json.dumps(header), body[:first] + values.tobytes() + body[last:])
    set_payload(content, data)


def _payload_of_others(content: RecordDict, rng: random.Random, foreign: Sequence[RecordDict]) -> None:
    """Put another method's or phase's payload in the place of this one's, whole or in part."""
    others = [
        each
        for other in foreign
        for each in other.config_records.get(layout_of(other).knowledge, {}).values()
        if isinstance(each, bytes)
    ]
    record = content.config_records.get(layout_of(content).knowledge)
    if not others or (record is None and metrics_of(content) is None):
        raise Unfit
    other = rng.choice(others)
    mine = None if record is None else record.get("payload")
    if isinstance(mine, bytes) and rng.random() < 0.6:
        at = rng.randrange(len(mine) + 1)
        other = mine[:at] + other[rng.choice([at, rng.randrange(len(other) + 1)]) :]
    set_payload(content, other)


def _payload_of_another_kind(content: RecordDict, rng: random.Random, foreign: Sequence[RecordDict]) -> None:
    record = content.config_records.get(layout_of(content).knowledge)
    if record is None and metrics_of(content) is None:
        raise Unfit
    if record is not None and "payload" in record and rng.random() < 0.3:
        del record["payload"]
        return
    others: list[Any] = ["text", 5, 1.5, True, [b"a", b"b"], [], ["a"], FORGED]
    set_payload(content, rng.choice(others))


PAYLOADS: dict[str, Mutation] = {
    "payload: bytes": _payload_bytes,
    "payload: header": _payload_header,
    "payload: header, again": _payload_header,
    "payload: values": _payload_values,
    "payload: another's": _payload_of_others,
    "payload: another kind": _payload_of_another_kind,
}
"""By name."""
