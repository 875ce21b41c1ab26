"""Curves of accuracy and training loss over rounds, bytes and seconds."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from flwr_kd.plotting.lines import COINCIDING, Curve, coinciding, draw_line, joined, widths_below
from flwr_kd.plotting.style import (
    add_legend,
    add_title,
    empty_figure,
    measured_on,
    method_styles,
    write_picture,
)
from flwr_kd.results.errors import ResultError
from flwr_kd.results.measures import Accuracy, chosen
from flwr_kd.results.rounds import RoundResult
from flwr_kd.results.schema import Comparison, RunResult
from flwr_kd.text import unknown_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["OVER", "figure", "plot"]

_COSTS: dict[str, tuple[Callable[[RoundResult], float], str]] = {
    "bytes": (lambda stats: stats.megabytes, "MB of all rounds so far, all clients, up and down"),
    "seconds": (lambda stats: stats.seconds, "seconds of all rounds so far"),
}
OVER = ("rounds", *_COSTS)
"""What curves may be drawn over."""
_LOSS = Accuracy("train_loss", "training loss", "mean over the clients", of_client=False)
_POINTS_OF_LOSS = 50.0
"""The points of accuracy to which the range of a panel's losses corresponds where lines are compared."""
_FEW_ROUNDS = 15
_LEAST_HEIGHT = 10.0
_LEAST_OVERLAP = 0.25
_MOST_COLUMNS = 3


def plot(comparison: Comparison, path: Path, accuracies: Sequence[str] = (), *, over: str = "rounds") -> Path:
    """Write the :func:`figure` of a comparison to a PNG.

    Parameters
    ----------
    comparison : Comparison
        With at least one run.
    path : Path
        The PNG to write, whatever its suffix. Its directory is made if it does not exist; an existing file is
        overwritten.
    accuracies : sequence of str
        As :func:`figure` takes them.
    over : str
        As :func:`figure` takes it.

    Returns
    -------
    Path
        ``path``.

    Raises
    ------
    ResultError
        As :func:`figure`.
    ImportError
        If ``matplotlib`` is not installed.
    """
    return write_picture(figure(comparison, accuracies, over=over), path)


