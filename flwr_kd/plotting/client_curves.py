"""Curves of single clients over rounds, a panel each, as FedDKC's figures 6 and 7."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from flwr_kd.plotting.lines import Curve, draw_line, widths_below
from flwr_kd.plotting.style import add_legend, add_title, empty_figure, method_styles, write_picture
from flwr_kd.results.errors import ResultError
from flwr_kd.results.measures import ACCURACIES
from flwr_kd.results.schema import Comparison, RunResult

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["figure", "most_measured", "plot"]

_MOST_COLUMNS = 3


def plot(comparison: Comparison, path: Path, clients: Sequence[int], metric: str = "local_accuracy") -> Path:
    """Write the :func:`figure` to a PNG, and return its path."""
    return write_picture(figure(comparison, clients, metric), path)


def figure(comparison: Comparison, clients: Sequence[int], metric: str = "local_accuracy") -> Figure:
    """Draw a panel for each client, with a line for each method.

    A line is the mean over seeds, its band ± one standard deviation (ddof = 1). It connects the rounds in which the
    client was measured.

    Parameters
    ----------
    comparison : Comparison
        With at least one run.
    clients : sequence of int
        Partition ids.
    metric : str
        An accuracy that is measured of each client.

    Raises
    ------
    ResultError
        If the metric was not measured of any of these clients.
    ImportError
        If ``matplotlib`` is not installed.
    """
    methods, styles = comparison.by_method(), method_styles(comparison)
    panels = {
        client: {
            name: curve
            for name, runs in methods.items()
            if (curve := _curve(runs, str(client), metric))[0].size
        }
        for client in clients
    }
    if not any(panels.values()):
        numbers = ", ".join(map(str, clients))
        raise ResultError(f"{metric.replace('_', '-')} was not measured of clients {numbers} in any run")
    columns = min(len(panels), _MOST_COLUMNS)
    rows = -(-len(panels) // columns)
    drawn = empty_figure(1.5 + 4 * columns, max(3.6 * rows, 1 + 0.22 * len(methods)))
    from matplotlib.lines import Line2D

    grid = list(drawn.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flat)
    for axes in grid[len(panels) :]:
        axes.remove()
    for axes, (client, curves) in zip(grid, panels.items(), strict=False):
        below = widths_below(curves)
        for name, curve in curves.items():
            draw_line(axes, curve, styles[name], below=below[name], markers=curve[0].size < 2)
        axes.set_title(f"client {client}", fontsize=11)
        axes.tick_params(labelleft=True, labelbottom=True)
        axes.set_xlabel("round")
        axes.set_ylabel(f"{ACCURACIES[metric].title} (%)")
        axes.grid(visible=True, color="0.9", linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
    handles = [Line2D([], [], **style) for style in styles.values()]
    add_legend(drawn, handles, list(methods))
    add_title(drawn, comparison, comparison.runs)
    return drawn


def most_measured(comparison: Comparison, metrics: Sequence[str]) -> str | None:
    """Return the first of some metrics that clients have in several rounds, else the first that they have at all.

    None without either. The common test set may be measured after the last round alone, which is no curve.
    """
    rounds = {
        metric: len({
            stats.round
            for run in comparison.runs
            for stats in run.rounds
            if any(values.get(metric) is not None for values in stats.clients.values())
        })
        for metric in metrics
    }  # fmt: skip
    several = next((metric for metric, count in rounds.items() if count > 1), None)
    return several or next((metric for metric, count in rounds.items() if count), None)


def _curve(runs: Sequence[RunResult], client: str, metric: str) -> Curve:
    """Return the rounds ``[R]`` in which a seed has a value of the client, and those in percent ``[S, R]``."""
    series = [
        {
            stats.round: value
            for stats in run.rounds
            if (value := stats.clients.get(client, {}).get(metric)) is not None
        }
        for run in runs
    ]
    rounds = sorted(set().union(*series))
    values = [[100 * curve.get(number, np.nan) for number in rounds] for curve in series]
    return np.array(rounds, dtype=np.int64), np.array(values, dtype=np.float64)
