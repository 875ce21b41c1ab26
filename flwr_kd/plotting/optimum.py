"""Distance of the global model to the end of its run: by rounds, and after the first round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flwr_kd.plotting.lines import Curve, coinciding, joined, widths_below
from flwr_kd.plotting.style import MARKERS, add_legend, add_title, empty_figure, method_styles, write_picture
from flwr_kd.results.errors import ResultError
from flwr_kd.results.schema import Comparison, RunResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["figure", "plot"]

_FEW_ROUNDS = 15
_WIDER = 2.4


def plot(comparison: Comparison, path: Path) -> Path:
    """Write the :func:`figure` to a PNG, as :func:`flwr_kd.plotting.curves.plot` does."""
    return write_picture(figure(comparison), path)


def figure(comparison: Comparison) -> Figure:
    r"""Draw how far each method's global model is from the optimum, as FedHyb's figure 5.

    The optimum :math:`\Omega^*` is the run's own global model after its last round; see
    :mod:`flwr_kd.experiments.distances`.

    Parameters
    ----------
    comparison : Comparison
        Of an experiment with ``distances``.

    Returns
    -------
    matplotlib.figure.Figure
        Left :math:`\lVert \Omega_t - \Omega^* \rVert^2` over the rounds t before the last one, on a logarithmic
        scale: the mean over seeds, with a band from the smallest to the largest. Lines that coincide lie above
        each other from the widest to the thinnest, and are named below. Right the same after the first round:
        each seed is a dot, with the box of its quartiles and median for two and more. Methods without a distance,
        such as those without a global model, are named below the left panel.

    Raises
    ------
    ResultError
        If no run has distances in two rounds.
    ImportError
        If ``matplotlib`` is not installed.
    """
    runs = {name: [run for run in group if _distances(run)] for name, group in comparison.by_method().items()}
    measured = {name: group for name, group in runs.items() if group}
    if not measured:
        raise ResultError(
            "no run has the distances of its models to the last one in two rounds: run it with --distances"
        )
    styles = method_styles(comparison)
    drawn = empty_figure(11.5, max(4.8, 1 + 0.22 * len(measured)))
    left, right = drawn.subplots(1, 2, width_ratios=(1.5, 1))
    curves = {name: _curve(group) for name, group in measured.items()}
    logarithms = {name: (x, 100 * np.log10(values)) for name, (x, values) in curves.items()}
    together, below = coinciding(logarithms), widths_below(logarithms)
    for name, curve in curves.items():
        _draw_line(left, curve, styles[name], below[name], MARKERS[list(styles).index(name) % len(MARKERS)])
    _draw_boxes(right, measured, styles)
    notes = [f"one line: {joined(group)}" for group in together]
    absent = [name for name in runs if name not in measured]
    notes += [f"no global model, or not measured: {joined(absent)}"] if absent else []
    shown = [run for group in measured.values() for run in group]
    _decorate(left, right, notes, several=len({run.seed for run in shown}) > 1)
    add_legend(drawn, left.lines, list(curves))
    add_title(drawn, comparison, shown, "optimum: each run's own last global model")
    return drawn


def _distances(run: RunResult) -> dict[int, float]:
    """Return the distances of the rounds before the last one that has any: there it is 0."""
    found = {each.round: each.distance_to_last for each in run.rounds if each.distance_to_last is not None}
    return {number: value for number, value in found.items() if number != max(found) and value > 0}


def _curve(runs: Sequence[RunResult]) -> Curve:
    """Return the rounds ``[R]`` and the seeds' distances ``[S, R]``."""
    series = [_distances(run) for run in runs]
    rounds = sorted(set().union(*series))
    values = [[found.get(number, np.nan) for number in rounds] for found in series]
    return np.array(rounds, dtype=np.int64), np.array(values, dtype=np.float64)


def _draw_line(axes: Axes, curve: Curve, style: dict[str, Any], below: int, marker: str) -> None:
    rounds, values = curve
    wider = _WIDER * min(below, 4)
    dots: dict[str, Any] = {"marker": marker, "markersize": 4 + wider} if rounds.size <= _FEW_ROUNDS else {}
    axes.plot(rounds, np.nanmean(values, axis=0), linewidth=1.6 + wider, **style, **dots)
    if len(values) > 1:
        low, high = np.nanmin(values, axis=0), np.nanmax(values, axis=0)
        axes.fill_between(rounds, low, high, color=style["color"], alpha=0.15, linewidth=0)


def _draw_boxes(
    axes: Axes, measured: Mapping[str, Sequence[RunResult]], styles: Mapping[str, dict[str, Any]]
) -> None:
    for place, (name, runs) in enumerate(measured.items()):
        first = [found[min(found)] for found in map(_distances, runs)]
        colour = styles[name]["color"]
        if len(first) > 1:
            axes.boxplot(
                [first],
                positions=[place],
                widths=0.55,
                showfliers=False,
                boxprops={"color": colour},
                whiskerprops={"color": colour},
                capprops={"color": colour},
                medianprops={"color": colour, "linewidth": 2},
            )
        # Beside each other, since seeds may agree.
        moved = place + 0.12 * (np.arange(len(first)) - (len(first) - 1) / 2) / max(1, len(first) - 1)
        axes.plot(moved, first, linestyle="", marker="o", markersize=4, color=colour, alpha=0.75)
    axes.set_xticks(
        range(len(measured)), list(measured), rotation=30 if len(measured) > 3 else 0, ha="center"
    )
    axes.set_xlim(-0.6, len(measured) - 0.4)
    for label in axes.get_xticklabels():
        label.set_parse_math(False)


def _decorate(left: Axes, right: Axes, notes: Sequence[str], *, several: bool) -> None:
    from matplotlib.ticker import MaxNLocator

    left.set_yscale("log")
    left.xaxis.set_major_locator(MaxNLocator(steps=[1, 2, 5, 10], integer=True, min_n_ticks=1))
    left.set_xlabel("\n".join(["round t", *notes])).set_parse_math(False)
    left.set_title("by rounds, smallest to largest seed" if several else "by rounds", fontsize=11)
    right.set_title("after the first round, by seed" if several else "after the first round", fontsize=11)
    for axes in (left, right):
        axes.set_ylabel(r"$\Vert\Omega_t - \Omega^*\Vert^2$")
        axes.grid(visible=True, color="0.9", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    # The highest dot is drawn whole, also where all are nearly as high.
    right.set_ylim(0, 1.08 * right.dataLim.y1)
