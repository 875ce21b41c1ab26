"""What the shared checks need to know of FedHKD's hyper-knowledge."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from flwr_kd.rules import (
    Arrays,
    Change,
    Example,
    Rules,
    Scalars,
    broken_distributions,
    infinite_fields,
    keep_rows,
    larger_than,
    set_value,
)
from flwr_kd.transport.payload import Payload

from ..fedproto.rules import class_knowledge_violations
from .messages import HyperKnowledge

if TYPE_CHECKING:
    from flwr_kd.server.records import Node
    from flwr_kd.server.strategy import KDStrategy

__all__ = ["RULES"]


def _violations(payload: Payload, node: Node, strategy: KDStrategy[Any, Any], num_examples: int) -> list[str]:
    assert isinstance(payload, HyperKnowledge)
    classes = payload.classes.tolist()
    texts = infinite_fields(payload) + larger_than(65504, "representations", payload.representations)
    texts += class_knowledge_violations(
        classes, payload.counts.tolist(), payload.representations, node, strategy, num_examples
    )
    return texts + broken_distributions(payload.predictions, (len(classes), node.num_classes), 1e-3)


def _fill(arrays: Arrays, node: Node, strategy: KDStrategy[Any, Any]) -> tuple[Scalars, int]:
    arrays["counts"][:] = 1
    if arrays["predictions"].size:
        arrays["predictions"][:, 0] = 1
    return {}, 50


def _all_classes(predictions: Any = None, **others: Any) -> Change:
    """Return a change to knowledge of all four classes, which a client with few samples of each need not have."""

    def change(arrays: Arrays, scalars: Scalars) -> None:
        whole: Arrays = {
            "classes": np.arange(4),
            "representations": np.zeros((4, 8), np.float32),
            "predictions": np.asarray(np.eye(4) if predictions is None else predictions, np.float32),
            "counts": np.ones(4, np.int64),
        }
        arrays |= whole
        arrays |= {name: np.asarray(value, dtype=whole[name].dtype) for name, value in others.items()}

    return change


RULES = Rules(
    _violations,
    _fill,
    (
        Example("rows that do not sum to 1", set_value("predictions", (0, 0), 2.0), "sum to 1"),
        Example("negative predictions", set_value("predictions", 0, [-0.5, 0.5, 0.5, 0.5]), "sum to 1"),
        Example("infinite predictions", set_value("predictions", (0, 0), np.inf), "not finite"),
        Example(
            "predictions of float32's largest", set_value("predictions", 0, [3e38, -3e38, 1, 0]), "sum to 1"
        ),
        Example(
            "differences that wrap", _all_classes(classes=[0, 2**63 - 1, -(2**63) + 5, 3]), "expected bits"
        ),
        Example("another C", _all_classes(np.eye(4, 5)), "shape"),
        Example("NaN", set_value("representations", (0, 0), np.nan), "not finite"),
        Example("beyond float16", set_value("representations", (0, 0), -65520), "within"),
        Example("float16's largest", _all_classes(representations=np.full((4, 8), 65504))),
        Example("one-hot predictions", _all_classes()),
        Example("no classes", keep_rows(slice(0, 0))),
    ),
)
"""What a client's hyper-knowledge must satisfy."""
