"""What has gone wrong in this field's code before: small data, BatchNorm, names, noise, other people's models."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Context, RecordDict
from flwr.clientapp import ClientApp
from torch import nn
from torch.utils.data import DataLoader

from flwr_kd.client.client import KDClient
from flwr_kd.client.task import Task
from flwr_kd.learning.batches import Batches
from flwr_kd.learning.loop import batchnorm_frozen
from flwr_kd.models import build_model
from flwr_kd.server.records import KDResult, VoidRoundsError
from flwr_kd.server.strategy import KDStrategy
from flwr_kd.strategies.fedavg import FedAvg, FedAvgClient
from flwr_kd.strategies.fedhkd import FedHKD, FedHKDClient, HyperKnowledge
from flwr_kd.strategies.fedproto import FedProto, FedProtoClient
from flwr_kd.testing.faults import Fault
from flwr_kd.transport import flower_records
from flwr_kd.transport.inline_grid import InlineGrid
from flwr_kd.transport.payload import PayloadError

QUICK: dict[str, Any] = {"local_epochs": 1, "batch_size": 8}
MakeClient = Callable[[int, Context], KDClient]


def start(
    strategy: KDStrategy,
    make: MakeClient,
    arrays: ArrayRecord,
    clients: int = 3,
    rounds: int = 2,
    **grid: Any,
) -> tuple[InlineGrid, KDResult]:
    def client_fn(context: Context) -> Any:
        return make(int(context.node_config["partition-id"]), context).to_client()

    inline = InlineGrid(ClientApp(client_fn=client_fn), clients, **grid)
    return inline, strategy.start(inline, arrays, num_rounds=rounds)


def node(partition: int = 0) -> Context:
    return Context(1, 17 + partition, {"partition-id": partition}, RecordDict(), {})


def fit(
    client: KDClient, strategy: KDStrategy, server_round: int = 1, payload: bytes | None = None
) -> tuple[list[np.ndarray], dict[str, Any]]:
    """One answer of a client, asked as the strategy asks."""
    run = strategy.prepare(ArrayRecord(client.model.state_dict()))
    config = run.messages.config("train", server_round, strategy.template.names)
    if payload is not None:
        config[flower_records.PAYLOAD] = payload
    arrays, _, metrics = client.fit(client.arrays(()), config)
    return arrays, dict(metrics)


def record(model: nn.Module) -> ArrayRecord:
    return ArrayRecord(model.state_dict())


def states(result: KDResult) -> dict[str, bytes]:
    return {name: array.data for name, array in result.arrays.items()}


# ---------------------------------------------------------------------- small clients


def test_a_last_batch_of_one_sample_under_batchnorm(make_blobs: Any, make_model: Any) -> None:
    sizes = [9, 17, 1]  # with batches of 8: one left over, one left over, one in all

    def make(index: int, context: Context) -> KDClient:
        return FedHKDClient(
            make_model("resnet8"), make_blobs(sizes[index], index), make_blobs(4, 9), context=context
        )

    _, result = start(FedHKD(**QUICK), make, record(make_model("resnet8")))
    assert [(r.participants, r.failures) for r in result.rounds] == [(3, 0), (3, 0)]
    for array in result.arrays.values():
        assert np.isfinite(array.numpy()).all()


def test_no_sample_is_lost_where_a_single_one_is_left_over(make_blobs: Any) -> None:
    batches = list(Batches(make_blobs(17, 0), num_classes=4).shuffled(8, torch.Generator().manual_seed(0)))
    assert [len(y) for _, y in batches] == [8, 9]


def test_the_running_statistics_stay_where_the_only_batch_has_one_sample(
    make_blobs: Any, make_model: Any
) -> None:
    model = make_model("resnet8")
    before = {n: b.clone() for n, b in model.named_buffers()}
    weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    client = FedAvgClient(model, make_blobs(1, 0), context=node())
    fit(client, FedAvg(**QUICK))
    assert all(torch.equal(before[n], b) for n, b in client.model.named_buffers())
    assert any(not torch.equal(weights[n], p) for n, p in client.model.named_parameters())


@pytest.mark.parametrize("strategy", [FedAvg, FedHKD, FedProto])
def test_clients_with_one_class_or_without_test_data(strategy: Any, make_blobs: Any, make_model: Any) -> None:
    kinds: dict[Any, Any] = {FedAvg: FedAvgClient, FedHKD: FedHKDClient, FedProto: FedProtoClient}

    def make(index: int, context: Context) -> KDClient:
        data = make_blobs(16, index)
        if index == 0:
            data = data.subset(torch.nonzero(data.y == 2).flatten())
        tests = [make_blobs(4, 9), None, make_blobs(4, 9).subset([])]
        return kinds[strategy](make_model(), data, tests[index], context=context)  # type: ignore[no-any-return]

    _, result = start(strategy(fraction_evaluate=1.0, **QUICK), make, record(make_model()))
    assert [(r.participants, r.failures) for r in result.rounds] == [(3, 0), (3, 0)]
    # The one client with test data is the mean; the others do not count as 0.
    assert all(r.local_accuracy in (0.0, 0.25, 0.5, 0.75, 1.0) for r in result.rounds)

    _, none = start(
        strategy(**QUICK),
        lambda i, c: kinds[strategy](make_model(), make_blobs(8, i), None, context=c),
        record(make_model()),
    )
    assert [r.local_accuracy for r in none.rounds] == [None, None]
    assert all(r.train_loss is not None for r in none.rounds)


# ---------------------------------------------------------------------- arrays


@pytest.mark.parametrize("strategy", [FedAvg, FedHKD])
def test_batchnorms_counter_stays_a_whole_number_without_a_shape(
    strategy: Any, make_blobs: Any, make_model: Any
) -> None:
    client = FedAvgClient if strategy is FedAvg else FedHKDClient

    def make(index: int, context: Context) -> KDClient:
        return client(make_model("resnet8"), make_blobs(16 + 8 * index, index), context=context)

    _, result = start(strategy(**QUICK), make, record(make_model("resnet8")))
    counters = [n for n in result.arrays if n.endswith("num_batches_tracked")]
    assert counters
    for name in counters:
        value = result.arrays[name].numpy()
        assert (value.dtype, value.shape) == (np.dtype("int64"), ())
        assert value > 0
    fresh = make_model("resnet8", seed=9)
    fresh.load_state_dict(result.arrays.to_torch_state_dict())
    assert fresh.state_dict()[counters[0]].shape == ()


class Turned(nn.Module):
    """The same names in another order."""

    def __init__(self, turned: bool, seed: int = 0) -> None:
        super().__init__()
        parts = [("low", nn.Linear(16, 8)), ("mid", nn.Linear(8, 8)), ("high", nn.Linear(8, 4))]
        for name, part in reversed(parts) if turned else parts:
            self.add_module(name, part)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for _, parameter in sorted(self.named_parameters()):
                parameter.normal_(std=0.3, generator=generator)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.get_submodule("low")(x.flatten(1)).relu()
        out: torch.Tensor = self.get_submodule("high")(self.get_submodule("mid")(h).relu())
        return out


def test_arrays_are_matched_by_name_whatever_their_order(make_blobs: Any) -> None:
    def run(turned: bool) -> KDResult:
        def make(index: int, context: Context) -> KDClient:
            return FedHKDClient(
                Turned(turned and index == 1, seed=index),
                make_blobs(16, index),
                make_blobs(4, 9),
                context=context,
                reproducible_noise=True,
            )

        return start(FedHKD(**QUICK), make, record(Turned(False)))[1]

    assert list(Turned(True).state_dict()) != list(Turned(False).state_dict())
    straight, turned = run(False), run(True)
    assert states(straight) == states(turned)
    assert list(turned.arrays) == list(Turned(False).state_dict())
    assert [r.local_accuracy for r in straight.rounds] == [r.local_accuracy for r in turned.rounds]


def test_a_client_that_returns_fewer_arrays_is_dropped(
    make_blobs: Any, make_model: Any, flower_log: list[str]
) -> None:
    class Short(FedAvgClient):
        def arrays(self, names: Any) -> list[np.ndarray]:
            return super().arrays(names)[:-1]

    def make(index: int, context: Context) -> KDClient:
        kind = Short if index == 1 else FedAvgClient
        return kind(make_model(), make_blobs(16, index), context=context)

    _, result = start(FedAvg(**QUICK), make, record(make_model()), rounds=1)
    assert (result.rounds[0].participants, result.rounds[0].failures) == (2, 1)
    (line,) = flower_log
    count = len(make_model().state_dict())
    assert "(partition 1) is dropped" in line
    assert f"{count - 1} arrays came back, expected {count}" in line


# ---------------------------------------------------------------------- running statistics


def test_running_statistics_move_in_training_only(make_blobs: Any, make_model: Any) -> None:
    model = make_model("resnet8")
    client = FedHKDClient(model, make_blobs(16, 0), make_blobs(8, 1), context=node())

    def statistics() -> dict[str, torch.Tensor]:
        return {name: buffer.clone() for name, buffer in client.model.named_buffers()}

    def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
        return all(torch.equal(a[name], b[name]) for name in a)

    start_ = statistics()
    assert any("running_mean" in name for name in start_)
    client.model.train()
    client.extract(8)
    assert same(start_, statistics())
    client.model.train()
    client.measure(8)
    assert same(start_, statistics())
    strategy = FedHKD(**QUICK)
    run = strategy.prepare(record(make_model("resnet8")))
    client.model.train()
    client.evaluate(client.arrays(()), run.messages.config("evaluate", 1, strategy.template.names))
    assert same(start_, statistics())
    arrays, _ = fit(client, strategy)
    assert not same(start_, statistics())
    # What was sent is what the model had at the end of training, before knowledge was extracted.
    assert all(
        np.array_equal(a, b) for a, b in zip(arrays, client.arrays(strategy.template.names), strict=True)
    )
    assert not client.model.training


def headed() -> tuple[nn.Module, nn.Module]:
    generator = torch.Generator().manual_seed(0)
    extractor = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.ReLU())
    head = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 4))
    with torch.no_grad():
        for layer in [*extractor, *head]:
            if isinstance(layer, nn.Linear):
                layer.weight.normal_(std=0.3, generator=generator)
                layer.bias.zero_()
    return extractor, head


def test_a_head_with_batchnorm_sees_training_data_only(make_blobs: Any) -> None:
    """The global representations pass through the head too; its statistics must be those of the data."""

    def moved(weight: float) -> torch.Tensor:
        # So small a step that the weights, and with them the data's statistics, are the same in both.
        client = FedHKDClient(headed(), make_blobs(16, 0), context=node())
        strategy = FedHKD(classifier_weight=weight, gamma=0.0, learning_rate=1e-12, **QUICK)
        fit(client, strategy, 2, knowledge([0, 1, 2, 3], 100.0).to_bytes())
        statistics = dict(client.model.named_buffers())
        (name,) = [n for n in statistics if n.endswith("running_mean")]
        return torch.clone(statistics[name])

    without, with_term = moved(0.0), moved(1.0)
    assert without.abs().sum() > 0
    assert torch.allclose(without, with_term, atol=1e-6)


def test_a_head_with_batchnorm_runs_end_to_end(make_blobs: Any) -> None:
    def make(index: int, context: Context) -> KDClient:
        return FedHKDClient(headed(), make_blobs(17, index), make_blobs(4, 9), context=context)

    names = FedHKDClient(headed(), make_blobs(4, 0), context=node()).model
    strategy = FedHKD(threshold=0.0, **QUICK)
    _, result = start(strategy, make, record(names))
    assert [r.failures for r in result.rounds] == [0, 0]
    assert strategy.knowledge is not None
    assert strategy.knowledge.known.all()


def test_frozen_batchnorm_goes_back_to_training() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3), nn.Dropout())
    model.train()
    model[1].eval()

    def fail_inside() -> None:
        with batchnorm_frozen(model):
            assert [m.training for m in model] == [False, False, True]
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_inside()
    assert [m.training for m in model] == [True, False, True]


# ---------------------------------------------------------------------- other people's code


def test_hugging_face_dicts_end_to_end(make_model: Any) -> None:
    def rows(seed: int, size: int) -> Any:
        rng = np.random.default_rng(seed)
        labels = rng.integers(0, 4, size)
        images = rng.normal(size=(size, 1, 4, 4)) + 2 * labels[:, None, None, None]
        return datasets.Dataset.from_dict({"image": images.tolist(), "label": labels.tolist()}).with_format(
            "torch"
        )

    def make(index: int, context: Context) -> KDClient:
        return FedHKDClient(make_model(), rows(index, 20), rows(9, 8), context=context)

    _, result = start(FedHKD(**QUICK), make, record(make_model()))
    assert [(r.participants, r.failures) for r in result.rounds] == [(3, 0), (3, 0)]
    assert result.rounds[-1].local_accuracy is not None


class Mine(nn.Module):
    """A user's model: no features(), no classify(), dropout, and an output that is a Linear."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 3, padding=1)
        self.bn = nn.BatchNorm2d(3)
        self.drop = nn.Dropout(0.2)
        self.fc1, self.out = nn.Linear(48, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.relu(self.bn(self.conv(x)))
        h = self.drop(torch.relu(self.fc1(h.flatten(1))))
        out: torch.Tensor = self.out(h)
        return out


def test_a_users_own_model_and_loader(make_blobs: Any) -> None:
    mine = Mine()
    state = mine.state_dict()

    def make(index: int, context: Context) -> KDClient:
        loader = DataLoader(make_blobs(21, index), batch_size=4, shuffle=True)
        return FedHKDClient(
            copy.deepcopy(mine),
            loader,
            DataLoader(make_blobs(8, 9)),
            context=context,
            reproducible_noise=True,
        )

    def run(workers: int) -> KDResult:
        grid, result = start(FedHKD(local_epochs=1), make, ArrayRecord(state), workers=workers)
        grid.close()
        return result

    result, again = run(1), run(2)
    assert [r.failures for r in result.rounds] == [0, 0]
    # The names are those of the user's own state dict, and what comes back loads there.
    Mine().load_state_dict(result.arrays.to_torch_state_dict())
    assert list(result.arrays) == list(state)
    # 21 samples in batches of 4, the last one joining the batch before: 5 steps a round.
    assert int(result.arrays["bn.num_batches_tracked"].numpy()) == 10
    # Dropout can only draw from the global generator: even so, the same numbers in threads.
    assert states(result) == states(again)


def test_the_callers_generators_are_left_alone(make_blobs: Any) -> None:
    models = [Mine() for _ in range(3)]
    python_state = torch.get_rng_state(), np.random.get_state()[1].copy()  # type: ignore[index]  # noqa: NPY002

    def make(index: int, context: Context) -> KDClient:
        loader = DataLoader(make_blobs(16, index), batch_size=4, shuffle=True)
        return FedHKDClient(models[index], loader, make_blobs(8, 9), context=context)

    start(FedHKD(fraction_train=0.5, **QUICK), make, record(models[0]))
    assert torch.equal(python_state[0], torch.get_rng_state())
    assert np.array_equal(python_state[1], np.random.get_state()[1])  # type: ignore[index]  # noqa: NPY002


# ---------------------------------------------------------------------- FedHKD's knowledge


def knowledge(classes: list[int], value: float = 0.5, counts: int = 4, dim: int = 8) -> HyperKnowledge:
    return HyperKnowledge(
        classes=np.array(classes, dtype=np.int64),
        representations=np.full((len(classes), dim), value, dtype=np.float32),
        predictions=np.full((len(classes), 4), 0.25, dtype=np.float32),
        counts=np.full(len(classes), counts, dtype=np.int64),
    )


def run_hkd(make_blobs: Any, make_model: Any, rounds: int, **options: Any) -> tuple[FedHKD, KDResult]:
    def make(index: int, context: Context) -> KDClient:
        return FedHKDClient(
            make_model(), make_blobs(24, index), make_blobs(8, 9), context=context, reproducible_noise=True
        )

    strategy = FedHKD(**{"threshold": 0.0, **QUICK, **options})
    return strategy, start(strategy, make, record(make_model()), rounds=rounds)[1]


def test_the_first_round_is_cross_entropy_alone(make_blobs: Any, make_model: Any) -> None:
    off = {"gamma": 0.0, "classifier_weight": 0.0}
    _, full_1 = run_hkd(make_blobs, make_model, 1)
    _, plain_1 = run_hkd(make_blobs, make_model, 1, **off)
    assert states(full_1) == states(plain_1)
    assert full_1.rounds[0].train_loss == plain_1.rounds[0].train_loss
    _, full_2 = run_hkd(make_blobs, make_model, 2)
    _, plain_2 = run_hkd(make_blobs, make_model, 2, **off)
    assert states(full_2) != states(plain_2)
    for part in ({"gamma": 0.0}, {"classifier_weight": 0.0}):
        _, partly = run_hkd(make_blobs, make_model, 2, **part)
        assert states(partly) not in (states(full_2), states(plain_2))


def test_without_its_terms_it_is_fedavg(make_blobs: Any, make_model: Any) -> None:
    _, result = run_hkd(make_blobs, make_model, 2, gamma=0.0, classifier_weight=0.0)

    def make(index: int, context: Context) -> KDClient:
        return FedAvgClient(make_model(), make_blobs(24, index), make_blobs(8, 9), context=context)

    _, plain = start(FedAvg(**QUICK), make, record(make_model()))
    for name, array in plain.arrays.items():
        np.testing.assert_allclose(array.numpy(), result.arrays[name].numpy(), rtol=1e-5, atol=1e-7)


def test_classes_that_nobody_shares(make_blobs: Any, make_model: Any) -> None:
    """Samples of such a class train on cross-entropy; with none at all every round is FedAvg's."""

    def make(index: int, context: Context) -> KDClient:
        data = make_blobs(24, index)
        return FedHKDClient(
            make_model(),
            data.subset(torch.nonzero(data.y != 3).flatten()),
            context=context,
            reproducible_noise=True,
        )

    strategy = FedHKD(threshold=0.1, **QUICK)
    _, result = start(strategy, make, record(make_model()))
    assert strategy.knowledge is not None
    assert strategy.knowledge.known.tolist() == [True, True, True, False]
    assert strategy.knowledge.counts.tolist() == [18, 18, 18, 0]
    assert [r.failures for r in result.rounds] == [0, 0]

    nobody, empty = run_hkd(make_blobs, make_model, 2, threshold=1.0)
    assert nobody.knowledge is not None
    assert not nobody.knowledge.known.any()
    _, plain = run_hkd(make_blobs, make_model, 2, gamma=0.0, classifier_weight=0.0)
    assert states(empty) == states(plain)


def sent_knowledge(
    make_blobs: Any, make_model: Any, reproducible: bool | None, **options: Any
) -> HyperKnowledge:
    extra = {} if reproducible is None else {"reproducible_noise": reproducible}
    client = FedHKDClient(make_model(), make_blobs(24, 0), context=node(), **extra)
    _, metrics = fit(client, FedHKD(threshold=0.0, seed=5, **QUICK, **options))
    return HyperKnowledge.from_bytes(metrics["payload"], dims={"C": 4, "D": 8})


def test_the_noise_is_secret_unless_a_simulation_asks_otherwise(make_blobs: Any, make_model: Any) -> None:
    secret = [sent_knowledge(make_blobs, make_model, None) for _ in range(2)]
    known = [sent_knowledge(make_blobs, make_model, True) for _ in range(2)]
    clean = sent_knowledge(make_blobs, make_model, None, noise="none")
    assert not np.array_equal(secret[0].representations, secret[1].representations)
    assert np.array_equal(known[0].representations, known[1].representations)
    # All the rest is the same: only the noise is secret.
    assert np.array_equal(secret[0].predictions, secret[1].predictions)
    assert np.array_equal(secret[0].predictions, clean.predictions)
    assert np.array_equal(secret[0].counts, clean.counts)
    # Its size is the paper's: 2 ζ σ / N = 2 · 3 · 7 / 6 per element, over 32 elements.
    difference = np.concatenate(
        [(m.representations - clean.representations).ravel() for m in [*secret, known[0]]]
    )
    assert difference.std() == pytest.approx(7.0, rel=0.35)


def test_the_server_warns_once_that_noise_drowns_the_knowledge(
    make_blobs: Any, make_model: Any, flower_log: list[str]
) -> None:
    run_hkd(make_blobs, make_model, 3)
    assert len([line for line in flower_log if "far above" in line]) == 1
    flower_log.clear()
    run_hkd(make_blobs, make_model, 2, noise="none")
    run_hkd(make_blobs, make_model, 2, sigma=0.001)
    assert flower_log == []


def test_knowledge_of_more_samples_than_the_client_has_is_dropped(
    make_blobs: Any, make_model: Any, flower_log: list[str]
) -> None:
    """Else one client could outweigh all others in the global knowledge."""

    def boast(content: RecordDict) -> None:
        content.config_records["fitres.metrics"]["payload"] = knowledge([0], 1e4, counts=10**9).to_bytes()

    def make(index: int, context: Context) -> KDClient:
        return FedHKDClient(make_model(), make_blobs(24, index), context=context, reproducible_noise=True)

    strategy = FedHKD(threshold=0.0, noise="none", **QUICK)
    faults: Mapping[int, Fault] = {1: Fault("garbage", garble=boast)}
    _, result = start(strategy, make, record(make_model()), faults=faults)
    assert [(r.participants, r.failures) for r in result.rounds] == [(2, 1), (2, 1)]
    assert "knowledge of 1000000000 samples from a client with 24" in flower_log[0]
    assert strategy.knowledge is not None
    assert strategy.knowledge.representations.abs().max() < 1e3


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"classes": np.array([0, 0])}, "classes"),
        ({"classes": np.array([0, 9])}, "classes"),
        ({"counts": np.array([0, 1])}, "counts"),
        ({"predictions": np.full((2, 4), 0.5, dtype=np.float32)}, "predictions"),
    ],
)
def test_knowledge_that_cannot_be_is_refused_by_the_client_too(
    changes: dict[str, Any], text: str, make_blobs: Any, make_model: Any
) -> None:
    good = knowledge([0, 1])
    fields = {n: getattr(good, n) for n in ("classes", "representations", "predictions", "counts")}
    with pytest.raises(PayloadError, match=text):
        HyperKnowledge(**(fields | changes)).to_bytes()
    client = FedHKDClient(make_model(), make_blobs(8, 0), context=node())
    with pytest.raises(PayloadError):
        fit(client, FedHKD(**QUICK), 2, knowledge([0], dim=5).to_bytes())


