"""What the training loop says of inputs and models that cannot be trained on."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flwr_kd.config import StepDecayConfig
from flwr_kd.learning.loop import BatchNorms, falling_rate, fit, make_optimizer
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


def test_the_mean_loss_is_that_of_the_samples_in_the_last_epoch() -> None:
    losses = iter([9.0, 9.0, 1.0, 4.0])
    model = nn.Linear(2, 2)
    optimizer = make_optimizer(model, CONFIG, 0.1)

    def epoch() -> list[tuple[Tensor, ...]]:
        return [(torch.ones(3, 2),), (torch.ones(1, 2),)]

    mean = fit(model, optimizer, epoch, lambda x: model(x).sum() * 0 + next(losses), epochs=2)
    assert mean == (1.0 * 3 + 4.0) / 4


@pytest.mark.parametrize("epochs", [0, 1])
def test_nothing_to_train_on(epochs: int) -> None:
    model = nn.Linear(2, 2)
    assert fit(model, make_optimizer(model, CONFIG, 0.1), list, lambda x: model(x).sum(), epochs=epochs) == 0


def test_a_loss_that_is_not_finite_for_a_while_is_refused() -> None:
    factors = iter([1.0, float("inf"), 1.0])
    model = nn.Linear(2, 2)
    optimizer = make_optimizer(model, CONFIG, 0.1)
    with pytest.raises(FloatingPointError, match=r"the training loss is .*try a smaller learning-rate"):
        fit(
            model,
            optimizer,
            lambda: [(torch.ones(3, 2),)] * 3,
            lambda x: (model(x) * next(factors, 1.0)).sum(),
            epochs=1,
        )


def test_a_loss_may_put_the_model_into_eval_mode() -> None:
    model, modes = nn.Sequential(nn.Linear(2, 2), nn.Dropout()), []

    def loss(x: Tensor) -> Tensor:
        modes.append([module.training for module in model.modules()])
        return model.eval()(x).sum()

    fit(model, make_optimizer(model, CONFIG, 0.1), lambda: [(torch.ones(3, 2),)] * 2, loss, epochs=2)
    assert modes == [[True] * 3] * 4
    assert not model.training


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_the_fused_step_is_that_of_the_plain_one(optimizer: str) -> None:
    config = FedAvg(
        optimizer=optimizer, momentum=0.9 if optimizer == "sgd" else 0.0, weight_decay=0.01
    ).config
    model = nn.Linear(3, 2)
    plain = nn.Linear(3, 2)
    plain.load_state_dict(model.state_dict())
    ours = make_optimizer(model, config, 0.1)
    assert ours.defaults["fused"]
    options = {key: value for key, value in ours.defaults.items() if key != "fused"}
    theirs = type(ours)(plain.parameters(), **options)
    for step in range(5):
        for net, steps in ((model, ours), (plain, theirs)):
            steps.zero_grad()
            net(torch.full((4, 3), float(step))).square().sum().backward()
            steps.step()
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, other)


def test_sparse_gradients_have_the_plain_step() -> None:
    model = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Flatten(), nn.Linear(6, 2))
    before = model[0].weight.detach().clone()
    optimizer = make_optimizer(model, FedAvg(optimizer="sgd").config, 0.1)
    fit(
        model,
        optimizer,
        lambda: [(torch.tensor([[0, 1], [2, 3]]),)],
        lambda x: model(x).square().sum(),
        epochs=1,
    )
    assert not torch.equal(model[0].weight[:4], before[:4])
    assert torch.equal(model[0].weight[4], before[4])


@pytest.mark.parametrize("training", [False, True])
def test_batchnorm_is_in_a_mode_of_its_own_and_then_as_before(training: bool) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Dropout())
    for whole in (False, True):
        model.train(whole)
        with BatchNorms(model).in_mode(training=training):
            assert [layer.training for layer in model] == [whole, training, whole]
        assert [layer.training for layer in model] == [whole] * 3


def test_statistics_are_the_means_of_batches_by_their_sizes() -> None:
    """The single sample has no variance, and counts in nothing."""
    draw = torch.Generator().manual_seed(0)
    batches = [torch.randn(size, 2, generator=draw, dtype=torch.float64) for size in (3, 1, 5)]
    model = nn.Sequential(nn.BatchNorm1d(2, momentum=0.3), nn.Linear(2, 3), nn.BatchNorm1d(3)).double().eval()
    nn.init.constant_(model[0].running_mean, float("nan"))
    BatchNorms(model).estimate(batches, model)
    used = [batches[0], batches[2]]
    normed = [(x - x.mean(0)) / (x.var(0, unbiased=False) + 1e-5).sqrt() for x in used]
    for layer, inputs in ((model[0], used), (model[2], [model[1](x) for x in normed])):
        mean, variance = (
            sum(len(x) * value for x, value in zip(inputs, values, strict=True)) / 8
            for values in ([x.mean(0) for x in inputs], [x.var(0) for x in inputs])
        )
        torch.testing.assert_close(layer.running_mean, mean)
        torch.testing.assert_close(layer.running_var, variance)
        assert int(layer.num_batches_tracked) == 2
    assert (model[0].momentum, model[2].momentum, model[0].training) == (0.3, 0.1, False)


def test_statistics_of_nothing_stay_as_they_are() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2, track_running_stats=False)).eval()
    model[0].running_mean.fill_(7)
    BatchNorms(model).estimate([torch.ones(1, 2)], model)
    assert model[0].running_mean.tolist() == [7, 7]
    BatchNorms(model).estimate([torch.ones(2, 2)], model)
    assert model[0].running_mean.tolist() == [1, 1]


@pytest.mark.parametrize("before", [0, 7])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_the_rate_falls_with_each_step_as_that_of_keras(optimizer: str, before: int) -> None:
    """lr / (1 + decay · iterations), the first step being iteration 0; a gradient of 1 moves by the rate."""
    config = StepDecayConfig(optimizer=optimizer, step_decay=0.5)
    model = nn.Linear(1, 1, bias=False).double()
    used = make_optimizer(model, config, 0.1)
    seen: list[float] = []

    def loss(x: Tensor) -> Tensor:
        seen.append(float(model.weight.detach()))
        return model(x).sum()

    batches = [(torch.ones(1, 1, dtype=torch.float64),)] * 3
    fit(model, used, lambda: batches, loss, epochs=2, after_step=falling_rate(used, config, before))
    moves = np.diff([*seen, float(model.weight.detach())])
    expected = [-0.1 / (1 + 0.5 * (before + i)) for i in range(6)]
    np.testing.assert_allclose(moves, expected, rtol=1e-6)


def test_a_rate_that_does_not_fall() -> None:
    model = nn.Linear(1, 1)
    for config in (CONFIG, StepDecayConfig()):
        assert falling_rate(make_optimizer(model, config, 0.1), config, 5) is None
