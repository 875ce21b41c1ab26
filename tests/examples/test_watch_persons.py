"""The example whose clients are persons, on the real recordings."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from flwr_kd.by_name import import_function
from flwr_kd.data import Samples, load, natural
from flwr_kd.experiments.data import client_splits
from flwr_kd.experiments.experiment import Experiment
from flwr_kd.experiments.runner import run
from flwr_kd.registry import get

ROOT = Path(__file__).resolve().parents[2]
NAME = "watch_persons:watch"


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT / "examples")
    monkeypatch.setattr(sys, "path", [*sys.path])


def test_the_data_has_ten_persons_and_seven_exercises() -> None:
    bundle = load(NAME)
    assert bundle.input_shape == (6, 100)
    assert bundle.num_classes == 7
    assert sorted(set(bundle.columns["person"].tolist())) == list(range(1, 11))
    assert len(bundle.columns["person"]) == len(bundle.train)
    parts = natural(bundle.columns, "natural:person", num_clients=10)
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(bundle.train)))


def test_windows_keep_their_recordings_labels() -> None:
    windows = import_function("watch_persons:windows", "dataset")

    recordings = [np.full((250, 1), 5.0), np.full((199, 1), -5.0)]
    found = windows(recordings, np.array([1, 0]), np.array([7, 9]))
    assert isinstance(found, Samples)
    assert found.x.shape == (3, 1, 100)
    assert found.y.tolist() == [1, 1, 0]
    assert found.columns["person"].tolist() == [7, 7, 9]
    assert found.x[0].min() > 0 > found.x[2].max()


@pytest.mark.long
def test_a_federation_of_persons_learns() -> None:
    experiment = Experiment(
        dataset=NAME, partition="natural:person", clients=10, rounds=3, workers=1, device="cpu", model="mlp"
    )
    assert len(client_splits(experiment)) == 10
    method = get("fedproto")
    result = run(method, experiment, method.config(["local-epochs=3"]))
    accuracy = result.rounds[-1].local_accuracy
    assert accuracy is not None
    assert accuracy > 0.5  # seven exercises
