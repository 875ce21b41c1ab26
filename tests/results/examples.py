"""Results that tests share."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from flwr_kd.results import table
from flwr_kd.results.schema import Comparison, RoundResult, RunResult


def a_round(number: int = 1, **changes) -> RoundResult:
    values = {
        "round": number,
        "local_accuracy": 0.5,
        "global_accuracy": None,
        "train_loss": 1.25,
        "bytes_up": 1_000_000,
        "bytes_down": 3_000_000,
        "seconds": 2.0,
        "participants": 4,
        "failures": 1,
    }
    return RoundResult(**(values | changes))


def a_run(method: str = "fedavg", seed: int = 0, *, rounds=None) -> RunResult:
    return RunResult(method, seed, rounds or (a_round(),), {"lr": 0.1}, [[1, 2], [3, 4]])


def a_comparison(*runs: RunResult) -> Comparison:
    return Comparison(
        {"dataset": "digits", "clients": 2}, {"flwr": "1"}, "flwr-kd compare", runs or (a_run(),)
    )


def rendered(comparison: Comparison, width: int = 80, columns: Sequence[str] = ()) -> str:
    console = Console(width=width)
    with console.capture() as capture:
        console.print(table.table(comparison, columns))
    return capture.get()
