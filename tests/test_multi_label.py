"""Samples with several labels each: in the methods that take them, in the data, in a comparison's table."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Context, RecordDict
from flwr.clientapp import ClientApp
from sklearn.metrics import roc_auc_score
from torch import nn
from torch.utils.data import TensorDataset

from flwr_kd import registry
from flwr_kd.checks import ConfigError
from flwr_kd.client.client import KDClient
from flwr_kd.data import DataError, MultiLabelDataset, Samples, Selection, load, load_public
from flwr_kd.data._base import Bundle
from flwr_kd.experiments.comparison import compare, prepare
from flwr_kd.experiments.experiment import Experiment
from flwr_kd.experiments.options import ExperimentOptions
from flwr_kd.experiments.runner import run
from flwr_kd.learning.batches import Batches, DatasetError
from flwr_kd.results.table import table
from flwr_kd.server.records import Node
from flwr_kd.strategies.fedavg import FedAvg, FedAvgClient
from flwr_kd.transport.inline_grid import InlineGrid
from tests.own_functions import make_importable

METHODS = registry.methods()
TAKING = sorted(name for name, method in METHODS.items() if method.takes_multi_label)
SETTINGS = {
    "fedalign": ("learning-rate=0.1",),
    "fedfomo": ("local-epochs=5", "learning-rate=0.1"),
    "ktpfl-weights": ("local-epochs=5", "learning-rate=0.1"),
    "per-fedavg": ("learning-rate=0.1",),
    "per-fedavg-hf": ("learning-rate=0.1",),
    "pfedhn": ("learning-rate=0.1",),
    "pfedhn-pc": ("learning-rate=0.1",),
    "pfedme": ("proximal-lambda=0.03", "learning-rate=30", "personal-learning-rate=0.3", "local-epochs=1"),
}
"""Settings of those methods that train by SGD, and need larger rates."""
NAME = "own_labels_of_test"
SOURCE = """
import numpy as np

from flwr_kd.data import Samples


def findings():
    draw = np.random.default_rng(0)
    x = draw.normal(size=(400, 8))
    return Samples(x, (x @ draw.normal(size=(8, 4)) + draw.normal(size=(400, 4)) > 1).astype(int))
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    make_importable(NAME, SOURCE, tmp_path, monkeypatch)
    return f"{NAME}:findings"


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))


def data(size: int = 30) -> MultiLabelDataset:
    x = torch.randn(size, 3, generator=torch.Generator().manual_seed(size))
    return MultiLabelDataset(x, (x[:, :2] > 0.3).float())


def node(**config: Any) -> Context:
    return Context(1, 1, {"partition-id": 0, **config}, RecordDict(), {})


@pytest.mark.parametrize("name", TAKING)
def test_a_method_learns_several_labels(name: str, own: str) -> None:
    config = METHODS[name].config(SETTINGS.get(name, ("local-epochs=3", "learning-rate=0.01")))
    experiment = Experiment(dataset=own, clients=3, rounds=3, model="mlp", partition="iid", backend="inline")
    result = run(METHODS[name], experiment, config=config)
    last = result.rounds[-1]
    assert (last.failures, last.local_top5) == (0, None)
    assert last.local_auroc is not None
    assert last.local_auroc > 0.65
    assert (last.global_auroc is not None) == METHODS[name].global_model
    assert all("local_auroc" in values for values in last.clients.values())


@pytest.mark.parametrize("name", sorted(set(METHODS) - set(TAKING)))
def test_another_method_refuses_them(name: str, own: str) -> None:
    """Before it begins, and in Python when its client is built."""
    message = re.escape(f"methods that take several: {', '.join(TAKING)}")
    with pytest.raises(ConfigError, match=rf"{name} needs one class per sample, and these .*{message}"):
        run(METHODS[name], Experiment(dataset=own, clients=2, rounds=1, backend="inline"))
    client: type[KDClient[Any]] = METHODS[name].client
    with pytest.raises(ConfigError, match=rf"{client.__name__} needs one class per sample"):
        client(net(), data(), context=node(), **METHODS[name].client_options)


def test_what_a_client_measures_is_scikit_learns(monkeypatch: pytest.MonkeyPatch) -> None:
    test = data(40)
    client = FedAvgClient(net(), data(), test, context=node(), device="cpu")
    measured = client.measure(16)
    with torch.no_grad():
        logits = client.model(test.x).numpy()
    assert measured is not None
    assert measured.auroc == pytest.approx(roc_auc_score(test.labels.numpy(), logits))
    assert measured.accuracy == pytest.approx(((logits > 0) == test.labels.numpy()).mean())


def test_a_users_own_data_set_says_that_it_has_several_labels() -> None:
    own = TensorDataset(data().x, data().labels.long())
    with pytest.raises(DatasetError, match=r"one label per sample .* several labels multi_label=True"):
        next(FedAvgClient(net(), own, context=node()).train_batches.ordered(8))
    app = ClientApp(
        client_fn=lambda context: FedAvgClient(net(), own, own, context=context, multi_label=True).to_client()
    )
    strategy = FedAvg(local_epochs=20, learning_rate=0.05, min_available_nodes=2)
    result = strategy.start(InlineGrid(app, 2), ArrayRecord(net().state_dict()), num_rounds=2)
    assert result.rounds[-1].local_auroc > 0.95


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (torch.zeros(4, 3), r"must be a tensor of 2 numbers, 0 or 1, .*batch is \[B, 2\]; got \[4, 3\]"),
        (torch.zeros(4, dtype=torch.int64), r"got \[4\]"),
        (torch.tensor([[0.0, 0.5]]), r"labels must be 0 or 1, got 0.5"),
        (torch.tensor([[0, -1]]), r"labels must be 0 or 1, got -1"),
        (torch.tensor([[torch.nan, 1]]), r"labels must be 0 or 1, got nan"),
    ],
)
def test_other_labels_are_refused(labels: torch.Tensor, message: str) -> None:
    batches = Batches(TensorDataset(torch.zeros(len(labels), 3), labels), num_classes=2, multi_label=True)
    with pytest.raises(DatasetError, match=message):
        next(batches.ordered(8))


