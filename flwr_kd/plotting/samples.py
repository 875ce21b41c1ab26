"""Pictures of the images that a server made for its distillation."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from flwr_kd.plotting.style import MOST_COLUMNS, add_title, chosen_runs, make_panels, write_picture
from flwr_kd.results.errors import ResultError
from flwr_kd.results.schema import Comparison

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["figure", "plot"]

FloatArray: TypeAlias = npt.NDArray[np.float64]

_MOST_ROWS = 20


def plot(
    comparison: Comparison, images: Mapping[str, FloatArray], path: Path, *, seed: int | None = None
) -> Path:
    """Write the :func:`figure` to a PNG, as :func:`flwr_kd.plotting.curves.plot` does."""
    return write_picture(figure(comparison, images, seed=seed), path)


def figure(comparison: Comparison, images: Mapping[str, FloatArray], *, seed: int | None = None) -> Figure:
    """Draw the images that a server made, one panel per method, one row per class.

    Parameters
    ----------
    comparison : Comparison
        Its accuracies in the last round stand above the panels.
    images : mapping of str to ndarray
        By method, ``[C, n, K, H, W]``: n images of each class. The first ten images of the first 20 classes are
        drawn. Images of three channels are in colour; of others, the mean over channels is in grey. A method's
        darkest pixels are black and its brightest white, except for one in a hundred at either end.
    seed : int, optional
        The runs with this seed; each method's first run if None.

    Returns
    -------
    matplotlib.figure.Figure
        The numbers of the classes are to the left of their rows.

    Raises
    ------
    ResultError
        If there is no method to draw, the comparison has no run of one, or images have another shape.
    ImportError
        If ``matplotlib`` is not installed.
    """
    runs = chosen_runs(comparison, images, seed)
    for name, of_method in images.items():
        if of_method.ndim != 5 or not of_method.size:
            raise ResultError(
                f"images of {name} must have the shape [C, n, K, H, W], got {list(of_method.shape)}"
            )
    shown = {name: of_method[:_MOST_ROWS, :MOST_COLUMNS] for name, of_method in images.items()}
    rows, columns = (max(each.shape[axis] for each in shown.values()) for axis in (0, 1))
    drawn, panels = make_panels(runs, size=max(0.45 * columns, 2.4), height=max(0.45 * rows, 2.4))
    for axes, of_method, part in zip(panels, images.values(), shown.values(), strict=True):
        axes.imshow(_mosaic(part), interpolation="nearest")
        height = part.shape[3] + 1
        labels = range(len(part))
        axes.set_yticks([label * height + height / 2 for label in labels], [str(each) for each in labels])
        axes.set_xticks([])
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        axes.set_ylabel("class")
        if part.shape[:2] != of_method.shape[:2]:
            counts = [f"{a} of {b}" for a, b in zip(part.shape[:2], of_method.shape[:2], strict=True)]
            axes.set_xlabel(f"{counts[0]} classes, {counts[1]} images of each")
    add_title(drawn, comparison, runs.values(), "images made by the server")
    return drawn


def _mosaic(images: FloatArray) -> FloatArray:
    """Lay ``[C, n, K, H, W]`` out as one image ``[.., .., 3]``, with values in [0, 1] and white lines between."""
    rows, columns, channels, height, width = images.shape
    pixels = np.where(np.isfinite(images), images, np.nan).astype(np.float64)
    if channels != 3:
        pixels = np.repeat(pixels.mean(axis=2, keepdims=True), 3, axis=2)
    finite = pixels[np.isfinite(pixels)]
    low, high = np.percentile(finite, [1, 99]) if finite.size else (0.0, 1.0)
    if low == high:
        low, high = finite.min(), max(finite.max(), finite.min() + 1e-6)
    pixels = np.nan_to_num(np.clip((pixels - low) / (high - low), 0, 1))
    page = np.ones((rows * (height + 1) + 1, columns * (width + 1) + 1, 3))
    for row in range(rows):
        for column in range(columns):
            top, left = 1 + row * (height + 1), 1 + column * (width + 1)
            page[top : top + height, left : left + width] = pixels[row, column].transpose(1, 2, 0)
    return page
