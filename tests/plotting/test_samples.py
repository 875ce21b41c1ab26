"""Images that a server made."""

from __future__ import annotations

import numpy as np

from flwr_kd.plotting import samples


def test_samples_have_a_row_per_class(comparison):
    images = np.zeros((3, 2, 1, 4, 5))
    for label in range(3):
        images[label] = label
    images[2, 1] = np.nan
    drawn = samples.figure(comparison, {"fedavg": images})
    (axes,) = drawn.axes
    assert [text.get_text() for text in axes.get_yticklabels()] == ["0", "1", "2"]
    page = np.asarray(axes.images[0].get_array())
    assert page.shape == (3 * 5 + 1, 2 * 6 + 1, 3)
    for label, shade in enumerate((0.0, 0.5, 1.0)):
        row = 1 + label * 5
        assert np.allclose(page[row : row + 4, 1:6], shade)
        assert row - 0.5 < axes.get_yticks()[label] < row + 4
    assert np.allclose(page[11:15, 7:12], 0)
    assert np.allclose(page[0], 1)
    assert axes.get_xlabel() == ""


def test_of_many_samples_the_first_are_drawn(comparison):
    images = np.random.default_rng(0).random((25, 12, 3, 4, 4))
    images[0, 0, 0], images[0, 0, 1:] = 1, 0
    (axes,) = samples.figure(comparison, {"fedavg": images}).axes
    page = np.asarray(axes.images[0].get_array())
    assert page.shape == (20 * 5 + 1, 10 * 5 + 1, 3)
    assert page[1, 1].tolist() == [1, 0, 0]
    assert axes.get_xlabel() == "20 of 25 classes, 10 of 12 images of each"


def test_images_that_are_nearly_all_dark(comparison):
    images = np.zeros((1, 1, 1, 20, 20))
    images[..., 0, 0] = 1
    page = np.asarray(samples.figure(comparison, {"fedavg": images}).axes[0].images[0].get_array())
    assert (page[1, 1, 0], page[2, 2, 0]) == (1, 0)
    assert np.isfinite(
        np.asarray(samples.figure(comparison, {"fedavg": 0 * images}).axes[0].images[0].get_array())
    ).all()
