"""Weighted means of models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["shares", "weighted_mean"]

NDArray = npt.NDArray[Any]


def shares(weights: Sequence[float]) -> npt.NDArray[np.float64]:
    r"""Return :math:`p_i`, the weights over their sum; all alike if all weights are 0.

    Raises
    ------
    ValueError
        If there are none, or a weight is negative or not finite.

    Examples
    --------
    >>> shares([1, 3]).tolist(), shares([0, 0]).tolist()
    ([0.25, 0.75], [0.5, 0.5])
    """
    share = np.asarray(weights, dtype=np.float64)
    if not len(share) or not (np.isfinite(share).all() and (share >= 0).all()):
        raise ValueError(f"weights must be finite, at least 0 and not none, got {list(weights)}")
    total = share.sum()
    return share / total if total > 0 else np.full(len(share), 1 / len(share))


def weighted_mean(models: Sequence[Sequence[NDArray]], weights: Sequence[float]) -> list[NDArray]:
    r"""Return :math:`\sum_i p_i w_i` with :math:`p_i` the weights over their sum, array by array.

    Source: FedAvg; FedHKD, equation 1.

    Parameters
    ----------
    models : sequence of sequence of ndarray
        One list of arrays per client; the lists agree in number, shapes and dtypes.
    weights : sequence of float
        At least 0, for example the clients' sample counts. If all are 0, the mean is unweighted.

    Returns
    -------
    list of ndarray
        Each with the dtype and shape of the input: floats are summed in float64 in the order given, whole
        numbers (BatchNorm's counter) are rounded to the nearest and stay whole.

    Raises
    ------
    ValueError
        If there are no models, or as many weights as models are not given, or a weight is negative.

    Examples
    --------
    >>> weighted_mean([[np.float32([1, 2])], [np.float32([4, 8])]], [2, 1])
    [array([2., 4.], dtype=float32)]
    """
    if not models or len(models) != len(weights):
        raise ValueError(
            f"as many weights as models and at least one expected, got {len(models)}, {len(weights)}"
        )
    share = shares(weights)
    return [_mean(column, share) for column in zip(*models, strict=True)]


def _mean(column: Sequence[NDArray], share: npt.NDArray[np.float64]) -> NDArray:
    total = np.zeros(column[0].shape, dtype=np.float64)
    for array, p in zip(column, share, strict=True):
        total += p * array.astype(np.float64)
    if column[0].dtype.kind in "iub":
        total = np.rint(total)
    return np.asarray(total.astype(column[0].dtype)).reshape(column[0].shape)
