"""A mean of personal models that is measured as global model, and reaches no client."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from flwr_kd import registry
from flwr_kd.checks import ConfigError
from flwr_kd.experiments import runner
from flwr_kd.experiments.experiment import Experiment
from flwr_kd.server.records import HandshakeError
from flwr_kd.testing.faults import Fault
from flwr_kd.testing.federation import Federation, numbers
from flwr_kd.transport.inline_grid import InlineGrid
from tests.server.federations import Watched


class InModelPhase(Fault):
    """A fault of the phase in which models are sent."""

    def applies(self, message: Message) -> bool:
        config = message.content.config_records.get("fitins.config", {})
        return config.get("phase") == "model" and super().applies(message)


def start(name: str, *settings: str, faults: Any = None, **options: Any) -> tuple[Any, Any, list[Any]]:
    fed, seen = Federation(name), []
    grid = Watched(fed.app(), fed.clients, faults=faults or {})

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        seen.append((server_round, {key: array.numpy() for key, array in arrays.items()}))
        return MetricRecord({"accuracy": server_round / 10})

    strategy = fed.strategy(*settings, **options)
    result = strategy.start(grid, ArrayRecord(), num_rounds=2, timeout=60.0, evaluate_fn=evaluate)
    return grid, result, seen


@pytest.mark.parametrize("name", ["fedproto", "fedmd"])
def test_the_mean_is_that_of_the_models_weighted_by_samples(name: str) -> None:
    grid, result, seen = start(name, "global-model=average")
    # Not before the first round: there are no models yet.
    assert [server_round for server_round, _ in seen] == [1, 2]
    assert [stats.global_accuracy for stats in result.rounds] == [0.1, 0.2]
    models, counts = [], []
    for context in grid.contexts.values():
        client = Federation(name).client_fn(context).numpy_client
        assert client.load_own()
        # The model is lent: the next client may have the same object.
        models.append({key: value.clone() for key, value in client.model.state_dict().items()})
        counts.append(len(client.train_batches))
    for key, value in seen[-1][1].items():
        mean = np.average([model[key].numpy() for model in models], axis=0, weights=counts)
        np.testing.assert_allclose(value, mean, rtol=1e-6, atol=1e-7)
    # Whether models are averaged changes nothing else, and no client is sent an array.
    _, plain, unseen = start(name)
    assert unseen == []
    without = [(*row[:1], *row[2:]) for row in numbers(plain)]
    assert [(*row[:1], *row[2:]) for row in numbers(result)] == without
    assert [stats.round_trips for stats in result.rounds] == [stats.round_trips for stats in plain.rounds]
    assert not any(message.content.array_records["fitins.parameters"] for message in grid.of_type("train"))


def test_a_client_that_fails_costs_its_own_model_only(flower_log: list[str]) -> None:
    _, result, seen = start("fedproto", "global-model=average")
    _, missing, others = start(
        "fedproto", "global-model=average", faults={1: InModelPhase("raise", frozenset({2}))}
    )
    assert [stats.failures for stats in missing.rounds] == [0, 0]
    assert numbers(missing) == numbers(result)
    assert any("is left out of the mean" in line for line in flower_log)
    key = next(iter(seen[1][1]))
    assert np.array_equal(seen[0][1][key], others[0][1][key])
    assert not np.array_equal(seen[1][1][key], others[1][1][key])


def test_a_model_that_does_not_fit_is_left_out() -> None:
    fed = Federation("fedproto")

    def client_fn(context: Any) -> Any:
        client = fed.client_fn(context)
        if context.node_config["partition-id"] == 2:
            arrays = client.numpy_client.arrays
            client.numpy_client.arrays = lambda names: [array * np.nan for array in arrays(names)]
        return client

    seen: list[ArrayRecord] = []
    strategy = fed.strategy("global-model=average")
    grid = InlineGrid(ClientApp(client_fn=client_fn), 4)
    strategy.start(grid, ArrayRecord(), num_rounds=1, evaluate_fn=lambda r, arrays: seen.append(arrays))
    assert all(np.isfinite(array.numpy()).all() for array in seen[0].values())


def test_a_client_whose_owner_did_not_allow_it_sends_no_model(flower_log: list[str]) -> None:
    fed = Federation("fedproto")

    def client_fn(context: Any) -> Any:
        client = fed.client_fn(context)
        client.numpy_client.shares_model = False
        return client

    seen: list[Any] = []
    result = fed.strategy("global-model=average").start(
        InlineGrid(ClientApp(client_fn=client_fn), 4),
        ArrayRecord(),
        num_rounds=1,
        evaluate_fn=lambda r, arrays: seen.append(arrays),
    )
    assert seen == []
    assert result.rounds[0].global_accuracy is None
    assert any("its owner did not allow" in line for line in flower_log)


@pytest.mark.parametrize("name", ["fedproto", "fedmd"])
def test_the_node_config_says_whether_a_client_shares_its_model(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.ReLU(), torch.nn.Linear(5, 3))
    data = torch.utils.data.TensorDataset(torch.randn(12, 4), torch.arange(12) % 3)
    kind = registry.get(name).client

    def shares(**given: Any) -> bool:
        config = {key: value for key, value in given.items() if key == "share-model"}
        options = {key: value for key, value in given.items() if key != "share-model"}
        context = Context(1, 1, node_config=config, state=RecordDict(), run_config={})
        return bool(kind(model, data, data, context=context, **options).shares_model)

    # As at a SuperNode.
    assert not shares()
    assert shares(**{"share-model": True})
    # In Python the owner of the code has the last word.
    assert not shares(**{"share-model": True}, shares_model=False)
    assert shares(**{"share-model": False}, shares_model=True)
    with pytest.raises(ConfigError, match="share-model must be of type bool, got 1"):
        shares(**{"share-model": 1})
    monkeypatch.setattr("flwr_kd.client.shared_model.in_simulation", lambda: True)
    assert shares()
    assert not shares(**{"share-model": False})


def test_heterogeneous_models_are_refused() -> None:
    fed = Federation("fedproto", clients=3)
    fed.models = ["mlp", "mlp", "lenet"]
    strategy = fed.strategy("global-model=average")
    grid = InlineGrid(fed.app(), 3)
    with pytest.raises(HandshakeError, match='global_model="average" needs the same model at all clients'):
        strategy.start(grid, ArrayRecord(), num_rounds=1, timeout=1.0, evaluate_fn=lambda r, a: None)
    method = registry.get("fedmd")
    experiment = Experiment(model="mlp,lenet", clients=2, limit=60)
    with pytest.raises(
        ConfigError, match='global_model="average" needs the same model at all clients, got model='
    ):
        runner.check(experiment, method.config(["global-model=average"]), method)


def test_a_simulation_measures_the_mean_on_the_common_test_set() -> None:
    options: dict[str, Any] = {"clients": 3, "rounds": 2, "limit": 150, "backend": "inline", "device": "cpu"}
    method = registry.get("fedproto")
    plain, averaged = (
        runner.run(method, Experiment(**options), method.config([f"global-model={value}", "local-epochs=1"]))
        for value in ("none", "average")
    )
    for one, other in zip(plain.rounds, averaged.rounds, strict=True):
        assert one.global_accuracy is None
        assert other.global_accuracy is not None
        assert other.global_top5 is not None
        assert (one.clients, one.bytes_up, one.bytes_down) == (
            other.clients,
            other.bytes_up,
            other.bytes_down,
        )
        # Clients get the mean for no purpose, and so do not measure it.
        assert other.global_on_clients is None


def test_models_of_one_class_are_averaged_with_their_statistics() -> None:
    fed = Federation("fedproto", clients=2)
    fed.models = ["resnet8"] * 2
    seen: list[ArrayRecord] = []
    fed.strategy("global-model=average").start(
        InlineGrid(fed.app(), 2), ArrayRecord(), num_rounds=1, evaluate_fn=lambda r, a: seen.append(a)
    )
    assert any(name.endswith("running_mean") for name in seen[0])
    assert all(torch.isfinite(torch.from_numpy(array.numpy())).all() for array in seen[0].values())
