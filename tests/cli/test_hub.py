"""``--dataset hf:...`` on the command line and in the run config of an app."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Context, RecordDict

from flwr_kd.data import load
from flwr_kd.data._hub import loaded
from flwr_kd.experiments.data import client_splits
from flwr_kd.experiments.experiment import Experiment
from flwr_kd.experiments.run_config import client_data
from flwr_kd.results import files
from tests.cli.commands import Command

datasets = pytest.importorskip("datasets", reason="needs flwr-kd[hf]")

RUN = ("--backend", "inline", "--rounds", "1", "--device", "cpu")


@pytest.fixture(autouse=True)
def speech(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write 90 measurements of three words by three speakers."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    loaded.cache_clear()
    labels = np.arange(90) % 3
    values = np.random.default_rng(0).normal(size=(90, 4)) + 3 * labels[:, None]
    columns: dict[str, Any] = {f"band{i}": values[:, i].tolist() for i in range(4)}
    columns["word"] = [("one", "two", "three")[label] for label in labels]
    columns["speaker"] = [f"s{row // 3 % 3}" for row in range(90)]
    file = tmp_path / "speech.parquet"
    datasets.Dataset.from_dict(columns).to_parquet(file)
    return file


@pytest.mark.long
def test_compare_with_a_client_for_each_speaker(command: Command, tmp_path: Path) -> None:
    name = "hf:speech.parquet,label=word"
    code, _, err = command(
        "compare", "fedavg", "fedproto", *RUN, "--dataset", name, "--partition", "natural:speaker",
        "--clients", "3", "--seeds", "0", "--out", "here",
    )  # fmt: skip
    assert (code, err) == (0, "")
    result = files.load(tmp_path / "here")
    assert (result.config["dataset"], result.config["public"]) == (name, name)
    histogram = result.runs[0].histogram
    assert (len(histogram), [len(row) for row in histogram]) == (3, [3, 3, 3])
    splits = client_splits(Experiment(dataset=name, partition="natural:speaker", clients=3))
    assert [sum(row) for row in histogram] == [len(train) for train, _ in splits]
    # The result is run again by its own file.
    code, _, err = command("compare", "--config", "here", "--out", "again")
    assert (code, err) == (0, "")
    assert files.load(tmp_path / "again").runs[0].rounds[0].local_accuracy == (
        result.runs[0].rounds[0].local_accuracy
    )


@pytest.mark.parametrize(
    ("name", "partition", "text"),
    [
        ("hf:speech.parquet", "iid", "no column has the labels: name one of band0, band1"),
        ("hf:speech.parquet,label=word", "natural:person", "valid: natural:speaker"),
        ("hf:speech.parquet,label=word", "natural:speaker", "set --clients 3, got 10"),
        ("hf:no such thing!", "iid", "there is no file or folder 'no such thing!'"),
        ("hf:speech.parquet,labels=word", "iid", "unknown option 'labels' (did you mean 'label'?)"),
    ],
)
def test_a_mistake_is_one_line(command: Command, no_run: None, name: str, partition: str, text: str) -> None:
    code, _, err = command("simulate", "fedavg", *RUN, "--dataset", name, "--partition", partition)
    assert (code, len(err.splitlines())) == (2, 1)
    assert text in err


def test_an_app_names_it_in_its_run_config(speech: Path) -> None:
    settings = {
        "dataset": f"hf:{speech},label=word", "data-dir": "", "partition": "natural:speaker", "model": "mlp",
        "num-server-rounds": 1, "min-nodes": 3, "seed": 0, "method": "fedavg",
    }  # fmt: skip
    sizes = []
    for i in range(3):
        node = {"partition-id": i, "num-partitions": 3}
        data = client_data(Context(1, 7 + i, node, RecordDict(), {**settings}))
        sizes.append(len(data.train_set) + len(data.test_set))
        assert data.train_set.x.shape[1:] == (4,)
    assert sum(sizes) == len(load(f"hf:{speech},label=word").train)
