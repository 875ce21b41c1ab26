"""Maps of the global models' features by t-SNE."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from flwr_kd.plotting.style import (
    COLOURS,
    MARKERS,
    add_legend,
    add_title,
    chosen_runs,
    make_panels,
    measured_on,
    number_range,
    write_picture,
)
from flwr_kd.results.schema import Comparison
from flwr_kd.text import clipped

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["figure", "plot"]

_NAME = 24
"""Characters of a class's name for which there is room."""

FloatArray: TypeAlias = npt.NDArray[np.float64]


def plot(
    comparison: Comparison,
    embeddings: Mapping[str, tuple[FloatArray, npt.NDArray[np.int64]]],
    path: Path,
    *,
    seed: int | None = None,
) -> Path:
    """Write the :func:`figure` to a PNG, as :func:`flwr_kd.plotting.curves.plot` does."""
    return write_picture(figure(comparison, embeddings, seed=seed), path)


def figure(
    comparison: Comparison,
    embeddings: Mapping[str, tuple[FloatArray, npt.NDArray[np.int64]]],
    *,
    seed: int | None = None,
) -> Figure:
    """Draw maps of features, one panel per method, one colour and marker per class; FedHyb's figure 3.

    Parameters
    ----------
    comparison : Comparison
        Its accuracies in the last round stand above the panels.
    embeddings : mapping of str to (ndarray, ndarray)
        By method, points ``[N, 2]`` as from :func:`~flwr_kd.plotting.measurements.embed`, and their classes
        ``[N]``. Points that are not finite are not drawn.
    seed : int, optional
        The runs with this seed; each method's first run if None.

    Returns
    -------
    matplotlib.figure.Figure
        Axes without numbers, since a map's scale means nothing, and a legend of the classes beside them.

    Raises
    ------
    ResultError
        If there is no method to draw, or the comparison has no run of one.
    ImportError
        If ``matplotlib`` is not installed.
    """
    runs = chosen_runs(comparison, embeddings, seed)
    drawn, panels = make_panels(runs, size=3.4)
    from matplotlib.lines import Line2D

    classes = sorted({int(label) for _, labels in embeddings.values() for label in np.unique(labels)})
    looks: dict[int, dict[str, Any]] = {
        label: {
            "color": COLOURS[index % len(COLOURS)],
            "marker": MARKERS[index // len(COLOURS) % len(MARKERS)],
        }
        for index, label in enumerate(classes)
    }
    for axes, (points, labels) in zip(panels, embeddings.values(), strict=True):
        for label, look in looks.items():
            of_class = points[labels == label]
            axes.scatter(of_class[:, 0], of_class[:, 1], s=11, alpha=0.75, linewidths=0, **look)
        axes.set_aspect("equal", adjustable="datalim")
        axes.set_xticks([])
        axes.set_yticks([])
        axes.spines[:].set_color("0.8")
    handles = [Line2D([], [], linestyle="", markersize=5, **look) for look in looks.values()]
    known = next(iter(runs.values())).class_names
    names = [clipped(known[label], _NAME) if known else f"class {label}" for label in classes]
    add_legend(drawn, handles, names)
    add_title(
        drawn,
        comparison,
        runs.values(),
        f"features of {number_range(len(e[1]) for e in embeddings.values())} samples of the "
        f"{measured_on(comparison.config)}",
    )
    return drawn
