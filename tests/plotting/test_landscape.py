"""Losses around the global models."""

from __future__ import annotations

import numpy as np

from flwr_kd.plotting import landscape
from flwr_kd.plotting.curves import figure
from tests.plotting.examples import titles


def test_landscapes_share_their_axes_and_show_the_flattest(comparison):
    x = np.linspace(-1, 1, 5)
    flat, steep = 0.5 + np.outer([1.0, 2.0, 3.0], x**2), 0.5 + np.outer([1e3, 1e4, 1e5], x**2)
    steep[0, -1], steep[1, 0] = np.inf, np.nan
    drawn = landscape.figure(comparison, x, {"fedavg": steep, "ktpfl": flat})
    left, right = drawn.axes
    assert titles(drawn) == ["fedavg", "ktpfl"]
    assert drawn.get_suptitle().endswith("seed 0 · loss in 3 directions")
    assert left.get_ylim() == right.get_ylim()
    low, high = right.get_ylim()
    assert 0 <= low < 0.5
    assert 2.5 < high < 12
    assert len(right.lines) == 4
    np.testing.assert_allclose(right.lines[-1].get_ydata(), 0.5 + 2 * x**2)
    assert np.isnan(left.lines[0].get_ydata()[-1])
    curves = figure(comparison).axes[0].lines
    assert [left.lines[0].get_color(), right.lines[0].get_color()] == [line.get_color() for line in curves]


def test_landscapes_without_a_finite_loss_or_without_a_difference(tmp_path, comparison):
    x = np.array([-1.0, 0.0, 1.0])
    landscape.plot(comparison, x, {"fedavg": np.full((2, 3), np.nan)}, tmp_path / "a.png")
    low, high = landscape.figure(comparison, x, {"fedavg": np.full((2, 3), 2.3)}).axes[0].get_ylim()
    assert high - low >= 0.1
    half = np.array([[1.0, 0.5, np.inf], [1.0, 0.5, np.inf], [1.0, 0.5, 2.0]])
    median = landscape.figure(comparison, x, {"fedavg": half}).axes[0].lines[-1].get_ydata()
    assert np.isnan(median[2])
    assert median[:2].tolist() == [1.0, 0.5]
