"""What the shared checks need to know of FedGKT's features."""

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
    set_value,
)
from flwr_kd.transport.payload import Payload

from .messages import ClientFeatures

if TYPE_CHECKING:
    from flwr_kd.server.records import Node
    from flwr_kd.server.strategy import KDStrategy

__all__ = ["RULES"]

_SAMPLES = ("index", "features", "logits", "labels")
_BOTH_ENDS = [3.4e38, -3.4e38, 0, 1e-45]


def _violations(payload: Payload, node: Node, strategy: KDStrategy[Any, Any], num_examples: int) -> list[str]:
    assert isinstance(payload, ClientFeatures)
    texts = infinite_fields(payload)
    texts += larger_than(65504, "features", payload.features)
    texts += larger_than(65504, "test_features", payload.test_features)
    rows = payload.index.tolist()
    if sorted(rows) != list(range(node.num_examples)) or num_examples != len(rows):
        texts.append(f"index {rows}")
    labels = [*payload.labels.tolist(), *payload.test_labels.tolist()]
    if not set(labels) <= set(range(node.num_classes)):
        texts.append(f"labels {labels}")
    allowed = node.num_test_examples if strategy.config.to_wire()["send-test-features"] else 0
    if len(payload.test_labels) > allowed:
        texts.append(f"{len(payload.test_labels)} test rows")
    if payload.features.shape != (len(rows), node.feature_dim):
        texts.append(f"shape {payload.features.shape}")
    return texts


def _fill(arrays: Arrays, node: Node, strategy: KDStrategy[Any, Any]) -> tuple[Scalars, int]:
    rows = len(arrays["index"])
    arrays["index"][:] = np.arange(rows)
    return {}, rows


def _unasked_test_rows(arrays: Arrays, scalars: Scalars) -> None:
    arrays.update(test_labels=arrays["labels"][:1], test_features=arrays["features"][:1])


RULES = Rules(
    _violations,
    _fill,
    (
        Example("a label of C", set_value("labels", 0, 4), "labels"),
        Example("a label below 0", set_value("labels", 0, -1), "labels"),
        Example("a sample twice", set_value("index", 0, 1), "once"),
        Example("a sample beyond N", set_value("index", 0, 25), "once"),
        Example("a sample far out", set_value("index", 0, 2**63 - 1), "once"),
        Example("a sample below 0", set_value("index", 0, -(2**63)), "once"),
        Example("a missing row", keep_rows(slice(1, None), *_SAMPLES), "once"),
        Example("the last row missing", keep_rows(slice(0, 24), *_SAMPLES), "shape"),
        Example("every row twice", keep_rows(list(range(25)) * 2, *_SAMPLES), "once"),
        Example("no rows", keep_rows(slice(0, 0), *_SAMPLES), "shape"),
        Example("a label of a test row of C", set_value("test_labels", 0, 4), "test_labels"),
        Example(
            "more test rows than were reported",
            keep_rows([*list(range(8)), 0], "test_features", "test_labels"),
            "test rows",
        ),
        Example("features beyond float16", set_value("features", (0, 0), 65520.0), "within"),
        Example("features of float32's least", set_value("features", (0, 0), -3e38), "within"),
        Example("NaN", set_value("features", (0, 0), np.nan), "not finite"),
        Example("infinite logits", set_value("logits", (0, 0), np.inf), "not finite"),
        Example(
            "float64", lambda arrays, scalars: arrays.update(logits=arrays["logits"].astype("f8")), "dtype"
        ),
        Example("test rows that were not asked for", _unasked_test_rows, "test rows", variant="float16"),
        Example("samples in another order", keep_rows(list(range(25))[::-1], *_SAMPLES)),
        Example("features of float16's largest", lambda arrays, scalars: arrays["features"].fill(65504)),
        Example(
            "logits of float32's largest",
            lambda arrays, scalars: arrays["logits"].fill(np.finfo("f4").max),
        ),
        Example("logits of both ends", set_value("logits", slice(None), _BOTH_ENDS)),
        Example("float16", lambda arrays, scalars: arrays.update(features=arrays["features"].astype("f2"))),
    ),
)
"""What a client's features, logits and labels must satisfy."""
