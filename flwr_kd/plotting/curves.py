"""Curves of accuracy over rounds and bytes."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from flwr_kd.plotting.style import add_title, empty_figure, measured_on, method_styles, write_picture
from flwr_kd.results.errors import ResultError
from flwr_kd.results.schema import Comparison, RunResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["figure", "plot"]

FloatArray: TypeAlias = npt.NDArray[np.float64]
_FEW_ROUNDS = 15
_LEAST_HEIGHT = 10.0
_PANELS = (
    ("local_accuracy", "local accuracy", "clients' own models, own test splits"),
    ("global_accuracy", "global accuracy", "aggregated model, common test set"),
)
_SERVER = ("server_accuracy", "server accuracy", "server's own model, clients' test splits")


def plot(comparison: Comparison, path: Path) -> Path:
    """Write the :func:`figure` of a comparison to a PNG.

    Parameters
    ----------
    comparison : Comparison
        With at least one run.
    path : Path
        The PNG to write, whatever its suffix. Its directory is made if it does not exist; an existing file is
        overwritten.

    Returns
    -------
    Path
        ``path``.

    Raises
    ------
    ResultError
        If there is no run to draw.
    ImportError
        If ``matplotlib`` is not installed.
    """
    return write_picture(figure(comparison), path)


def figure(comparison: Comparison) -> Figure:
    """Draw local and global accuracy over rounds, one line per method.

    If no method has a global model, but a server's own model was measured, that one takes its place.

    A line is the mean over seeds. Its band is ± one standard deviation (ddof = 1), and is missing if fewer than
    two seeds have a value. Rounds without a value are skipped: the line connects those that have one. A method
    without any value in a panel, such as one that has no global model, is named below that panel. The function
    changes neither pyplot's state nor the caller's backend.

    Parameters
    ----------
    comparison : Comparison
        With at least one run.

    Returns
    -------
    matplotlib.figure.Figure
        Two axes, local and global accuracy in percent, and a legend beside them. It belongs to no window.

    Raises
    ------
    ResultError
        If there is no run to draw.
    ImportError
        If ``matplotlib`` is not installed.
    """
    if not comparison.runs:
        raise ResultError("runs is empty: there is nothing to plot")
    methods = comparison.by_method()
    styles = method_styles(comparison)
    drawn = empty_figure(11, max(4.6, 1 + 0.22 * len(methods)))
    from matplotlib.lines import Line2D

    panels: Sequence[Axes] = drawn.subplots(1, 2, sharex=True, sharey=True)
    shown = [_PANELS[0], _SERVER if _only_server(comparison) else _PANELS[1]]
    for axes, (metric, title, meaning) in zip(panels, shown, strict=True):
        absent = [name for name, runs in methods.items() if not _draw(axes, runs, metric, styles[name])]
        axes.set_title(f"{title}\n", fontsize=11)
        meaning = meaning.replace("common test set", measured_on(comparison.config))
        axes.text(0.5, 1.02, meaning, transform=axes.transAxes, ha="center", fontsize=8.5, color="0.35")
        _decorate(axes, title, absent, everything=len(absent) == len(methods))
    low, high = panels[0].get_ylim()
    # Without a minimum height, noise of half a point would look like a difference.
    missing = max(0.0, _LEAST_HEIGHT - (high - low)) / 2
    panels[0].set_ylim(max(low - missing, -2.0), min(high + missing, 102.0))

    handles = [Line2D([], [], **style) for style in styles.values()]
    legend = drawn.legend(handles, list(methods), loc="outside right center", frameon=False)
    add_title(drawn, comparison, comparison.runs)
    for text in legend.get_texts():
        text.set_parse_math(False)
    return drawn


def _only_server(comparison: Comparison) -> bool:
    """Return whether a server's own model was measured, and no global one."""
    rounds = [each for run in comparison.runs for each in run.rounds]
    return any(each.server_accuracy is not None for each in rounds) and all(
        each.global_accuracy is None for each in rounds
    )


def _draw(axes: Axes, runs: Sequence[RunResult], metric: str, style: dict[str, Any]) -> bool:
    """Draw one method; return whether it had anything to draw."""
    rounds, values = _curves(runs, metric)
    if not rounds.size:
        return False
    mean = np.nanmean(values, axis=0)
    marker: dict[str, Any] = {"marker": "o", "markersize": 3.5} if rounds.size <= _FEW_ROUNDS else {}
    axes.plot(rounds, mean, linewidth=1.6, **style, **marker)
    several = (~np.isnan(values)).sum(axis=0) > 1
    if several.any():
        std = np.nanstd(values[:, several], axis=0, ddof=1)
        centre = mean[several]
        axes.fill_between(
            rounds[several],
            np.maximum(centre - std, 0.0),
            np.minimum(centre + std, 100.0),
            color=style["color"],
            alpha=0.15,
            linewidth=0,
        )
    return True


def _curves(runs: Sequence[RunResult], metric: str) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Return the rounds ``[R]`` in which a seed has a value, and those in percent ``[S, R]``, else NaN."""
    series = [
        {each.round: getattr(each, metric) for each in run.rounds if getattr(each, metric) is not None}
        for run in runs
    ]
    rounds = sorted(set().union(*series))
    values = [[100 * curve.get(number, np.nan) for number in rounds] for curve in series]
    return np.array(rounds, dtype=np.int64), np.array(values, dtype=np.float64)


def _decorate(axes: Axes, title: str, absent: Sequence[str], *, everything: bool) -> None:
    from matplotlib.ticker import MaxNLocator

    is_global = title == "global accuracy"
    axes.xaxis.set_major_locator(MaxNLocator(steps=[1, 2, 5, 10], integer=True, min_n_ticks=1))
    axes.tick_params(labelleft=True)
    axes.set_ylabel(f"{title} (%)")
    label = "round"
    if absent and not everything:
        reason = "no global model" if is_global else "not measured"
        label += "\n" + textwrap.fill(f"{reason}: {', '.join(absent)}", 60)
    axes.set_xlabel(label).set_parse_math(False)
    axes.grid(visible=True, color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if everything:
        message = "no method here has a global model" if is_global else f"{title} was not measured"
        axes.text(0.5, 0.5, message, transform=axes.transAxes, ha="center", va="center", color="0.35")
