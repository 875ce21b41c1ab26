"""Distances to the end of a run: lines, boxes and what is left out."""

from __future__ import annotations

import numpy as np
import pytest

from flwr_kd.plotting.optimum import figure
from flwr_kd.results.errors import ResultError
from flwr_kd.results.schema import RoundResult, RunResult
from tests.plotting.examples import a_comparison


def a_run(method, seed, distances):
    rounds = [
        RoundResult(number, 0.5, None, None, 1, 1, 1.0, 2, 0, distance_to_last=distance)
        for number, distance in enumerate(distances, start=1)
    ]
    return RunResult(method, seed, tuple(rounds))


def test_lines_are_means_without_the_last_round_and_boxes_are_of_the_first():
    result = a_comparison(
        a_run("fedavg", 0, [8.0, 2.0, 0.0]),
        a_run("fedavg", 1, [4.0, 4.0, 0.0]),
        a_run("fedhyb", 0, [1.0, 0.5, 0.0]),
        a_run("fedproto", 0, [None, None, None]),
    )
    drawn = figure(result)
    left, right = drawn.axes
    assert left.get_yscale() == "log"
    np.testing.assert_allclose(left.lines[0].get_xydata(), [[1, 6], [2, 3]])
    np.testing.assert_allclose(left.lines[1].get_xydata(), [[1, 1], [2, 0.5]])
    band = left.collections[0].get_paths()[0].vertices
    assert {tuple(point) for point in band} >= {(1.0, 4.0), (1.0, 8.0), (2.0, 2.0), (2.0, 4.0)}
    assert len(left.collections) == 1
    assert left.get_xlabel() == "round t\nno global model, or not measured: fedproto"
    assert [tick.get_text() for tick in right.get_xticklabels()] == ["fedavg", "fedhyb"]
    dots = [line.get_ydata().tolist() for line in right.lines if line.get_marker() == "o"]
    assert dots == [[8.0, 4.0], [1.0]]
    assert right.get_ylim() == (0, pytest.approx(1.08 * 8))
    assert [axes.get_title() for axes in drawn.axes] == [
        "by rounds, smallest to largest seed",
        "after the first round, by seed",
    ]
    assert drawn.get_suptitle().replace("\n", " · ").endswith("optimum: each run's own last global model")


def test_coinciding_lines_are_wider_below_and_named():
    left, _ = figure(
        a_comparison(a_run("fedavg", 0, [4.0, 2.0, 0.0]), a_run("fedprox", 0, [4.0, 2.0, 0.0]))
    ).axes
    assert left.lines[0].get_linewidth() > left.lines[1].get_linewidth()
    assert left.get_xlabel() == "round t\none line: fedavg, fedprox"
    assert left.get_title() == "by rounds"


@pytest.mark.parametrize("distances", [[None, None], [0.0], [None, 0.0]])
def test_a_result_without_distances_is_refused(distances):
    with pytest.raises(ResultError, match="run it with --distances"):
        figure(a_comparison(a_run("fedavg", 0, distances)))
