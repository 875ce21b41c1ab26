"""What the shared checks need to know of DaFKD's scores."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from flwr_kd.rules import Arrays, Example, Rules, Scalars, infinite_fields, keep_rows, replace_all, set_value
from flwr_kd.transport.payload import Payload

from .messages import DiscriminatorScores

if TYPE_CHECKING:
    from flwr_kd.server.records import Node
    from flwr_kd.server.strategy import KDStrategy

__all__ = ["RULES", "SCORES", "score_violations"]


def score_violations(scores: Any, strategy: KDStrategy[Any, Any]) -> list[str]:
    """Return which rules scores break: how many there are, and their range."""
    values, config = scores.tolist(), strategy.config.to_wire()
    expected = int(config["server-batches"]) * int(config["batch-size"])
    texts = [] if len(values) in (0, expected) else [f"{len(values)} scores"]
    return texts + [f"score {value}" for value in values if not 0 <= value <= 1][:1]


def _violations(payload: Payload, node: Node, strategy: KDStrategy[Any, Any], num_examples: int) -> list[str]:
    assert isinstance(payload, DiscriminatorScores)
    return infinite_fields(payload) + score_violations(payload.scores, strategy)


def _fill(arrays: Arrays, node: Node, strategy: KDStrategy[Any, Any]) -> tuple[Scalars, int]:
    return {}, 50


SCORES = (
    Example("a score above 1", set_value("scores", 0, 1.1), r"in \[0, 1\]"),
    Example("a negative score", set_value("scores", -1, -1e-6), r"in \[0, 1\]"),
    Example("a score that is not finite", set_value("scores", 0, np.nan), "not finite"),
    Example("an infinite score", set_value("scores", 3, np.inf), "not finite"),
    Example("one score too few", keep_rows(slice(1, None), "scores"), "scores, expected one for each"),
    Example("one score", replace_all("scores", [0.5]), "1 scores, expected one for each"),
    Example("no scores", replace_all("scores", [])),
    Example("scores of 0", lambda arrays, scalars: arrays["scores"].fill(0)),
    Example("scores of 1", lambda arrays, scalars: arrays["scores"].fill(1)),
    Example("float32's smallest", lambda arrays, scalars: arrays["scores"].fill(1e-45)),
)
"""Examples for every payload with scores."""
RULES = Rules(_violations, _fill, SCORES)
"""What a client's scores must satisfy."""
