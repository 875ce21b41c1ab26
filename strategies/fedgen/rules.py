"""What the shared checks need to know of FedGen's label counts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from flwr_kd.rules import Arrays, Example, Rules, Scalars, replace_all, set_value
from flwr_kd.transport.payload import Payload

from .messages import LabelCounts

if TYPE_CHECKING:
    from flwr_kd.server.records import Node
    from flwr_kd.server.strategy import KDStrategy

__all__ = ["RULES"]


def _violations(payload: Payload, node: Node, strategy: KDStrategy[Any, Any], num_examples: int) -> list[str]:
    assert isinstance(payload, LabelCounts)
    counts = payload.counts.tolist()
    texts = [] if len(counts) == node.num_classes else [f"{len(counts)} counts"]
    if min(counts, default=0) < 0 or sum(counts) > num_examples < strategy.max_examples:
        texts.append(f"counts {counts}")
    return texts


def _fill(arrays: Arrays, node: Node, strategy: KDStrategy[Any, Any]) -> tuple[Scalars, int]:
    arrays["counts"][:] = 1
    return {}, 50


RULES = Rules(
    _violations,
    _fill,
    (
        Example("a negative count", set_value("counts", 0, -1), "in 0..2\\^40"),
        Example("the least count", set_value("counts", 0, -(2**63)), "in 0..2\\^40"),
        Example("more samples than there are", set_value("counts", 0, 10**6), "counts of"),
        Example("one more than there are", replace_all("counts", [26, 0, 0, 0]), "counts of 26"),
        Example("counts whose sum wraps", replace_all("counts", [2**40] * 4), "counts of"),
        Example("counts beyond 2^40", replace_all("counts", [2**62] * 4), "in 0..2\\^40"),
        Example("another C", replace_all("counts", [5] * 5), "shape"),
        Example("no classes", replace_all("counts", []), "shape"),
        Example(
            "float64",
            lambda arrays, scalars: arrays.update(counts=np.ones(4)),
            "dtype float64, expected int64",
        ),
        Example("all of one class", replace_all("counts", [25, 0, 0, 0])),
        Example("no samples of any class", replace_all("counts", [0] * 4)),
    ),
)
"""What a client's label counts must satisfy."""
