"""Bars of bytes: sums over rounds, in megabytes."""

from __future__ import annotations

import numpy as np
import pytest

from flwr_kd.plotting.communication import figure
from flwr_kd.results.errors import ResultError
from flwr_kd.results.schema import RoundResult, RunResult
from tests.plotting.examples import CONFIG, a_comparison


def a_run(method, seed, up, down, rounds=2):
    stats = [RoundResult(n, 0.5, None, None, up, down, 1.0, 2, 0) for n in range(1, rounds + 1)]
    return RunResult(method, seed, tuple(stats))


def widths(axes):
    return [[bar.get_width() for bar in container] for container in axes.containers]


def test_a_bar_is_the_sum_over_rounds_and_the_mean_over_seeds():
    result = a_comparison(
        a_run("ktpfl", 0, 10**6, 2 * 10**6),
        a_run("ktpfl", 1, 3 * 10**6, 2 * 10**6),
        a_run("ktpfl-weights", 0, 10**8, 10**8),
    )
    (axes,) = figure([result]).axes
    np.testing.assert_allclose(widths(axes), [[4, 200], [4, 200]])
    np.testing.assert_allclose([bar.get_x() for bar in axes.containers[1]], [4, 200])
    assert [text.get_text() for text in axes.texts] == ["8.00", "400"]
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["ktpfl", "ktpfl-weights"]


def test_other_numbers_of_rounds_are_said():
    (axes,) = figure([a_comparison(a_run("fedavg", 0, 1, 1), a_run("fedmd", 0, 1, 1, rounds=3))]).axes
    labels = [tick.get_text() for tick in axes.get_yticklabels()]
    assert labels == ["fedavg (2 rounds)", "fedmd (3 rounds)"]


def test_results_are_panels_with_what_differs_as_title():
    results = [
        a_comparison(a_run("fedavg", 0, 1, 1), config={**CONFIG, "dataset": name})
        for name in ("mnist", "cifar10")
    ]
    drawn = figure(results)
    assert [axes.get_title() for axes in drawn.axes] == ["mnist", "cifar10"]
    assert drawn.get_suptitle().startswith("inner-dirichlet:0.1 · 10 clients")
    results = [
        a_comparison(a_run("fedavg", 0, 1, 1), config={**CONFIG, "clients": clients}) for clients in (1, 5)
    ]
    assert [axes.get_title() for axes in figure(results).axes] == ["1 client", "5 clients"]
    with pytest.raises(ResultError, match="runs is empty"):
        figure([])
