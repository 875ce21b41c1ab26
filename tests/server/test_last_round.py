"""After the last round all clients are measured, also those that did not take part in it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Message, RecordDict
from flwr.clientapp import ClientApp

from flwr_kd.data import ArrayDataset
from flwr_kd.server.records import KDResult, RoundStats
from flwr_kd.strategies.fedavg import FedAvgClient
from flwr_kd.testing.faults import Fault
from flwr_kd.testing.federation import Federation, blobs, small_model
from flwr_kd.transport.inline_grid import InlineGrid
from tests.server.federations import Watched

LAST = 3


class InTraining(Fault):
    """A fault that spares evaluations."""

    def applies(self, message: Message) -> bool:
        return message.metadata.message_type == "train" and super().applies(message)


def accuracy(model: torch.nn.Module, test: ArrayDataset) -> float:
    with torch.no_grad():
        return float((model.eval()(test.x).argmax(dim=1) == test.y).float().mean())


def run(name: str, *, rounds: int = LAST, faults: Any = None, **options: Any) -> tuple[Any, KDResult]:
    fed = Federation(name)
    grid = Watched(fed.app(), fed.clients, faults=faults or {})
    strategy = fed.strategy(**{"fraction_train": 0.5, **options})
    return grid, strategy.start(grid, fed.initial(), num_rounds=rounds, timeout=0.5 if faults else 60.0)


def asked(grid: Any) -> list[int]:
    return sorted(grid.partition(message.metadata.dst_node_id) for message in grid.of_type("evaluate"))


def test_clients_that_were_not_drawn_are_measured_with_the_global_model() -> None:
    grid, result = run("fedavg")
    last = result.rounds[-1]
    assert [len(stats.clients) for stats in result.rounds] == [2, 2, 4]
    assert (asked(grid), last.stored, last.participants, last.available) == (last.received, [], 2, 4)
    model = small_model()
    model.load_state_dict(result.arrays.to_torch_state_dict())
    for key in last.received:
        assert last.clients[key]["local-accuracy"] == accuracy(model, blobs(8, 100 + key))
    assert last.local_accuracy == np.mean([client["local-accuracy"] for client in last.clients.values()])
    # It is no part of the method.
    assert (last.bytes_up, last.bytes_down) == (result.rounds[0].bytes_up, result.rounds[0].bytes_down)
    assert last.failures == 0


@pytest.mark.parametrize("name", ["fedproto", "fedgkt", "ktpfl-weights"])
def test_clients_that_trained_before_are_measured_with_their_own_models(name: str) -> None:
    grid, result = run(name, seed=1, fraction_train=0.25)
    *before, last = (set(stats.bytes_by_partition) for stats in result.rounds)
    trained = set().union(*before) - last
    stats = result.rounds[-1]
    assert trained
    assert set(stats.stored) == trained
    assert set(stats.received) == {0, 1, 2, 3} - trained - last
    for context in grid.contexts.values():
        key = context.node_config["partition-id"]
        client = Federation(name).client_fn(context).numpy_client
        assert client.load_own() == (key in trained | last)
        mine = {name: value for name, value in stats.clients[key].items() if name.startswith("local-")}
        assert mine == client.local_metrics(8)


def test_nothing_is_sent_where_all_took_part() -> None:
    for faults in ({}, {2: Fault("raise", frozenset({1}))}):
        grid, result = run("fedproto", faults=faults, fraction_train=1.0)
        assert asked(grid) == []
        assert (result.rounds[-1].stored, result.rounds[-1].received) == ([], [])


def test_a_client_that_failed_is_measured_and_one_that_was_silent_is_not_waited_for_again() -> None:
    faults = {1: InTraining("raise", frozenset({LAST})), 2: InTraining("silent", frozenset({LAST}))}
    grid, result = run("fedproto", faults=faults, fraction_train=1.0)
    last = result.rounds[-1]
    assert (asked(grid), last.failures) == ([1], 2)
    # Its training of this round was undone; the model is that of the round before.
    assert (last.stored, sorted(last.clients)) == ([1], [0, 1, 3])


class Liar(FedAvgClient):
    said: dict[str, Any]

    def evaluate(self, parameters: Any, config: Any) -> Any:
        if not self.said:
            raise RuntimeError("no")
        loss, count, metrics = super().evaluate(parameters, config)
        return loss, count, metrics | self.said


@pytest.mark.parametrize(
    "said", [{}, {"local-accuracy": 5.0}, {"local-top5": -1.0}, {"local-accuracy": float("nan")}]
)
def test_a_measurement_that_cannot_be_used_costs_nothing(said: dict[str, Any], flower_log: list[str]) -> None:
    fed = Federation("fedavg")

    def client_fn(context: Any) -> Any:
        client = fed.client_fn(context)
        client.numpy_client.__class__, client.numpy_client.said = Liar, said
        return client

    result = fed.strategy(fraction_train=0.5).start(
        InlineGrid(ClientApp(client_fn=client_fn), 4), fed.initial(), num_rounds=1
    )
    _, honest = run("fedavg", rounds=1)
    last = result.rounds[0]
    assert (len(last.clients), last.received, last.failures) == (2, [], 0)
    assert all(honest.rounds[0].clients[key] == values for key, values in last.clients.items())
    assert sum("the evaluation of node" in line for line in flower_log) == 2


def test_a_client_without_test_data_is_not_asked(make_blobs: Callable[..., ArrayDataset]) -> None:
    def client_fn(context: Any) -> Any:
        test = make_blobs(8, 1) if context.node_config["partition-id"] else None
        return FedAvgClient(small_model(), make_blobs(8, 0), test, context=context, device="cpu").to_client()

    fed = Federation("fedavg")
    grid = Watched(ClientApp(client_fn=client_fn), 4)
    result = fed.strategy(fraction_train=0.25).start(grid, fed.initial(), num_rounds=1)
    drawn = set(result.rounds[0].bytes_by_partition)
    assert asked(grid) == sorted({1, 2, 3} - drawn)


def test_after_a_void_last_round_all_are_measured_with_the_model_of_before() -> None:
    faults = {i: InTraining("raise", frozenset({LAST})) for i in range(2)}
    _, result = run("fedavg", faults=faults, fraction_train=1.0, min_train_nodes=3)
    last = result.rounds[-1]
    assert (last.void, sorted(last.clients), sorted(last.received)) == (True, [0, 1, 2, 3], [0, 1, 2, 3])
    model = small_model()
    model.load_state_dict(result.arrays.to_torch_state_dict())
    assert last.local_accuracy == np.mean([accuracy(model, blobs(8, 100 + key)) for key in range(4)])


@pytest.mark.parametrize("name", ["fedavg", "fedproto"])
def test_a_resumed_run_measures_what_a_whole_one_does(name: str, tmp_path: Path) -> None:
    fed = Federation(name)
    contexts: dict[int, RecordDict] = {}

    def go(rounds: int, **options: Any) -> tuple[Any, list[RoundStats]]:
        grid = Watched(fed.app(), 4)
        for node, state in contexts.items():
            grid.contexts[node].state = state
        result = fed.strategy(fraction_train=0.5, **options).start(grid, fed.initial(), num_rounds=rounds)
        contexts.update({node: context.state for node, context in grid.contexts.items()})
        return grid, result.rounds

    _, whole = go(3)
    contexts.clear()
    go(2, checkpoint_dir=tmp_path)
    _, rest = go(3, checkpoint_dir=tmp_path, resume=True)
    for one, other in zip(whole[2:], rest, strict=True):
        assert (one.clients, one.stored, one.received) == (other.clients, other.stored, other.received)
    # A complete run has nothing left to measure.
    grid, rounds = go(3, checkpoint_dir=tmp_path, resume=True)
    assert (asked(grid), rounds) == ([], [])


# ---------------------------------------------------------------------- the rounds of the option measure


def measured(name: str, *, common: int = 20, **options: Any) -> tuple[Any, KDResult]:
    fed = Federation(name, common=common)
    grid = Watched(fed.app(), fed.clients, faults=options.pop("faults", {}))
    strategy = fed.strategy(**{"measure": "last", **options})
    return grid, strategy.start(grid, fed.initial(), num_rounds=2, timeout=60.0)


def test_the_global_model_is_measured_on_all_clients_test_data() -> None:
    grid, result = measured("fedavg", fraction_train=0.5)
    first, last = result.rounds
    assert (first.global_on_clients, first.common_accuracy) == (None, None)
    model = small_model()
    model.load_state_dict(result.arrays.to_torch_state_dict())
    own = {key: accuracy(model, blobs(8, 100 + key)) for key in range(4)}
    assert {key: client["global-on-clients"] for key, client in last.clients.items()} == own
    assert last.global_on_clients == np.mean([*own.values()])
    # Two that were not drawn, then all four; neither counts as bytes of the method.
    assert asked(grid) == sorted([*last.received, 0, 1, 2, 3])
    assert (last.bytes_up, last.bytes_down) == (first.bytes_up, first.bytes_down)
    # Who was not drawn would receive the global model.
    for key in last.received:
        assert last.clients[key]["common-accuracy"] == accuracy(model, blobs(20, 300))


def test_the_common_accuracy_is_that_of_the_clients_own_models() -> None:
    grid, result = measured("fedproto", fraction_train=0.5)
    last = result.rounds[-1]
    assert (last.global_on_clients, sorted(last.clients)) == (None, [0, 1, 2, 3])
    for context in grid.contexts.values():
        client = Federation("fedproto").client_fn(context).numpy_client
        client.load_own()
        expected = accuracy(client.model, blobs(20, 300))
        assert last.clients[context.node_config["partition-id"]]["common-accuracy"] == expected
    assert last.common_accuracy == np.mean([client["common-accuracy"] for client in last.clients.values()])


def test_without_a_common_test_set_there_is_no_common_accuracy() -> None:
    _, result = measured("fedavg", common=0)
    assert result.rounds[-1].common_accuracy is None
    assert result.rounds[-1].global_on_clients is not None


def test_adapted_models_are_measured_on_the_common_test_set() -> None:
    _, result = measured("fedavg-ft")
    last = result.rounds[-1]
    assert last.accuracy_before == last.global_on_clients
    model = small_model()
    model.load_state_dict(result.arrays.to_torch_state_dict())
    assert last.common_accuracy is not None
    assert last.common_accuracy != accuracy(model, blobs(20, 300))


def test_a_common_accuracy_that_nobody_asked_for_is_left_out() -> None:
    class Eager(FedAvgClient):
        def _task(self, parameters: Any, config: Any) -> Any:
            return super()._task(parameters, {**config, "measure-common": True})

    def client_fn(context: Any) -> Any:
        data = (blobs(24, 0), blobs(8, 100))
        return Eager(
            small_model(), *data, context=context, common_test_set=blobs(20, 300), device="cpu"
        ).to_client()

    result = (
        Federation("fedavg")
        .strategy()
        .start(InlineGrid(ClientApp(client_fn=client_fn), 4), Federation("fedavg").initial(), num_rounds=1)
    )
    assert result.rounds[0].common_accuracy is None
    assert all("common-accuracy" not in client for client in result.rounds[0].clients.values())


def test_clients_with_common_test_data_alone_are_measured(make_blobs: Callable[..., ArrayDataset]) -> None:
    def client_fn(context: Any) -> Any:
        common = make_blobs(20, 2)
        return FedAvgClient(
            small_model(), make_blobs(8, 0), context=context, common_test_set=common, device="cpu"
        ).to_client()

    fed = Federation("fedavg")
    for fraction, epochs in ((1.0, 0), (0.25, 0), (1.0, 1)):
        strategy = fed.strategy(f"personalize-epochs={epochs}", fraction_train=fraction, measure="last")
        grid = InlineGrid(ClientApp(client_fn=client_fn), 4)
        (stats,) = strategy.start(grid, fed.initial(), num_rounds=1).rounds
        assert (stats.local_accuracy, stats.global_on_clients) == (None, None)
        assert stats.common_accuracy is not None
        assert sorted(stats.clients) == [0, 1, 2, 3]


@pytest.mark.parametrize("said", [{"accuracy": 1.5}, {"accuracy": 0.5, "top5": -1.0}])
def test_an_evaluation_that_cannot_be_used_costs_only_itself(said: dict[str, float]) -> None:
    class Wrong(FedAvgClient):
        def evaluate(self, parameters: Any, config: Any) -> Any:
            loss, count, metrics = super().evaluate(parameters, config)
            return loss, count, metrics | (said if self.context.node_config["partition-id"] == 1 else {})

    def client_fn(context: Any) -> Any:
        return Wrong(small_model(), blobs(24, 0), blobs(8, 100), context=context, device="cpu").to_client()

    fed = Federation("fedavg")
    grid = InlineGrid(ClientApp(client_fn=client_fn), 4)
    (stats,) = fed.strategy(measure="last").start(grid, fed.initial(), num_rounds=1).rounds
    assert [key for key, client in stats.clients.items() if "global-on-clients" in client] == [0, 2, 3]
    assert stats.failures == 0


def test_a_client_that_trained_and_then_failed_is_measured() -> None:
    class InDistillation(Fault):
        def applies(self, message: Message) -> bool:
            config = message.content.config_records.get("fitins.config", {})
            return config.get("phase") == "distill" and super().applies(message)

    grid, result = run(
        "fedmd", rounds=1, faults={1: InDistillation("raise", frozenset({1}))}, fraction_train=1.0
    )
    (stats,) = result.rounds
    assert (asked(grid), stats.stored, stats.failures) == ([1], [1], 1)
    assert all(set(client) == {"trained-accuracy", "local-accuracy"} for client in stats.clients.values())
    # It did not distil, so that its model is still the trained one.
    assert stats.clients[1]["local-accuracy"] == stats.clients[1]["trained-accuracy"]
