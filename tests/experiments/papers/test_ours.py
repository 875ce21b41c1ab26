"""Our numbers as a grid: rounds to a target, and the target of a cell."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from flwr_kd.experiments.papers import ours, reproduction
from flwr_kd.results import files
from flwr_kd.results.measures import Target
from flwr_kd.results.schema import Comparison, RunResult
from tests.results.examples import a_comparison, a_round


def run(method: str, seed: int, *shares: float) -> RunResult:
    rounds = tuple(
        a_round(n, global_accuracy=share, local_accuracy=None) for n, share in enumerate(shares, 1)
    )
    return RunResult(method, seed, rounds)


@pytest.fixture
def comparison() -> Comparison:
    return a_comparison(
        run("fedavg", 0, 0.25, 0.5, 1.0),
        run("fedavg", 1, 0.25, 0.75, 0.75),
        run("fedhyb", 0, 0.75, 0.75, 0.75),
    )


def test_a_run_that_does_not_reach_the_target_counts_as_one_round_more(
    comparison: Comparison, tmp_path: Path
) -> None:
    chosen = reproduction.prepare("fedhyb/table-2", scale="small", out=tmp_path, seeds=[0, 1])
    (job,) = chosen.jobs
    job.folder.mkdir()
    files.save(comparison, job.folder)
    found = {cell.id: cell.of("rounds", "fedhyb") for cell in ours.our_grid(chosen)}
    # FedAvg ends with 1.0 with seed 0, which has no other seed to be compared with.
    targets = {cell.id: cell.target for cell in chosen.experiment.run}
    assert found == {name: {0: 1.0 if target <= 0.75 else 4.0} for name, target in targets.items() if target}
    of_fedavg = next(cell for cell in ours.our_grid(chosen) if targets[cell.id] == 1.0)
    assert of_fedavg.of("rounds", "fedavg") == {0: 3.0, 1: 2.0}


def test_the_target_is_nine_tenths_of_what_the_first_row_ends_with(comparison: Comparison) -> None:
    table = reproduction.prepare("fedhkd/table-2", scale="small").experiment
    # Local accuracy was not measured: 90 % of the mean of 1.0 and 0.75 is 78.75.
    assert ours.target_of(table, comparison) == Target(78, "global_accuracy")
    given = replace(comparison, config={"target": "85"})
    assert ours.target_of(table, given) == Target(85)
    assert ours.target_of(table, a_comparison(run("fedavg", 0, 0.01))) is None
    assert ours.target_of(replace(table, measures={}), comparison) is None
