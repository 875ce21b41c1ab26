"""Clients' own copies of the last global model: fine-tuned, measured before and after, and not kept."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord
from torch import nn

from flwr_kd.checks import ConfigError
from flwr_kd.client.adaptation import head_of
from flwr_kd.client.client import KDClient
from flwr_kd.experiments.runner import round_result
from flwr_kd.models import FeatureModel, SplitModel, as_feature_model
from flwr_kd.results.schema import Comparison, RunResult
from flwr_kd.results.table import coverage
from flwr_kd.strategies.fedproto import FedProto
from flwr_kd.testing.federation import Federation, blobs, small_model


def accuracy(model: nn.Module, client: int) -> float:
    test = blobs(8, 100 + client)
    with torch.no_grad():
        return float((model.eval()(test.x).argmax(dim=1) == test.y).float().mean())


def watched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Return what becomes a list of phase, weights before and weights after, of each adaptation."""
    seen: list[tuple[str, dict[str, Any], dict[str, Any]]] = []
    real = KDClient.adapt

    def adapt(self: KDClient[Any], task: Any) -> None:
        before = copy.deepcopy(self.model.state_dict())
        real(self, task)
        seen.append((task.phase, before, copy.deepcopy(self.model.state_dict())))

    monkeypatch.setattr(KDClient, "adapt", adapt)
    return seen


@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_all_clients_adapt_the_last_global_model(monkeypatch: pytest.MonkeyPatch, fraction: float) -> None:
    seen = watched(monkeypatch)
    _, plain = Federation("fedavg").run(fraction_train=fraction)
    assert not seen
    _, result = Federation("fedavg").run(fraction_train=fraction, settings=["personalize-epochs=20"])
    last = result.rounds[-1]
    assert [phase for phase, _, _ in seen] == ["personalize"] * 4
    arrays = {name: torch.from_numpy(value.numpy()) for name, value in result.arrays.items()}
    for _, before, after in seen:
        assert all(torch.equal(before[name], value) for name, value in arrays.items())
        assert not any(torch.equal(after[name], value) for name, value in arrays.items())
    # Training is what it is without adaptation, and so are the bytes.
    assert all(a.data == plain.arrays[name].data for name, a in result.arrays.items())
    assert [r.bytes_down for r in result.rounds] == [r.bytes_down for r in plain.rounds]
    model = small_model()
    model.load_state_dict(arrays)
    assert {key: values["local-accuracy-before"] for key, values in last.clients.items()} == {
        client: accuracy(model, client) for client in range(4)
    }
    for client, (_, _, after) in enumerate(seen):
        model.load_state_dict(after)
        assert last.clients[client]["local-accuracy"] == accuracy(model, client)
    assert last.local_accuracy == sum(values["local-accuracy"] for values in last.clients.values()) / 4
    assert (
        last.accuracy_before == sum(values["local-accuracy-before"] for values in last.clients.values()) / 4
    )
    assert len(last.received) == (0 if fraction == 1.0 else 2)
    assert result.rounds[0].accuracy_before is None


def test_the_head_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = watched(monkeypatch)
    fed = Federation("fedavg")
    fed.models = ["resnet8"] * 4
    initial = small_model("resnet8").state_dict()
    monkeypatch.setattr(fed, "initial", lambda: ArrayRecord(initial))
    fed.run(rounds=1, settings=["personalize-epochs=2", "personalize-part=head"])
    for _, before, after in seen:
        changed = {name for name, value in before.items() if not torch.equal(value, after[name])}
        assert changed == {"head.weight", "head.bias"}
    assert len(seen) == 4


def test_a_client_whose_adaptation_fails_costs_its_own_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    def adapt(self: KDClient[Any], task: Any) -> None:
        if self.context.node_config["partition-id"] == 1:
            raise RuntimeError("no")

    monkeypatch.setattr(KDClient, "adapt", adapt)
    fed = Federation("fedavg")
    _, result = fed.run(settings=["personalize-epochs=1"])
    assert sorted(result.rounds[-1].clients) == [0, 2, 3]


def test_a_method_without_a_global_model_has_nothing_to_adapt() -> None:
    with pytest.raises(ConfigError, match="personalize_epochs=0 expected: FedProto has no global model"):
        FedProto(personalize_epochs=1)


def test_the_result_has_both_accuracies() -> None:
    fed = Federation("fedavg")
    _, result = fed.run(settings=["personalize-epochs=1"])
    rounds = tuple(map(round_result, result.rounds))
    comparison = Comparison({"clients": 4}, {}, "", (RunResult("fedavg", 0, rounds),))
    again = Comparison.from_json(comparison.to_json())
    assert again.runs[0].rounds == rounds
    assert rounds[-1].accuracy_before is not None
    assert rounds[-1].clients["2"]["local_accuracy_before"] is not None
    assert coverage(again) == [
        "local accuracy: each client's adapted copy of the global model, which has "
        f"{100 * rounds[-1].accuracy_before:.2f} % before"
    ]


def test_the_head_of_each_kind_of_model() -> None:
    head, predictor, plain = nn.Linear(3, 2), nn.Linear(4, 2), nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    assert head_of(FeatureModel(nn.Linear(4, 3), head)) is head
    assert head_of(SplitModel(nn.Linear(2, 4), predictor)) is predictor
    assert head_of(as_feature_model(plain)) is plain[1]
    with pytest.raises(ValueError, match="needs a model with a head, a module; ReLU has none"):
        head_of(nn.ReLU())
