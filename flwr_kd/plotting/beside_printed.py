"""Our numbers beside a paper's: a panel per measure, a group per cell, a colour per method."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any, NamedTuple

from flwr_kd.plotting.style import COLOURS, empty_figure, palette, set_title, write_picture
from flwr_kd.results.errors import ResultError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["Group", "figure", "plot"]

_MARKERS = ("o", "s", "^", "v")


class Group(NamedTuple):
    """The numbers of a cell.

    Attributes
    ----------
    name : str
        The cell's.
    ours : mapping of str to sequence of float
        By row, a value per seed.
    printed : mapping of str to float
        By row, the paper's number.
    """

    name: str
    ours: Mapping[str, Sequence[float]]
    printed: Mapping[str, float]


def plot(panels: Mapping[str, Sequence[Group]], title: Sequence[str], path: Path) -> Path:
    """Write the :func:`figure` to a PNG, and return its path."""
    return write_picture(figure(panels, title), path)


def figure(panels: Mapping[str, Sequence[Group]], title: Sequence[str]) -> Figure:
    """Draw our numbers as filled markers with the standard deviation over seeds, and the paper's as hollow ones.

    Colours repeat from the eighth row on; the markers differ then.

    Parameters
    ----------
    panels : mapping of str to sequence of Group
        By measure.
    title : sequence of str
        Parts of the title above all panels.

    Raises
    ------
    ResultError
        If there is no number to draw.
    ImportError
        If ``matplotlib`` is not installed.
    """
    rows = list(
        dict.fromkeys(
            row for groups in panels.values() for group in groups for row in (*group.ours, *group.printed)
        )
    )
    if not rows:
        raise ResultError("there is no number to plot")
    styles = _styles(rows)
    most = max(len(each) for each in panels.values())
    drawn = empty_figure(max(6.0, 1.5 + most * max(0.5, 0.12 * len(rows))), 0.8 + 3.4 * len(panels))
    axes: list[Axes] = list(drawn.subplots(len(panels), 1, squeeze=False).flat)
    from matplotlib.lines import Line2D

    for panel, (measure, each) in zip(axes, panels.items(), strict=True):
        _draw(panel, each, rows, styles)
        panel.set_ylabel(measure)
    handles = [Line2D([], [], linestyle="none", **styles[row]) for row in rows]
    faces = {"ours": "0.3", "printed": "none"}
    if not any(group.printed for groups in panels.values() for group in groups):
        del faces["printed"]
    kinds = [
        Line2D([], [], color="0.3", marker="o", linestyle="none", markerfacecolor=face)
        for face in faces.values()
    ]
    legend = drawn.legend([*handles, *kinds], [*rows, *faces], loc="outside right center", frameon=False)
    for text in legend.get_texts():
        text.set_parse_math(False)
    set_title(drawn, title)
    return drawn


def _styles(rows: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return a colour and a marker for each row."""
    return {
        row: {"color": style["color"], "marker": _MARKERS[index // len(COLOURS) % len(_MARKERS)]}
        for index, (row, style) in enumerate(palette(rows).items())
    }


def _draw(
    axes: Axes, groups: Sequence[Group], rows: Sequence[str], styles: Mapping[str, dict[str, Any]]
) -> None:
    for place, group in enumerate(groups):
        for index, row in enumerate(rows):
            x = place + 0.8 * ((index + 0.5) / len(rows) - 0.5)
            style = styles[row]
            if values := list(group.ours.get(row, ())):
                spread = stdev(values) if len(values) > 1 else 0.0
                axes.errorbar(
                    x, fmean(values), yerr=spread, linestyle="none", markersize=4, linewidth=1, **style
                )
            if row in group.printed:
                hollow = {**style, "markerfacecolor": "none", "linestyle": "none"}
                axes.plot(x, group.printed[row], markersize=4, **hollow)
    axes.set_xticks(range(len(groups)), [group.name for group in groups], rotation=30, ha="right", fontsize=8)
    for label in axes.get_xticklabels():
        label.set_parse_math(False)
    axes.grid(visible=True, axis="y", color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