def figure(comparison: Comparison, accuracies: Sequence[str] = (), *, over: str = "rounds") -> Figure:
    """Draw accuracies over rounds, bytes or seconds, one line per method: a panel for each of them.

    Without ``accuracies`` these are local and global accuracy. If no method has a global model, but a server's own
    model was measured, that one takes its place; without either there is only the local accuracy. Common accuracy
    takes the place of local accuracy where that was not measured.

    Local and common accuracy are those of the clients that took part in each round, also in the last one.

    A line is the mean over seeds. Its band is ± one standard deviation (ddof = 1), and is missing if fewer than
    two seeds have a value. Rounds without a value are skipped: the line connects those that have one. Lines that
    coincide lie above each other from the widest to the thinnest, and their methods are named below the panel. So
    is a method without any value in a panel, such as one that has no global model. The panels have one scale where
    their values overlap. The function changes neither pyplot's state nor the caller's backend.

    Parameters
    ----------
    comparison : Comparison
        With at least one run.
    accuracies : sequence of str
        Names of :data:`flwr_kd.results.measures.ACCURACIES`, and ``training-loss``, in kebab-case or with
        underscores.
    over : str
        ``rounds``; or ``bytes`` or ``seconds``, those of all rounds so far: means over the seeds, in MB (10⁶ bytes)
        of all clients, up and down.

    Returns
    -------
    matplotlib.figure.Figure
        Axes in percent, up to three in a row, and a legend beside them. It belongs to no window.

    Raises
    ------
    ResultError
        If there is no run to draw, no such accuracy, one that was not measured in any run, or ``over`` is
        something else.
    ImportError
        If ``matplotlib`` is not installed.
    """
    if not comparison.runs:
        raise ResultError("runs is empty: there is nothing to plot")
    if over not in OVER:
        raise ResultError(unknown_name("over", over, OVER))
    methods = comparison.by_method()
    styles = method_styles(comparison)
    shown = _shown(comparison, accuracies)
    columns = min(len(shown), _MOST_COLUMNS)
    rows = -(-len(shown) // columns)
    drawn = empty_figure(1 + 5 * columns, max(4.6 * rows, 1 + 0.22 * len(methods)))
    from matplotlib.lines import Line2D

    grid = list(drawn.subplots(rows, columns, sharex=True, squeeze=False).flat)
    for axes in grid[len(shown) :]:
        axes.remove()
    panels: Sequence[Axes] = grid[: len(shown)]
    for axes, (metric, title, meaning, _) in zip(panels, shown, strict=True):
        curves = {name: _curves(runs, metric, over) for name, runs in methods.items()}
        measured = {name: curve for name, curve in curves.items() if curve[0].size}
        compared = _in_points(measured) if metric == _LOSS.name else measured
        together = coinciding(compared)
        below = widths_below(compared)
        for name, curve in measured.items():
            markers = curve[0].size <= _FEW_ROUNDS
            draw_line(
                axes, curve, styles[name], below=below[name], markers=markers, percent=metric != _LOSS.name
            )
        axes.set_title(f"{title}\n", fontsize=11)
        meaning = meaning.replace("common test set", measured_on(comparison.config))
        if metric.startswith("local_"):
            meaning = _taking_part(comparison) or meaning
        axes.text(0.5, 1.02, meaning, transform=axes.transAxes, ha="center", fontsize=8.5, color="0.35")
        absent = [name for name in methods if name not in measured]
        label = "round" if over == "rounds" else _COSTS[over][1]
        notes = _notes(metric, absent, together, alone=len(shown) == 1 and not accuracies)
        _decorate(
            axes, title if metric == _LOSS.name else f"{title} (%)", [label, *notes], whole=label == "round"
        )
    _set_heights([axes for axes, panel in zip(panels, shown, strict=True) if panel != _LOSS])

    handles = [Line2D([], [], **style) for style in styles.values()]
    add_legend(drawn, handles, list(methods))
    add_title(drawn, comparison, comparison.runs)
    return drawn


def _taking_part(comparison: Comparison) -> str:
    """Return what local accuracy is where not all clients took part in each round; else an empty text."""
    rounds = [stats for run in comparison.runs for stats in run.rounds]
    total = max((stats.available or 0 for stats in rounds), default=0)
    drawn = sorted({stats.participants for stats in rounds if stats.participants < (stats.available or 0)})
    if not drawn:
        return ""
    count = str(drawn[0]) if len(drawn) == 1 else f"{drawn[0]} to {drawn[-1]}"
    return f"own models and test splits; {count} of {total} clients took part"


def _shown(comparison: Comparison, names: Sequence[str]) -> list[Accuracy]:
    """Return the panels: those with these names, else local accuracy, and global or the server's if measured.

    The training loss is named as in a table of the library, or as its field.
    """
    rounds = [stats for run in comparison.runs for stats in run.rounds]

    def measured(panel: Accuracy) -> bool:
        return any(getattr(stats, panel.name) is not None for stats in rounds)

    if names:
        panels = []
        for name in names:
            loss = name.strip().replace("_", "-") in ("training-loss", "train-loss")
            panels += [_LOSS] if loss else chosen([name])
        panels = list(dict.fromkeys(panels))
        for panel in panels:
            if not measured(panel):
                name = "training-loss" if panel == _LOSS else panel.name.replace("_", "-")
                raise ResultError(f"{name} was not measured in any run of this result")
        return panels
    local, common, *others = chosen(
        ("local_accuracy", "common_accuracy", "global_accuracy", "server_accuracy")
    )
    # Without local accuracy, clients train on all of their samples.
    first = common if measured(common) and not measured(local) else local
    return [first, *[panel for panel in others if measured(panel)][:1]]


def _curves(runs: Sequence[RunResult], metric: str, over: str) -> Curve:
    """Return the rounds ``[R]`` in which a seed has a value, and those in percent ``[S, R]``, else NaN.

    Over bytes or seconds, a round's place is the mean of what the seeds with a value have spent so far.
    """
    factor = 1.0 if metric == _LOSS.name else 100.0
    series = [
        {stats.round: value for stats in run.rounds if (value := stats.of_participants(metric)) is not None}
        for run in runs
    ]
    rounds = sorted(set().union(*series))
    values = [[factor * curve.get(number, np.nan) for number in rounds] for curve in series]
    places = np.array(rounds, dtype=np.int64)
    if over != "rounds":
        spent = [_spent(run, over) for run in runs]
        places = np.array(
            [
                np.mean(
                    [so_far[number] for so_far, curve in zip(spent, series, strict=True) if number in curve]
                )
                for number in rounds
            ]
        )
    return places, np.array(values, dtype=np.float64)


def _spent(run: RunResult, over: str) -> dict[int, float]:
    """Return by round what a run has cost until its end."""
    costs = (_COSTS[over][0](stats) for stats in run.rounds)
    return dict(zip((stats.round for stats in run.rounds), itertools.accumulate(costs), strict=True))


def _in_points(losses: Mapping[str, Curve]) -> dict[str, Curve]:
    """Return losses of a panel on a scale on which the width of a line is that of accuracies."""
    means = np.concatenate([np.nanmean(values, axis=0) for _, values in losses.values()] or [np.zeros(1)])
    scale = _POINTS_OF_LOSS / (float(np.ptp(means)) or 1.0)
    return {name: (places, values * scale) for name, (places, values) in losses.items()}


def _notes(
    metric: str, absent: Sequence[str], together: Sequence[Sequence[str]], *, alone: bool
) -> list[str]:
    """Return the lines below a panel: which methods coincide, and which are not there."""
    notes = [f"one line (within {COINCIDING:g} points): {joined(group)}" for group in together]
    if absent:
        reason = "no global model" if metric.startswith("global_") else "not measured"
        notes.append(f"{reason}: {', '.join(absent)}")
    if alone:
        notes.append("no method here has a global model")
    return notes


def _set_heights(panels: Sequence[Axes]) -> None:
    """Give the panels one scale, unless their values lie apart, so that each would be half empty."""
    if not panels:
        return
    limits = []
    for axes in panels:
        low, high = axes.get_ylim()
        # Without a minimum height, noise of half a point would look like a difference.
        missing = max(0.0, _LEAST_HEIGHT - (high - low)) / 2
        limits.append((max(low - missing, -2.0), min(high + missing, 102.0)))
    lows, highs = zip(*limits, strict=True)
    overlap = min(highs) - max(lows)
    if overlap > _LEAST_OVERLAP * min(high - low for low, high in limits):
        limits = [(min(lows), max(highs))] * len(panels)
    for axes, (low, high) in zip(panels, limits, strict=True):
        axes.set_ylim(low, high)


def _decorate(axes: Axes, label: str, below: Sequence[str], *, whole: bool) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(steps=[1, 2, 5, 10], integer=whole, min_n_ticks=1))
    axes.tick_params(labelleft=True, labelbottom=True)
    axes.set_ylabel(label)
    lines = [textwrap.fill(line, 60, break_on_hyphens=False) for line in below]
    axes.set_xlabel("\n".join(lines)).set_parse_math(False)
    axes.grid(visible=True, color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
