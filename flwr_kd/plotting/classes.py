"""Maps of classes: how many training samples of each class each client has."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from flwr_kd.plotting.style import empty_figure, name_panel, number_range, set_title, write_picture
from flwr_kd.results.errors import ResultError
from flwr_kd.text import clipped

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["figure", "plot"]

Counts: TypeAlias = npt.NDArray[np.int64]
_MOST_PANELS = 3
_CELL, _LEAST, _MOST = 0.34, 3.2, 9.0
"""Inches: a row or column where there is room, and the sides of a panel."""
_MOST_NUMBERS = 150
_MOST_NAMES, _NAME = 26, 24
"""Names of classes, and characters of one, for which there is room."""
_DOT = 0.85
_POINTS = 72


def plot(
    panels: Mapping[str, Sequence[Sequence[int]]],
    path: Path,
    *,
    title: Sequence[str] = (),
    dots: bool = False,
    class_names: Sequence[str] = (),
) -> Path:
    """Write the :func:`figure` to a PNG, as :func:`flwr_kd.plotting.curves.plot` does."""
    return write_picture(figure(panels, title=title, dots=dots, class_names=class_names), path)


def figure(
    panels: Mapping[str, Sequence[Sequence[int]]],
    *,
    title: Sequence[str] = (),
    dots: bool = False,
    class_names: Sequence[str] = (),
) -> Figure:
    """Draw who has what: one panel for each division of a data set, with a column per client and a row per class.

    As FedHKD's figures 1 to 3 (cells, the darker the more samples), or as FedDKC's figure 3 and FedHEAD's figure 2
    (dots, whose areas are the numbers of samples).

    Parameters
    ----------
    panels : mapping of str to sequence
        By title, the histogram ``[clients][classes]`` of :func:`flwr_kd.data.histogram`.
    title : sequence of str
        Parts of the title of all.
    dots : bool
        Whether numbers are areas of dots and not colours.
    class_names : sequence of str
        Names of the classes in all panels, at the rows of the first column of panels if there are not too many;
        numbers if empty.

    Returns
    -------
    matplotlib.figure.Figure
        All panels have one scale, from 0 to the largest number. Below each title stand the range of the clients'
        samples and of the number of classes that they have. Cells have their number where there are at most 150.

    Raises
    ------
    ResultError
        If there is no panel, a histogram has no clients, no classes, or no samples, or not one class for each name.
    ImportError
        If ``matplotlib`` is not installed.
    """
    counts = {name: _checked(name, histogram) for name, histogram in panels.items()}
    if not counts:
        raise ResultError("there is no division of data to draw")
    widths = {table.shape[1] for table in counts.values()}
    if class_names and widths != {len(class_names)}:
        raise ResultError(f"there are {len(class_names)} names for {number_range(widths)} classes")
    rows = math.ceil(len(counts) / _MOST_PANELS)
    columns = math.ceil(len(counts) / rows)
    clients = max(len(table) for table in counts.values())
    classes = max(table.shape[1] for table in counts.values())
    side_x, side_y = (min(max(_CELL * count, _LEAST), _MOST) for count in (clients, classes))
    drawn = empty_figure(max(columns * (side_x + 0.9) + 1.1, 6.0), rows * (side_y + 1.1) + 0.8)
    from matplotlib.ticker import MaxNLocator

    grid = list(drawn.subplots(rows, columns, squeeze=False).flat)
    for axes in grid[len(counts) :]:
        axes.set_visible(False)
    shown, most = grid[: len(counts)], max(int(table.max()) for table in counts.values())
    # A dot of the largest number touches its neighbours nearly.
    diameter = _DOT * _POINTS * min(side_x / clients, side_y / classes)
    for axes, (name, table) in zip(shown, counts.items(), strict=True):
        if dots:
            image = _dots(axes, table, most, diameter)
        else:
            image = axes.imshow(
                table.T, cmap="Blues", vmin=0, vmax=most, aspect="auto", interpolation="nearest"
            )
            if clients * classes <= _MOST_NUMBERS:
                _write_numbers(axes, table, most)
        _decorate(axes, name, table)
        if class_names and len(class_names) <= _MOST_NAMES:
            axes.set_yticks(range(len(class_names)), [clipped(label, _NAME) for label in class_names])
    bar = drawn.colorbar(image, ax=shown, fraction=0.05, pad=0.02, ticks=MaxNLocator(8, integer=True))
    bar.set_label("training samples", fontsize=9)
    bar.ax.tick_params(labelsize=8)
    set_title(drawn, title)
    return drawn


def _checked(name: str, histogram: Sequence[Sequence[int]]) -> Counts:
    table = np.asarray(histogram, dtype=np.int64)
    if table.ndim != 2 or not table.size or not table.sum():
        raise ResultError(
            f"the histogram of {name} must have samples of clients and classes, [clients][classes], got "
            f"{list(table.shape)}"
        )
    return table


def _dots(axes: Axes, table: Counts, most: int, diameter: float) -> Any:
    client, label = np.nonzero(table)
    number = table[client, label]
    points = axes.scatter(
        client,
        label,
        s=diameter**2 * number / most,
        c=number,
        cmap="viridis_r",
        vmin=0,
        vmax=most,
        linewidths=0,
    )
    axes.set_xlim(-0.6, len(table) - 0.4)
    axes.set_ylim(table.shape[1] - 0.4, -0.6)
    axes.grid(visible=True, color="0.92", linewidth=0.6)
    axes.set_axisbelow(True)
    return points


def _write_numbers(axes: Axes, table: Counts, most: int) -> None:
    for (client, label), number in np.ndenumerate(table):
        if number:
            colour = "white" if number > most / 2 else "0.25"
            axes.text(client, label, str(number), ha="center", va="center", fontsize=6.5, color=colour)


def _decorate(axes: Axes, name: str, table: Counts) -> None:
    from matplotlib.ticker import MaxNLocator

    samples = number_range(table.sum(axis=1).tolist())
    present = number_range((table > 0).sum(axis=1).tolist())
    name_panel(axes, name, f"per client {samples} samples of {present} classes")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(nbins=20, integer=True, min_n_ticks=1))
    axes.set_xlabel("client")
    axes.set_ylabel("class")
    axes.tick_params(labelsize=8)
