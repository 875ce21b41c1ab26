"""``flwr-kd privacy``."""

from __future__ import annotations

from flwr_kd import privacy
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
