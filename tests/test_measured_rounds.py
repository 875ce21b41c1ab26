"""When models are measured besides on the clients' own test data."""

from __future__ import annotations

import pytest

from flwr_kd.checks import ConfigError
from flwr_kd.measured_rounds import MeasuredRounds
from flwr_kd.strategies.fedavg import FedAvg


@pytest.mark.parametrize(
    ("text", "rounds"),
    [("never", []), ("last", [7]), ("every:1", [*range(1, 8)]), ("every:3", [3, 6, 7]), ("every:50", [7])],
)
def test_the_rounds(text: str, rounds: list[int]) -> None:
    measured = MeasuredRounds.parse(text)
    assert [number for number in range(1, 8) if measured.has(number, 7)] == rounds


@pytest.mark.parametrize("text", ["", "Last", "every", "always", "3", None, 3])
def test_anything_else_is_refused(text: object) -> None:
    with pytest.raises(ConfigError, match="measure must be never, last or every:N, got"):
        MeasuredRounds.parse(text)


@pytest.mark.parametrize("count", ["", "0", "-1", "1.5", "x"])
def test_the_number_of_rounds_is_at_least_one(count: str) -> None:
    with pytest.raises(ConfigError, match="measure: the N of every:N must be a whole number from 1"):
        FedAvg(measure=f"every:{count}")
