"""Bars of what a run sends: megabytes of all rounds and clients together, up and down."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from flwr_kd.plotting.style import (
    COLOURS,
    empty_figure,
    heading,
    set_title,
    shared_config,
    title_lines,
    write_picture,
)
from flwr_kd.results.errors import ResultError
from flwr_kd.results.schema import Comparison, RunResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["figure", "plot"]

_MEGABYTE = 10**6
_ROW, _WIDTH = 0.42, 5.4
_MOST_PANELS = 3
_UP, _DOWN = COLOURS[0], COLOURS[5]


class _Bar(NamedTuple):
    name: str
    up: float
    down: float


def plot(comparisons: Sequence[Comparison], path: Path) -> Path:
    """Write the :func:`figure` to a PNG, as :func:`flwr_kd.plotting.curves.plot` does."""
    return write_picture(figure(comparisons), path)


def figure(comparisons: Sequence[Comparison]) -> Figure:
    """Draw what each method's clients send and are sent, in all rounds together, as KT-pFL's figure 5.

    Parameters
    ----------
    comparisons : sequence of Comparison
        A panel for each. KT-pFL's figure has three data sets.

    Returns
    -------
    matplotlib.figure.Figure
        A bar is the mean over seeds of the bytes of all rounds and clients, in MB (10^6 bytes): up to the server,
        then down to the clients, with their sum beside it. Bytes are those of arrays and payloads, as counted in
        the runs. KT-pFL's figure divides them into public data, parameters and predictions; which of these a
        method sends stands on its page. Methods with other numbers of rounds are named with theirs.

    Raises
    ------
    ResultError
        If there is no run to draw.
    ImportError
        If ``matplotlib`` is not installed.
    """
    panels = [(comparison, _bars(comparison)) for comparison in comparisons]
    if not panels or not all(bars for _, bars in panels):
        raise ResultError("runs is empty: there is nothing to plot")
    columns = min(_MOST_PANELS, len(panels))
    rows = -(-len(panels) // columns)
    tall = max(len(bars) for _, bars in panels)
    drawn = empty_figure(columns * _WIDTH + 0.8, rows * (_ROW * tall + 1.3) + 1.0)
    from matplotlib.patches import Patch

    grid = list(drawn.subplots(rows, columns, squeeze=False).flat)
    for axes in grid[len(panels) :]:
        axes.set_visible(False)
    config = shared_config(comparisons)
    for axes, (comparison, bars) in zip(grid, panels, strict=False):
        _draw(axes, bars)
        own = {name: value for name, value in comparison.config.items() if name not in config}
        lines = title_lines(heading(own, []), 55)
        axes.set_title("\n".join(lines), fontsize=11).set_parse_math(False)
    handles = [
        Patch(facecolor=_UP, label="up, to the server"),
        Patch(facecolor=_DOWN, label="down, to the clients"),
    ]
    drawn.legend(handles=handles, loc="outside lower center", ncols=2, frameon=False)
    seeds = sorted({run.seed for comparison in comparisons for run in comparison.runs})
    set_title(drawn, [*heading(config, seeds), "all rounds and clients together"])
    return drawn


def _bars(comparison: Comparison) -> list[_Bar]:
    counts = {len(run.rounds) for run in comparison.runs}
    bars = []
    for name, runs in comparison.by_method().items():
        rounds = sorted({len(run.rounds) for run in runs})
        text = name if len(counts) == 1 else f"{name} ({' or '.join(map(str, rounds))} rounds)"
        bars.append(_Bar(text, _mean(runs, "bytes_up"), _mean(runs, "bytes_down")))
    return bars


def _mean(runs: Sequence[RunResult], metric: str) -> float:
    totals = [sum(getattr(stats, metric) for stats in run.rounds) for run in runs]
    return float(np.mean(totals)) / _MEGABYTE


def _draw(axes: Axes, bars: Sequence[_Bar]) -> None:
    places = range(len(bars))
    up, down = (np.array([getattr(bar, way) for bar in bars]) for way in ("up", "down"))
    axes.barh(places, up, 0.62, color=_UP)
    axes.barh(places, down, 0.62, left=up, color=_DOWN)
    for place, total in zip(places, up + down, strict=True):
        axes.annotate(
            _written(total),
            (total, place),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8.5,
        )
    axes.set_yticks(places, [bar.name for bar in bars], fontsize=9)
    axes.set_ylim(len(bars) - 0.4, -0.6)
    axes.set_xlim(0, max(float((up + down).max()), 1e-9) * 1.18)
    axes.set_xlabel("MB")
    axes.grid(visible=True, axis="x", color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    for label in axes.get_yticklabels():
        label.set_parse_math(False)


def _written(megabytes: float) -> str:
    """Write three significant digits without an exponent."""
    return f"{megabytes:,.0f}" if megabytes >= 100 else f"{megabytes:#.3g}".rstrip(".")
