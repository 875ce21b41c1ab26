"""FedHKD+DaFKD: it has both methods' parts, and copies neither."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Context, RecordDict
from tensors import normal as doubles
from torch import nn
from torch.utils.data import TensorDataset

from flwr_kd import registry
from flwr_kd.client.task import Task
from flwr_kd.config import MethodConfig
from flwr_kd.server.records import Node, Reply
from flwr_kd.strategies.dafkd import DaFKD, DaFKDClient, DaFKDConfig
from flwr_kd.strategies.fedhkd import FedHKD, FedHKDClient, FedHKDConfig, HyperKnowledge
from flwr_kd.strategies.fedhkd_dafkd import FedHKDDaFKD, FedHKDDaFKDClient, FedHKDDaFKDConfig, ScoredKnowledge
from flwr_kd.testing.federation import Federation
from flwr_kd.transport.payload import PayloadError

CLASSES, NOISE = 3, 5
QUICK: dict[str, Any] = {"noise_dim": NOISE, "local_epochs": 1, "batch_size": 8, "server_batches": 2}


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, CLASSES))


def data() -> TensorDataset:
    return TensorDataset(doubles(16, 4, seed=1).float(), torch.arange(16) % CLASSES)


def strategy_of(**options: Any) -> FedHKDDaFKD:
    return FedHKDDaFKD(**{"model": net(), "input_shape": (4,), "device": "cpu", **QUICK, **options})


def client_of(kind: Any, **options: Any) -> Any:
    context = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config={})
    return kind(net(), data(), context=context, device="cpu", reproducible_noise=True, **options)


def knowledge() -> HyperKnowledge:
    rows = torch.softmax(doubles(CLASSES, CLASSES, seed=3).float(), dim=1).numpy()
    features = doubles(CLASSES, 6, seed=2).float().numpy()
    return HyperKnowledge(np.arange(CLASSES), features, rows, np.full(CLASSES, 5))


def task(strategy: FedHKDDaFKD, server_round: int) -> Task[Any]:
    record = strategy.with_generator(ArrayRecord(net().state_dict()))
    arrays = [value.numpy() for value in record.values()]
    payload = knowledge().to_bytes()
    return Task(server_round, "train", 7, tuple(record), arrays, payload, strategy.config)


def test_a_clients_loss_is_fedhkds_with_the_discriminators_terms() -> None:
    strategy, client, plain = strategy_of(), client_of(FedHKDDaFKDClient), client_of(FedHKDClient)
    x, y = client.train_batches.dataset.tensors
    asked = task(strategy, 2)
    client.load(asked)
    loss, hkd = client.objective(asked), plain.objective(asked)
    client.local_epoch = 99
    assert loss(x, y).item() == hkd(x, y).item()
    client.local_epoch = 0
    assert loss(x, y).item() > hkd(x, y).item() + 0.5


def test_a_reply_has_fedhkds_knowledge_and_dafkds_scores() -> None:
    strategy, client = strategy_of(), client_of(FedHKDDaFKDClient)
    asked = task(strategy, 2)
    answer = client.phase_train(asked)
    plain = client_of(FedHKDClient)
    plain.model.load_state_dict(client.model.state_dict())
    plain._task([], {})
    expected = plain.knowledge(asked)
    for item in dataclasses.fields(HyperKnowledge):
        np.testing.assert_array_equal(getattr(answer.payload, item.name), getattr(expected, item.name))
    np.testing.assert_array_equal(answer.payload.scores, client.scores(asked))
    assert len(answer.payload.scores) == 16


def test_each_methods_rules_hold() -> None:
    strategy, node = strategy_of(), Node(1, 1, num_examples=20, num_classes=CLASSES)
    values = {item.name: getattr(knowledge(), item.name) for item in dataclasses.fields(HyperKnowledge)}
    with pytest.raises(PayloadError, match=r"'scores' must be in \[0, 1\]"):
        ScoredKnowledge(**values, scores=np.float32([2]))
    with pytest.raises(PayloadError, match="'counts' must be in"):
        ScoredKnowledge(**{**values, "counts": np.zeros(CLASSES, np.int64)}, scores=np.float32([0.5]))
    few = ScoredKnowledge(**values, scores=np.full(3, 0.5, np.float32))
    with pytest.raises(PayloadError, match="3 scores"):
        strategy.check_reply("train", Reply(node, [], 20, {}, few))
    with pytest.raises(PayloadError, match="knowledge of 15 samples from a client with 14"):
        strategy.check_reply(
            "train", Reply(node, [], 14, {}, dataclasses.replace(few, scores=np.zeros(0, "f4")))
        )


def test_the_server_averages_knowledge_and_distils() -> None:
    strategy, result = Federation("fedhkd-dafkd").run(rounds=3)
    assert isinstance(strategy, FedHKDDaFKD)
    assert strategy.knowledge is not None
    names = {name.partition("/")[0] for name in strategy.state_arrays()}
    assert names == {"knowledge", "generator"}
    assert all(r.failures == 0 for r in result.rounds)
    alone, _ = Federation("fedhkd-dafkd").run(rounds=3, settings=["server-learning-rate=0.1"])
    assert isinstance(alone, DaFKD)
    # Another rate of the distillation is another global model, and so other knowledge of the third round.
    assert alone.knowledge is not None  # type: ignore[attr-defined]
    assert not torch.equal(alone.knowledge.predictions, strategy.knowledge.predictions)  # type: ignore[attr-defined]


def test_nothing_is_copied() -> None:
    assert issubclass(FedHKDDaFKD, FedHKD)
    assert issubclass(FedHKDDaFKD, DaFKD)
    assert issubclass(FedHKDDaFKDClient, DaFKDClient)
    assert issubclass(ScoredKnowledge, HyperKnowledge)
    folder = Path(registry.__file__).parents[1] / "strategies" / "fedhkd_dafkd"
    assert not (folder / "functional.py").exists()
    own, base = FedHKDDaFKDConfig.field_types(), MethodConfig.field_types()
    assert own.keys() == FedHKDConfig.field_types().keys() | DaFKDConfig.field_types().keys()
    for name in own.keys() - base.keys():
        source = FedHKDConfig if name in FedHKDConfig.field_types() else DaFKDConfig
        assert getattr(FedHKDDaFKDConfig(), name) == getattr(source(), name)
