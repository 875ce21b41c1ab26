"""Replies of a broken or malicious client."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    RecordDict,
)

from flwr_kd.testing.reply_parts import metrics_of, set_count, set_payload

__all__ = ["GARBAGE"]


def _random_payload(content: RecordDict) -> None:
    for record in content.config_records.values():
        if "payload" in record:
            record["payload"] = bytes(range(256)) * 4


def _no_payload(content: RecordDict) -> None:
    for record in content.config_records.values():
        record.pop("payload", None)


def _payload_of_text(content: RecordDict) -> None:
    set_payload(content, "not bytes")


def _arrays_of_nan(content: RecordDict) -> None:
    _replace_arrays(content, lambda a: np.full_like(a, np.nan) if a.dtype.kind == "f" else a)


def _arrays_of_other_shape(content: RecordDict) -> None:
    _replace_arrays(content, lambda a: np.zeros((*a.shape, 2), dtype=a.dtype))


def _arrays_of_garbage(content: RecordDict) -> None:
    for record in content.array_records.values():
        for name in list(record):
            record[name] = Array(dtype="", shape=(), stype="numpy.ndarray", data=b"\x93NUMPY garbage")


def _fewer_arrays(content: RecordDict) -> None:
    for record in content.array_records.values():
        record.popitem()


def _negative_examples(content: RecordDict) -> None:
    set_count(content, -1)


def _metrics_of_nan(content: RecordDict) -> None:
    record = metrics_of(content)
    if record is not None:
        record["train-loss"] = float("nan")


def _no_records(content: RecordDict) -> None:
    for key in list(content):
        del content[key]


def _other_records(content: RecordDict) -> None:
    _no_records(content)
    content["arrays"] = ArrayRecord([np.zeros(3)])
    content["config"] = ConfigRecord({"a": 1})


def _replace_arrays(content: RecordDict, change: Callable[[Any], Any]) -> None:
    for record in content.array_records.values():
        for name in list(record):
            if name != "_empty":
                record[name] = Array(change(record[name].numpy()))


GARBAGE: dict[str, Callable[[RecordDict], None]] = {
    "random-payload": _random_payload,
    "no-payload": _no_payload,
    "payload-of-text": _payload_of_text,
    "arrays-of-nan": _arrays_of_nan,
    "arrays-of-other-shape": _arrays_of_other_shape,
    "arrays-of-garbage": _arrays_of_garbage,
    "fewer-arrays": _fewer_arrays,
    "negative-examples": _negative_examples,
    "metrics-of-nan": _metrics_of_nan,
    "no-records": _no_records,
    "other-records": _other_records,
}
"""Ways to mutilate an answer. Not each harms each method: without a payload, a random one changes nothing."""
