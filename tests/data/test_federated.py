"""Clients' data from a ``FederatedDataset`` of flwr-datasets."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flwr_kd.data import DataError, federated_samples, from_hub, from_partition, load
from flwr_kd.data._function import samples
from flwr_kd.experiments.data import client_splits
from flwr_kd.experiments.experiment import Experiment

datasets = pytest.importorskip("datasets", reason="needs flwr-kd[hf]")
library = pytest.importorskip("flwr_datasets", reason="needs flwr-kd[hf]")
partitioners = pytest.importorskip("flwr_datasets.partitioner", reason="needs flwr-kd[hf]")
image = pytest.importorskip("PIL.Image", reason="needs flwr-kd[hf]")

ROWS = 48
PERSONS = ("eve", "adam", "kim", "bo")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in a folder with a data set of files, as the library reads one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    Path("people").mkdir()
    for part, first, count in (("train", 0, ROWS), ("test", 100, 9)):
        numbers = range(first, first + count)
        rows = {
            "value": [float(row) for row in numbers],
            "person": [PERSONS[row % 4] for row in numbers],
            "label": [row % 3 for row in numbers],
        }
        datasets.Dataset.from_dict(rows).to_parquet(f"people/{part}-00000-of-00001.parquet")


def people(partitioner: Any) -> Any:
    return library.FederatedDataset(dataset="people", partitioners={"train": partitioner})


class TestFromPartition:
    def test_a_person_is_a_client(self) -> None:
        fds = people(partitioners.NaturalIdPartitioner("person"))
        seen = []
        for i in range(4):
            train, test = from_partition(fds, i, seed=1)
            assert (len(train), len(test)) == (9, 3)
            assert sorted(test.y.tolist()) == [0, 1, 2]
            rows = torch.cat([train.x, test.x])[:, 0].long()
            assert len(set((rows % 4).tolist())) == 1
            assert torch.equal(torch.cat([train.y, test.y]), rows % 3)
            seen += rows.tolist()
        assert sorted(seen) == list(range(ROWS))

    def test_any_partitioner(self) -> None:
        fds = people(partitioners.DirichletPartitioner(3, "label", alpha=1.0, min_partition_size=1, seed=0))
        parts = [from_partition(fds, i, test_fraction=0.0) for i in range(3)]
        assert all(len(test) == 0 for _, test in parts)
        assert sorted(torch.cat([train.x[:, 0] for train, _ in parts]).tolist()) == list(range(ROWS))

    def test_a_partition_that_is_not_there(self) -> None:
        fds = people(partitioners.IidPartitioner(3))
        with pytest.raises(DataError, match="partition 7 of split 'train' cannot be loaded"):
            from_partition(fds, 7)


class TestFromHub:
    def test_images_are_mapped_by_constants(self) -> None:
        features = datasets.Features(
            {"image": datasets.Image(), "label": datasets.ClassLabel(names=["no", "yes"])}
        )
        values = [np.full((4, 4), 51 * number, dtype=np.uint8) for number in range(4)]
        rows = datasets.Dataset.from_dict(
            {"image": [image.fromarray(value) for value in values], "label": [1, 1, 1, 1]}, features=features
        )
        data = from_hub(rows)
        assert data.x.shape == (4, 1, 4, 4)
        torch.testing.assert_close(data.x[:, 0, 0, 0], torch.tensor([-1.0, -0.6, -0.2, 0.2]))
        assert data.y.tolist() == [1, 1, 1, 1]
        assert from_hub(rows, input_shape=(3, 8, 8)).x.shape == (4, 3, 8, 8)
        with pytest.raises(DataError, match=r"input_shape must be \(channels, height, width\)"):
            from_hub(rows, input_shape=(2, 8, 8))

    def test_classes_in_an_order_that_all_clients_share(self) -> None:
        rows = datasets.Dataset.from_dict({"a": [1.0, 2.0], "label": ["yes", "yes"]})
        with pytest.raises(DataError, match=r"labels in 'label' are texts: .*classes=\['yes'\]"):
            from_hub(rows)
        assert from_hub(rows, classes=["no", "yes"]).y.tolist() == [1, 1]
        with pytest.raises(DataError, match="unknown class 'yes'"):
            from_hub(rows, classes=["no", "ja"])
        named = rows.cast_column("label", datasets.ClassLabel(names=["maybe", "yes"]))
        assert from_hub(named).y.tolist() == [1, 1]
        assert from_hub(named, classes=["yes", "no"]).y.tolist() == [0, 0]

    def test_labels_that_are_no_numbers_from_0(self) -> None:
        rows = datasets.Dataset.from_dict({"a": [1.0, 2.0], "label": [-1, 4]})
        with pytest.raises(DataError, match="must be whole numbers from 0, or classes="):
            from_hub(rows)
        assert from_hub(rows, classes=["-1", "2", "4"]).y.tolist() == [0, 2]
        assert from_hub(rows.select([1])).y.tolist() == [4]

    def test_hints_are_python(self) -> None:
        rows = datasets.Dataset.from_dict({"a": [[1.0]], "b": [[2.0]], "label": [0]})
        with pytest.raises(DataError, match=r"the data set has the inputs a, b, .* input_key='a'"):
            from_hub(rows)
        assert from_hub(rows, input_key="b").x.tolist() == [[2.0]]
        assert from_hub(
            datasets.Dataset.from_dict({"c": [3], "a": [1], "label": [0]}), input_key=["a", "c"]
        ).x.tolist() == [[1.0, 3.0]]
        rows = datasets.Dataset.from_dict({"a": [1.0], "b": [0]})
        with pytest.raises(DataError, match=r"name one of a, b, for example label_key='a'"):
            from_hub(rows)

    @pytest.mark.parametrize(
        ("wrong", "text"),
        [
            ([1, 2], "expected, got list"),
            ({"train": 1}, "expected, got dict: take one of its splits"),
        ],
    )
    def test_what_is_no_data_set(self, wrong: Any, text: str) -> None:
        with pytest.raises(DataError, match=text):
            from_hub(wrong)

    def test_no_rows(self) -> None:
        rows = datasets.Dataset.from_dict({"a": [1.0], "label": [0]})
        with pytest.raises(DataError, match="has no rows"):
            from_hub(rows.select([]))


class TestFederatedSamples:
    def test_partitions_are_the_clients_of_a_comparison(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        source = """
