"""Checks of memory: what a reply claims and does not bring takes none, and what is too large is not decoded."""

from __future__ import annotations

import copy
import json
import math
import re
import tracemalloc
from collections.abc import Iterator
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt
from flwr.app import Array, Message, RecordDict

from flwr_kd.testing import inside
from flwr_kd.testing.array_mutations import as_array, npy_file
from flwr_kd.testing.federation import quiet
from flwr_kd.testing.hostile_values import fresh
from flwr_kd.testing.outcomes import (
    LONGEST_LINE,
    Findings,
    ensure,
    equal,
    honest,
    hostile,
    node_of,
    payload_parts,
    sent_payload,
)
from flwr_kd.testing.payload_mutations import encode, parts_of, payload_of, safetensors_file
from flwr_kd.testing.recording import Case, Scene, recorded
from flwr_kd.testing.reply_parts import arrays_of, set_payload
from flwr_kd.transport import flower_records
from flwr_kd.transport.payload import Payload, array

__all__ = [
    "arrays_beyond_the_model",
    "claims_take_no_memory",
    "memory_of_an_honest_reply",
    "payloads_beyond_the_limit",
]

# JSON is what grows most: "[]," is three characters, and in Python a list of 56 bytes and a reference of 8, which
# makes 21 times; a header's entries come to 22. What is claimed and does not arrive must not count at all.
TIMES, FIXED = 32, 64 * 1024
LARGE = 50 * 2**20
MOST_PAYLOAD = 16 * 1024
"""Largest payload limit that is tight for the federation of the checks."""
SHAPES = (
    "(1099511627776,)",
    "(2147483648, 2147483648)",
    "(0, 4611686018427387904)",
    "(-1,)",
    "(1" + ", 1" * 4000 + ")",
)
DTYPES = ("'<f4'", "'|V1000000000'", "[('a', '<f4', (1000000000,))]", "'<U1000000000'")


def _second_round(case: Case) -> list[Scene]:
    return [scene for (server_round, _), scene in recorded(case).scenes.items() if server_round == 2]


def _peak(scene: Scene, content: RecordDict) -> tuple[int, int, list[str]]:
    """Return the most memory that reading a reply took beside itself, its size, and the warnings."""
    strategy, message = copy.deepcopy(scene.strategy), scene.messages[hostile(scene)]
    # Once before, for what is imported and cached.
    inside.read_reply(strategy, scene.phase, message, honest(scene)[hostile(scene)])
    size = flower_records.nbytes(content) + sum(
        len(v) for record in content.config_records.values() for v in record.values() if isinstance(v, str)
    )
    reply = Message(content, reply_to=message)
    with quiet() as lines:
        tracemalloc.start()
        try:
            inside.read_reply(strategy, scene.phase, message, reply)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    return peak, size, lines


def claims_take_no_memory(case: Case) -> None:
    """Check that reading a reply that claims to be huge takes no more memory than its own size explains."""
    findings = Findings()
    for scene in _second_round(case):
        for what, content in _claims(scene):
            peak, size, lines = _peak(scene, content)
            findings.inputs += 1
            if peak > TIMES * size + FIXED:
                findings.add(f"{peak} bytes", f"{scene.phase}: {what} of {size} bytes")
            if len(lines) != 1 or "unexpected" in lines[0] or len(lines[0]) > LONGEST_LINE:
                findings.add(f"warnings {lines}", f"{scene.phase}: {what}")
    findings.none()
    ensure(findings.inputs > 20, f"{findings.inputs} claims were tried", "more than 20")


def _claims(scene: Scene) -> Iterator[tuple[str, RecordDict]]:
    """Yield replies that claim to be huge, or whose headers are made to grow when they are read."""
    answer = scene.answers[hostile(scene)]
    files = [("nothing, and a header of 2^62", safetensors_file("{}", length=2**62))]
    files += [("deep", safetensors_file("[" * 50_000)), ("deep objects", safetensors_file('{"a":' * 10_000))]
    if scene.strategy.reply_payloads.get(scene.phase) is not None:
        files += _claiming_payloads(payload_of(answer))
    for what, data in files:
        content = fresh(answer)
        set_payload(content, data)
        yield f"payload: {what}", content
    names = [name for name in arrays_of(answer) if name != "_empty"]
    for shape in SHAPES:
        for descr in DTYPES:
            text = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}"
            content = fresh(answer)
            for name in names[:1] or ["0"]:
                arrays_of(content)[name] = as_array(npy_file(text, b"\0" * 16))
            yield f"array: {descr} {shape[:30]}", content
    content = fresh(answer)
    long = npy_file("(" * 50_000, version=b"\x02\x00")
    arrays_of(content)[(names or ["0"])[0]] = as_array(long)
    yield "array: a long header", content


