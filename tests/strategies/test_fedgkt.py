"""FedGKT's rounds: rows and samples, the server's training, failures, resumption."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from feature_rounds import CLASSES, CLIENTS, FEATURES, QUICK, SAMPLES, features, pair, samples, start, task
from flwr.app import ArrayRecord, Context, RecordDict
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from flwr_kd.checks import ConfigError
from flwr_kd.client.task import Task
from flwr_kd.learning.batches import DatasetError
from flwr_kd.models import SplitModel, build_model, build_predictor, count_parameters
from flwr_kd.server.records import HandshakeError
from flwr_kd.strategies.feddkc import FedDKC, FedDKCConfig
from flwr_kd.strategies.fedgkt import (
    ClientFeatures,
    FedGKT,
    FedGKTClient,
    FedGKTConfig,
    ServerLogits,
)
from flwr_kd.testing.faults import Fault
from flwr_kd.transport.payload import PayloadError

# The default target needs nine classes.
TARGETS: dict[type[FedGKT], dict[str, Any]] = {FedGKT: {}, FedDKC: {"target_peak": 0.6}}


class Echo(nn.Module):
    """A server's model whose logits tell which sample they are of, whatever it learns; it keeps what it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.seen: list[tuple[bool, list[float]]] = []

    def forward(self, features: Tensor) -> Tensor:
        self.seen.append((self.training, features[:, 0].tolist()))
        return echo(features) + 0 * self.weight


def echo(x: Tensor) -> Tensor:
    return torch.stack([x[:, 0], torch.zeros(len(x)), -x[:, 0]], dim=1)


class Watched(FedGKTClient):
    """Counts the training rows that come with their own sample's logits."""

    met: dict[int, list[tuple[int, int]]]

    def objective(self, task: Task) -> Callable[..., Tensor]:
        teacher, plain = self.teacher(task), super().objective(task)
        right = total = 0

        def loss(x: Tensor, y: Tensor, rows: Tensor) -> Tensor:
            nonlocal right, total
            if teacher is not None and task.server_round > 1:
                expected = torch.softmax(echo(x), dim=1)
                right += int((teacher[rows] - expected).abs().amax(dim=1).lt(1e-6).sum())
            total += len(y)
            self.met[task.server_round][int(self.context.node_config["partition-id"])] = (right, total)
            return plain(x, y, rows)

        return loss


def lone_client(kind: type[FedGKTClient] = FedGKTClient, **options: Any) -> FedGKTClient:
    context = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config={})
    options = {"model": pair(), "train_set": samples(0), "device": "cpu"} | options
    return kind(context=context, **options)


@pytest.mark.parametrize("order", ["pooled", "client-by-client"])
def test_every_row_meets_its_own_sample(order: str) -> None:
    met: dict[int, list[tuple[int, int]]] = {r: [(0, 0)] * CLIENTS for r in (1, 2, 3, 4)}

    def make(index: int, context: Context) -> Watched:
        client = Watched(pair(index), samples(index, 200), context=context, device="cpu")
        client.met = met
        return client

    strategy = FedGKT(server_model=Echo(), server_order=order, **QUICK)
    # A client misses round 2; in round 3 it has its logits of round 1.
    result = start(strategy, make, rounds=4, faults={1: Fault("raise", frozenset({2}))})
    assert [r.participants for r in result.rounds] == [4, 3, 4, 4]
    for server_round in (3, 4):
        assert [sum(column) for column in zip(*met[server_round], strict=True)] == [800, 800]


def test_rows_may_come_in_any_order() -> None:
    class Shuffled(FedGKTClient):
        def knowledge(self, task: Task) -> ClientFeatures:
            sent = super().knowledge(task)
            mixed = np.random.default_rng(task.server_round).permutation(len(sent.index))
            return ClientFeatures(
                index=sent.index[mixed],
                features=sent.features[mixed],
                logits=sent.logits[mixed],
                labels=sent.labels[mixed],
                test_features=sent.test_features,
                test_labels=sent.test_labels,
            )

    strategy = FedGKT(server_model=Echo(), **QUICK)
    start(strategy, lambda i, c: Shuffled(pair(i), samples(i), context=c, device="cpu"), rounds=1)
    for index, logits in strategy.logits.items():
        np.testing.assert_allclose(logits, echo(samples(index).tensors[0]).numpy(), rtol=1e-6)


