"""Data sets that a user's own function returns, and natural partitions by their columns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flwr_kd.data import DataError, Samples, Selection, load, load_public, natural, partition
from flwr_kd.experiments.data import client_splits
from flwr_kd.experiments.experiment import Experiment
from tests.own_functions import make_importable

SOURCE = """
import numpy as np

from flwr_kd.data import Samples


def people():
    rows = np.arange(120)
    x = np.stack([rows, rows % 3], axis=1).astype(np.float64)
    return Samples(x, rows % 3, columns={"person": np.array(["eve", "adam", "kim", "bo"])[rows % 4]})


def tokens():
    rows = np.arange(60)
    return Samples(rows[:, None] % 5, rows % 2, vocabulary=5)


def tested():
    rows = np.arange(60)[:, None] * 1.0
    return Samples(rows, np.arange(60) % 2, test_x=-rows[:9], test_y=np.arange(9) % 2)


def table():
    return [1, 2]


def failing():
    raise OSError("the disk is away")
"""
NAME = "own_data_of_test"


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_importable(NAME, SOURCE, tmp_path, monkeypatch)


class TestLoad:
    def test_columns_stay_beside_their_samples(self) -> None:
        """Also where samples are held back, taken for the test, limited and selected."""
        for options in (
            {},
            {"limit": 20},
            {"selection": Selection(class_limit=7)},
            {"selection": Selection(classes="0,2")},
        ):
            bundle = load(f"{NAME}:people", **options)  # type: ignore[arg-type]
            names = np.array(["eve", "adam", "kim", "bo"])
            rows = bundle.train.x[:, 0].long().numpy()
            assert bundle.columns["person"].tolist() == names[rows % 4].tolist()
            assert bundle.train.x.dtype == torch.float32

    def test_a_fifth_is_for_tests_and_a_fifth_is_held_back(self) -> None:
        bundle, public = load(f"{NAME}:people"), load_public(None, dataset=f"{NAME}:people")
        assert (len(bundle.train), len(bundle.test), len(public)) == (72, 24, 24)
        rows = torch.cat([part.x[:, 0] for part in (bundle.train, bundle.test, public)])
        assert sorted(rows.tolist()) == list(range(120))

    def test_its_own_test_set(self) -> None:
        bundle = load(f"{NAME}:tested")
        assert bundle.test.x.flatten().tolist() == [-float(i) for i in range(9)]

    def test_token_ids(self) -> None:
        bundle = load(f"{NAME}:tokens")
        assert (bundle.train.x.dtype, bundle.vocabulary) == (torch.int64, 5)

    @pytest.mark.parametrize(
        ("function", "text"),
        [
            ("table", "must return flwr_kd.data.Samples, got list"),
            ("failing", r"failed .OSError: the disk is away"),
            ("poeple", "has no function poeple"),
        ],
    )
    def test_what_cannot_be_used(self, function: str, text: str) -> None:
        with pytest.raises(DataError, match=text):
            load(f"{NAME}:{function}")


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"x": np.ones((2, 1)), "y": [0, 1, 0]}, "2 inputs do not fit 3 labels"),
        ({"x": np.ones(2), "y": [0, 1]}, r"x must be numbers with shape \[N, ...\]"),
        ({"x": np.array([[np.nan]]), "y": [0]}, "x has values that are not finite"),
        ({"x": np.ones((1, 1)), "y": [-1]}, "y must not be negative"),
        ({"x": np.ones((1, 1)), "y": [0], "columns": {"a": [1, 2]}}, "column 'a' has 2 values for 1 samples"),
        ({"x": np.ones((1, 1)), "y": [0], "test_x": np.ones((1, 1))}, "given together"),
        ({"x": np.array([[7]]), "y": [0], "vocabulary": 7}, "token ids below vocabulary=7"),
    ],
)
def test_samples_are_checked(given: dict[str, Any], text: str) -> None:
    with pytest.raises(DataError, match=text):
        Samples(**given)


class TestNatural:
    def test_a_client_for_each_value(self) -> None:
        experiment = Experiment(dataset=f"{NAME}:people", partition="natural:person", clients=4)
        persons = load(f"{NAME}:people").columns["person"]
        splits = client_splits(experiment)
        found = [set(persons[np.concatenate(both)].tolist()) for both in splits]
        assert found == [{"adam"}, {"bo"}, {"eve"}, {"kim"}]
        assert sum(len(rows) for both in splits for rows in both) == len(persons)

    def test_with_validation_and_a_long_tail(self) -> None:
        options = {"dataset": f"{NAME}:people", "partition": "natural:person", "clients": 4}
        for more in ({"validation": True}, {"imbalance": 3.0}):
            splits = client_splits(Experiment(**options, **more))  # type: ignore[arg-type]
            assert all(len(train) for train, _ in splits)

    def test_another_number_of_clients(self) -> None:
        with pytest.raises(DataError, match="4 values in the column: set clients=4, got 3"):
            client_splits(Experiment(dataset=f"{NAME}:people", partition="natural:person", clients=3))

    def test_another_column(self) -> None:
        with pytest.raises(DataError, match="got 'speaker'; valid: natural:person"):
            natural({"person": np.array([1])}, "natural:speaker", num_clients=1)
        with pytest.raises(DataError, match="valid: none: it has no columns"):
            client_splits(Experiment(partition="natural:person", limit=100))

    def test_labels_alone_have_no_columns(self) -> None:
        with pytest.raises(DataError, match="needs a data set with columns"):
            partition([0, 1], "natural:person", num_clients=1, seed=0)
