"""Methods, data sets and runs that the tests of public data share."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import watched
from flwr.app import Context, RecordDict
from torch import Tensor
from watched import Party, party

from flwr_kd.distillation.samples import digest_of
from flwr_kd.learning.batches import Batches
from flwr_kd.public_data.client import PublicKnowledgeClient
from flwr_kd.public_data.config import PRECISIONS, PublicKnowledgeConfig
from flwr_kd.public_data.server import PublicKnowledgeStrategy
from flwr_kd.server.records import KDResult, Reply

X, Y = watched.samples(99, watched.PUBLIC)
every_precision = pytest.mark.parametrize("precision", PRECISIONS)


class Own(PublicKnowledgeStrategy):
    """Each client's target is its own prediction."""

    def targets(self, server_round: int, replies: list[Reply], predictions: Tensor) -> Tensor:
        return predictions


class Turned(PublicKnowledgeStrategy):
    """Client n's target is client n + 1's prediction."""

    def targets(self, server_round: int, replies: list[Reply], predictions: Tensor) -> Tensor:
        return predictions.roll(-1, dims=0)


def bare(**changes: Any) -> Party:
    """Return four clients without a method: the core's own client half."""
    run = party("fedmd", **changes)
    run.client = PublicKnowledgeClient
    return run


def participants(result: KDResult) -> list[tuple[int, int]]:
    return [(stats.participants, stats.failures) for stats in result.rounds]


def rows_of(run: Party, r: int, phase: str = "train") -> list[list[int]]:
    return [call.sent()["rows"].tolist() for call in run.grid.of(r, phase).values()]


def digest(source: Any, **options: Any) -> str:
    return digest_of(Batches(source, num_classes=0, labelled=False, **options))


def distributions(seed: int, rows: int, classes: int, temperature: float) -> np.ndarray[Any, Any]:
    z = np.random.default_rng(seed).normal(scale=4.0, size=(rows, classes)) / temperature
    e = np.exp(z - z.max(axis=1, keepdims=True))
    return np.asarray(e / e.sum(axis=1, keepdims=True))


def lone_context(partition: int = 0) -> Context:
    return Context(
        run_id=1, node_id=1, node_config={"partition-id": partition}, state=RecordDict(), run_config={}
    )


def lone_client(context: Context | None = None, **changes: Any) -> tuple[Any, dict[str, Any]]:
    run = bare(**changes)
    config = PublicKnowledgeConfig(**run.config)
    return run.make(context or lone_context()), config.to_wire()
