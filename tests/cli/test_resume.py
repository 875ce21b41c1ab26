"""Comparisons that were interrupted: finished runs are neither lost nor run again."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flwr_kd import registry
from flwr_kd.experiments import runner, saved_arrays
from flwr_kd.results import files, provenance
from tests.cli.commands import PAIR, TINY, Command, Outcome, kept_files, numbers

pytestmark = pytest.mark.long


def interrupted(
    command: Command, monkeypatch: pytest.MonkeyPatch, before: tuple[str, int], *args: str
) -> Outcome:
    """Run a command whose user interrupts it when one of its runs begins."""
    real = runner.run

    def stopping(method: Any, experiment: Any, *rest: Any, **kwargs: Any) -> Any:
        if (method.name, experiment.seed) == before:
            raise KeyboardInterrupt
        return real(method, experiment, *rest, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(runner, "run", stopping)
        return command(*args)


def test_finished_runs_are_not_run_again(
    command: Command, monkeypatch: pytest.MonkeyPatch, ran: list[tuple[str, int]], tmp_path: Path
) -> None:
    assert command(*PAIR, "--out", "whole").code == 0
    code, out, err = interrupted(command, monkeypatch, ("fedavg", 1), *PAIR, "--out", "o")
    assert (code, err.splitlines()[-1]) == (
        130,
        "flwr-kd: interrupted; 2 finished runs kept in 'o': the same command with --resume goes on",
    )
    assert not (tmp_path / "o" / "result.json").exists()
    ran.clear()
    code, out, _ = command(*PAIR, "--out", "o", "--resume")
    assert code == 0
    assert ran == [("fedavg", 1), ("fedhkd", 1)]
    assert "not run again: fedavg (seed 0), fedhkd (seed 0)" in out
    resumed = numbers(tmp_path / "o")
    assert list(resumed) == list(numbers(tmp_path / "whole"))
    assert resumed == numbers(tmp_path / "whole")
    assert kept_files(tmp_path / "o") == kept_files(tmp_path / "whole")
    assert sorted(path.name for path in (tmp_path / "o").iterdir()) == ["arrays", "curves.png", "result.json"]
    assert saved_arrays.read(tmp_path / "o", files.load(tmp_path / "o").runs[0]).server_round == 1


KILLED = """
import os, signal, sys
from flwr_kd.cli import main
from flwr_kd.experiments import runner

run = runner.run

def kill_at_fedhkd(method, *args, **kwargs):
    if method.name == "fedhkd":
        os.kill(os.getpid(), signal.SIGKILL)
    return run(method, *args, **kwargs)

