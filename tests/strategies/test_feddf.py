"""FedDF's rounds against the oracle, its server's failures, resumption, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hierarchy as oracle
import numpy as np
import pytest
import torch
from ensemble_rounds import CLASSES, FEATURES, N_G, N_L, RATE, REFERENCE, data, descend, full, reference
from ensembles import close
from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord
from flwr.clientapp import ClientApp
from hierarchy import Linear, Samples
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from flwr_kd.checks import ConfigError
from flwr_kd.learning.batches import DatasetError
from flwr_kd.server.records import KDResult
from flwr_kd.strategies.feddf import FedDF, FedDFClient, FedDFConfig, PFedDFConfig
from flwr_kd.strategies.fedhead import communication_cost
from flwr_kd.testing.faults import Fault
from flwr_kd.testing.federation import WORK_SECONDS
from flwr_kd.testing.garbage import GARBAGE
from flwr_kd.transport.inline_grid import InlineGrid

SIZES = (5, 9, 14, 7)


def oracle_data(who: Sequence[int] = range(4), sizes: Sequence[int] = SIZES) -> dict[Any, Samples]:
    return {i: oracle.samples(*(part.numpy() for part in data(i, sizes[i]))) for i in who}


def rows() -> np.ndarray:
    return oracle.samples(reference().numpy(), np.zeros(REFERENCE)).x


def net(classes: int = CLASSES, hidden: int = 0) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = [nn.Linear(FEATURES, hidden), nn.ReLU()] if hidden else []
        return nn.Sequential(nn.Flatten(), *layers, nn.Linear(hidden or FEATURES, classes))


class Run:
    """A federation of linear models whose global models are kept, round by round."""

    def __init__(
        self,
        *,
        hidden: int = 0,
        options: dict[str, Any] | None = None,
        sizes: Sequence[int] = SIZES,
        **config: Any,
    ) -> None:
        self.hidden, self.sizes = hidden, sizes
        values: dict[str, Any] = {"local_epochs": N_L, "batch_size": 64, "optimizer": "sgd"}
        values |= {"learning_rate": RATE, "weight_decay": 0.0, "validation_share": 0.0, "server_epochs": N_G}
        given: dict[str, Any] = {"model": net(hidden=hidden), "public_set": TensorDataset(reference())}
        given |= {"device": "cpu", "min_available_nodes": 4} | (options or {})
        self.strategy = FedDF(FedDFConfig(**(values | config)), **given)
        self.models: list[Linear] = []
        self.trained = 0

    def app(self) -> ClientApp:
        run = self

        class Counting(FedDFClient):
            def phase_train(self, task: Any) -> Any:
                run.trained += 1
                return super().phase_train(task)

        def client_fn(context: Context) -> Any:
            index = int(context.node_config["partition-id"])
            train = TensorDataset(*data(index, self.sizes[index]))
            return Counting(net(hidden=self.hidden), train, context=context, device="cpu").to_client()

        return ClientApp(client_fn=client_fn)

    def start(self, rounds: int = 1, **grid: Any) -> KDResult:
        def keep(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
            if not self.hidden:
                values = [arrays[name].numpy() for name in ("1.weight", "1.bias")]
                self.models.append(oracle.linear(*values))
            return None

        initial = ArrayRecord(net(hidden=self.hidden).state_dict())
        return self.strategy.start(
            InlineGrid(self.app(), 4, work_seconds=WORK_SECONDS, **grid),
            initial,
            rounds,
            timeout=0.3,
            evaluate_fn=keep,
        )

    def check(
        self, server_round: int, who: Sequence[int] = range(4), average: str = "probabilities", **changes: Any
    ) -> None:
        options: dict[str, Any] = {"rate": RATE, "n_l": N_L, "n_g": N_G, "average": average} | changes
        expected = oracle.feddf(self.models[server_round - 1], oracle_data(who), rows(), **options)
        close(self.models[server_round], expected)


@pytest.mark.parametrize("average", ["logits", "probabilities"])
def test_rounds_equal_the_oracle(average: str) -> None:
    run = Run(average=average)
    result = run.start(2)
    run.check(1, average=average)
    run.check(2, average=average)
    assert [(r.participants, r.failures) for r in result.rounds] == [(4, 0)] * 2
    plain = oracle.feddf(run.models[0], oracle_data(), rows(), rate=RATE, n_l=N_L, n_g=0)
    assert np.abs(run.models[1].W - plain.W).max() > 1e-3


@pytest.mark.parametrize("average", ["logits", "probabilities"])
def test_a_round_of_a_model_that_is_not_linear(average: str) -> None:
    run = Run(hidden=6, average=average)
    arrays = run.start(1).arrays
    local = [net(hidden=6).double() for _ in SIZES]
    for k, model in enumerate(local):
        x, y = data(k, SIZES[k])
        descend(model, x.double(), nn.functional.one_hot(y, CLASSES).double(), N_L)
    student, x, total = net(hidden=6).double(), reference().double(), sum(SIZES)
    with torch.no_grad():
        for name, value in student.state_dict().items():
            value.copy_(sum(n / total * m.state_dict()[name] for n, m in zip(SIZES, local, strict=True)))
        if average == "logits":
            targets = torch.stack([m(x) for m in local]).mean(dim=0).softmax(dim=1)
        else:
            shared = [n / total * m(x).softmax(dim=1) for n, m in zip(SIZES, local, strict=True)]
            targets = torch.stack(shared).sum(dim=0)
    before = {name: value.clone() for name, value in student.state_dict().items()}
    descend(student, x, targets, N_G)
    for name, value in student.state_dict().items():
        np.testing.assert_allclose(arrays[name].numpy(), value.numpy(), rtol=0, atol=3e-6)
    assert (student.state_dict()["3.weight"] - before["3.weight"]).abs().max() > 1e-4


def test_logits_of_clients_of_one_size_teach_a_linear_model_nothing() -> None:
    """Their unweighted mean is then that of the mean model, which is its own teacher."""
    run = Run(average="logits", sizes=(8, 8, 8, 8))
    run.start(1)
    plain = oracle.feddf(run.models[0], oracle_data(sizes=(8, 8, 8, 8)), rows(), rate=RATE, n_l=N_L, n_g=0)
    close(run.models[1], plain)


def test_the_average_is_that_of_the_comparison_unless_said_otherwise() -> None:
    """FedHEAD's paper weights probabilities by samples; pFedDF is from a paper that compares with FedDF's own."""
    assert (FedDFConfig().average, PFedDFConfig().average) == ("probabilities", "logits")


def test_the_values_of_the_comparison_are_the_defaults() -> None:
    config = FedDFConfig()
    assert (config.local_epochs, config.server_epochs, config.batch_size, config.patience) == (20, 20, 128, 5)
    assert (config.optimizer, config.learning_rate, config.weight_decay) == ("adam", 1e-3, 1e-4)
    assert config.learning_rate_at(50) == 1e-3


def test_the_learning_rate_of_a_round() -> None:
    run = Run(lr_decay=0.5, lr_decay_every=1)
    run.start(2)
    run.check(1)
    run.check(2, rate=RATE / 2)


@pytest.mark.parametrize("rounds", [1, 3])
def test_what_it_costs(rounds: int) -> None:
    run = Run()
    result = run.start(rounds)
    expected = oracle.round_trips("feddf", sectors=2, clients=4, rounds=rounds)
    assert (
        run.strategy.round_trips
        == expected
        == communication_cost("feddf", sectors=2, clients=4, rounds=rounds)
    )
    copy = sum(len(value.data) for value in ArrayRecord(net().state_dict()).values())
    for stats in result.rounds:
        assert stats.bytes_by_partition == dict.fromkeys(range(4), (copy, copy))
    run.start(1)
    assert run.strategy.round_trips == 4


@pytest.mark.parametrize("kind", ["raise", "silent", "arrays-of-nan"])
def test_a_client_that_fails_has_no_part(kind: str) -> None:
    fault = Fault("garbage", garble=GARBAGE[kind]) if kind in GARBAGE else Fault(kind)
    run = Run()
    result = run.start(1, faults={2: fault})
    assert (result.rounds[0].participants, result.rounds[0].failures) == (3, 1)
    run.check(1, who=[0, 1, 3])
    assert run.strategy.round_trips == 3


def test_a_round_without_answers_keeps_the_model() -> None:
    run = Run()
    run.start(2, faults={k: Fault("raise", frozenset({1})) for k in range(4)})
    close(run.models[1], run.models[0], atol=0)
    run.check(2)


@pytest.mark.parametrize("hidden", [0, 6])
@pytest.mark.parametrize("value", [1e30, -3e38])
@pytest.mark.parametrize("average", ["logits", "probabilities"])
def test_huge_weights(hidden: int, value: float, average: str) -> None:
    run = Run(hidden=hidden, average=average)
    result = run.start(2, faults={0: Fault("garbage", frozenset({1}), garble=full(value))})
    assert result.rounds[0].participants == 4
    assert len(result.rounds) == 2
    for name, array in result.arrays.items():
        assert np.isfinite(array.numpy()).all(), name


def test_a_teacher_without_finite_outputs_is_reported(flower_log: list[str]) -> None:
    run, without = Run(hidden=6), Run(hidden=6)
    poisoned = run.start(1, faults={0: Fault("garbage", frozenset({1}), garble=full(1e38))}).arrays
    expected = without.start(1, faults={0: Fault("raise", frozenset({1}))}).arrays
    assert any("(partition 0) has outputs that are not finite" in line for line in flower_log)
    for name, value in expected.items():
        np.testing.assert_array_equal(poisoned[name].numpy(), value.numpy())


class Unlabelled(Dataset[Any]):
    def __len__(self) -> int:
        return REFERENCE

    def __getitem__(self, index: int) -> Any:
        return {"image": reference()[index], "label": "nonsense"}


@pytest.mark.parametrize(
    "public",
    [
        Unlabelled(),
        DataLoader(TensorDataset(reference()), batch_size=64, shuffle=True),
        TensorDataset(reference(), torch.full((REFERENCE,), -1)),
    ],
    ids=["dicts", "loader", "labels of -1"],
)
def test_labels_of_the_public_data_are_ignored(public: Any) -> None:
    run = Run(options={"public_set": public})
    run.start(1)
    run.check(1)


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        (
            {"model": net(classes=4)},
            ConfigError,
            r"model is not what initial_arrays are of: array '1\.weight' has",
        ),
        ({"model": net(hidden=3)}, ConfigError, "model is not what initial_arrays are of: arrays missing"),
        (
            {"public_set": TensorDataset(torch.zeros(5, 1, 3, 3))},
            ConfigError,
            r"model does not take public_set of shape \[1, 3, 3\]",
        ),
        ({"public_set": TensorDataset(reference()[:0])}, DatasetError, "public_set is empty"),
        ({"public_set": iter([1])}, DatasetError, "a map-style data set"),
        ({"device": "tpu"}, ConfigError, "device must be"),
    ],
)
def test_what_does_not_fit_is_refused_before_training(options: dict[str, Any], kind: Any, text: str) -> None:
    runs: list[Run] = []

    def begin() -> None:
        runs.append(Run(options=options))
        runs[0].start(1)

    with pytest.raises(kind, match=text):
        begin()
    assert all(run.trained == 0 for run in runs)


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    small: dict[str, Any] = {"batch_size": 4, "validation_share": 0.3, "patience": 1}
    whole = Run(**small)
    whole.start(3)
    Run(options={"checkpoint_dir": tmp_path}, **small).start(2)
    rest = Run(options={"checkpoint_dir": tmp_path, "resume": True}, **small)
    rest.start(3)
    close(rest.models[-1], whole.models[-1], atol=0)


def test_seeds_and_rounds_decide_what_the_server_holds_out() -> None:
    small: dict[str, Any] = {"validation_share": 0.3, "patience": 99}
    one, again, other = Run(**small), Run(**small), Run(options={"seed": 1}, **small)
    for run in (one, again, other):
        run.start(1)
    close(one.models[1], again.models[1], atol=0)
    assert np.abs(one.models[1].W - other.models[1].W).max() > 1e-6


def test_flowers_own_hooks_give_the_same() -> None:
    """`configure_train` and `aggregate_train`, which Flower's loop and its wrappers call."""
    run = Run()
    run.start(1)
    hooked = Run()
    grid = InlineGrid(hooked.app(), 4)
    strategy, arrays = hooked.strategy, ArrayRecord(net().state_dict())
    messages = list(strategy.configure_train(1, arrays, ConfigRecord(), grid))
    new, metrics = strategy.aggregate_train(1, list(grid.send_and_receive(messages)))
    assert new is not None
    assert metrics is not None
    close(oracle.linear(*(new[name].numpy() for name in ("1.weight", "1.bias"))), run.models[1], atol=0)
