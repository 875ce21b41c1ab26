"""Checkpoints: what is written is read back, and what is not ours is refused by its version."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord
from safetensors import safe_open
from safetensors.numpy import save

from flwr_kd.checks import ConfigError
from flwr_kd.server.checkpoint import CHECKPOINT, Checkpoint


def checkpoint() -> Checkpoint:
    arrays = ArrayRecord({"b": Array(np.arange(3.0)), "a": Array(np.array(7))})
    state = {"matrix": np.eye(2, dtype=np.float32)}
    kept = {"run": "abc", "trained": {2**64 - 1: 3}, "steps": 17}
    return Checkpoint("FedAvg", 4, {"batch-size": 8}, 1, arrays, state, **kept)


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    written = checkpoint()
    path = written.save(tmp_path)
    read = Checkpoint.load(tmp_path, "FedAvg")
    assert path == tmp_path / CHECKPOINT
    assert read is not None
    assert list(read.arrays) == ["b", "a"]
    for name, value in written.arrays.items():
        assert np.array_equal(read.arrays[name].numpy(), value.numpy())
    assert np.array_equal(read.state["matrix"], np.eye(2))
    assert (read.server_round, read.config, read.seed) == (4, {"batch-size": 8}, 1)
    assert (read.run, read.trained, read.steps) == ("abc", {2**64 - 1: 3}, 17)


def test_without_a_file_there_is_no_checkpoint(tmp_path: Path) -> None:
    assert Checkpoint.load(tmp_path, "FedAvg") is None


@pytest.mark.parametrize(
    ("metadata", "text"),
    [
        (
            {"version": "1", "strategy": "FedAvg", "round": "2", "names": "[]"},
            r"is a checkpoint of version 1, expected version 2: end its run with the flwr-kd that wrote it "
            r"\(0\.1 writes version 1\), or begin anew with another checkpoint_dir",
        ),
        ({"version": "3", "strategy": "FedAvg"}, "is a checkpoint of version 3, expected version 2"),
        ({"version": "1", "strategy": "FedHKD"}, "is a checkpoint of version 1, expected version 2"),
        ({"version": "2", "strategy": "FedHKD"}, "is a checkpoint of FedHKD, expected one of FedAvg"),
        ({"format": "pt"}, "is no checkpoint, expected version 2"),
        (None, "is no checkpoint, expected version 2"),
        ({"version": "2", "strategy": "FedAvg"}, "lacks 'names', or has it in another form"),
    ],
)
def test_another_checkpoint_is_refused_by_name(metadata: Any, text: str, tmp_path: Path) -> None:
    (tmp_path / CHECKPOINT).write_bytes(save({"arrays/w": np.zeros(1)}, metadata=metadata))
    with pytest.raises(ConfigError, match=text) as caught:
        Checkpoint.load(tmp_path, "FedAvg")
    assert str(tmp_path / CHECKPOINT) in str(caught.value)


def test_what_is_no_safetensors_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / CHECKPOINT).write_bytes(b"not this")
    with pytest.raises(ConfigError, match="cannot be read"):
        Checkpoint.load(tmp_path, "FedAvg")


def damaged(folder: Path, values: dict[str, Any], **metadata: str) -> None:
    """Change arrays and metadata in the file of a checkpoint."""
    with safe_open(folder / CHECKPOINT, framework="numpy") as file:
        before = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    for name, value in values.items():
        tensors[name] = np.full_like(tensors[name], value)
    (folder / CHECKPOINT).write_bytes(save(tensors, metadata={**before, **metadata}))


@pytest.mark.parametrize(
    ("values", "metadata", "text"),
    [
        ({"arrays/b": np.nan}, {}, "is damaged: array 'arrays/b' has values that are not finite"),
        ({"state/matrix": np.nan}, {}, "is damaged: array 'state/matrix' has values that are not finite"),
        ({"state/matrix": np.inf}, {}, "is damaged: array 'state/matrix' has other infinite values"),
        ({}, {"round": "-5"}, "is damaged: its round must be a whole number from 1, got '-5'"),
        ({}, {"round": "2.5"}, "is damaged: its round must be a whole number from 1, got '2.5'"),
        ({}, {"round": "two"}, "is damaged: its round must be a whole number from 1, got 'two'"),
        ({}, {"round": "2"}, "is damaged: a client has trained after its round, 2"),
    ],
)
def test_values_that_cannot_be_are_refused(
    values: dict[str, Any], metadata: dict[str, str], text: str, tmp_path: Path
) -> None:
    checkpoint().save(tmp_path)
    damaged(tmp_path, values, **metadata)
    with pytest.raises(ConfigError, match=re.escape(f"{tmp_path / CHECKPOINT} {text}")):
        Checkpoint.load(tmp_path, "FedAvg")


def test_infinite_values_that_were_written_are_read(tmp_path: Path) -> None:
    mask = np.float32([0, -np.inf])
    Checkpoint("FedAvg", 4, {}, 1, ArrayRecord({"mask": Array(mask)}), {"mask": mask}).save(tmp_path)
    read = Checkpoint.load(tmp_path, "FedAvg")
    assert read is not None
    assert np.array_equal(read.state["mask"], mask)


@pytest.mark.parametrize("name", ["fedavg", "fedproto"])
def test_a_run_that_does_not_fit_the_checkpoint_is_refused_before_round_1(
    name: str, federation: Any, tmp_path: Path
) -> None:
    fed = federation(name, clients=3)
    fed.run(rounds=3, checkpoint_dir=tmp_path)
    file = re.escape(str(tmp_path / CHECKPOINT))
    with pytest.raises(ConfigError, match=rf"{file} is a checkpoint of round 3, and num_rounds is 2"):
        fed.run(rounds=2, checkpoint_dir=tmp_path, resume=True)
    for clients in (2, 4):
        text = rf"{file} is of a run with 3 clients, and the data are now divided among {clients}"
        with pytest.raises(ConfigError, match=text):
            federation(name, clients=clients).run(rounds=4, checkpoint_dir=tmp_path, resume=True)
    if name == "fedproto":
        damaged(tmp_path, {}, infinite="5")
        with pytest.raises(ConfigError, match=file):
            fed.run(rounds=4, checkpoint_dir=tmp_path, resume=True)
