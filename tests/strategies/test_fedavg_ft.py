"""FedAvg with local fine-tuning: FedAvg, and a copy of its last global model that each client adapts."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord
from torch import nn

from flwr_kd.client import client as client_half
from flwr_kd.client.client import KDClient
from flwr_kd.strategies.fedavg_ft import FedAvgFT, FedAvgFTConfig
from flwr_kd.testing.federation import Federation, blobs, numbers, small_model
from flwr_kd.transport.inline_grid import InlineGrid

State = dict[str, torch.Tensor]


def accuracy(model: nn.Module, client: int) -> float:
    test = blobs(8, 100 + client)
    with torch.no_grad():
        return float((model.eval()(test.x).argmax(dim=1) == test.y).float().mean())


def copies(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, State, State]]:
    """Return what becomes a list of client, weights before and weights after, of each adaptation."""
    seen: list[tuple[int, State, State]] = []
    real = KDClient.adapt

    def adapt(self: KDClient[Any], task: Any) -> None:
        before = copy.deepcopy(self.model.state_dict())
        real(self, task)
        partition = int(self.context.node_config["partition-id"])
        seen.append((partition, before, copy.deepcopy(self.model.state_dict())))

    monkeypatch.setattr(KDClient, "adapt", adapt)
    return seen


@pytest.mark.parametrize("fraction", [1.0, 0.5])
@pytest.mark.parametrize("part", ["model", "head"])
def test_all_clients_are_measured_before_and_after(
    monkeypatch: pytest.MonkeyPatch, fraction: float, part: str
) -> None:
    seen = copies(monkeypatch)
    settings = [f"personalize-part={part}", "personalize-epochs=10"]
    _, result = Federation("fedavg-ft").run(fraction_train=fraction, settings=settings)
    last = result.rounds[-1]
    assert last.participants == round(4 * fraction)
    assert sorted(client for client, _, _ in seen) == [0, 1, 2, 3] == sorted(last.clients)
    arrays = {name: torch.from_numpy(value.numpy()) for name, value in result.arrays.items()}
    model = small_model()
    names = set(arrays) if part == "model" else {"head.weight", "head.bias"}
    for client, before, after in seen:
        assert all(torch.equal(before[name], value) for name, value in arrays.items())
        assert {name for name, value in arrays.items() if not torch.equal(after[name], value)} == names
        measured = {}
        for name, weights in (("local-accuracy-before", before), ("local-accuracy", after)):
            model.load_state_dict(weights)
            measured[name] = accuracy(model, client)
        assert {name: last.clients[client][name] for name in measured} == measured
    assert last.local_accuracy == sum(each["local-accuracy"] for each in last.clients.values()) / 4
    assert last.accuracy_before == sum(each["local-accuracy-before"] for each in last.clients.values()) / 4


def test_the_copies_are_discarded() -> None:
    """Neither the global model nor a client's state knows of them, nor do the bytes."""
    fed, plain = Federation("fedavg-ft"), Federation("fedavg")
    grid = InlineGrid(fed.app(), fed.clients)
    result = fed.strategy(fraction_train=0.5).start(grid, fed.initial(), num_rounds=2)
    assert not any(context.state.array_records for context in grid.contexts.values())
    _, other = plain.run(fraction_train=0.5)
    assert numbers(result)[0] == numbers(other)[0]
    assert all(array.data == other.arrays[name].data for name, array in result.arrays.items())
    assert [r.bytes_down for r in result.rounds] == [r.bytes_down for r in other.rounds]


@pytest.mark.parametrize(("personalize", "expected"), [(0, 3), (1, 1)])
def test_the_epochs_are_a_rounds_by_default(personalize: int, expected: int) -> None:
    """As FedAvg's with `personalize-epochs`, to the last bit."""
    common = ["local-epochs=3", "lr-decay-every=1"]
    _, result = Federation("fedavg-ft").run(settings=[*common, f"personalize-epochs={personalize}"])
    _, other = Federation("fedavg").run(settings=[*common, f"personalize-epochs={expected}"])
    assert numbers(result) == numbers(other)
    assert result.rounds[-1].clients == other.rounds[-1].clients
    assert FedAvgFT(FedAvgFTConfig(personalize_epochs=personalize)).config.personalizes


def test_the_optimiser_is_the_runs_with_the_last_rate_and_a_fresh_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[tuple[str, float, int]] = []
    real = client_half.make_optimizer

    def make_optimizer(model: nn.Module, config: Any, rate: float) -> torch.optim.Optimizer:
        optimizer = real(model, config, rate)
        made.append((type(optimizer).__name__, rate, len(optimizer.state)))
        return optimizer

    monkeypatch.setattr(client_half, "make_optimizer", make_optimizer)
    settings = ["optimizer=sgd", "learning-rate=0.08", "lr-decay=0.5", "lr-decay-every=1"]
    Federation("fedavg-ft").run(rounds=3, settings=settings)
    assert made == [("SGD", rate, 0) for rate in (0.08, 0.04, 0.02, 0.02) for _ in range(4)]


def test_statistics_of_batchnorm_stay_the_global_models_where_the_head_is_tuned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = copies(monkeypatch)
    fed = Federation("fedavg-ft")
    fed.models = ["resnet8"] * 4
    monkeypatch.setattr(fed, "initial", lambda: ArrayRecord(small_model("resnet8").state_dict()))
    fed.run(rounds=1, settings=["personalize-part=head"])
    for _, before, after in seen:
        changed = {name for name, value in before.items() if not torch.equal(value, after[name])}
        assert changed == {"head.weight", "head.bias"}
    assert len(seen) == 4
