"""``flwr-kd privacy``."""

from __future__ import annotations

from pathlib import Path

import pytest

from flwr_kd import privacy, update_privacy
from tests.cli.commands import Command


def test_privacy_prints_the_budget(command: Command) -> None:
    code, out, err = command("privacy", "--sigma", "7", "--rounds", "50", "--delta", "0.01", "--count", "256")
    assert (code, err) == (0, "")
    for label, value in privacy.budget(sigma=7, rounds=50, delta=0.01, dimensions=64, count=256).rows():
        (line,) = [line for line in out.splitlines() if f" {label} " in line]
        assert f" {value} " in line
    assert "It holds if" in out
    assert "Not covered" in out
    assert "model weights" in out
    twice = command("privacy", "--sigma", "14", "--rounds", "50").out
    assert twice != command("privacy", "--sigma", "7", "--rounds", "50").out


def test_privacy_prints_the_budget_of_updates(command: Command) -> None:
    arguments = ("privacy", "--dp-noise", "4", "--dp-clip", "0.5", "--rounds", "20", "--updates", "2")
    code, out, err = command(*arguments, "--delta", "1e-5")
    assert (code, err) == (0, "")
    rows = update_privacy.update_budget(noise=4, releases=40, delta=1e-5, clip=0.5).rows()
    for label, value in rows:
        (line,) = [line for line in out.splitlines() if f" {label} " in line]
        assert f" {value} " in line
    assert "BatchNorm's num_batches_tracked" in out
    # FedHKD's budget is printed as well where it is asked for.
    assert "of one class" not in out
    assert "of one class" in command(*arguments, "--sigma", "7").out


@pytest.mark.long
def test_a_comparison_prints_what_its_methods_state(command: Command, tmp_path: Path) -> None:
    settings = ("--clients", "2", "--rounds", "1", "--seeds", "0", "--out", str(tmp_path / "run"))
    chosen = ("--set", "dp-clip=0.5", "--set", "dp-noise=4", "--set", "local-epochs=1")
    code, out, _ = command("compare", "fedavg", *settings, *chosen)
    assert code == 0
    (line,) = [line for line in out.splitlines() if line.startswith("privacy: fedavg: 1 update per client")]
    assert "dp-noise=4" in line
    assert "privacy: fedavg: not covered" in out
    assert "the noise of a simulation comes from its seed" in out


def test_privacy_prints_the_budget_of_dp_sgd(command: Command) -> None:
    arguments = ("--dp-sgd-noise", "2", "--rounds", "10", "--local-epochs", "3", "--delta", "1e-5")
    code, out, err = command("privacy", *arguments, "--rate", "0.25")
    assert (code, err) == (0, "")
    for label, value in update_privacy.sgd_budget(noise=2, epochs=30, delta=1e-5, rate=0.25).rows():
        (line,) = [line for line in out.splitlines() if f" {label} " in line]
        assert f" {value} " in line
    assert "one of its samples" in out
    assert "updates of one client" not in out
