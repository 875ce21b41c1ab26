"""What the training loop says of inputs and models that cannot be trained on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flwr_kd.learning.loop import fit, make_optimizer
from flwr_kd.strategies.fedavg import FedAvg

CONFIG = FedAvg().config


def train(x: Tensor) -> float:
    model, y = nn.Linear(2, 2), torch.zeros(len(x), dtype=torch.int64)
    optimizer = make_optimizer(model, CONFIG, 0.1)
    return fit(model, optimizer, lambda: [(x, y)], lambda x, y: F.cross_entropy(model(x), y), epochs=1)


@pytest.mark.parametrize(
    ("x", "error", "text"),
    [
        (torch.ones(3, 2, dtype=torch.uint8), TypeError, r"inputs of torch.uint8 .*x\.float\(\) / 255"),
        (torch.full((3, 2), float("nan")), FloatingPointError, "inputs are not finite"),
        (torch.ones(3, 5), RuntimeError, "shapes cannot be multiplied"),
    ],
)
def test_inputs_that_cannot_be_trained_on(x: Tensor, error: Any, text: str) -> None:
    with pytest.raises(error, match=text):
        train(x)


def test_a_model_without_trainable_parameters() -> None:
    with pytest.raises(ValueError, match="no parameter that requires a gradient"):
        make_optimizer(nn.Linear(2, 2).requires_grad_(False), CONFIG, 0.1)
