"""Curves of single clients."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from flwr_kd.plotting import client_curves
from flwr_kd.results.errors import ResultError
from flwr_kd.results.schema import Comparison, RunResult
from tests.results.examples import a_comparison, a_round


def run(method: str, seed: int, values: list[tuple[float, float | None]]) -> RunResult:
    """Return a run of two clients, the second of which may not be measured in a round."""
    rounds = tuple(
        a_round(
            number,
            participants=2,
            clients={
                "0": {
                    "local_accuracy": first,
                    "common_accuracy": first / 2 if number == len(values) else None,
                },
                "1": {"local_accuracy": second},
            },
        )
        for number, (first, second) in enumerate(values, 1)
    )
    return RunResult(method, seed, rounds)


@pytest.fixture
def comparison() -> Comparison:
    return a_comparison(
        run("fedgkt", 0, [(0.25, 0.5), (0.5, None), (0.75, 1.0)]),
        run("fedgkt", 1, [(0.25, 0.5), (0.25, None), (0.5, 0.5)]),
        run("feddkc-kkr", 0, [(0.5, 0.5), (0.5, 0.5), (1.0, 0.5)]),
    )


def test_each_client_has_a_panel_with_a_line_for_each_method(comparison: Comparison, tmp_path: Path) -> None:
    drawn = client_curves.figure(comparison, [0, 1])
    first, second = drawn.axes
    assert [axes.get_title() for axes in (first, second)] == ["client 0", "client 1"]
    lines = [line for line in first.get_lines() if len(line.get_xdata())]
    assert [list(line.get_ydata()) for line in lines] == [[25.0, 37.5, 62.5], [50.0, 50.0, 100.0]]
    # A round in which it was not measured is left out.
    (gkt, _) = [line for line in second.get_lines() if len(line.get_xdata())]
    assert list(gkt.get_xdata()) == [1, 3]
    assert np.allclose(gkt.get_ydata(), [50.0, 75.0])
    assert client_curves.plot(comparison, tmp_path / "c.png", [1]).stat().st_size > 1000


def test_what_was_not_measured_is_an_error(comparison: Comparison) -> None:
    with pytest.raises(ResultError, match="local-top5 was not measured of clients 0, 1 in any run"):
        client_curves.figure(comparison, [0, 1], "local_top5")


def test_a_metric_of_the_last_round_alone_is_no_curve(comparison: Comparison) -> None:
    assert client_curves.most_measured(comparison, ["common_accuracy", "local_accuracy"]) == "local_accuracy"
    assert client_curves.most_measured(comparison, ["common_accuracy", "local_top5"]) == "common_accuracy"
    assert client_curves.most_measured(comparison, ["local_top5"]) is None