from flwr_datasets import FederatedDataset
from flwr_datasets.partitioner import NaturalIdPartitioner

from flwr_kd.data import federated_samples


def load():
    fds = FederatedDataset(dataset="people", partitioners={"train": NaturalIdPartitioner("person")})
    return federated_samples(fds, test_split="test")
"""
        Path("federated_of_test.py").write_text(source, encoding="utf-8")
        monkeypatch.setattr(sys, "path", [*sys.path])
        monkeypatch.delitem(sys.modules, "federated_of_test", raising=False)
        samples.cache_clear()
        name = "federated_of_test:load"
        experiment = Experiment(dataset=name, partition="natural:partition", clients=4)
        bundle = load(name)
        assert sorted(bundle.test.x[:, 0].tolist()) == list(range(100, 109))
        assert torch.equal(bundle.test.y, bundle.test.x[:, 0].long() % 3)
        for train, test in client_splits(experiment):
            rows = bundle.train.x[np.concatenate([train, test])][:, 0].long()
            assert len(set((rows % 4).tolist())) == 1
        samples.cache_clear()

    def test_texts_as_classes(self) -> None:
        fds = people(partitioners.IidPartitioner(2))
        found = federated_samples(fds, input_key="value", label_key="person")
        assert found.columns["partition"].tolist() == [0] * 24 + [1] * 24
        names = np.array(sorted(PERSONS))[found.y]
        assert names.tolist() == [PERSONS[int(row) % 4] for row in found.x[:, 0]]

    def test_a_split_without_a_partitioner(self) -> None:
        with pytest.raises(DataError, match="unknown split with a partitioner 'test'"):
            federated_samples(people(partitioners.IidPartitioner(2)), split="test")
