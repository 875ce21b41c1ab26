"""What the shared checks need to know of FedFomo's payload."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from flwr_kd.rules import Arrays, Example, Rules, Scalars, infinite_fields, replace_all, set_value
from flwr_kd.transport.payload import Payload

from .messages import Affinities

if TYPE_CHECKING:
    from flwr_kd.server.records import Node
    from flwr_kd.server.strategy import KDStrategy

__all__ = ["RULES"]


def _violations(payload: Payload, node: Node, strategy: KDStrategy[Any, Any], num_examples: int) -> list[str]:
    assert isinstance(payload, Affinities)
    sent = strategy.payload_dims("train", node)["M"]
    texts = infinite_fields(payload)
    return texts if payload.values.shape == (sent,) else [*texts, f"shape {payload.values.shape}"]


def _fill(arrays: Arrays, node: Node, strategy: KDStrategy[Any, Any]) -> tuple[Scalars, int]:
    return {}, 20


_MAX = float(np.finfo(np.float32).max)

RULES = Rules(
    _violations,
    _fill,
    (
        Example("NaN", set_value("values", 0, np.nan), "not finite"),
        Example("infinity", set_value("values", 2, -np.inf), "not finite"),
        Example(
            "a value too few", lambda arrays, scalars: arrays.update(values=arrays["values"][1:]), "shape"
        ),
        Example("no values", lambda arrays, scalars: arrays.update(values=arrays["values"][:0]), "shape"),
        Example(
            "float64", lambda arrays, scalars: arrays.update(values=arrays["values"].astype("f8")), "dtype"
        ),
        Example("all 0", replace_all("values", [0, 0, 0])),
        Example("float32's largest", replace_all("values", [_MAX, _MAX, -_MAX])),
        Example("float32's smallest", replace_all("values", [1e-45, -1e-45, 0])),
    ),
)
"""What a client's affinities to other models must satisfy."""
