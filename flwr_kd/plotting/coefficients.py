"""Heat maps of how much each client learns from each other one."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from flwr_kd.plotting.style import add_title, chosen_runs, make_panels, write_picture
from flwr_kd.results.errors import ResultError
from flwr_kd.results.schema import Comparison

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["figure", "plot"]

FloatArray: TypeAlias = npt.NDArray[np.float64]
IntArray: TypeAlias = npt.NDArray[np.integer[Any]]
_LEAST_SPREAD = 1e-9
_LEAST_RANGE = 0.05
"""The colours' range as a share of the largest weight: smaller differences must not look like strong ones."""
_TICK_CHARACTERS = 42


def plot(
    comparison: Comparison,
    matrices: Mapping[str, tuple[FloatArray, IntArray]],
    path: Path,
    *,
    seed: int | None = None,
) -> Path:
    """Write the :func:`figure` to a PNG, as :func:`flwr_kd.plotting.curves.plot` does."""
    return write_picture(figure(comparison, matrices, seed=seed), path)


def figure(
    comparison: Comparison,
    matrices: Mapping[str, tuple[FloatArray, IntArray]],
    *,
    seed: int | None = None,
) -> Figure:
    """Draw how clients weigh each other's knowledge, one heat map per method.

    Groups of clients that learn from each other appear as blocks if the clients of a group have neighbouring ids.

    Parameters
    ----------
    comparison : Comparison
        Its accuracies in the last round stand above the panels.
    matrices : mapping of str to (ndarray, ndarray)
        By method, as from :func:`~flwr_kd.experiments.saved_arrays.coefficients`: a finite matrix ``[N, N]``, whose
        row n has the weights of all clients in client n's target, and the clients' ids ``[N]``, in the order of
        rows and columns.
    seed : int, optional
        The runs with this seed; each method's first run if None.

    Returns
    -------
    matplotlib.figure.Figure
        Client n's row is the n-th from the top. Each panel has a scale of its own, from the smallest to the
        largest weight off the diagonal. It covers at least 5 % of the largest of these, around their middle, so
        that smaller differences have similar colours; the label of the colour bar then states their range. Clients'
        weights for themselves are often larger than all others and would hide the blocks. If they exceed the scale,
        they have the colour of its end, the colour bar is pointed, and its label states their range. If all other
        weights are equal, the scale is that of the whole matrix; if that is uniform as well, the scale begins or
        ends at 0, with the weight in its middle.

    Raises
    ------
    ResultError
        If there is no method to draw, the comparison has no run of one, or a matrix or its clients are wrong.
    ImportError
        If ``matplotlib`` is not installed.
    """
    runs = chosen_runs(comparison, matrices, seed)
    for name, (matrix, clients) in matrices.items():
        count = len(clients)
        if not count or matrix.shape != (count, count) or not np.isfinite(matrix).all():
            raise ResultError(
                f"coefficients of {name} must be finite and of the shape [N, N] for its clients [N], got "
                f"{list(matrix.shape)} for {list(clients.shape)}"
            )
    drawn, panels = make_panels(runs, size=4.6, height=3.6, metric="local_accuracy")
    from matplotlib.ticker import MaxNLocator, ScalarFormatter

    for axes, (matrix, clients) in zip(panels, matrices.values(), strict=True):
        low, high = _scale(matrix)
        image = axes.imshow(matrix, cmap="viridis", vmin=low, vmax=high, interpolation="antialiased")
        # In the panel's own axes, which are square and narrower than their space, the bar stays beside the cells.
        bar = drawn.colorbar(
            image,
            cax=axes.inset_axes((1.04, 0.0, 0.05, 1.0)),
            extend=_beyond(matrix, low, high),
            ticks=MaxNLocator(5),
            format=ScalarFormatter(useOffset=False),
        )
        bar.ax.tick_params(labelsize=8)
        bar.set_label(_scale_label(matrix, low, high), fontsize=8.5)
        shown = _thinned(clients)
        labels = [str(clients[index]) for index in shown]
        axes.set_xticks(shown, labels, fontsize=8)
        axes.set_yticks(shown, labels, fontsize=8)
        axes.set_xlabel("weight of client m")
        axes.set_ylabel("client n")
    add_title(drawn, comparison, runs.values(), "knowledge coefficients")
    return drawn


def _scale(matrix: FloatArray) -> tuple[float, float]:
    """Return the weights at both ends of the colours."""
    others = matrix[~np.eye(len(matrix), dtype=bool)]
    for shown in (others, matrix):
        # A smaller spread is rounding, which would look like a pattern.
        if shown.size and np.ptp(shown) > _LEAST_SPREAD * np.abs(shown).max():
            low, high = float(shown.min()), float(shown.max())
            missing = max(0.0, _LEAST_RANGE * float(np.abs(shown).max()) - (high - low)) / 2
            return low - missing, high + missing
    low, high = sorted((0.0, 2 * float(matrix.mean()) or 1.0))
    return low, high


def _beyond(matrix: FloatArray, low: float, high: float) -> str:
    """Return at which ends the diagonal leaves the scale, as a colour bar names it."""
    diagonal, rounding = np.diagonal(matrix), _LEAST_SPREAD * (high - low)
    below, above = diagonal.min() < low - rounding, diagonal.max() > high + rounding
    if below and above:
        return "both"
    return "min" if below else "max" if above else "neither"


def _scale_label(matrix: FloatArray, low: float, high: float) -> str:
    notes = []
    others = matrix[~np.eye(len(matrix), dtype=bool)]
    if others.size and _LEAST_SPREAD * np.abs(others).max() < np.ptp(others) < high - low:
        notes.append(f"others: {_range_text(others, np.ptp(others))}")
    if _beyond(matrix, low, high) != "neither":
        notes.append(f"diagonal clipped: {_range_text(np.diagonal(matrix), high - low)}")
    return "weight (" + ";\n".join(notes) + ")" if notes else "weight"


def _range_text(weights: FloatArray, spread: float) -> str:
    """Return the smallest and the largest weight, with enough digits to tell apart what differs by the spread."""
    largest = max(float(np.abs(weights).max()), spread)
    digits = max(2, 1 + math.ceil(-math.log10(max(spread / largest, 1e-9))))
    return " to ".join(dict.fromkeys(f"{weight:.{digits}g}" for weight in (weights.min(), weights.max())))


def _thinned(clients: IntArray) -> list[int]:
    """Return the indices of every first, second, fifth, tenth, ... client, so that their ids fit."""
    most = max(2, _TICK_CHARACTERS // (1 + max(len(str(each)) for each in clients)))
    steps = (factor * 10**power for power in itertools.count() for factor in (1, 2, 5))
    step = next(each for each in steps if math.ceil(len(clients) / each) <= most)
    return list(range(0, len(clients), step))
