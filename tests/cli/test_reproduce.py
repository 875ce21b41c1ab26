"""``flwr-kd reproduce``."""

from __future__ import annotations

import pytest

from flwr_kd.experiments.papers import estimate, library
from tests.cli.commands import Command


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimate, "seconds_per_sample", lambda *args: 0.001)


def test_the_list_names_each_experiment_with_its_claim_data_and_cost(command: Command, timed: None) -> None:
    code, out, err = command("reproduce")
    assert (code, err) == (0, "")
    for paper, experiment in library.every():
        assert f"  {paper.id}/{experiment.id} " in out
        assert experiment.claim.split()[0] in out
    (line,) = (each for each in out.splitlines() if each.startswith("  fedhkd/table-2 "))
    assert "accuracy" in line
    assert "–cifar10" in line
    # 9 methods, 3 seeds, 10 clients, 50 rounds, 5 epochs: of 375 samples 6 batches, of 549 9, in two cells each.
    assert f"{9 * 3 * 10 * 50 * 5 * (6 + 9) * 2 / 1e6:.2g} M steps" in line


def test_a_few_steps_of_a_model_are_timed() -> None:
    size = estimate.SIZES["digits"]
    seconds = estimate.seconds_per_sample("mlp", size)
    assert seconds is not None
    assert seconds > 0
    # The second call does not measure again.
    assert estimate.seconds_per_sample("mlp", size) == seconds
    assert estimate.seconds_per_sample("bilstm", size) is None
    assert estimate.seconds_per_sample("mlp", None) is None