def test_a_client_that_was_not_drawn_keeps_its_logits_and_a_late_one_has_none() -> None:
    received: dict[tuple[int, int], Tensor | None] = {}

    class Curious(FedGKTClient):
        def objective(self, task: Task) -> Callable[..., Tensor]:
            received[task.server_round, int(self.context.node_config["partition-id"])] = self.teacher(task)
            return super().objective(task)

    # A new model each round, so that logits tell of which round they are.
    strategy = FedGKT(fraction_train=0.5, seed=3, learning_rate=0.5, **QUICK)
    kept: list[dict[int, np.ndarray]] = []
    strategy.on_round = lambda stats: kept.append(dict(strategy.logits))
    start(strategy, lambda i, c: Curious(pair(i), samples(i), context=c, device="cpu"), rounds=6)
    last: dict[int, int] = {}
    late = missed = 0
    for (server_round, client), teacher in sorted(received.items()):
        if client not in last:
            if server_round == 1:
                assert teacher is not None
                torch.testing.assert_close(teacher, torch.full((SAMPLES, CLASSES), 1 / CLASSES))
            else:
                late += 1
                assert teacher is None
        else:
            missed += last[client] < server_round - 1
            expected = torch.softmax(torch.tensor(kept[last[client] - 1][client]), dim=1)
            torch.testing.assert_close(teacher, expected)
        last[client] = server_round
    assert late
    assert missed


def test_the_first_round_may_start_without_logits() -> None:
    client = lone_client()
    assert client.teacher(task(FedGKTConfig(initial_logits="none"))) is None
    first = client.teacher(task(FedGKTConfig()))
    assert first is not None
    assert torch.equal(first, torch.full((SAMPLES, CLASSES), 1 / CLASSES))
    assert client.teacher(task(FedGKTConfig(), server_round=2)) is None


def test_logits_of_another_number_of_samples_are_refused_by_the_client() -> None:
    sent = ServerLogits(np.zeros((7, CLASSES), np.float32)).to_bytes()
    with pytest.raises(PayloadError, match=r"'logits' has shape \[7, \d+\], expected \[N=20, C=\d+\]"):
        lone_client().teacher(task(FedGKTConfig(), 2, sent))


@pytest.mark.parametrize("more", [5, -5])
def test_a_changed_number_of_samples_is_dropped_with_the_reason(more: int, flower_log: list[str]) -> None:
    class Grown(FedGKTClient):
        def get_properties(self, config: Any) -> dict[str, Any]:
            return {**super().get_properties(config), "num-examples": SAMPLES}

    def make(index: int, context: Context) -> FedGKTClient:
        size = SAMPLES + (more if index == 2 else 0)
        return Grown(pair(index), samples(index, size), context=context, device="cpu")

    strategy = FedGKT(**QUICK)
    result = start(strategy, make, rounds=1)
    assert (result.rounds[0].participants, result.rounds[0].failures) == (3, 1)
    assert sorted(strategy.logits) == [0, 1, 3]
    assert any(f"'index' has shape [{SAMPLES + more}], expected [N={SAMPLES}]" in line for line in flower_log)