def _claiming_payloads(true: bytes) -> Iterator[tuple[str, bytes]]:
    header, body = parts_of(true)
    for name in [name for name in header if name != "__metadata__"]:
        for shape in ([2**40], [2**31, 2**31], [0, 2**62], [2**62, 0], [1] * 5000, [0] * 10_000):
            claim = {**header, name: {**header[name], "shape": shape}}
            yield f"{name} {str(shape)[:30]}", safetensors_file(json.dumps(claim), body)
        claim = {**header, name: {**header[name], "data_offsets": [0, 2**40]}}
        yield f"{name} ends at 2^40", safetensors_file(json.dumps(claim), body)
    metadata = header["__metadata__"]
    for what, text in (
        ("lists", "[" + "[]," * 20_000 + "[]]"),
        ("mappings", "[" + "{}," * 20_000 + "{}]"),
    ):
        claim = {**header, "__metadata__": {**metadata, "scalars": text}}
        yield f"scalars of {what}", safetensors_file(json.dumps(claim), body)
    many = {f"{i:x}": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]} for i in range(1000)}
    yield "many fields", safetensors_file(json.dumps({"__metadata__": metadata, **many}))
    texts = {f"{i:x}": "" for i in range(5000)}
    yield "much metadata", safetensors_file(json.dumps({"__metadata__": metadata | texts}))


@dataclass(frozen=True, eq=False)
class _Unasked(Payload, schema="flwr_kd.testing.unasked", version=1):
    """A payload for phases whose replies have none."""

    values: npt.NDArray[np.uint8] = array("uint8", "N")


def payloads_beyond_the_limit(case: Case) -> None:
    """Check that a payload that is too large is refused before it is decoded, and that the limit is tight."""
    for scene in _second_round(case):
        position, node = hostile(scene), node_of(scene)
        kind = scene.strategy.reply_payloads.get(scene.phase, _Unasked)
        # Well-formed, and all there: 50 MB.
        names = [f.name for f in fields(kind) if "array" in f.metadata]  # type: ignore[arg-type]
        data = encode(kind, {names[0]: np.zeros(LARGE, np.uint8)}, {})
        content = fresh(scene.answers[position])
        set_payload(content, data)
        peak, _, lines = _peak(scene, content)
        most = flower_records.nbytes(scene.answers[position]) + FIXED
        ensure(peak < most, f"reading 50 MB takes {peak} bytes in {scene.phase}", f"less than {most}")
        equal("number of warnings", len(lines), 1)
        if scene.phase not in scene.strategy.reply_payloads:
            ensure("expected none" in lines[0], f"warning {lines[0]!r}", "that no payload is expected")
            continue
        limit, true = scene.strategy.payload_limit(scene.phase, node), sent_payload(scene)
        ensure(
            re.search(rf"{len(data)} bytes is more than .*{limit}", lines[0]),
            f"warning {lines[0]!r}",
            f"the size and the limit, {limit}",
        )
        needed = sum(value.nbytes for value in payload_parts(true)[0].values())
        ensure(
            needed <= limit <= MOST_PAYLOAD,
            f"payload_limit is {limit}",
            f"at least the {needed} bytes of an honest payload, and at most {MOST_PAYLOAD}",
        )


def arrays_beyond_the_model(case: Case) -> None:
    """Check that an array of 50 MB in place of the model, or where none is expected, is refused without a copy."""
    for scene in _second_round(case):
        content = fresh(scene.answers[hostile(scene)])
        arrays_of(content)["0"] = Array(np.zeros(LARGE // 4, np.float32))
        peak, size, lines = _peak(scene, content)
        ensure(size > LARGE, f"the reply has {size} bytes", f"more than {LARGE}")
        ensure(peak < FIXED, f"reading it takes {peak} bytes in {scene.phase}", f"less than {FIXED}")
        equal("number of warnings", len(lines), 1)


def memory_of_an_honest_reply(case: Case) -> None:
    """Check that reading an honest reply with a model takes its size once, and no more."""
    scene = recorded(case).scenes[2, "train"]
    peak, size, lines = _peak(scene, fresh(scene.answers[hostile(scene)]))
    equal("warnings", lines, [])
    template = scene.strategy.template_of(node_of(scene))
    kinds = zip(template.dtypes, template.shapes, strict=True)
    least = sum(np.dtype(dtype).itemsize * math.prod(shape) for dtype, shape in kinds)
    ensure(size > least > 0, f"the reply has {size} bytes", f"more than the {least} of its arrays")
    ensure(peak < size + FIXED, f"reading {size} bytes takes {peak}", f"less than {size + FIXED}")
