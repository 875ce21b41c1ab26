"""Losses with classes as masks: on a device without waits, with the CPU's values and gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tensors import normal, random_labels
from torch import Tensor

from flwr_kd.strategies.fedhkd import classifier_loss, feature_loss
from flwr_kd.strategies.fedproto import prototype_loss
from flwr_kd.testing.synchronisations import DEVICE, CountingDevice

SAMPLES, CLASSES, WIDTH = 9, 5, 3
LABELS = random_labels(SAMPLES, CLASSES - 1, 3)
MEANS, SQUARE = normal(CLASSES, WIDTH, seed=1), torch.softmax(normal(CLASSES, CLASSES, seed=2), dim=1)
KNOWN = {
    "all": torch.ones(CLASSES, dtype=torch.bool),
    "some": torch.tensor([True, False, True, False, False]),
    "none": torch.zeros(CLASSES, dtype=torch.bool),
}
Loss = Callable[[Tensor, Callable[[Tensor], Tensor], Tensor], Tensor]
LOSSES: dict[str, tuple[tuple[int, int], Loss]] = {
    "prototype": (
        (SAMPLES, WIDTH),
        lambda x, put, known: prototype_loss(x, put(LABELS), put(MEANS), put(known)),
    ),
    "feature": (
        (SAMPLES, WIDTH),
        lambda x, put, known: feature_loss(x, put(LABELS), put(MEANS), put(known)),
    ),
    "classifier": (
        (CLASSES, CLASSES),
        lambda x, put, known: classifier_loss(x, put(SQUARE), put(known), 0.5),
    ),
}


@pytest.mark.parametrize("known", KNOWN)
@pytest.mark.parametrize("name", LOSSES)
def test_a_device_has_the_same_loss_and_does_not_wait(name: str, known: str) -> None:
    shape, loss = LOSSES[name]
    values, gradients = [], []
    for device in (torch.device("cpu"), DEVICE):
        with CountingDevice() as counting:
            x = normal(*shape, seed=4).to(device).requires_grad_()
            value = loss(x, lambda tensor, device=device: tensor.to(device), KNOWN[known])
            value.backward()
            assert counting.counts.waits == counting.counts.to_host == 0
            assert x.grad is not None
            values.append(value.detach().cpu())
            gradients.append(x.grad.cpu())
    assert torch.allclose(*values, rtol=1e-6)
    assert torch.allclose(*gradients, rtol=1e-5)
    if known == "none":
        assert values[0] == 0
        assert not gradients[0].any()


@pytest.mark.parametrize("name", ["feature", "classifier"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_that_does_not_count_may_be_anything(name: str, bad: float) -> None:
    shape, loss = LOSSES[name]
    known = KNOWN["some"]
    rows = known[LABELS] if name == "feature" else known
    gradients = []
    for filled in (0.0, bad):
        x = torch.where(rows[:, None], normal(*shape, seed=4), filled).requires_grad_()
        loss(x, lambda tensor: tensor, known).backward()
        assert x.grad is not None
        gradients.append(x.grad)
    assert torch.equal(*gradients)
    assert not gradients[0][~rows].any()
