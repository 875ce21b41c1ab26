"""Heat maps of how much each client learns from each other one."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from flwr_kd.plotting import coefficients
from tests.plotting.examples import titles, two_groups


def bars(drawn):
    return [axes.images[0].colorbar for axes in drawn.axes if axes.get_visible()]


def cells(axes):
    """Return the colours of a heat map, [N, N, 4]."""
    image = axes.images[0]
    return image.to_rgba(image.get_array())


def test_groups_are_blocks_however_large_the_diagonal_is(comparison):
    matrix = two_groups(20, inside=1.1, diagonal=0.9)
    drawn = coefficients.figure(
        comparison, {"ktpfl": (matrix, np.arange(20)), "fedavg": (matrix.T, np.arange(20))}
    )
    left, right = drawn.axes
    np.testing.assert_array_equal(left.images[0].get_array(), matrix)
    np.testing.assert_array_equal(right.images[0].get_array(), matrix.T)
    assert (left.get_ylabel(), left.get_xlabel()) == ("client n", "weight of client m")
    assert left.get_ylim() == (19.5, -0.5)  # client 0 at the top
    assert left.get_aspect() == 1
    seen = cells(left)
    assert np.abs(seen[0, 1] - seen[0, 19]).max() > 0.5
    assert left.images[0].get_clim() == pytest.approx((matrix[0, 19], matrix[0, 1]))
    (bar, _) = bars(drawn)
    assert bar.extend == "max"
    assert bar.ax.get_ylabel() == "weight (diagonal clipped: 0.9)"
    assert titles(drawn) == ["ktpfl", "fedavg"]
    assert [axes.texts[0].get_text() for axes in drawn.axes] == [
        "local accuracy 70.00 %", "local accuracy 60.00 %"
    ]  # fmt: skip
    assert drawn.get_suptitle().endswith("seed 0 · knowledge coefficients")


def test_each_matrix_has_its_own_scale(comparison):
    bare = np.array([[-0.7, 0.3, 1.4], [0.4, 1.6, -0.2], [0.2, 0.1, 0.7]])
    low = np.array([[0.1, 0.45, 0.45], [0.4, 0.2, 0.4], [0.3, 0.3, 0.4]])
    drawn = coefficients.figure(comparison, {"ktpfl": (bare, np.arange(3)), "fedavg": (low, np.arange(3))})
    assert [axes.images[0].get_clim() for axes in drawn.axes] == [(-0.2, 1.4), (0.3, 0.45)]
    assert [(bar.extend, bar.ax.get_ylabel()) for bar in bars(drawn)] == [
        ("both", "weight (diagonal clipped: -0.7 to 1.6)"),
        ("min", "weight (diagonal clipped: 0.1 to 0.4)"),
    ]


def test_small_differences_are_pale_and_their_range_is_stated(comparison):
    matrix = np.where(np.eye(4), 0.26, 0.25) + 1e-6 * np.arange(16).reshape(4, 4)
    drawn = coefficients.figure(comparison, {"ktpfl": (matrix, np.arange(4))})
    low, high = drawn.axes[0].images[0].get_clim()
    assert high - low == pytest.approx(0.05 * 0.25, rel=1e-3)
    assert (low + high) / 2 == pytest.approx(0.25, abs=1e-5)
    seen = cells(drawn.axes[0])[~np.eye(4, dtype=bool)]
    assert np.ptp(seen, axis=0).max() < 0.02
    (bar,) = bars(drawn)
    assert bar.ax.get_ylabel() == "weight (others: 0.250001 to 0.250014;\ndiagonal clipped: 0.26)"


@pytest.mark.parametrize(
    ("matrix", "limits"),
    [
        (np.full((20, 20), 0.05), (0, 0.1)),
        (np.full((3, 3), 1 / 3) + 1e-16 * np.arange(9).reshape(3, 3), (0, 2 / 3)),  # rounding is no pattern
        (np.ones((1, 1)), (0, 2)),
        (np.zeros((2, 2)), (0, 1)),
        (np.full((2, 2), -0.5), (-1, 0)),
        (np.eye(4), (0, 1)),
        (np.where(np.eye(4), 0.7, 0.1), (0.1, 0.7)),
    ],
    ids=["uniform", "rounding", "one client", "zero", "negative", "identity", "same off the diagonal"],
)
def test_matrices_without_a_difference_between_others(comparison, matrix, limits):
    drawn = coefficients.figure(comparison, {"ktpfl": (matrix, np.arange(len(matrix)))})
    assert drawn.axes[0].images[0].get_clim() == pytest.approx(limits)
    (bar,) = bars(drawn)
    assert (bar.extend, bar.ax.get_ylabel()) == ("neither", "weight")


@pytest.mark.parametrize(
    ("clients", "labels"),
    [
        ([4], ["4"]),
        ([0, 3, 12], ["0", "3", "12"]),
        (range(20), [str(each) for each in range(0, 20, 2)]),
        (range(100), [str(each) for each in range(0, 100, 10)]),
        (range(5, 105), ["5", "15", "25", "35", "45", "55", "65", "75", "85", "95"]),
        (range(1000), [str(each) for each in range(0, 1000, 100)]),
    ],
    ids=["1", "gaps", "20", "100", "three digits", "1000"],
)
def test_clients_are_named_as_far_as_their_names_fit(comparison, clients, labels):
    drawn = coefficients.figure(comparison, {"ktpfl": (two_groups(len(clients)), np.array(clients))})
    (axes,) = drawn.axes
    drawn.canvas.draw()
    renderer = drawn.canvas.get_renderer()
    for axis in (axes.xaxis, axes.yaxis):
        names = axis.get_ticklabels()
        assert [name.get_text() for name in names] == labels
        assert [list(clients)[int(at)] for at in axis.get_ticklocs()] == [int(label) for label in labels]
        boxes = [name.get_window_extent(renderer) for name in names]
        assert not any(a.overlaps(b) for a, b in itertools.pairwise(boxes))
