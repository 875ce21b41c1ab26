"""The training loss around the global models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from flwr_kd.plotting.style import (
    add_title,
    chosen_runs,
    make_panels,
    method_styles,
    number_range,
    write_picture,
)
from flwr_kd.results.schema import Comparison

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["figure", "plot"]

FloatArray: TypeAlias = npt.NDArray[np.float64]

_STEEPEST = 5.0
_LEAST_LOSS = 0.1


def plot(
    comparison: Comparison,
    magnitudes: FloatArray,
    losses: Mapping[str, FloatArray],
    path: Path,
    *,
    seed: int | None = None,
) -> Path:
    """Write the :func:`figure` to a PNG, as :func:`flwr_kd.plotting.curves.plot` does."""
    return write_picture(figure(comparison, magnitudes, losses, seed=seed), path)


def figure(
    comparison: Comparison,
    magnitudes: FloatArray,
    losses: Mapping[str, FloatArray],
    *,
    seed: int | None = None,
) -> Figure:
    """Draw the loss along random directions, one panel per method on the same axes; FedHyb's figure 4.

    Parameters
    ----------
    comparison : Comparison
        Its accuracies in the last round stand above the panels.
    magnitudes : ndarray
        ``[M]``, ascending, at least two; 0 is the model itself.
    losses : mapping of str to ndarray
        By method, ``[directions, M]`` as from :func:`~flwr_kd.plotting.measurements.loss_along`. A line has a gap
        where the loss is not finite.
    seed : int, optional
        The runs with this seed; each method's first run if None.

    Returns
    -------
    matplotlib.figure.Figure
        A thin line per direction, a thick one for their median. All methods share the height, which is at most five
        times that of the flattest method's median; steeper lines leave the picture at the top.

    Raises
    ------
    ResultError
        If there is no method to draw, or the comparison has no run of one.
    ImportError
        If ``matplotlib`` is not installed.
    """
    runs = chosen_runs(comparison, losses, seed)
    drawn, panels = make_panels(runs, size=3.4, shared=True)
    from matplotlib.lines import Line2D
    from matplotlib.ticker import MaxNLocator

    styles = method_styles(comparison)
    for axes, (name, measured) in zip(panels, losses.items(), strict=True):
        colour = styles[name]["color"]
        lines = np.where(np.isfinite(measured), measured, np.nan)
        axes.plot(magnitudes, lines.T, color=colour, linewidth=0.8, alpha=0.45)
        axes.plot(magnitudes, _median(lines), color=colour, linewidth=2.2)
        axes.grid(visible=True, color="0.9", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelleft=True, labelbottom=True)
        axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
        axes.set_xlabel("magnitude of the perturbation")
        axes.set_ylabel("training loss")
    _limit_loss(panels[0], list(losses.values()))
    looks: list[dict[str, Any]] = [{"linewidth": 0.8, "alpha": 0.6}, {"linewidth": 2.2}]
    handles = [Line2D([], [], color="0.2", **look) for look in looks]
    names = ["a direction", "median"]
    panels[0].legend(handles, names, loc="upper center", frameon=False, fontsize=8.5)
    directions = number_range(len(each) for each in losses.values())
    add_title(drawn, comparison, runs.values(), f"loss in {directions} directions")
    return drawn


def _limit_loss(axes: Axes, losses: Sequence[FloatArray]) -> None:
    """Show the flattest method in at least a fifth of the height, however steep another is."""
    finite = np.concatenate([each[np.isfinite(each)] for each in losses])
    if not finite.size:
        return
    tops = [line[np.isfinite(line)].max(initial=-np.inf) for line in map(_median, losses)]
    flattest = min((top for top in tops if np.isfinite(top)), default=finite.max())
    low, high = finite.min(), finite.max()
    high = max(min(high, low + _STEEPEST * (flattest - low)), low + _LEAST_LOSS)
    margin = 0.04 * (high - low)
    axes.set_ylim(max(low - margin, 0.0) if low > margin else -margin, high + margin)


def _median(lines: FloatArray) -> FloatArray:
    """Return the median over directions ``[M]``; NaN where fewer than half of them are finite."""
    # NaN counts as largest, so that the median is NaN once half of the directions have no finite loss.
    median = np.median(np.where(np.isnan(lines), np.inf, lines), axis=0)
    return np.where(np.isfinite(median), median, np.nan)
