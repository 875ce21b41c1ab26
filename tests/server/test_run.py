"""Void rounds change nothing, and too many of them end the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, MetricRecord
from flwr.serverapp.strategy import Strategy

from flwr_kd.server.checkpoint import Checkpoint
from flwr_kd.server.records import VoidRoundsError
from flwr_kd.transport.inline_grid import InlineGrid
from tests.server.federations import every, failing


@every
def test_a_round_with_too_few_replies_changes_nothing(name: str, federation: Any, numbers: Any) -> None:
    """Two of four answer where three are needed: as if the round had not been."""
    fed = federation(name)
    states: list[dict[str, Any]] = []

    def note(stats: Any) -> None:
        states.append({k: v.copy() for k, v in strategy.state_arrays().items()})

    strategy = fed.strategy(min_train_nodes=3, on_round=note)
    grid = InlineGrid(fed.app(), 4, faults=failing(2, {2}))
    result = strategy.start(grid, fed.initial(), num_rounds=3, timeout=30.0)
    assert [(r.participants, r.failures, r.void) for r in result.rounds] == [
        (4, 0, False),
        (2, 2, True),
        (4, 0, False),
    ]
    before, after, last = states
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[key], after[key]) for key in before)
    assert result.rounds[1].local_accuracy is None
    # FedHEAD's state is who is in which sector.
    if before and not name.startswith("fedhead"):
        assert any(not np.array_equal(before[key], last[key]) for key in before)
    # With as many as are needed it counts.
    _, other = fed.run(rounds=2, grid={"faults": failing(1, {2})}, min_train_nodes=3)
    assert [(r.participants, r.void) for r in other.rounds] == [(4, False), (3, False)]


def test_the_global_model_of_a_void_round_is_the_one_of_before(federation: Any) -> None:
    fed = federation("fedavg")
    _, one = fed.run(rounds=1)
    _, two = fed.run(rounds=2, grid={"faults": failing(2, {2})}, min_train_nodes=3)
    assert {n: a.data for n, a in one.arrays.items()} == {n: a.data for n, a in two.arrays.items()}


def test_too_many_void_rounds_end_the_run(federation: Any, flower_log: list[str], tmp_path: Path) -> None:
    fed = federation("fedavg")
    strategy = fed.strategy(min_train_nodes=3, max_void_rounds=2, checkpoint_dir=tmp_path)
    grid = InlineGrid(fed.app(), 4, faults=failing(2, {2, 4, 5, 6}))
    with pytest.raises(
        VoidRoundsError,
        match=r"2 rounds in a row were void: the last, round 5, had 2 usable replies and 2 failures, "
        r"min_train_nodes is 3",
    ):
        strategy.start(grid, fed.initial(), num_rounds=9, timeout=30.0)
    assert sum("is void: 2 usable replies, at least 3 are needed" in line for line in flower_log) == 3
    # What there is, is the last round that counted; a resumed run asks for round 4 again.
    found = Checkpoint.load(tmp_path, "FedAvg")
    assert found is not None
    assert found.server_round == 3
    resumed = fed.strategy(checkpoint_dir=tmp_path, resume=True)
    result = resumed.start(InlineGrid(fed.app(), 4), fed.initial(), num_rounds=4, timeout=30.0)
    assert [r.server_round for r in result.rounds] == [4]


def test_a_run_of_void_rounds_alone_is_an_error_however_short(federation: Any, tmp_path: Path) -> None:
    fed = federation("fedavg")
    strategy = fed.strategy(min_train_nodes=3, checkpoint_dir=tmp_path)
    grid = InlineGrid(fed.app(), 4, faults=failing(2, {1, 2, 4}))
    with pytest.raises(
        VoidRoundsError,
        match=r"every round was void \(2 of 2\), so nothing was learned: the last, round 2, had 2 usable replies",
    ) as raised:
        strategy.start(grid, fed.initial(), num_rounds=2, timeout=30.0)
    assert raised.value.result is not None
    assert [stats.void for stats in raised.value.result.rounds] == [True, True]
    # A resumed run has learned something in the checkpoint's round.
    _, result = fed.run(rounds=1, checkpoint_dir=tmp_path)
    resumed = fed.strategy(min_train_nodes=3, checkpoint_dir=tmp_path, resume=True)
    rest = resumed.start(
        InlineGrid(fed.app(), 4, faults=failing(2, {2})), fed.initial(), num_rounds=2, timeout=30.0
    )
    assert [stats.void for stats in rest.rounds] == [True]
    assert {n: a.data for n, a in rest.arrays.items()} == {n: a.data for n, a in result.arrays.items()}


def test_flowers_own_loop_has_void_rounds(federation: Any) -> None:

    fed = federation("fedavg")
    strategy = fed.strategy(min_train_nodes=3, max_void_rounds=2)
    grid = InlineGrid(fed.app(), 4, faults=failing(2, {1}))
    result = Strategy.start(strategy, grid, fed.initial(), num_rounds=2)
    assert list(result.train_metrics_clientapp) == [2]
    grid = InlineGrid(fed.app(), 4, faults=failing(2, {1, 2, 3}))
    with pytest.raises(VoidRoundsError, match=r"2 rounds in a row were void"):
        Strategy.start(strategy, grid, fed.initial(), num_rounds=5)


def test_a_round_is_kept_before_it_is_evaluated(federation: Any, tmp_path: Path) -> None:
    fed = federation("fedavg")

    def fail(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        if server_round:
            raise RuntimeError("no test data")
        return None

    strategy = fed.strategy(checkpoint_dir=tmp_path)
    with pytest.raises(RuntimeError, match=r"no test data"):
        strategy.start(InlineGrid(fed.app(), 4), fed.initial(), num_rounds=2, evaluate_fn=fail)
    found = Checkpoint.load(tmp_path, "FedAvg")
    assert found is not None
    assert found.server_round == 1
