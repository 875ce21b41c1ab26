"""Lines with bands of several seeds, which can be told apart where they coincide."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["COINCIDING", "Curve", "coinciding", "draw_line", "interval_of_mean", "joined", "widths_below"]

FloatArray: TypeAlias = npt.NDArray[np.float64]
Curve: TypeAlias = tuple[npt.NDArray[Any], FloatArray]
"""Positions ``[X]``, and the seeds' values there in percent ``[S, X]``, NaN where a seed has none."""
COINCIDING = 0.2
"""Points; about the width of a line."""
_WIDER, _WIDEST = 2.4, 9.6
_MOST_NAMES = 6
_LEVEL = 0.95


def coinciding(curves: Mapping[str, Curve]) -> list[list[str]]:
    """Return groups of at least two lines whose means differ by less than a line's width at all positions."""
    groups: list[list[str]] = []
    for name, (places, values) in curves.items():
        for group in groups:
            first_places, first_values = curves[group[0]]
            if np.array_equal(places, first_places) and np.allclose(
                np.nanmean(values, axis=0), np.nanmean(first_values, axis=0), rtol=0, atol=COINCIDING
            ):
                group.append(name)
                break
        else:
            groups.append([name])
    return [group for group in groups if len(group) > 1]


def widths_below(names: Sequence[str], together: Sequence[Sequence[str]]) -> dict[str, int]:
    """Return for each line the number of lines that coincide with it and are drawn later."""
    below = dict.fromkeys(names, 0)
    for group in together:
        below |= {name: len(group) - 1 - place for place, name in enumerate(group)}
    return below


def interval_of_mean(values: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return the limits ``[X]`` of a mean's 95 % t-interval over seeds, ``[S, X]``; NaN with fewer than two values.

    >>> low, high = interval_of_mean(np.array([[50.0, 70.0], [60.0, np.nan]]))
    >>> low.round(1).tolist(), high.round(1).tolist()
    ([-8.5, nan], [118.5, nan])
    """
    from scipy import stats

    counts = (~np.isnan(values)).sum(axis=0)
    several = counts > 1
    low, high = (np.full(values.shape[1], np.nan) for _ in range(2))
    if several.any():
        chosen, count = values[:, several], counts[several]
        half = stats.t.ppf((1 + _LEVEL) / 2, count - 1) * np.nanstd(chosen, axis=0, ddof=1) / np.sqrt(count)
        mean = np.nanmean(chosen, axis=0)
        low[several], high[several] = mean - half, mean + half
    return low, high


def draw_line(axes: Axes, curve: Curve, style: dict[str, Any], *, below: int, markers: bool) -> None:
    """Draw the mean over seeds, and a band of ± one standard deviation (ddof = 1) where two seeds have a value.

    Parameters
    ----------
    axes : Axes
        Of Matplotlib, in percent.
    curve : Curve
        At least one position.
    style : dict
        As from :func:`~flwr_kd.plotting.style.palette`.
    below : int
        Number of coinciding lines that are drawn later. The line is wider by it, so that its edges are seen.
    markers : bool
        Whether each position has a dot.
    """
    places, values = curve
    mean = np.nanmean(values, axis=0)
    wider = min(_WIDER * below, _WIDEST)
    marker: dict[str, Any] = {"marker": "o", "markersize": 3.5 + wider} if markers else {}
    axes.plot(places, mean, linewidth=1.6 + wider, **style, **marker)
    several = (~np.isnan(values)).sum(axis=0) > 1
    if not several.any():
        return
    std = np.nanstd(values[:, several], axis=0, ddof=1)
    low, high = mean[several] - std, mean[several] + std
    axes.fill_between(
        places[several],
        np.maximum(low, 0.0),
        np.minimum(high, 100.0),
        color=style["color"],
        alpha=0.15,
        linewidth=0,
    )


def joined(names: Sequence[str]) -> str:
    """Return names for a note, the first ones of many.

    >>> joined([str(number) for number in range(9)])
    '0, 1, 2, 3, 4, 5 and 3 more'
    """
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
