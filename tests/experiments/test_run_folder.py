"""Runs that were interrupted or killed go on with the numbers of whole ones."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flwr_kd import registry
from flwr_kd.experiments import runner
from flwr_kd.experiments.experiment import Experiment
from flwr_kd.experiments.run_folder import RunFolder
from flwr_kd.experiments.runner import run
from flwr_kd.results.schema import RoundResult, RunResult

pytestmark = pytest.mark.long

SMALL = Experiment(clients=3, rounds=4, limit=150, backend="inline", device="cpu", workers=1)
# One without personal models, one with.
METHODS = ["fedhkd", "fedproto", "ktpfl-weights"]


def untimed(result: RunResult) -> list[RoundResult]:
    # The server of ktpfl-weights does not know that its clients still have their models, and sends them again.
    bytes_down = {"bytes_down": 0} if result.method == "ktpfl-weights" else {}
    return [replace(stats, seconds=0.0, **bytes_down) for stats in result.rounds]


@pytest.mark.parametrize("name", METHODS)
def test_a_run_that_is_interrupted_in_a_round_goes_on_after_the_one_before(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clients have trained in round 3. Nothing was written before the interrupt: the rounds are short."""
    method = registry.get(name)
    config = method.config(method.quick)
    whole = run(method, SMALL, config)
    real = method.strategy.aggregate_phase

    def stop(self: Any, phase: str, server_round: int, replies: Any, arrays: Any) -> Any:
        replies = list(replies)
        if server_round == 3:
            assert RunFolder(tmp_path).last_round == 0
            raise KeyboardInterrupt
        return real(self, phase, server_round, iter(replies), arrays)

    with monkeypatch.context() as patch:
        patch.setattr(method.strategy, "aggregate_phase", stop)
        patch.setattr(runner, "CHECKPOINT_SECONDS", 600.0)
        with pytest.raises(KeyboardInterrupt):
            run(method, SMALL, config, checkpoint_dir=tmp_path)
    assert RunFolder(tmp_path).last_round == 2
    assert untimed(run(method, SMALL, config, checkpoint_dir=tmp_path, resume=True)) == untimed(whole)
    # Nothing is left to do, and the numbers are there.
    assert untimed(run(method, SMALL, config, checkpoint_dir=tmp_path, resume=True)) == untimed(whole)


@pytest.mark.parametrize("name", ["fedproto"])
@pytest.mark.parametrize("killed", [1, 3])
def test_a_run_that_is_killed_loses_what_is_after_its_last_checkpoint(
    name: str, killed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy of the folder is what SIGKILL leaves. A line of the rounds may be cut off."""
    method = registry.get(name)
    config = method.config(method.quick)
    folder, copy = tmp_path / "folder", tmp_path / "copy"
    models: list[int] = []

    def on_round(stats: Any) -> None:
        models.append(len(list(folder.glob("personal/*"))))
        if stats.server_round == killed:
            shutil.copytree(folder, copy)

    # As often as a twentieth of the time allows.
    monkeypatch.setattr(runner, "CHECKPOINT_SECONDS", 1e-9)
    whole = run(method, SMALL, config, checkpoint_dir=folder, on_round=on_round)
    assert max(models) <= 3 * SMALL.clients
    with (copy / "rounds.jsonl").open("a") as file:
        file.write('{"round": 4, "local_acc')
    assert RunFolder(copy).last_round < killed
    assert untimed(run(method, SMALL, config, checkpoint_dir=copy, resume=True)) == untimed(whole)


def test_a_new_run_removes_what_an_earlier_one_left_and_nothing_else(tmp_path: Path) -> None:
    method, experiment = registry.get("fedavg"), replace(SMALL, rounds=1)
    (tmp_path / "mine").write_text("precious")
    first = run(method, experiment, checkpoint_dir=tmp_path)
    assert untimed(run(method, experiment, checkpoint_dir=tmp_path)) == untimed(first)
    assert (tmp_path / "mine").read_text() == "precious"