def test_features_are_taken_in_eval_mode_and_without_augmentation() -> None:
    model = build_model("resnet4", input_shape=(1, 8, 8), num_classes=CLASSES, seed=0)
    assert isinstance(model, SplitModel)
    draw = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(12, 1, 8, 8, generator=draw), torch.arange(12) % CLASSES)
    calls: list[int] = []

    def blank(x: Tensor, generator: torch.Generator) -> Tensor:
        calls.append(len(x))
        return torch.zeros_like(x)

    client = lone_client(model=model, train_set=data, augment=blank)
    config = FedGKTConfig(batch_size=5)
    client.train(task(config), client.objective(task(config)), rows=True)
    assert sum(calls) == 12
    before = {name: value.clone() for name, value in client.model.state_dict().items()}
    sent = client.knowledge(task(config))
    assert sum(calls) == 12
    assert all(torch.equal(value, before[name]) for name, value in client.model.state_dict().items())
    with torch.no_grad():
        maps = client.model.eval().extractor(data.tensors[0])
        expected = client.model.predictor(maps)
    np.testing.assert_allclose(sent.features, maps.flatten(1).numpy(), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(sent.logits, expected.numpy(), rtol=1e-4, atol=1e-5)
    assert sent.labels.tolist() == data.tensors[1].tolist()
    assert sent.index.tolist() == list(range(12))


def test_the_shape_of_a_pairs_features_is_found_out() -> None:
    stem = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.MaxPool2d(2))
    head = nn.Sequential(nn.Flatten(), nn.Linear(64, CLASSES))
    data = TensorDataset(torch.randn(6, 1, 8, 8), torch.arange(6) % CLASSES)
    client = lone_client(model=(stem, head), train_set=data)
    assert client.feature_shape == (4, 4, 4)
    assert client.get_properties({})["feature-shape"] == "[4, 4, 4]"
    assert int(stem[1].num_batches_tracked) == 0


def test_samples_that_cannot_be_told_apart_are_refused() -> None:
    with pytest.raises(DatasetError, match="knowledge_set must have the samples of train_set, got 7 and 20"):
        lone_client(knowledge_set=samples(0, 7))
    lone_client(train_set=DataLoader(samples(0), batch_size=4, shuffle=True))


def test_a_collate_fn_that_loses_samples_is_noticed() -> None:
    def lossy(items: list[Any]) -> Any:
        x, y = (torch.stack(column) for column in zip(*items[len(items) > 1 :], strict=True))
        return x, y

    client = lone_client(train_set=DataLoader(samples(0), batch_size=4, collate_fn=lossy))
    config = FedGKTConfig(batch_size=4)
    with pytest.raises(DatasetError, match="collate_fn returned 3 inputs and 3 labels of 4 samples"):
        client.train(task(config), client.objective(task(config)), rows=True)


def test_test_features_are_sent_only_when_asked_for() -> None:
    client = lone_client(test_set=samples(0, 6))
    assert len(client.knowledge(task(FedGKTConfig())).test_labels) == 0
    sent = client.knowledge(task(FedGKTConfig(send_test_features=True)))
    np.testing.assert_allclose(sent.test_features, samples(0, 6).tensors[0])
    assert sent.test_labels.tolist() == [0, 1, 2, 0, 1, 2]


@pytest.mark.parametrize("kind", [FedGKT, FedDKC])
def test_client_by_client_trains_on_one_then_makes_its_logits(kind: type[FedGKT]) -> None:
    model = Echo()
    strategy = kind(server_model=model, server_order="client-by-client", **TARGETS[kind], **QUICK)
    orders: list[list[int]] = []
    for server_round in range(1, 5):
        model.seen.clear()
        start(strategy_round(strategy, server_round), rounds=1)
        seen = model.seen[1:]  # the first is the handshake's trial
        owners = [(training, {int(value) for value in first}) for training, first in seen]
        assert all(len(clients) == 1 for _, clients in owners)
        steps = [(training, clients.pop()) for training, clients in owners]
        order = list(dict.fromkeys(client for _, client in steps))
        assert steps == [step for c in order for step in [(True, c)] * 3 + [(False, c)]]
        orders.append(order)
    assert all(sorted(order) == [0, 1, 2, 3] for order in orders)
    assert len({tuple(order) for order in orders}) > 1


def strategy_round(strategy: FedGKT, server_round: int) -> FedGKT:
    strategy.seed = server_round
    return strategy


def test_the_order_is_drawn_anew_each_round() -> None:
    model, seen = Echo(), []
    strategy = FedGKT(server_model=model, server_order="client-by-client", **QUICK)

    def note(stats: Any) -> None:
        seen.append(list(dict.fromkeys(int(first[0]) for training, first in model.seen if training)))
        model.seen.clear()

    strategy.on_round = note
    start(strategy, rounds=5)
    assert len({tuple(order) for order in seen}) > 1


