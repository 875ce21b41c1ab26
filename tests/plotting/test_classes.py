"""Maps of classes: cells and dots are the numbers of samples."""

from __future__ import annotations

import numpy as np
import pytest

from flwr_kd.plotting.classes import figure
from flwr_kd.results.errors import ResultError
from tests.plotting.examples import titles

ONE = [[5, 0, 1], [0, 10, 2]]
OTHER = [[1, 1, 1], [2, 2, 2], [3, 3, 3], [0, 4, 0]]


def panels(drawn):
    return [axes for axes in drawn.axes if axes.get_visible() and axes.get_title()]


def test_cells_are_the_numbers_of_samples_on_one_scale():
    drawn = figure({"dirichlet:$1": ONE, "iid": OTHER}, title=["digits", "seed 0"])
    assert titles(drawn)[:2] == ["dirichlet:$1", "iid"]
    assert drawn.get_suptitle() == "digits · seed 0"
    for axes, table in zip(panels(drawn), (ONE, OTHER), strict=True):
        image = axes.images[0]
        np.testing.assert_array_equal(image.get_array(), np.transpose(table))
        assert image.get_clim() == (0, 10)
        assert (axes.get_xlabel(), axes.get_ylabel()) == ("client", "class")
    texts = [text.get_text() for text in panels(drawn)[0].texts]
    assert sorted(texts) == ["1", "10", "2", "5", "per client 6 to 12 samples of 2 classes"]


def test_dots_have_the_numbers_as_areas():
    axes = panels(figure({"a": ONE}, dots=True))[0]
    (dots,) = axes.collections
    np.testing.assert_array_equal(dots.get_offsets(), [[0, 0], [0, 2], [1, 1], [1, 2]])
    np.testing.assert_allclose(dots.get_sizes() / dots.get_sizes().max(), [0.5, 0.1, 1, 0.2])
    low, high = axes.get_ylim()
    assert low > high  # The first class is at the top, as in the cells.


def test_many_cells_have_no_numbers_and_nothing_overlaps():
    drawn = figure({str(name): np.ones((50, 100), dtype=int) for name in range(4)}, title=["x"])
    drawn.canvas.draw()
    renderer = drawn.canvas.get_renderer()
    boxes = [axes.get_tightbbox(renderer) for axes in panels(drawn)]
    assert all(len(axes.texts) == 1 for axes in panels(drawn))
    assert not any(box.overlaps(other) for index, box in enumerate(boxes) for other in boxes[:index])
    assert not any(box.overlaps(drawn._suptitle.get_window_extent(renderer)) for box in boxes)


def test_a_single_client_has_one_tick():
    drawn = figure({"a": [[3, 0, 5]]})
    drawn.canvas.draw()
    assert [tick for tick in panels(drawn)[0].get_xticks() if -0.5 <= tick <= 0.5] == [0]


@pytest.mark.parametrize("histogram", [[], [[]], [[0, 0]], [1, 2]])
def test_a_division_without_samples_is_refused(histogram):
    with pytest.raises(ResultError, match=r"the histogram of a must have samples"):
        figure({"a": histogram})
    with pytest.raises(ResultError, match="there is no division of data to draw"):
        figure({})


def test_classes_have_their_names_where_there_is_room():
    names = ["apple", "a very long name of a class of fruit", "c$t"]
    axes = panels(figure({"a": ONE, "b": OTHER}, class_names=names))[0]
    shown = [tick.get_text() for tick in axes.get_yticklabels()]
    assert shown == ["apple", "a very long name of a c…", "c$t"]
    many = panels(figure({"a": np.ones((2, 40), dtype=int)}, class_names=[f"n{x}" for x in range(40)]))[0]
    assert "n0" not in [tick.get_text() for tick in many.get_yticklabels()]
    with pytest.raises(ResultError, match="2 names for 3 classes"):
        figure({"a": ONE}, class_names=names[:2])
