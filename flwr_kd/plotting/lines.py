"""Lines with bands of several seeds, which can be told apart where they coincide."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from flwr_kd.plotting.style import COLOURS

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
    for name, curve in curves.items():
        for group in groups:
            if _together(curve, curves[group[0]]).all():
                group.append(name)
                break
        else:
            groups.append([name])
    return [group for group in groups if len(group) > 1]


def widths_below(curves: Mapping[str, Curve]) -> dict[str, int]:
    """Return for each line the number of lines that lie on it and are drawn later.

    These are the lines that coincide with it. Of a few lines also those that do so for a part: from one position to
    the next at least. With many lines these would make all of them wide.

    >>> rounds = np.arange(3)
    >>> values = {"a": [[1.0, 2.0, 3.0]], "b": [[1.0, 2.0, 9.0]], "c": [[5.0, 2.0, 9.0]], "d": [[0.0, 2.0, 7.0]]}
    >>> widths_below({name: (rounds, np.array(seeds)) for name, seeds in values.items()})
    {'a': 2, 'b': 1, 'c': 0, 'd': 0}
    """
    below = dict.fromkeys(curves, 0)
    for group in coinciding(curves):
        below |= {name: len(group) - 1 - place for place, name in enumerate(group)}
    if len(curves) > len(COLOURS):
        return below
    names = list(curves)
    for place, name in reversed(list(enumerate(names))):
        for later in names[place + 1 :]:
            same = _together(curves[name], curves[later])
            if (same[1:] & same[:-1]).any():
                below[name] = max(below[name], below[later] + 1)
    return below


def _together(one: Curve, other: Curve) -> npt.NDArray[np.bool_]:
    """Say at which positions two lines differ by less than a line's width; nowhere if their positions differ."""
    if not np.array_equal(one[0], other[0]):
        return np.zeros(1, dtype=bool)
    first: FloatArray = np.nanmean(one[1], axis=0)
    second: FloatArray = np.nanmean(other[1], axis=0)
    near: npt.NDArray[np.bool_] = np.isclose(first, second, rtol=0, atol=COINCIDING)
    return near


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


def draw_line(
    axes: Axes, curve: Curve, style: dict[str, Any], *, below: int, markers: bool, percent: bool = True
) -> None:
    """Draw the mean over seeds, and a band of ± one standard deviation (ddof = 1) where two seeds have a value.

    Parameters
    ----------
    axes : Axes
        Of Matplotlib.
    curve : Curve
        At least one position.
    style : dict
        As from :func:`~flwr_kd.plotting.style.palette`.
    below : int
        Number of lines that lie on it and are drawn later. The line is wider by it, so that its edges are seen.
    markers : bool
        Whether each position has a dot.
    percent : bool
        Whether the values are, so that the band ends at 100.
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
        np.minimum(high, 100.0) if percent else high,
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