def test_pooled_mixes_the_clients_and_makes_logits_afterwards() -> None:
    model = Echo()
    start(FedGKT(server_model=model, server_epochs=2, **QUICK), rounds=1)
    training = [first for mode, first in model.seen if mode]
    modes = [mode for mode, _ in model.seen[1:]]
    assert modes == [True] * len(training) + [False] * CLIENTS
    assert any(len({int(value) for value in first}) > 1 for first in training)
    rows = sorted(value for first in training for value in first)
    expected = sorted(
        v for i in range(CLIENTS) for v in samples(i).tensors[0][:, 0].tolist() for _ in range(2)
    )
    assert rows == pytest.approx(expected)
    assert training[0] != training[len(training) // 2]


def test_the_server_learns_from_the_clients_logits() -> None:
    def make(index: int, context: Context) -> FedGKTClient:
        return FedGKTClient(pair(index), samples(index), samples(index, 9), context=context, device="cpu")

    options = {**QUICK, "optimizer": "adam", "learning_rate": 0.02, "server_epochs": 20}
    strategy = FedGKT(send_test_features=True, **options)
    result = start(strategy, make, rounds=4)
    assert result.rounds[-1].server_accuracy > 0.5
    model = strategy.server_model.eval()
    with torch.no_grad():
        right = [
            float((model(x).argmax(dim=1) == y).double().mean())
            for x, y in (samples(i, 9).tensors for i in range(CLIENTS))
        ]
    assert result.rounds[-1].server_accuracy == pytest.approx(np.mean(right))
    assert start(FedGKT(**options), make, rounds=1).rounds[0].server_accuracy is None


def test_float16_halves_the_features_and_changes_little() -> None:
    results = {
        kind: start(FedGKT(feature_dtype=kind, learning_rate=0.1, **QUICK), rounds=3)
        for kind in ("float32", "float16")
    }
    saved = results["float32"].rounds[0].bytes_up - results["float16"].rounds[0].bytes_up
    assert saved == pytest.approx(CLIENTS * SAMPLES * FEATURES * 2, abs=64)
    losses = [result.rounds[-1].train_loss for result in results.values()]
    assert losses[0] == pytest.approx(losses[1], abs=0.02)
    assert losses[0] != losses[1]


@pytest.mark.parametrize("order", ["pooled", "client-by-client"])
@pytest.mark.parametrize("kind", [FedGKT, FedDKC])
def test_one_client_cannot_teach_the_others_nonsense(
    kind: type[FedGKT], order: str, flower_log: list[str]
) -> None:
    """Features at the largest allowed magnitude make the default predictor useless, but still finite."""

    class Loud(FedGKTClient):
        config_class = FedDKCConfig if kind is FedDKC else FedGKTConfig

        def knowledge(self, task: Task) -> ClientFeatures:
            sent = super().knowledge(task)
            if self.context.node_config["partition-id"] == 1:
                noise = np.random.default_rng(0).choice([-6.5e4, 6.5e4], size=sent.features.shape)
                object.__setattr__(sent, "features", noise.astype(np.float32))
            return sent

    strategy = kind(server_order=order, **TARGETS[kind], **QUICK)
    result = start(strategy, lambda i, c: Loud(pair(i), samples(i), context=c, device="cpu"), rounds=4)
    assert [r.participants for r in result.rounds] == [4] * 4
    assert {0, 2, 3} <= set(strategy.logits)
    for logits in strategy.logits.values():
        assert np.abs(logits).max() <= 65504
    blamed = {line.split("(partition ")[1][0] for line in flower_log if "is undone" in line}
    assert blamed == {"1"}


@pytest.mark.parametrize("order", ["pooled", "client-by-client"])
def test_training_that_is_not_finite_is_undone(order: str, flower_log: list[str]) -> None:
    class Loud(FedGKTClient):
        def knowledge(self, task: Task) -> ClientFeatures:
            sent = super().knowledge(task)
            if self.context.node_config["partition-id"] != 1:
                return sent
            return features(
                index=sent.index,
                features=np.full_like(sent.features, 6e4),
                logits=np.full_like(sent.logits, -3e38),
                labels=sent.labels,
            )

    class Fragile(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(FEATURES, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x / (x.abs().amax(dim=1, keepdim=True) < 1e4))

    strategy = FedGKT(server_model=Fragile(), server_order=order, learning_rate=0.01, **QUICK)
    result = start(strategy, lambda i, c: Loud(pair(i), samples(i), context=c, device="cpu"), rounds=1)
    assert result.rounds[0].failures == 1
    assert sorted(strategy.logits) == [0, 2, 3]
    assert all(np.isfinite(value).all() for value in strategy.state_arrays().values())
    assert any("is undone" in line and "partition 1" in line for line in flower_log)


def test_the_server_goes_on_where_it_was(tmp_path: Path) -> None:
    options = {**QUICK, "learning_rate": 0.1, "checkpoint_dir": tmp_path}
    first = FedGKT(**options)
    start(first, rounds=2)
    second = FedGKT(resume=True, **options)
    second.prepare(ArrayRecord()).load_checkpoint()
    assert second.server_model is None
    from flwr_kd.server.records import Node

    restored = second.predictor_for(Node(1, num_classes=CLASSES, feature_shape=(FEATURES,)))
    x = samples(0).tensors[0]
    with torch.no_grad():
        assert torch.equal(restored.eval()(x), first.server_model.eval()(x))
    with pytest.raises(ValueError, match="no state named 'prototypes'"):
        second.load_state_arrays({"prototypes": np.zeros(1)})


def test_a_checkpoint_of_another_predictor_is_refused_before_round_1(tmp_path: Path) -> None:
    options = {**QUICK, "checkpoint_dir": tmp_path}
    start(FedGKT(**options), rounds=1)

    def wider(index: int, context: Context) -> FedGKTClient:
        model = (nn.Linear(FEATURES, 7), nn.Linear(7, CLASSES))
        return FedGKTClient(model, samples(index), context=context, device="cpu")

    with pytest.raises(HandshakeError, match=r"the checkpoint's predictor is not for features \[7\]: array"):
        start(FedGKT(resume=True, **options), wider)
    with pytest.raises(ConfigError, match="the checkpoint's predictor is not server_model: arrays missing"):
        start(FedGKT(resume=True, server_model=nn.Linear(FEATURES, CLASSES), **options))


def test_a_given_model_is_restored_at_once(tmp_path: Path) -> None:
    options = {**QUICK, "checkpoint_dir": tmp_path, "learning_rate": 0.1}
    first, second = nn.Linear(FEATURES, CLASSES), nn.Linear(FEATURES, CLASSES)
    start(FedGKT(server_model=first, **options), rounds=2)
    start(FedGKT(server_model=second, resume=True, **options), rounds=2)
    assert torch.equal(first.weight, second.weight)


def test_a_given_model_begins_anew_with_each_start() -> None:
    model = nn.Linear(FEATURES, CLASSES)
    before = model.weight.detach().clone()
    strategy = FedGKT(server_model=model, learning_rate=0.1, **QUICK)
    losses = [start(strategy, rounds=2).rounds[-1].train_loss for _ in range(2)]
    assert losses[0] == losses[1]
    assert not torch.equal(model.weight, before)


def test_the_servers_default_model_is_the_papers_for_maps() -> None:
    def make(index: int, context: Context) -> FedGKTClient:
        model = build_model("resnet2", input_shape=(1, 8, 8), num_classes=10, seed=0)
        data = TensorDataset(torch.randn(12, 1, 8, 8), torch.arange(12) % 10)
        return FedGKTClient(model, data, context=context, device="cpu")

    strategy = FedGKT(**QUICK)
    start(strategy, make, rounds=1)
    assert count_parameters(strategy.server_model) == 167_306


def test_other_features_or_classes_are_refused() -> None:
    def make(index: int, context: Context) -> FedGKTClient:
        width = 7 if index == 2 else FEATURES
        model = (nn.Linear(FEATURES, width), nn.Linear(width, CLASSES))
        return FedGKTClient(model, samples(index), context=context, device="cpu")

    with pytest.raises(HandshakeError, match=r"3 classes and features \[7\], expected 3 and \[5\]"):
        start(FedGKT(**QUICK), make)
    with pytest.raises(HandshakeError, match=r"0 clients fit, 4 are needed.*does not take features \[5\]"):
        start(FedGKT(server_model=nn.Linear(7, CLASSES), **QUICK), make)


def test_one_shape_of_features_is_taken_also_where_the_model_takes_several() -> None:
    def make(index: int, context: Context) -> FedGKTClient:
        side = 2 if index == 2 else 4
        data = TensorDataset(torch.randn(6, 16, side, side), torch.arange(6) % CLASSES)
        head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, CLASSES))
        return FedGKTClient((nn.Identity(), head), data, context=context, device="cpu")

    with pytest.raises(HandshakeError, match=r"features \[16, 2, 2\], expected 3 and \[16, 4, 4\]"):
        start(FedGKT(server_model=build_predictor((16, 4, 4), num_classes=CLASSES, seed=0), **QUICK), make)