def test_a_model_of_another_feature_size_does_not_mix_in(make_blobs: Any, make_model: Any) -> None:
    client = FedHKDClient(
        build_model("mlp", input_shape=(1, 4, 4), num_classes=4, seed=0, feature_dim=6),
        make_blobs(8, 0),
        context=node(),
    )
    strategy = FedHKD(**QUICK)
    config = strategy.prepare(record(make_model())).messages.config("train", 1, strategy.template.names)
    with pytest.raises(PayloadError, match="the server's model does not fit this client's"):
        client.fit([a.numpy() for a in record(make_model()).values()], config)


# ---------------------------------------------------------------------- runs after one another


def test_two_runs_in_one_process_do_not_know_of_each_other(make_blobs: Any, make_model: Any) -> None:
    _, first = run_hkd(make_blobs, make_model, 2)

    def personal(index: int, context: Context) -> KDClient:
        return FedProtoClient(make_model(), make_blobs(24, index), make_blobs(8, 9), context=context)

    _, proto = start(FedProto(**QUICK), personal, ArrayRecord())
    _, second = run_hkd(make_blobs, make_model, 2)
    _, proto_again = start(FedProto(**QUICK), personal, ArrayRecord())
    assert states(first) == states(second)
    assert [r.train_loss for r in proto.rounds] == [r.train_loss for r in proto_again.rounds]


