"""Weighted means of models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["RunningMean", "cast", "shares", "weighted_mean"]

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


class RunningMean:
    r"""A mean :math:`\sum_i n_i w_i / \sum_i n_i` of models that come one after another.

    Source: FedAvg; FedHKD, equation 1. Holds one mean in float64, however many models there are. Whole numbers
    (BatchNorm's counter) are rounded to the nearest and stay whole. Where the first model is not finite, as in a
    causal mask with -inf, the mean has its value: a client's array was checked to have the same there.

    Examples
    --------
    >>> mean = RunningMean()
    >>> for model, weight in (([np.float32([1, 2])], 2), ([np.float32([4, 8])], 1)):
    ...     mean.add(model, weight)
    >>> mean.count, mean.weight, mean.result()
    (2, 3.0, [array([2., 4.], dtype=float32)])
    """

    def __init__(self) -> None:
        self.count = 0
        self.weight = 0.0
        self._means: list[npt.NDArray[np.float64]] = []
        self._like: list[tuple[np.dtype[Any], tuple[int, ...]]] = []
        self._constants: dict[int, NDArray] = {}

    def add(self, model: Sequence[NDArray], weight: float) -> None:
        """Add a model, whose arrays are not kept.

        Parameters
        ----------
        model : sequence of ndarray
            All models agree in number, shapes and dtypes.
        weight : float
            At least 0, for example the client's sample count. As long as all weights are 0, they count alike.

        Raises
        ------
        ValueError
            If a weight is negative, their sum is not finite, or the arrays are not those of the first model.
        """
        if not (weight >= 0 and np.isfinite(self.weight + weight)):
            raise ValueError(f"weights must be finite, at least 0, with a finite sum, got {weight}")
        like = [(array.dtype, array.shape) for array in model]
        if not self.count:
            self._like = like
            self._means = [np.zeros(shape, dtype=np.float64) for _, shape in like]
            self._constants = {
                index: array.copy()
                for index, array in enumerate(model)
                if array.dtype.kind == "f" and not np.isfinite(array).all()
            }
        elif like != self._like:
            raise ValueError(f"models must have the same arrays, got {like[:3]} after {self._like[:3]}")
        self.count += 1
        self.weight += weight
        if self.weight and not weight:
            return
        share = weight / self.weight if self.weight else 1 / self.count
        # Not the sum, divided at the end: that of float64's largest numbers would be infinite.
        for index, (mean, array) in enumerate(zip(self._means, model, strict=True)):
            if index in self._constants:
                array = np.where(np.isfinite(self._constants[index]), array, array.dtype.type(0))
            mean *= 1 - share
            mean += np.multiply(array, share, dtype=np.float64)

    def result(self) -> list[NDArray]:
        """Return the mean, with the models' dtypes and shapes.

        Raises
        ------
        ValueError
            If there was no model.
        """
        if not self.count:
            raise ValueError("no models to average")
        means = [cast(mean, dtype) for mean, (dtype, _) in zip(self._means, self._like, strict=True)]
        for index, own in self._constants.items():
            means[index] = np.where(np.isfinite(own), means[index], own)
        return means


def weighted_mean(models: Sequence[Sequence[NDArray]], weights: Sequence[float]) -> list[NDArray]:
    r"""Return :math:`\sum_i n_i w_i / \sum_i n_i`, array by array; see :class:`RunningMean`.

    Parameters
    ----------
    models : sequence of sequence of ndarray
        One list of arrays per client; the lists agree in number, shapes and dtypes.
    weights : sequence of float
        At least 0, for example the clients' sample counts. If all are 0, the mean is unweighted.

    Returns
    -------
    list of ndarray
        Each with the dtype and shape of the input.

    Raises
    ------
    ValueError
        If there are no models, or as many weights as models are not given, or a weight is negative or not finite.

    Examples
    --------
    >>> weighted_mean([[np.float32([1, 2])], [np.float32([4, 8])]], [2, 1])
    [array([2., 4.], dtype=float32)]
    """
    if not models or len(models) != len(weights):
        raise ValueError(
            f"as many weights as models and at least one expected, got {len(models)}, {len(weights)}"
        )
    mean = RunningMean()
    for model, weight in zip(models, weights, strict=True):
        mean.add(model, weight)
    return mean.result()


def cast(mean: npt.NDArray[np.float64], dtype: np.dtype[Any]) -> NDArray:
    """Return a mean in the models' dtype; whole numbers are rounded to the nearest."""
    if dtype.kind in "iu":
        # The nearest float64 of the largest whole number is beyond it.
        largest, rounded = np.iinfo(dtype).max, np.rint(np.asarray(mean))
        beyond = rounded >= largest
        whole = np.where(beyond, 0, rounded).astype(dtype)
        whole[beyond] = largest
        return whole
    if dtype.kind == "b":
        mean = np.rint(mean)
    return np.asarray(mean).astype(dtype)
