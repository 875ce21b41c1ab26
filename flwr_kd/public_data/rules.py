"""What the shared checks need to know of soft predictions on public data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from flwr_kd.public_data.messages import SoftPredictions, unpack_predictions
from flwr_kd.rules import (
    Arrays,
    Change,
    Example,
    Rules,
    Scalars,
    broken_distributions,
    infinite_fields,
    keep_rows,
    replace_all,
    set_value,
)
from flwr_kd.transport.payload import Payload

if TYPE_CHECKING:
    from flwr_kd.server.records import Node
    from flwr_kd.server.strategy import KDStrategy

__all__ = ["RULES"]

_AT_THE_EDGE = np.repeat(np.array([[0.25, 0.25, 0.25, 0.24]], dtype=np.float32), 32, axis=0)


def _violations(payload: Payload, node: Node, strategy: KDStrategy[Any, Any], num_examples: int) -> list[str]:
    assert isinstance(payload, SoftPredictions)
    texts = infinite_fields(payload)
    rows = strategy.payload_dims("train", node)["K"]
    if payload.predictions.dtype.name != strategy.config.to_wire()["precision"]:
        texts.append(f"dtype {payload.predictions.dtype}")
    values = payload.predictions.astype(np.float64)
    if payload.predictions.dtype == np.uint8:
        values = unpack_predictions(payload.predictions).numpy()
    return texts + broken_distributions(values, (rows, node.num_classes), 0.02)


def _fill(arrays: Arrays, node: Node, strategy: KDStrategy[Any, Any]) -> tuple[Scalars, int]:
    precision = str(strategy.config.to_wire()["precision"])
    predictions = arrays["predictions"].astype(precision)
    if predictions.size:
        predictions[:, 0] = 255 if precision == "uint8" else 1
    arrays["predictions"] = predictions
    return {}, 50


def _predictions(values: Any, dtype: str = "f4") -> Change:
    return lambda arrays, scalars: arrays.update(predictions=np.asarray(values).astype(dtype))


RULES = Rules(
    _violations,
    _fill,
    (
        Example("rows that do not sum to 1", _predictions(_AT_THE_EDGE * np.float32(0.9)), "sum to 1"),
        Example("negative predictions", set_value("predictions", 0, [-0.5, 0.5, 0.5, 0.5]), r"in \[0, 1\]"),
        Example("NaN", set_value("predictions", (0, 0), np.nan), "not finite"),
        Example("float32's largest", set_value("predictions", (0, 0), 3e38), r"in \[0, 1\]"),
        Example("zeros", replace_all("predictions", np.zeros((32, 4))), "sum to 1"),
        Example("a missing sample", keep_rows(slice(1, None)), "shape"),
        Example("a sample too many", keep_rows([*list(range(32)), 0]), "shape"),
        Example(
            "another precision",
            lambda arrays, scalars: arrays.update(predictions=arrays["predictions"].astype("f2")),
            "soft predictions have dtype",
        ),
        Example("one-hot predictions", _predictions(np.eye(4)[[0] * 32])),
        Example("sums at the edge", _predictions(_AT_THE_EDGE)),
        Example("sums at the edge", _predictions(_AT_THE_EDGE, "f2"), variant="float16"),
        Example("zeros", replace_all("predictions", np.zeros((32, 4))), "255", variant="uint8"),
        Example(
            "no row's largest is 255",
            replace_all("predictions", np.full((32, 4), 254)),
            "255",
            variant="uint8",
        ),
        Example(
            "another precision", _predictions(_AT_THE_EDGE), "soft predictions have dtype", variant="uint8"
        ),
        Example("all 255", lambda arrays, scalars: arrays["predictions"].fill(255), variant="uint8"),
    ),
)
"""What a client's soft predictions must satisfy."""