def test_a_personal_model_lives_in_the_clients_own_state(
    make_blobs: Any, make_model: Any, tmp_path: Any
) -> None:
    def personal(index: int, context: Context) -> KDClient:
        return FedProtoClient(make_model(), make_blobs(24, index), make_blobs(8, 9), context=context)

    in_memory, one = start(FedProto(**QUICK), personal, ArrayRecord(), rounds=3)
    configs = [{"state-dir": str(tmp_path)}] * 3
    on_disk, other = start(FedProto(**QUICK), personal, ArrayRecord(), rounds=3, node_configs=configs)
    assert [r.train_loss for r in one.rounds] == [r.train_loss for r in other.rounds]
    assert one.rounds[2].train_loss < one.rounds[0].train_loss  # type: ignore[operator]
    assert all(len(c.state.array_records) == 1 for c in in_memory.contexts.values())
    assert all(len(c.state.array_records) == 0 for c in on_disk.contexts.values())
    # The last two rounds of each: a resumed server may ask for the last one again.
    names = sorted(path.name.partition("-node-")[2] for path in tmp_path.iterdir())
    assert names == [f"{node}-round-{r}.safetensors" for node in range(3) for r in (2, 3)]


def test_training_that_diverges_says_so(make_blobs: Any, make_model: Any, flower_log: list[str]) -> None:
    def make(index: int, context: Context) -> KDClient:
        return FedAvgClient(make_model(), make_blobs(24, index), context=context)

    strategy = FedAvg(optimizer="sgd", learning_rate=1e30, **QUICK)
    with pytest.raises(VoidRoundsError) as raised:
        start(strategy, make, record(make_model()), rounds=1)
    result = raised.value.result
    assert result is not None
    assert result.rounds[0].failures == 3
    assert "try a smaller learning-rate" in flower_log[0]
    assert states(result) == {n: a.data for n, a in record(make_model()).items()}


def test_a_task_without_a_payload_reads_none() -> None:
    task = Task(1, "train", 0, (), [], None, FedHKD().config)
    assert task.read(HyperKnowledge, D=8, C=4) is None
