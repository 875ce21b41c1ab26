"""What the shared checks need to know of FedProto's payload; FedHKD's class knowledge keeps the same rules."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from flwr_kd.rules import (
    Arrays,
    Example,
    Rules,
    Scalars,
    infinite_fields,
    keep_rows,
    larger_than,
    replace_all,
    set_value,
)
from flwr_kd.transport.payload import Payload

from .messages import Prototypes

if TYPE_CHECKING:
    from flwr_kd.server.records import Node
    from flwr_kd.server.strategy import KDStrategy

__all__ = ["RULES", "class_knowledge_violations"]


def class_knowledge_violations(
    classes: list[int],
    counts: list[int],
    features: Any,
    node: Node,
    strategy: KDStrategy[Any, Any],
    num_examples: int,
) -> list[str]:
    """Return which rules knowledge per class breaks: which classes, of how many samples, with which features."""
    texts = []
    if classes != sorted(set(classes)) or not set(classes) <= set(range(node.num_classes)):
        texts.append(f"classes {classes}")
    if min(counts, default=1) < 1 or sum(counts) > num_examples < strategy.max_examples:
        texts.append(f"counts {counts}")
    if features.shape != (len(classes), node.feature_dim):
        texts.append(f"shape {features.shape}")
    return texts


def _violations(payload: Payload, node: Node, strategy: KDStrategy[Any, Any], num_examples: int) -> list[str]:
    assert isinstance(payload, Prototypes)
    texts = infinite_fields(payload) + larger_than(65504, "prototypes", payload.prototypes)
    texts += class_knowledge_violations(
        payload.classes.tolist(), payload.counts.tolist(), payload.prototypes, node, strategy, num_examples
    )
    if payload.num_classes != node.num_classes:
        texts.append(f"{payload.num_classes} classes")
    return texts


def _fill(arrays: Arrays, node: Node, strategy: KDStrategy[Any, Any]) -> tuple[Scalars, int]:
    arrays["counts"][:] = 1
    return {"num_classes": node.num_classes}, 50


RULES = Rules(
    _violations,
    _fill,
    (
        Example("a class beyond C", set_value("classes", -1, 4), "ascending"),
        Example("a class below 0", set_value("classes", 0, -1), "expected bits"),
        Example("a class twice", set_value("classes", 1, 0), "expected bits"),
        Example("classes in another order", keep_rows([1, 0, 2, 3]), "expected bits"),
        Example(
            "differences that wrap", replace_all("classes", [0, 2**63 - 1, -(2**63) + 5, 3]), "expected bits"
        ),
        Example("a count of 0", set_value("counts", 0, 0), "counts"),
        Example("a negative count", set_value("counts", 0, -(2**63)), "counts"),
        Example("more samples than there are", set_value("counts", 0, 10**6), "knowledge of"),
        Example("counts whose sum wraps", replace_all("counts", [2**40] * 4), "knowledge of"),
        Example("NaN", set_value("prototypes", (0, 0), np.nan), "not finite"),
        Example("infinity", set_value("prototypes", (0, 0), -np.inf), "not finite"),
        Example("beyond float16", set_value("prototypes", (0, 0), 65520), "within"),
        Example("float32's least", set_value("prototypes", (0, 0), np.finfo("f4").min), "within"),
        Example("another C", lambda arrays, scalars: scalars.update(num_classes=5), "5 classes"),
        Example("no C", lambda arrays, scalars: scalars.update(num_classes=0), "num_classes"),
        Example(
            "a fraction of a class", lambda arrays, scalars: scalars.update(num_classes=4.0), "must be int"
        ),
        Example(
            "a missing row",
            lambda arrays, scalars: arrays.update(classes=arrays["classes"][1:]),
            "3 positions, expected 4",
        ),
        Example(
            "another D",
            lambda arrays, scalars: arrays.update(prototypes=arrays["prototypes"][:, 1:]),
            "shape",
        ),
        Example(
            "float64",
            lambda arrays, scalars: arrays.update(prototypes=arrays["prototypes"].astype("f8")),
            "dtype",
        ),
        Example("float16's largest", lambda arrays, scalars: arrays["prototypes"].fill(-65504)),
        Example("float32's smallest", lambda arrays, scalars: arrays["prototypes"].fill(1e-45)),
        Example("no classes", keep_rows(slice(0, 0))),
    ),
)
"""What a client's prototypes must satisfy."""
