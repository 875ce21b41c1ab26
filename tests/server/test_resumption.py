"""A server that is killed is resumed to the same numbers, with the clients' personal models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, RecordDict

from flwr_kd.checks import ConfigError
from flwr_kd.server.checkpoint import Checkpoint
from flwr_kd.server.records import VoidRoundsError
from flwr_kd.strategies.fedavg import FedAvg
from flwr_kd.strategies.fedhkd import FedHKD, FedHKDClient
from flwr_kd.transport.inline_grid import InlineGrid
from tests.server.federations import (
    PERSONAL,
    QUICK,
    Coming,
    Killed,
    Net,
    each_method,
    failing,
    initial,
    states_of,
)

KEPT = (*PERSONAL, "pfeddf", "dafkd", "fedhkd-dafkd", "moon", "pfedhn-pc", "pfedme")
"""Methods whose clients keep something between rounds."""


def test_a_checkpoint_of_another_method_or_model_is_refused(grid_of: Any, tmp_path: Any) -> None:
    FedHKD(checkpoint_dir=tmp_path, **QUICK).start(grid_of(FedHKDClient), initial(), num_rounds=1)
    with pytest.raises(ConfigError, match="is a checkpoint of FedHKD, expected one of FedAvg"):
        FedAvg(checkpoint_dir=tmp_path, resume=True).start(grid_of(), initial())
    with pytest.raises(ConfigError, match=r"does not fit initial_arrays: array 'body.weight' has shape"):
        FedHKD(checkpoint_dir=tmp_path, resume=True).start(
            grid_of(FedHKDClient), ArrayRecord(Net(6).state_dict())
        )


def test_resume_without_a_checkpoint_starts_from_the_beginning(
    grid_of: Any, numbers: Any, tmp_path: Any
) -> None:
    plain = FedAvg(**QUICK).start(grid_of(), initial(), num_rounds=2)
    resumed = FedAvg(checkpoint_dir=tmp_path, resume=True, **QUICK).start(grid_of(), initial(), num_rounds=2)
    assert numbers(plain) == numbers(resumed)
    # Nothing is left to do: the arrays of the last round come back.
    done = FedAvg(checkpoint_dir=tmp_path, resume=True, **QUICK).start(grid_of(), initial(), num_rounds=2)
    assert done.rounds == []
    assert {n: a.data for n, a in done.arrays.items()} == {n: a.data for n, a in plain.arrays.items()}


def test_resuming_with_another_seed_warns(grid_of: Any, flower_log: list[str], tmp_path: Any) -> None:
    FedAvg(checkpoint_dir=tmp_path, seed=1, **QUICK).start(grid_of(), initial(), num_rounds=1)
    assert flower_log == []
    FedAvg(checkpoint_dir=tmp_path, seed=2, resume=True, **QUICK).start(grid_of(), initial(), num_rounds=2)
    assert "other hyper-parameters or another seed" in flower_log[0]


# Inside a write is the harder case. The slow tier has the other one, and further variants of a method.
@each_method(variants=pytest.mark.slow)
@pytest.mark.parametrize("when", [pytest.param("between", marks=pytest.mark.slow), "inside"])
def test_a_killed_server_goes_on_to_the_same_numbers(
    name: str,
    when: str,
    federation: Any,
    numbers: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """To the last bit, also where clients keep their models: those of a ``state-dir`` outlive the run."""
    fed = federation(name)
    whole, expected = fed.run(rounds=3, grid=states_of(tmp_path / "undisturbed"))

    def kill(stats: Any) -> None:
        if stats.server_round == 2:
            raise Killed

    broken = fed.strategy(
        checkpoint_dir=tmp_path / "checkpoint", on_round=kill if when == "between" else None
    )
    save = Checkpoint.save

    def killed(self: Checkpoint, folder: Path) -> Path:
        if self.server_round == 2:
            raise Killed
        return save(self, folder)

    grid = InlineGrid(fed.app(), 4, **states_of(tmp_path / "states"))
    with monkeypatch.context() as patch:
        if when == "inside":
            # The clients have trained and replied; the round is not written yet.
            patch.setattr(Checkpoint, "save", killed)
        with pytest.raises(Killed):
            broken.start(grid, fed.initial(), num_rounds=3)
    last = 2 if when == "between" else 1

    # A new run: other node ids, nothing in Flower's state.
    resumed = fed.strategy(checkpoint_dir=tmp_path / "checkpoint", resume=True)
    grid = InlineGrid(fed.app(), 4, seed=9, **states_of(tmp_path / "states"))
    result = resumed.start(grid, fed.initial(), num_rounds=3, timeout=30.0)
    assert [r.server_round for r in result.rounds] == list(range(last + 1, 4))
    sent = name == "ktpfl-weights"  # it cannot know that the clients still have their models, and sends them
    for found, other in zip(numbers(result), numbers(expected)[last:], strict=False):
        assert found[:3] == other[:3]
        assert sent or found == other
    left, right = whole.state_arrays(), resumed.state_arrays()
    assert left.keys() == right.keys()
    assert all(np.array_equal(left[key], right[key]) for key in left)
    kept = [
        {
            path.name.partition("-node-")[2]: path.read_bytes()
            for path in folder.iterdir()
            if "-round-3" in path.name
        }
        for folder in (tmp_path / "undisturbed", tmp_path / "states")
        if folder.exists()
    ]
    # pFedDF's clients keep what they fine-tuned after the last round.
    assert len(kept) == (2 if name in KEPT else 0)
    if kept:
        # FedFomo's clients keep two models.
        assert len(kept[0]) == (8 if name == "fedfomo" else 4)
        assert kept[0] == kept[1]


@pytest.mark.parametrize("name", PERSONAL)
def test_models_of_void_rounds_do_not_displace_those_of_the_checkpoint(
    name: str, federation: Any, flower_log: list[str], numbers: Any, tmp_path: Path
) -> None:
    """Rounds 2 and 3 are void, though half of the clients trained in them; the run is resumed after round 1."""
    fed = federation(name)
    _, expected = fed.run(rounds=3, grid=states_of(tmp_path / "undisturbed"))
    broken = fed.strategy(checkpoint_dir=tmp_path / "checkpoint", min_train_nodes=3, max_void_rounds=2)
    grid = InlineGrid(fed.app(), 4, faults=failing(2, {2, 3}), **states_of(tmp_path / "states"))
    with pytest.raises(VoidRoundsError):
        broken.start(grid, fed.initial(), num_rounds=5)
    files = [path.name.partition("-node-3-")[2] for path in (tmp_path / "states").glob("*-node-3-*")]
    expected_files = ["round-1.safetensors", "round-3.safetensors"]
    if name == "fedfomo":
        expected_files = [f"{kind}{file}" for kind in ("previous-", "") for file in expected_files]
    assert sorted(files) == expected_files
    resumed = fed.strategy(checkpoint_dir=tmp_path / "checkpoint", resume=True)
    grid = InlineGrid(fed.app(), 4, seed=9, **states_of(tmp_path / "states"))
    result = resumed.start(grid, fed.initial(), num_rounds=3, timeout=30.0)
    assert not [line for line in flower_log if "lost" in line]
    for found, other in zip(numbers(result), numbers(expected)[1:], strict=False):
        assert found[:3] == other[:3]


@pytest.mark.parametrize("name", PERSONAL)
def test_checkpoints_that_could_not_be_written_do_not_cost_models(
    name: str, federation: Any, flower_log: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fed = federation(name)
    save = Checkpoint.save

    def full(self: Checkpoint, folder: Path) -> Path:
        if self.server_round > 1:
            raise OSError(28, "No space left on device")
        return save(self, folder)

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoint, "save", full)
        fed.run(rounds=4, checkpoint_dir=tmp_path / "checkpoint", grid=states_of(tmp_path / "states"))
    assert sum("no checkpoint could be written" in line for line in flower_log) == 3
    fed.run(
        rounds=2, checkpoint_dir=tmp_path / "checkpoint", resume=True, grid=states_of(tmp_path / "states")
    )
    assert not [line for line in flower_log if "lost" in line]


@pytest.mark.parametrize("name", PERSONAL)
def test_without_a_state_dir_resumed_clients_begin_anew_with_a_warning(
    name: str, federation: Any, flower_log: list[str], tmp_path: Path
) -> None:
    fed = federation(name)
    fed.run(rounds=2, checkpoint_dir=tmp_path)
    assert flower_log == fed.strategy().config.doubts()
    _, result = fed.run(rounds=3, checkpoint_dir=tmp_path, resume=True)
    assert (result.rounds[0].participants, result.rounds[0].failures) == (4, 0)
    lost = [line for line in flower_log if "has lost its personal model, which it had after round 2" in line]
    assert sorted(line.partition("(partition ")[2][0] for line in lost) == list("0123")


def test_a_clients_first_round_is_not_reported_as_a_loss(federation: Any, flower_log: list[str]) -> None:
    fed = federation("fedproto", clients=3)
    grid = Coming(fed.app(), 3, since={2: 2}, gone=lambda *_: False)
    fed.strategy(min_available_nodes=2).start(grid, fed.initial(), num_rounds=3, timeout=30.0)
    assert not [line for line in flower_log if "lost" in line]


@pytest.mark.parametrize("name", PERSONAL)
def test_a_client_that_lost_its_model_is_distinguished_from_a_new_one(
    name: str, federation: Any, flower_log: list[str]
) -> None:
    fed = federation(name)

    def lose(stats: Any) -> None:
        if stats.server_round == 1:
            (context,) = [c for c in grid.contexts.values() if c.node_config["partition-id"] == 1]
            context.state = RecordDict()

    grid = InlineGrid(fed.app(), 4)
    strategy = fed.strategy(on_round=lose)
    result = strategy.start(grid, fed.initial(), num_rounds=3, timeout=30.0)
    lost = [line for line in flower_log if "has lost its personal model" in line]
    if name == "ktpfl-weights":
        # It goes by a model that is not there: this round is lost, in the next it is sent one.
        assert [r.participants for r in result.rounds] == [4, 3, 4]
        assert any("no model of an earlier round is kept here" in line for line in flower_log)
        return
    assert [(r.participants, r.failures) for r in result.rounds] == [(4, 0)] * 3
    (line,) = lost
    assert "(partition 1) has lost its personal model, which it had after round 1: it began anew" in line
