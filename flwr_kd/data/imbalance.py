"""Long-tailed training sets, whose classes have exponentially fewer samples."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from flwr_kd.checks import DataError, number
from flwr_kd.data._base import AnyArray, IntArray, as_labels
from flwr_kd.seeding import numpy_generator

__all__ = ["long_tail"]

_ROUNDING = 1e-9


def long_tail(labels: Tensor | AnyArray | Sequence[int], factor: float, *, seed: int) -> IntArray:
    r"""Choose samples so that the sizes of the classes decrease exponentially.

    Class :math:`c = 0 .. C-1` keeps :math:`n_{max} \, \rho^{-c/(C-1)}` samples, rounded, where C is the number of
    classes that occur, in the order of their labels, and :math:`\rho` is the imbalance factor. Source: the
    long-tailed CIFAR of Cao et al., "Learning Imbalanced Datasets with Label-Distribution-Aware Margin Loss",
    NeurIPS 2019, which FedHyb uses with factors 10, 20, 50 and 100. There the set is balanced, and
    :math:`n_{max}` is the size of a class. Here the smallest class keeps the largest whole number
    :math:`n_{min}` for which every class has enough samples, and :math:`n_{max} = \rho \, n_{min}`. For a whole
    :math:`\rho` the largest class is exactly :math:`\rho` times the smallest.

    Parameters
    ----------
    labels : Tensor or ndarray
        Class of each sample, ``[N]``, whole numbers from 0; at least one. Numbers may be missing.
    factor : float
        :math:`\rho`, finite and at least 1; 1 gives all classes the same size. It has no effect with one class.
    seed : int
        Determines which samples of a class are kept.

    Returns
    -------
    ndarray
        Positions in ``labels``, int64, ascending.

    Raises
    ------
    DataError
        If the factor is out of range, there are no labels, or a class has too few samples even if the smallest
        class keeps only one.

    Examples
    --------
    >>> import numpy as np
    >>> labels = np.repeat([0, 1, 2], 9)
    >>> np.bincount(labels[long_tail(labels, 4, seed=0)]).tolist()
    [8, 4, 2]
    >>> long_tail(labels, 100, seed=0)
    Traceback (most recent call last):
    flwr_kd.DataError: imbalance factor 100 needs at least 100 samples of class 0 for one of class 2, ...
    """
    factor = number("imbalance factor", factor, 1, error=DataError)
    classes = as_labels(labels)
    if not len(classes):
        raise DataError("a long tail needs at least one sample, labels is empty")
    numbers, dense, counts = np.unique(classes, return_inverse=True, return_counts=True)
    last = len(numbers) - 1
    # Size of each class relative to the smallest: the factor for the first class, 1 for the last.
    exponents = np.arange(last, -1, -1) / max(last, 1)
    ratios = factor**exponents
    smallest = int(np.floor(counts / ratios + _ROUNDING).min())
    if smallest < 1:
        too_small = int(np.argmax(counts / ratios < 1 - _ROUNDING))
        needed = math.ceil(ratios[too_small] - _ROUNDING)
        raise DataError(
            f"imbalance factor {factor:g} needs at least {needed} samples of class {numbers[too_small]} for one of "
            f"class {numbers[last]}, there are {counts[too_small]}: take a smaller factor or more samples"
        )
    sizes = np.floor(smallest * ratios + 0.5 + _ROUNDING).astype(np.int64)
    rng = numpy_generator(seed, "data", "long-tail")
    kept = [rng.permutation(np.flatnonzero(dense == c))[:size] for c, size in enumerate(sizes)]
    return np.sort(np.concatenate(kept)).astype(np.int64)
