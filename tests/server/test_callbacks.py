"""Callbacks: when they are called, with what, and what their errors do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flwr_kd import Callback, Callbacks, ConfigError, PhaseStats, RoundStats, RunInfo
from flwr_kd.server.records import KDResult
from flwr_kd.transport.inline_grid import InlineGrid
from tests.server.federations import failing


class Noting(Callback):
    """Notes each call."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    def on_start(self, run: RunInfo) -> None:
        self.calls.append(("start", run))

    def on_phase(self, stats: PhaseStats) -> None:
        self.calls.append(("phase", stats))

    def on_round(self, stats: RoundStats) -> None:
        self.calls.append(("round", stats))

    def on_end(self, result: KDResult, error: BaseException | None) -> None:
        self.calls.append(("end", (result, error)))

    def of(self, hook: str) -> list[Any]:
        return [value for name, value in self.calls if name == hook]


class Failing(Noting):
    """Notes each call, and fails in some."""

    def __init__(self, *hooks: str) -> None:
        super().__init__()
        self.hooks = hooks

    def on_start(self, run: RunInfo) -> None:
        super().on_start(run)
        self._fail("start")

    def on_round(self, stats: RoundStats) -> None:
        super().on_round(stats)
        self._fail("round")

    def _fail(self, hook: str) -> None:
        if hook in self.hooks:
            raise OSError("the disk is full\nof other things")


def test_the_order_of_the_calls_and_what_they_are_told(federation: Any) -> None:
    noting = Noting()
    strategy, result = federation("fedmd").run(rounds=2, callbacks=[noting])
    per_round = [*["phase"] * len(strategy.phases), "round"]
    assert [name for name, _ in noting.calls] == ["start", *per_round, *per_round, "end"]
    (info,) = noting.of("start")
    assert (info.name, info.first_round, info.num_rounds, info.clients) == ("FedMD", 1, 2, 4)
    assert info.hyperparameters == strategy.config.to_wire()
    assert (info.seed, info.key, info.settings) == (strategy.seed, strategy.current_run.key, {})
    assert noting.of("round") == result.rounds
    assert noting.of("end") == [(result, None)]
    phases = noting.of("phase")
    assert [(each.server_round, each.phase) for each in phases] == [
        (number, phase) for number in (1, 2) for phase in strategy.phases
    ]
    for stats in result.rounds:
        mine = [each for each in phases if each.server_round == stats.server_round]
        assert sum(each.bytes_up for each in mine) == stats.bytes_up > 0
        assert sum(each.bytes_down for each in mine) == stats.bytes_down
        assert sum(each.usable for each in mine) == stats.round_trips
        assert all(each.asked == 4 and 0 < each.seconds <= stats.seconds for each in mine)


def test_a_void_round_is_told_and_none_of_its_replies_was_used(federation: Any) -> None:
    fed, noting = federation("fedavg"), Noting()
    strategy = fed.strategy(min_train_nodes=3, callbacks=[noting])
    strategy.start(
        InlineGrid(fed.app(), 4, faults=failing(2, {1})), fed.initial(), num_rounds=2, timeout=30.0
    )
    assert [(each.asked, each.usable) for each in noting.of("phase")] == [(4, 0), (4, 4)]
    assert [each.void for each in noting.of("round")] == [True, False]


def test_errors_are_logged_once_and_cost_nothing_else(federation: Any, flower_log: list[str]) -> None:
    fed, broken, other = federation("fedavg"), Failing("round"), Noting()
    _, alone = fed.run(rounds=2)
    _, result = fed.run(rounds=2, callbacks=[broken, other])
    assert {n: a.data for n, a in result.arrays.items()} == {n: a.data for n, a in alone.arrays.items()}
    assert len(broken.of("round")) == len(other.of("round")) == 2
    assert [len(each.of("end")) for each in (broken, other)] == [1, 1]
    assert [line for line in flower_log if "callback" in line] == [
        "callback Failing failed in on_round, and the run goes on: OSError: the disk is full",
        "callback Failing: 2 of its calls failed in this run; what it keeps is not complete",
    ]


def test_a_callback_that_cannot_start_is_left_out(federation: Any, flower_log: list[str]) -> None:
    fed, broken, other = federation("fedavg"), Failing("start"), Noting()
    fed.run(rounds=1, callbacks=[broken, other])
    assert [name for name, _ in broken.calls] == ["start"]
    assert [name for name, _ in other.calls] == ["start", "phase", "round", "end"]
    assert (
        "callback Failing failed in on_start, and the run goes on without it: OSError: the disk is full"
        in (flower_log)
    )


@pytest.mark.parametrize("error", [ValueError("stop"), KeyboardInterrupt()])
def test_the_end_names_the_error_of_the_run(federation: Any, error: BaseException) -> None:
    fed, noting = federation("fedavg"), Noting()

    def stop(stats: RoundStats) -> None:
        if stats.server_round == 2:
            raise error

    with pytest.raises(type(error)):
        fed.run(rounds=3, on_round=stop, callbacks=[noting])
    ((result, told),) = noting.of("end")
    assert told is error
    assert [each.server_round for each in result.rounds] == [1, 2]
    # What must not fail comes first: the callback is not told of a round in which it did.
    assert [each.server_round for each in noting.of("round")] == [1]


def test_a_resumed_run_keeps_its_key(federation: Any, tmp_path: Path) -> None:
    fed, noting = federation("fedavg"), Noting()
    fed.run(rounds=1, checkpoint_dir=tmp_path, callbacks=[noting])
    fed.run(rounds=2, checkpoint_dir=tmp_path, resume=True, callbacks=[noting])
    first, second = noting.of("start")
    assert (first.first_round, second.first_round) == (1, 2)
    assert first.key == second.key


def test_name_and_settings_of_several_as_one(federation: Any) -> None:
    noting = Noting()
    federation("fedavg").run(
        rounds=1, callbacks=Callbacks([noting], name="mine", settings={"dataset": "digits"})
    )
    (info,) = noting.of("start")
    assert (info.name, dict(info.settings)) == ("mine", {"dataset": "digits"})


def test_a_function_is_refused_with_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"derive from flwr_kd.Callback, got .* given as on_round"):
        Callbacks([print])  # type: ignore[list-item]