runner.run = kill_at_fedhkd
sys.argv = ["flwr-kd", *sys.argv[1:]]
main()
"""


@pytest.mark.program
def test_a_comparison_that_is_killed_goes_on(command: Command, tmp_path: Path) -> None:
    """No handler runs on SIGKILL: what is finished is on the disk before the next run begins."""
    args = ["compare", "fedavg", "fedhkd", *TINY, "--seeds", "0", "--out", "o"]
    killed = subprocess.run([sys.executable, "-c", KILLED, *args], cwd=tmp_path, timeout=280, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert not (tmp_path / "o" / "result.json").exists()
    code, out, _ = command(*args, "--resume")
    assert code == 0
    assert "not run again: fedavg (seed 0)" in out


def test_a_whole_result_takes_more_methods_and_seeds(
    command: Command, ran: list[tuple[str, int]], tmp_path: Path
) -> None:
    assert command("compare", "fedavg", *TINY, "--seeds", "1", "--out", "o").code == 0
    first = numbers(tmp_path / "o")
    ran.clear()
    assert command(*PAIR, "--out", "o", "--resume").code == 0
    assert ran == [("fedavg", 0), ("fedhkd", 0), ("fedhkd", 1)]
    extended = numbers(tmp_path / "o")
    assert list(extended) == [("fedavg", 0), ("fedhkd", 0), ("fedavg", 1), ("fedhkd", 1)]
    assert extended["fedavg", 1] == first["fedavg", 1]
    assert files.load(tmp_path / "o").config["seeds"] == [0, 1]
    assert len(kept_files(tmp_path / "o")) == 4
    ran.clear()
    assert command(*PAIR, "--out", "o", "--resume").code == 0
    assert ran == []
    assert numbers(tmp_path / "o") == extended


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        (["--partition", "iid"], "another partition (config): 'inner-dirichlet:0.1' there, 'iid' here"),
        (["--set", "local-epochs=2"], "another local-epochs (fedavg): 5 there, 2 here"),
        (["--model", "lenet"], "another model (fedavg): 'mlp' there, 'lenet' here"),
    ],
)
def test_other_settings_are_not_mixed_in(
    command: Command,
    ran: list[tuple[str, int]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    changed: list[str],
    named: str,
) -> None:
    assert interrupted(command, monkeypatch, ("fedhkd", 0), *PAIR, "--out", "o").code == 130
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    ran.clear()
    code, _, err = command(*PAIR, *changed, "--out", "o", "--resume")
    assert code == 2
    assert named in err
    assert len(err.splitlines()) == 1
    assert ran == []
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_other_versions_are_not_mixed_in(
    command: Command, monkeypatch: pytest.MonkeyPatch, ran: list[tuple[str, int]]
) -> None:
    assert interrupted(command, monkeypatch, ("fedhkd", 0), *PAIR, "--out", "o").code == 130
    real = provenance.versions()
    monkeypatch.setattr(provenance, "versions", lambda: {**real, "torch": "1.0"})
    ran.clear()
    code, _, err = command(*PAIR, "--out", "o", "--resume")
    assert (code, ran) == (2, [])
    assert f"another torch (versions): {real['torch']!r} there, '1.0' here" in err


def test_an_unfinished_comparison_is_not_lost_by_mistake(
    command: Command, monkeypatch: pytest.MonkeyPatch, ran: list[tuple[str, int]], tmp_path: Path
) -> None:
    assert interrupted(command, monkeypatch, ("fedhkd", 0), *PAIR, "--out", "o").code == 130
    code, _, err = command(*PAIR, "--out", "o")
    assert code == 2
    assert "'o' has an unfinished comparison; go on with --resume, begin anew with --force" in err
    code, _, err = command(*PAIR, "--out", "o", "--resume", "--force")
    assert (code, "give one of them" in err) == (2, True)
    code, _, err = command("compare", "fedhkd", *TINY, "--out", "o", "--resume")
    assert (code, "has runs of fedavg, which would be lost" in err) == (2, True)
    ran.clear()
    assert command(*PAIR, "--out", "o", "--force").code == 0
    assert len(ran) == 4


def test_nothing_is_left_where_no_run_was_finished(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    code, _, err = interrupted(command, monkeypatch, ("fedavg", 0), *PAIR, "--out", "o")
    assert (code, err) == (130, "flwr-kd: interrupted; no round was complete, and nothing is kept\n")
    assert not (tmp_path / "o").exists()


@pytest.mark.usefixtures("no_run")
@pytest.mark.parametrize("exists", [True, False])
def test_a_folder_without_a_comparison_cannot_be_resumed(
    command: Command, exists: bool, tmp_path: Path
) -> None:
    if exists:
        (tmp_path / "o").mkdir()
    code, _, err = command("simulate", "fedavg", *TINY, "--out", "o", "--resume")
    assert code == 2
    assert "--resume: 'o' has no comparison to go on with; leave --resume out to begin one" in err
    assert (tmp_path / "o").exists() == exists


LONGER = ("compare", "fedproto", "fedhkd", *TINY, "--rounds", "3", "--seeds", "0")


@pytest.mark.parametrize("backend", ["inline", pytest.param("processes", marks=pytest.mark.program)])
def test_a_run_that_is_interrupted_goes_on_after_its_last_complete_round(
    backend: str, command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The second run is interrupted in its last round. What it needed to go on is removed in the end."""
    longer = [*LONGER, "--backend", backend]
    assert command(*LONGER, "--out", "whole").code == 0
    strategy = registry.get("fedhkd").strategy
    real = strategy.aggregate_phase

    def stop(self: Any, phase: str, server_round: int, *args: Any) -> Any:
        if server_round == 3:
            raise KeyboardInterrupt
        return real(self, phase, server_round, *args)

    with monkeypatch.context() as patch:
        patch.setattr(strategy, "aggregate_phase", stop)
        code, _, err = command(*longer, "--out", "o")
    assert (code, err.splitlines()[-1]) == (
        130,
        "flwr-kd: interrupted; 1 finished run and fedhkd (seed 0) up to round 2 kept in 'o': the same command with "
        "--resume goes on",
    )
    code, _, err = command(*longer, "--set", "gamma=0.9", "--out", "o", "--resume")
    assert (code, "another gamma (fedhkd)" in err) == (2, True)
    code, out, _ = command(*longer, "--out", "o", "--resume")
    assert code == 0
    assert "goes on after round 2: fedhkd (seed 0)" in out
    assert numbers(tmp_path / "o") == numbers(tmp_path / "whole")
    assert kept_files(tmp_path / "o") == kept_files(tmp_path / "whole")
    assert not (tmp_path / "o" / ".unfinished").exists()
