"""Mutated replies: what a broken or malicious client may send.

Each mutation is a function ``(content, rng, foreign)`` that changes a reply's content in place, or raises ``Unfit``
if it has nothing to change. ``foreign`` are other replies, of which it may take parts. All draws come from ``rng``.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from flwr_kd.testing.array_mutations import MODELS
from flwr_kd.testing.hostile_values import (
    FORGED,
    LONG,
    NUMBERS,
    TEXTS,
    Mutation,
    Unfit,
    fresh,
)
from flwr_kd.testing.payload_mutations import PAYLOADS
from flwr_kd.testing.reply_parts import metrics_of, put, record_names
from flwr_kd.transport.flower_records import layout_of

__all__ = ["MUTATIONS", "OTHERS", "mutate"]


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


def _another_record(content: RecordDict, rng: random.Random, foreign: Sequence[RecordDict]) -> None:
    names = list(content)
    if not names:
        raise Unfit
    name = rng.choice([*record_names(content), *names])
    match rng.randrange(6):
        case 0:
            content.pop(name, None)
        case 1:
            record = content.pop(name, ConfigRecord())
            put(
                content, rng.choice([*names, "fitres", "", FORGED, "r" * 5000, "evaluateres.metrics"]), record
            )
        case 2:
            put(content, name, rng.choice([ConfigRecord, MetricRecord, ArrayRecord])())
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
                    put(content, each, other[each])
        case _:
            odd: dict[str, Any] = {"num_examples": rng.choice(["12", True, 12]), "payload": b"", "a": [1, 2]}
            put(content, name, ConfigRecord(odd))


def _another_metric(content: RecordDict, rng: random.Random, foreign: Sequence[RecordDict]) -> None:
    record = metrics_of(content)
    if record is None:
        raise Unfit
    known = [name for name in record if name != "payload"]
    names = [
        *known,
        "train-loss",
        "local-accuracy",
        "local-top5",
        "common-accuracy",
        "trained-accuracy",
        "state-lost",
        "distill-loss",
        "finetune-loss",
    ]
    name = rng.choice([*names, "", FORGED, "m" * LONG])
    values: list[Any] = [
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
    if isinstance(record, MetricRecord):
        values = [*NUMBERS, [], [1, 2], [float("nan")]]
    record[name] = rng.choice(values)


def _another_count(content: RecordDict, rng: random.Random, foreign: Sequence[RecordDict]) -> None:
    counts: list[Any] = [*NUMBERS, [], [1] * 2000, [1.5], 3.0]
    record, key = layout_of(content).count
    others: dict[str, Any] = {
        name: v for name, v in content.metric_records.get(record, {}).items() if name != key
    }
    name = key if rng.random() < 0.9 else rng.choice(["", FORGED, "num-examples", "num_examples"])
    put(content, record, MetricRecord({**others, name: rng.choice(counts)}))


OTHERS: dict[str, Mutation] = {
    "records": _another_record,
    "metrics": _another_metric,
    "count": _another_count,
}
"""By name, changes of what is beside payload and arrays in a reply."""
MUTATIONS = PAYLOADS | MODELS | OTHERS
"""All, by name."""
