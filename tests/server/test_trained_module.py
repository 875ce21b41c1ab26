"""A module that the server trains: a resumed run has the numbers of an uninterrupted one, to the last bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from flwr_kd.server.trained_module import TrainedModule

OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "adam": lambda module: torch.optim.Adam(module.parameters(), lr=0.1, weight_decay=0.01),
    "fused adam": lambda module: torch.optim.Adam(module.parameters(), lr=0.1, fused=True),
    "momentum": lambda module: torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9),
    "sgd": lambda module: torch.optim.SGD(module.parameters(), lr=0.1),
    "two groups": lambda module: torch.optim.Adam(
        [
            {"params": [p], "lr": rate}
            for p, rate in zip(module.parameters(), (0.1, 0.2, 0.3, 0.4), strict=True)
        ]
    ),
}


def module() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))


def made(optimizer: str, seed: int = 0) -> TrainedModule[nn.Sequential]:
    return TrainedModule(module(), OPTIMIZERS[optimizer], seed=seed)


def train(trained: TrainedModule[Any], steps: int) -> None:
    trained.module.train()
    for _ in range(steps):
        x = torch.rand(5, 3, generator=trained.generator)
        trained.optimizer.zero_grad()
        (trained.module(x) * torch.rand(5, 2, generator=trained.generator)).sum().backward()
        trained.optimizer.step()
    trained.scale_rates(0.98)


def same(first: dict[str, Any], second: dict[str, Any]) -> bool:
    return first.keys() == second.keys() and all(np.array_equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("before", [0, 2])
def test_a_resumed_run_goes_on_to_the_last_bit(optimizer: str, before: int) -> None:
    whole = made(optimizer)
    train(whole, before)
    state = whole.state_arrays()
    train(whole, 3)
    resumed = made(optimizer, seed=7)
    train(resumed, 1)
    resumed.load_state_arrays(state)
    assert same(resumed.state_arrays(), state)
    train(resumed, 3)
    assert same(resumed.state_arrays(), whole.state_arrays())


@pytest.mark.parametrize("state", [None, {}])
def test_a_reset_module_is_a_new_one(state: dict[str, Any] | None) -> None:
    trained = made("adam")
    first = trained.state_arrays()
    train(trained, 2)
    if state is None:
        trained.reset()
    else:
        trained.load_state_arrays(state)
    assert same(trained.state_arrays(), first)


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state.pop("rates"),
        lambda state: state.pop("generator"),
        lambda state: state.pop("module/0.weight"),
        lambda state: state.update({"module/0.weight": np.zeros((9, 9), np.float32)}),
        lambda state: state.update(rates=np.array([0.1, 0.2])),
        lambda state: state.update({"optimizer/0/exp_avg": np.zeros(5, np.float32)}),
        lambda state: state.update({"optimizer/9/exp_avg": np.zeros(5, np.float32)}),
        lambda state: state.update({"optimizer/x/exp_avg": np.zeros(5, np.float32)}),
        lambda state: state.update(generator=np.zeros(3, np.uint8)),
    ],
)
def test_the_state_of_another_module_is_refused(change: Callable[[dict[str, Any]], Any]) -> None:
    trained = made("adam")
    train(trained, 1)
    state = trained.state_arrays()
    change(state)
    with pytest.raises(ValueError, match=r"trained-module|invalid literal"):
        made("adam").load_state_arrays(state)


def test_what_is_no_longer_finite_is_refused() -> None:
    trained = TrainedModule(nn.Linear(2, 1), lambda m: torch.optim.Adam(m.parameters()), seed=0)
    trained.check_finite("the weights")
    trained.module(torch.full((1, 2), 1e30)).sum().backward()
    trained.optimizer.step()
    with pytest.raises(
        FloatingPointError, match="the optimiser of the weights is no longer finite: try a smaller x"
    ):
        trained.check_finite("the weights", option="x")
    trained.reset()
    trained.module.weight.data.fill_(torch.nan)
    with pytest.raises(FloatingPointError, match="the weights are no longer finite"):
        trained.check_finite("the weights")