def test_a_model_that_fails_without_a_message_is_reported() -> None:
    class Mute(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            raise AssertionError

    with pytest.raises(HandshakeError, match=r"does not take features \[5\]: AssertionError"):
        start(FedGKT(server_model=Mute(FEATURES, CLASSES), **QUICK))
    with pytest.raises(ConfigError, match="server_model cannot be used"):
        FedGKT(server_model=nn.LazyLinear(CLASSES))


@pytest.mark.parametrize("kind", [FedGKT, FedDKC])
@pytest.mark.parametrize("classes", [0, 1, 2**40])
@pytest.mark.parametrize("liars", [{0}, {0, 1, 2, 3}])
def test_a_client_with_an_impossible_number_of_classes_is_refused(
    kind: type[FedGKT], classes: int, liars: set[int]
) -> None:
    class Liar(FedGKTClient):
        def properties(self) -> dict[str, Any]:
            return {"num-classes": classes} if self.context.node_config["partition-id"] in liars else {}

    with pytest.raises(HandshakeError, match=f"{CLIENTS - len(liars)} clients fit, .*{classes} classes"):
        start(kind(**TARGETS[kind], **QUICK), lambda i, c: Liar(pair(i), samples(i), context=c, device="cpu"))


def test_test_rows_that_were_not_asked_for_are_dropped(flower_log: list[str]) -> None:
    class Eager(FedGKTClient):
        def knowledge(self, task: Task) -> ClientFeatures:
            sent = super().knowledge(task)
            if self.context.node_config["partition-id"] != 2:
                return sent
            values = {name: getattr(sent, name) for name in ("index", "features", "logits", "labels")}
            return ClientFeatures(**values, test_features=sent.features[:1], test_labels=sent.labels[:1])

    result = start(
        FedGKT(**QUICK), lambda i, c: Eager(pair(i), samples(i), context=c, device="cpu"), rounds=1
    )
    assert (result.rounds[0].participants, result.rounds[0].server_accuracy) == (3, None)
    assert any("1 test rows, expected at most 0" in line for line in flower_log)


def test_a_knowledge_set_in_another_order_is_noticed() -> None:
    x, y = samples(0).tensors
    client = lone_client(knowledge_set=TensorDataset(x.flip(0), y.flip(0)))
    config = FedGKTConfig()
    client.train(task(config), client.objective(task(config)), rows=True)
    with pytest.raises(DatasetError, match=r"in the same order; \d+ labels differ, the first at 0"):
        client.knowledge(task(config))


def test_a_server_model_with_other_classes_is_refused() -> None:
    with pytest.raises(HandshakeError, match=r"server_model returns \[2, 8\] for 2 rows, expected \[2, 3\]"):
        start(FedGKT(server_model=nn.Linear(FEATURES, 8), **QUICK))


def test_features_that_are_too_large_to_send_are_refused_before_training() -> None:
    text = r"its messages would have 960 bytes \(20 samples, 5 features, 3 classes\), .*feature-dtype=float16"
    with pytest.raises(HandshakeError, match=text):
        start(FedGKT(max_payload_bytes=300, **QUICK))
    # 20 rows of features, logits, index and label, and with them 6 of the test data
    start(FedGKT(max_payload_bytes=960, **QUICK), rounds=1)
    with pytest.raises(HandshakeError, match="would have 1,128 bytes"):
        start(FedGKT(max_payload_bytes=960, send_test_features=True, **QUICK))
    result = start(FedGKT(max_payload_bytes=1128, send_test_features=True, **QUICK), rounds=1)
    assert result.rounds[0].participants == CLIENTS