def test_classes_have_no_meaning() -> None:
    with pytest.raises(DatasetError, match="classes has no meaning with multi_label=True"):
        FedAvgClient(net(), data(), context=node(), classes=["a", "b"])


def test_a_histogram_counts_each_sample_by_its_first_label() -> None:
    client = FedAvgClient(net(), data(), context=node(**{"share-histogram": True}))
    properties = client.get_properties({})
    counts = data().y.bincount(minlength=2).tolist()
    assert json.loads(str(properties["class-counts"])) == counts
    assert Node.from_properties(1, {"wire-version": 2, **properties}).class_counts == tuple(counts)


class TestData:
    def test_a_data_set_keeps_all_labels(self) -> None:
        labels = torch.tensor([[0, 1, 1], [1, 0, 0], [0, 0, 0]])
        whole = MultiLabelDataset(torch.arange(3.0)[:, None], labels)
        assert whole.y.tolist() == [1, 0, 0]
        part = whole.subset([2, 0])
        assert isinstance(part, MultiLabelDataset)
        assert part.labels.tolist() == [[0, 0, 0], [0, 1, 1]]
        assert part[1][1].tolist() == [0, 1, 1]
        assert whole.to(torch.device("cpu")) is whole
        images = MultiLabelDataset(torch.zeros(3, 1, 2, 2), labels)
        padded = Bundle("pictures", images, images, 3, (1, 2, 2)).padded(4)
        assert padded.multi_label
        assert padded.train.tensors[1].tolist() == labels.tolist()

    @pytest.mark.parametrize("labels", [torch.tensor([0, 1]), torch.tensor([[2.0, 0], [0, 0]])])
    def test_other_labels_are_refused(self, labels: torch.Tensor) -> None:
        with pytest.raises(DataError, match=r"labels must be 0 or 1, with shape \[N, C\]"):
            MultiLabelDataset(torch.zeros(2, 1), labels)

    def test_labels_stay_beside_their_samples(self, own: str) -> None:
        """Also where samples are held back, taken for the test, limited and merged."""
        draw = np.random.default_rng(0)
        x = draw.normal(size=(400, 8))
        y = (x @ draw.normal(size=(8, 4)) + draw.normal(size=(400, 4)) > 1).astype(int)
        known = {row.astype(np.float32).tobytes(): labels.tolist() for row, labels in zip(x, y, strict=True)}
        for options in ({}, {"limit": 50}, {"selection": Selection(class_limit=30, merge_test=True)}):
            bundle = load(own, **options)  # type: ignore[arg-type]
            assert bundle.multi_label
            for part in (bundle.train, bundle.test, load_public(None, dataset=own)):
                for inputs, labels in zip(*part.tensors, strict=True):
                    assert known[inputs.numpy().tobytes()] == labels.tolist()
        with pytest.raises(DataError, match="classes cannot be chosen where samples have several labels"):
            load(own, selection=Selection(classes="2"))

    @pytest.mark.parametrize(
        ("labels", "message"),
        [
            (np.full((3, 2), 2), r"y with shape \[3, 2\] must be 0 or 1 for each of at least two labels"),
            (np.zeros((3, 1)), r"y with shape \[3, 1\] must be 0 or 1 for each of at least two"),
            (np.full((3, 2), np.nan), r"y with shape \[3, 2\] must be 0 or 1"),
        ],
    )
    def test_other_samples_are_refused(self, labels: Any, message: str) -> None:
        with pytest.raises(DataError, match=message):
            Samples(np.zeros((3, 1)), labels)

    def test_a_test_set_of_another_kind_is_refused(self) -> None:
        x, several = np.zeros((3, 1)), np.eye(3, 2)
        with pytest.raises(DataError, match=r"y and test_y must both be \[N\], or both \[N, C\]"):
            Samples(x, several, test_x=x, test_y=np.zeros(3, dtype=int))
        with pytest.raises(DataError, match=r"y and test_y must both"):
            Samples(x, several, test_x=x, test_y=np.eye(3))
        with pytest.raises(DataError, match=r"test_y with shape \[3, 2\] must be 0 or 1"):
            Samples(x, several, test_x=x, test_y=several * 3)


def test_the_table_has_auroc_in_place_of_accuracy(own: str) -> None:
    options = ExperimentOptions(dataset=own, clients=2, rounds=1, backend="inline")
    comparison = compare(["fedavg", "fedprox"], options, seeds=[0])
    headers = [str(column.header).replace("\n", " ") for column in table(comparison).columns]
    assert headers[1:3] == ["local AUROC %", "global AUROC %"]


def test_flipped_labels_need_one_class(own: str) -> None:
    experiment = Experiment(
        dataset=own, clients=3, rounds=1, attack="label-flip", attackers=1, backend="inline"
    )
    with pytest.raises(ConfigError, match="attack 'label-flip' needs one class per sample, and these have"):
        run(METHODS["fedavg"], experiment)


def test_clients_alone_are_refused_by_the_name_of_their_row(own: str) -> None:
    options = ExperimentOptions(dataset=own, clients=2, rounds=1, backend="inline")
    with pytest.raises(
        ConfigError, match=r"the row alone, fedproto with proto-weight=0: fedproto needs one class"
    ):
        prepare(["alone"], options, seeds=[0])
