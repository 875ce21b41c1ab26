"""Predictions of FedGKT's server on several cores."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from torch import nn

from flwr_kd.checks import ConfigError
from flwr_kd.models import build_predictor
from flwr_kd.server.records import Node
from flwr_kd.strategies.fedgkt import FedGKT

SHAPE = (4, 4, 4)
NODE = Node(100, 0, feature_shape=SHAPE, num_classes=3)
FEATURES = np.random.default_rng(0).normal(size=(500, 64)).astype(np.float32)


def logits(cores: int, model: nn.Module) -> Any:
    strategy = FedGKT(server_model=model, device="cpu", cores=cores, batch_size=16)
    return strategy._predict(model, FEATURES, NODE)


def test_the_same_bits_on_any_number_of_cores() -> None:
    model = build_predictor(SHAPE, num_classes=3, seed=0)
    first, *others = [logits(cores, model) for cores in (1, 2, 3)]
    assert first.shape == (500, 3)
    assert all(np.array_equal(first, other) for other in others)


@pytest.mark.parametrize("cores", [1, 2, 3])
def test_logits_that_are_not_finite(cores: int) -> None:
    model = build_predictor(SHAPE, num_classes=3, seed=0)
    nn.init.constant_(list(model.parameters())[-1], float("nan"))
    with pytest.raises(FloatingPointError, match="logits up to"):
        logits(cores, model)


@pytest.mark.parametrize("cores", [0, -1, 1.5, "2", True])
def test_a_number_of_cores_that_is_none(cores: Any) -> None:
    with pytest.raises(ConfigError, match="cores must be a whole number from 1"):
        FedGKT(cores=cores)
