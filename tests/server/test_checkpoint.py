"""Checkpoints: what is written is read back, and what is not ours is refused by its version."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord
from safetensors.numpy import save

from flwr_kd.checks import ConfigError
from flwr_kd.server.checkpoint import CHECKPOINT, Checkpoint


def checkpoint() -> Checkpoint:
    arrays = ArrayRecord({"b": Array(np.arange(3.0)), "a": Array(np.array(7))})
    state = {"matrix": np.eye(2, dtype=np.float32)}
    return Checkpoint("FedAvg", 4, {"batch-size": 8}, 1, arrays, state, run="abc", trained={2**64 - 1: 3})


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
    assert (read.run, read.trained) == ("abc", {2**64 - 1: 3})


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
