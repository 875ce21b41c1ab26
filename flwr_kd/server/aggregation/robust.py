"""Robust rules as pure functions of blocks of coordinates, and of inner products.

Distances between models follow from inner products of their differences from one common point. That point is near
the models, such as the model that they were trained from: then near models keep their distances beside a huge one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = [
    "clip_factors",
    "geometric_median_weights",
    "krum_scores",
    "median",
    "squared_distances",
    "trimmed_mean",
]

Floats = npt.NDArray[np.float64]
_SMOOTHING = 1e-6
_MOST_STEPS = 1000
_TOLERANCE = 1e-10


def median(block: npt.NDArray[Any]) -> Floats:
    """Return the median of each coordinate.

    Source: Yin et al., "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates", ICML 2018.

    Parameters
    ----------
    block : ndarray
        ``[N, d]``, finite, N at least 1. Of an even N it is the mean of the two in the middle.

    Returns
    -------
    ndarray
        ``[d]``.

    Examples
    --------
    >>> median(np.array([[1.0, 5.0], [2.0, -1e300], [9.0, 7.0]])).tolist()
    [2.0, 5.0]
    """
    # Rows of N numbers that lie together are sorted several times faster.
    across = np.partition(
        np.ascontiguousarray(block.T, np.float64), [(len(block) - 1) // 2, len(block) // 2], axis=1
    )
    low, high = across[:, (len(block) - 1) // 2], across[:, len(block) // 2]
    # Not their sum, which may be beyond float64.
    return np.asarray(low + (high / 2 - low / 2))


def trimmed_mean(block: npt.NDArray[Any], share: float) -> Floats:
    """Return the mean of each coordinate without the smallest and the largest values.

    Source: Yin et al., ICML 2018, definition 2.

    Parameters
    ----------
    block : ndarray
        ``[N, d]``, finite, N at least 1.
    share : float
        In [0, 0.5): the share that is left out at each end, of N rounded down.

    Returns
    -------
    ndarray
        ``[d]``.

    Examples
    --------
    >>> trimmed_mean(np.array([[1.0], [2.0], [3.0], [1e9]]), 0.25).tolist()
    [2.5]
    """
    cut = int(share * len(block) + 1e-9)
    across = np.ascontiguousarray(block.T, np.float64)
    if cut:
        across = np.partition(across, [cut, len(block) - cut - 1], axis=1)
    kept = across[:, cut : len(block) - cut]
    return np.asarray((kept / kept.shape[1]).sum(axis=1))


def squared_distances(products: Floats) -> Floats:
    """Return the squared distances of points from their inner products ``[N, N]``; infinite beyond float64.

    Examples
    --------
    >>> squared_distances(np.array([[1.0, 0.0], [0.0, 4.0]])).tolist()
    [[0.0, 5.0], [5.0, 0.0]]
    """
    with np.errstate(over="ignore", invalid="ignore"):
        squares = products.diagonal()
        distances = squares[:, None] + squares - 2 * products
    distances = np.where(np.isfinite(distances), np.maximum(distances, 0.0), np.inf)
    np.fill_diagonal(distances, 0.0)
    return distances


def krum_scores(distances: Floats, attackers: int) -> Floats:
    """Return each model's sum of squared distances to its N - F - 2 nearest others.

    Source: Blanchard et al., "Machine Learning with Adversaries", NeurIPS 2017, section 4. The smallest score wins.

    Parameters
    ----------
    distances : ndarray
        ``[N, N]``, squared.
    attackers : int
        F. At least one other counts, also where N - F - 2 is less.

    Examples
    --------
    >>> krum_scores(np.array([[0.0, 1.0, 9.0], [1.0, 0.0, 4.0], [9.0, 4.0, 0.0]]), 0).tolist()
    [1.0, 1.0, 4.0]
    """
    count = len(distances)
    others = distances[~np.eye(count, dtype=bool)].reshape(count, count - 1)
    nearest = np.sort(others, axis=1)[:, : max(count - attackers - 2, 1)]
    with np.errstate(over="ignore"):
        return np.asarray(nearest.sum(axis=1))


def clip_factors(norms: Floats, factor: float) -> Floats:
    """Return by what each update is multiplied, so that none is longer than a multiple of the median norm.

    Source: Sun et al., "Can You Really Backdoor Federated Learning?", 2019, with a bound that follows the updates.

    Parameters
    ----------
    norms : ndarray
        ``[N]``, at least 0, N at least 1. Of an even N the lower of the two medians counts.
    factor : float
        Above 0.

    Returns
    -------
    ndarray
        ``[N]``, in [0, 1]; 0 for an infinite norm.

    Examples
    --------
    >>> clip_factors(np.array([1.0, 2.0, 40.0]), 1.5).tolist()
    [1.0, 1.0, 0.075]
    """
    bound = factor * float(np.sort(norms)[(len(norms) - 1) // 2])
    if not np.isfinite(bound):
        return np.zeros(len(norms))
    return np.asarray(np.where(norms > bound, bound / np.maximum(norms, np.finfo(np.float64).tiny), 1.0))


def geometric_median_weights(products: Floats) -> Floats:
    r"""Return the weights :math:`\beta` with which :math:`\sum_i \beta_i w_i` is the geometric median.

    Source: Pillutla, Kakade, Harchaoui, "Robust Aggregation for Federated Learning", 2022, algorithm 2: Weiszfeld's
    iteration :math:`\beta_i \propto 1 / \max(\nu, \|z - w_i\|)`. Here all clients weigh the same, ν is 1e-6 times
    the median distance, and the iteration starts from the mean of the half that is nearest to the most central
    model, and ends where the weights no longer change.

    Parameters
    ----------
    products : ndarray
        ``[N, N]``, inner products of the models' differences from any point near them.

    Returns
    -------
    ndarray
        ``[N]``, at least 0, with sum 1. A model whose square is beyond float64 has weight 0.

    Examples
    --------
    >>> geometric_median_weights(np.array([[0.0, 0.0, 0.0], [0.0, 1.0, 9.0], [0.0, 9.0, 81.0]])).round(3).tolist()
    [0.0, 1.0, 0.0]
    """
    usable = np.flatnonzero(np.isfinite(products.diagonal()))
    weights = np.zeros(len(products))
    if not len(usable):
        return np.full(len(products), 1 / len(products))
    part = products[np.ix_(usable, usable)]
    between = np.sqrt(squared_distances(part))
    centre = between[np.argmin(np.median(between, axis=1))]
    start = centre <= np.median(centre)
    beta = start / start.sum()
    smallest = _SMOOTHING * float(np.median(between)) or np.finfo(np.float64).tiny
    for _ in range(_MOST_STEPS):
        squares = beta @ part @ beta - 2 * part @ beta + part.diagonal()
        distances = np.maximum(np.sqrt(np.maximum(squares, 0.0)), smallest)
        new = (distances.min() / distances) / (distances.min() / distances).sum()
        done = np.abs(new - beta).max() < _TOLERANCE
        beta = new
        if done:
            break
    weights[usable] = beta
    return weights
