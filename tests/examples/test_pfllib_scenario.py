"""The example that reads PFLlib's files, on files in their form."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_digits

from flwr_kd.by_name import import_function
from flwr_kd.checks import DataError
from flwr_kd.experiments.data import bundle_of, client_splits
from flwr_kd.experiments.experiment import Experiment
from flwr_kd.experiments.runner import run
from flwr_kd.registry import get

ROOT = Path(__file__).resolve().parents[2]
NAME = "pfllib_scenario:load"
CLIENTS = 3


@pytest.fixture(autouse=True)
def scenario(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[int, list[int]]:
    """Write a scenario as PFLlib does, and return the labels of each client."""
    monkeypatch.chdir(ROOT / "examples")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("SCENARIO", str(tmp_path))
    digits = load_digits()
    images = digits.images[:, None].astype(np.float64) / 16
    for client in range(CLIENTS):
        rows = np.flatnonzero(digits.target % CLIENTS == client)[:120]
        for part, chosen in (("train", rows[:90]), ("test", rows[90:])):
            (tmp_path / part).mkdir(exist_ok=True)
            with open(tmp_path / part / f"{client}.npz", "wb") as file:
                np.savez_compressed(file, data={"x": images[chosen], "y": digits.target[chosen]})
    return {client: [label for label in range(10) if label % CLIENTS == client] for client in range(CLIENTS)}


def experiment(**changed: object) -> Experiment:
    settings = {
        "partition": "natural:client",
        "clients": CLIENTS,
        "merge_test": True,
        "workers": 1,
        "device": "cpu",
    }
    return Experiment(dataset=NAME, rounds=2, model="mlp", **{**settings, **changed})  # type: ignore[arg-type]


def test_each_client_has_its_own_samples_and_a_quarter_is_its_test_split(
    scenario: dict[int, list[int]],
) -> None:
    held_back = 9
    run = experiment(hold_back=held_back)
    labels = bundle_of(run).train.y
    splits = client_splits(run)
    sizes = [len(train) + len(test) for train, test in splits]
    assert sum(sizes) == 120 * CLIENTS - held_back
    for client, (train, test) in enumerate(splits):
        assert sorted({*labels[train].tolist(), *labels[test].tolist()}) == scenario[client]
        assert len(test) == pytest.approx(sizes[client] / 4, abs=len(scenario[client]))


def test_a_method_runs_on_it() -> None:
    method = get("fedproto")
    result = run(method, experiment(), method.config(["local-epochs=3"]))
    assert (result.rounds[-1].local_accuracy or 0) > 0.5  # three or four classes


@pytest.mark.parametrize("value", ["", "/nowhere"])
def test_a_folder_without_clients_is_named(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCENARIO", value)
    with pytest.raises(DataError, match="SCENARIO must be the folder"):
        import_function(NAME, "dataset")()
