"""Divided training steps: their gradient is that of the whole batch, and the same bits on any number of cores."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flwr_kd.learning.cores import Cores
from flwr_kd.learning.divided import DividedLoss, is_divisible
from flwr_kd.learning.loop import fit
from flwr_kd.models import build_model

IMAGE = (1, 28, 28)


def zoo(name: str, shape: tuple[int, ...] = IMAGE) -> nn.Module:
    return build_model(name, input_shape=shape, num_classes=10, seed=0)


def cross_entropy(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def batch(count: int, shape: tuple[int, ...] = IMAGE) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(count)
    return torch.randn(count, *shape, generator=draw), torch.arange(count) % 10


class OwnCode(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(1, 32, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).mean(dim=(2, 3))


class Drawing(OwnCode):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.randn(())


class Uncopied(OwnCode):
    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("not this one")


def normalised() -> nn.Module:
    return nn.Sequential(OwnCode(), nn.BatchNorm1d(32, track_running_stats=False))


SMALL, COLOURS = (1, 8, 8), (3, 32, 32)


@pytest.mark.parametrize(
    ("build", "shape", "training", "evaluating"),
    [
        (partial(zoo, "cnn"), IMAGE, True, True),
        (partial(zoo, "lenet"), IMAGE, True, True),
        (partial(zoo, "resnet8", COLOURS), COLOURS, False, True),  # BatchNorm
        (partial(zoo, "alexnet", COLOURS), COLOURS, False, True),  # dropout
        (partial(zoo, "resnet18", COLOURS), COLOURS, False, False),  # many parameters for its work
        (partial(zoo, "mlp"), IMAGE, False, False),
        (partial(zoo, "lenet", SMALL), SMALL, False, False),  # little work
        (OwnCode, IMAGE, False, True),
        (Drawing, IMAGE, False, False),
        (Uncopied, IMAGE, False, False),
        (normalised, IMAGE, False, False),
    ],
)
def test_which_steps_are_divided(
    build: Callable[[], nn.Module], shape: tuple[int, ...], training: bool, evaluating: bool
) -> None:
    model, x = build(), torch.zeros(1, *shape)
    assert is_divisible(model, x, training=True) == training
    assert is_divisible(model, x, training=False) == evaluating


@pytest.mark.parametrize(("training", "batchnorm"), [(True, False), (False, True)])
def test_batchnorm_in_a_mode_of_its_own(training: bool, batchnorm: bool) -> None:
    model, x = zoo("resnet8", COLOURS), torch.zeros(1, *COLOURS)
    assert is_divisible(model, x, training=training, batchnorm=batchnorm) is not batchnorm
    assert is_divisible(model, x, training=training) is not training


@pytest.mark.parametrize("count", [1, 31, 32, 33, 64, 70, 300])
@pytest.mark.parametrize("name", ["cnn", "lenet"])
def test_the_gradient_is_that_of_the_whole_batch(name: str, count: int) -> None:
    if name == "cnn" and count == 300:
        pytest.skip("lenet does")
    x, y = batch(count)
    whole, divided = zoo(name).double(), zoo(name).double()
    expected = cross_entropy(whole.train(), x.double(), y)
    expected.backward()
    with Cores(2) as cores:
        value = DividedLoss(divided, cross_entropy, cores, training=True)(x.double(), y)
        (2 * value).backward()
    torch.testing.assert_close(value.detach(), expected.detach(), rtol=1e-12, atol=0)
    for one, other in zip(divided.parameters(), whole.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        torch.testing.assert_close(one.grad, 2 * other.grad, rtol=1e-9, atol=1e-14)


def test_the_same_bits_on_any_number_of_cores() -> None:
    x, y = batch(300)
    results = []
    for count, threads in ((1, 1), (1, 3), (2, 1), (3, 3), (8, 1)):
        model = zoo("lenet")
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            with Cores(count) as cores:
                loss = DividedLoss(model, cross_entropy, cores, training=True)
                mean = fit(
                    model, optimizer, lambda: zip(x.split(100), y.split(100), strict=True), loss, epochs=2
                )
        finally:
            torch.set_num_threads(before)
        results.append((mean, [parameter.detach() for parameter in model.parameters()]))
    first, *others = results
    for other in others:
        assert other[0] == first[0]
        assert all(torch.equal(a, b) for a, b in zip(first[1], other[1], strict=True))


def test_parameters_without_gradient() -> None:
    """A frozen parameter is left alone; one that the loss does not use has no gradient, as after backward()."""
    model = nn.Sequential(nn.Conv2d(1, 4, 5), nn.Flatten(), nn.Linear(4 * 24 * 24, 10), nn.Linear(2, 2))
    model[0].weight.requires_grad_(False)
    before = copy.deepcopy(model.state_dict())

    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model[2](model[1](model[0](x))), y)

    with Cores(2) as cores:
        DividedLoss(model, loss, cores, training=True)(*batch(70)).backward()
    assert model[0].weight.grad is None
    assert model[3].weight.grad is None
    assert model[0].bias.grad is not None
    assert model[2].weight.grad is not None
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize("count", [1, 2, 3])
def test_errors_are_the_loops(count: int) -> None:
    """A dtype that the model does not take, and a loss that is not finite, are named as in a whole step."""
    model = zoo("lenet")
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with Cores(count) as cores:
        loss = DividedLoss(model, cross_entropy, cores, training=True)
        x, y = batch(70)
        with pytest.raises(TypeError, match=r"cannot compute with inputs of torch\.uint8"):
            fit(model, optimizer, lambda: [(x.to(torch.uint8), y)], loss, epochs=1)
        with pytest.raises(FloatingPointError, match="inputs are not finite"):
            fit(model, optimizer, lambda: [(x * torch.inf, y)], loss, epochs=1)
