"""FedHKD's options: the threshold's unit, its warnings, and controls without knowledge."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, Context
from flwr.clientapp import ClientApp
from torch import nn
from torch.utils.data import TensorDataset

from flwr_kd import registry
from flwr_kd.checks import ConfigError
from flwr_kd.client.client import Objective
from flwr_kd.client.task import Task
from flwr_kd.formulas import Situation
from flwr_kd.strategies.fedavg import FedAvg, FedAvgClient
from flwr_kd.strategies.fedhkd import (
    FedHKD,
    FedHKDClient,
    FedHKDConfig,
    HyperKnowledge,
    Knowledge,
    controlled_knowledge,
)
from flwr_kd.transport.inline_grid import InlineGrid
from flwr_kd.wording import Interface, begin_run, speaking

CLASSES, CLIENTS = 5, 3
QUICK: dict[str, Any] = {"local_epochs": 1, "min_available_nodes": CLIENTS}


def net() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, CLASSES))


def data(index: int) -> TensorDataset:
    draw = torch.Generator().manual_seed(index)
    # 20 samples, 4 of each class: a share of 0.2.
    return TensorDataset(torch.randn(20, 4, generator=draw), torch.arange(20) % CLASSES)


def run(strategy: Any, received: dict[int, HyperKnowledge | None] | None = None, rounds: int = 2) -> Any:
    class Curious(FedHKDClient):
        def objective(self, task: Task[Any]) -> Objective:
            if received is not None:
                message = task.read(HyperKnowledge, D=6, C=CLASSES)
                received[task.server_round] = message
            return super().objective(task)

    def client_fn(context: Context) -> Any:
        index = int(context.node_config["partition-id"])
        if isinstance(strategy, FedAvg):
            return FedAvgClient(net(), data(index), context=context, device="cpu").to_client()
        client = Curious(net(), data(index), context=context, device="cpu", reproducible_noise=True)
        return client.to_client()

    grid = InlineGrid(ClientApp(client_fn=client_fn), CLIENTS)
    try:
        return strategy.start(grid, ArrayRecord(net().state_dict()), num_rounds=rounds, timeout=20)
    finally:
        grid.close()


def shared(strategy: FedHKD) -> int:
    run(strategy, rounds=1)
    assert strategy.knowledge is not None
    return int(strategy.knowledge.known.sum())


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"threshold": 0.2}, CLASSES),
        ({"threshold": 0.21}, 0),
        ({"threshold": 1.0, "threshold_scale": "relative"}, CLASSES),
        ({"threshold": 1.05, "threshold_scale": "relative"}, 0),
        ({"threshold_scale": "relative"}, CLASSES),
        ({}, 0),
    ],
)
def test_a_threshold_is_a_share_of_the_data_or_in_units_of_an_even_share(
    settings: dict[str, Any], expected: int
) -> None:
    assert shared(FedHKD(noise="none", **settings, **QUICK)) == expected
    config = FedHKDConfig(**settings)
    situation = Situation(config, [[4] * CLASSES] * CLIENTS, 0, "up")
    assert registry.get("fedhkd").letters(situation)["K"] == expected


def test_thresholds_that_no_class_can_reach_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"threshold must be <= 1, .* got 2; .*threshold_scale=\"relative\""
    ):
        FedHKDConfig(threshold=2.0)
    relative = FedHKDConfig(threshold=5.0, threshold_scale="relative")
    relative.check_classes(5)
    with pytest.raises(ConfigError, match="threshold must be <= C = 4 with threshold-scale=relative, got 5"):
        relative.check_classes(4)


def test_who_shares_nothing_is_told_once_per_run_what_to_do(flower_log: list[str]) -> None:
    begin_run()
    with speaking(Interface.COMMAND):
        run(FedHKD(**QUICK))
    (warning,) = flower_log
    assert warning == (
        "no client shared the knowledge of any class in a round, which leaves FedHKD without knowledge: "
        "threshold=0.25 (absolute) asks for 25 % of a client's samples in one class, for example 5 of 20, and an "
        "even share of 5 classes is 20 %; lower it, for example --set threshold=0.1, or set it in units of an even "
        "share: --set threshold-scale=relative"
    )
    flower_log.clear()
    begin_run()
    run(FedHKD(threshold=1.5, threshold_scale="relative", **QUICK))
    assert "threshold=1.5 (relative) asks for 30 %" in flower_log[0]
    assert flower_log[0].endswith("lower it, for example threshold=0.5")
    flower_log.clear()
    begin_run()
    run(FedHKD(threshold=0.1, noise="none", **QUICK))
    assert flower_log == []


def test_what_shares_nothing_is_fedavg() -> None:
    result = run(FedHKD(**QUICK), rounds=3)
    plain = run(FedAvg(**QUICK), rounds=3)
    ours, theirs = (each.arrays.to_torch_state_dict() for each in (result, plain))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def knowledge() -> Knowledge:
    draw = torch.Generator().manual_seed(0)
    known = torch.tensor([True, True, False, True, False])
    representations = torch.randn(5, 6, generator=draw) * known[:, None]
    predictions = torch.softmax(torch.randn(5, 5, generator=draw), dim=1) * known[:, None]
    return Knowledge(representations, predictions, torch.tensor([7, 2, 0, 9, 0]))


def controls(kind: str, seed: int = 0) -> Knowledge:
    return controlled_knowledge(knowledge(), kind, torch.Generator().manual_seed(seed))


def test_knowledge_itself_is_not_changed() -> None:
    before, after = knowledge(), controls("own")
    assert torch.equal(before.representations, after.representations)
    assert torch.equal(before.predictions, after.predictions)


def test_uniform_knowledge_is_alike_for_all_known_classes() -> None:
    before, after = knowledge(), controls("uniform")
    mean = before.representations[[0, 1, 3]].mean(dim=0)
    for number in (0, 1, 3):
        torch.testing.assert_close(after.representations[number], mean)
        torch.testing.assert_close(after.predictions[number], torch.full((5,), 0.2))
    for number in (2, 4):
        assert not after.representations[number].any()
        assert not after.predictions[number].any()
    assert torch.equal(after.counts, before.counts)


def test_permuted_knowledge_has_representations_of_other_known_classes() -> None:
    before = knowledge()
    for seed in range(5):
        after = controls("permuted", seed)
        known = [0, 1, 3]
        assert not (after.representations[known] == before.representations[known]).all(dim=1).any()
        assert sorted(after.representations.tolist()) == sorted(before.representations.tolist())
        assert torch.equal(after.predictions, before.predictions)
        assert torch.equal(after.counts, before.counts)


@pytest.mark.parametrize("kind", ["own", "uniform", "permuted"])
def test_nothing_known_stays_nothing(kind: str) -> None:
    nothing = Knowledge(torch.zeros(5, 6), torch.zeros(5, 5), torch.zeros(5, dtype=torch.int64))
    after = controlled_knowledge(nothing, kind, torch.Generator())
    assert not after.representations.any()
    assert not after.predictions.any()
    assert not after.known.any()


@pytest.mark.parametrize("kind", ["own", "uniform", "permuted"])
def test_clients_receive_the_control_and_the_server_keeps_the_knowledge(kind: str) -> None:
    received: dict[int, HyperKnowledge | None] = {}
    strategy = FedHKD(threshold=0.0, noise="none", client_knowledge=kind, **QUICK)
    run(strategy, received)
    assert received[1] is None
    message = received[2]
    assert message is not None
    assert len(message.classes) == CLASSES
    alone = FedHKD(threshold=0.0, noise="none", **QUICK)
    run(alone, rounds=1)
    assert alone.knowledge is not None
    same = [
        torch.equal(torch.from_numpy(sent.copy()), kept)
        for sent, kept in (
            (message.representations, alone.knowledge.representations),
            (message.predictions, alone.knowledge.predictions),
        )
    ]
    assert same == {"own": [True, True], "uniform": [False, False], "permuted": [False, True]}[kind]
    assert strategy.knowledge is not None
    # What the server keeps is its own knowledge, whatever it sends.
    assert len(torch.unique(strategy.knowledge.representations, dim=0)) == CLASSES
