r"""FedFomo's maths: how much a model helps, the weights of a client's mixture, and which models it is sent.

Source: Zhang, Sapra, Fidler, Yeung and Alvarez, "Personalized Federated Learning with First Order Model
Optimization", ICLR 2021.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["draw_models", "helpfulness", "mixture_weights"]

_LARGEST = float(np.finfo(np.float32).max)


def helpfulness(loss: float, losses: Sequence[float], distances: Sequence[float]) -> list[float]:
    r"""Return :math:`\Delta_n = (L(\theta^{prev}) - L(\theta_n)) / \|\theta_n - \theta^{prev}\|_2` (equation 3).

    Parameters
    ----------
    loss : float
        Validation loss of the model with which the last training began.
    losses : sequence of float
        Those of the candidates ``[N]``.
    distances : sequence of float
        Their Euclidean distances from that model ``[N]``.

    Returns
    -------
    list of float
        ``[N]``, within float32's range. 0 at distance 0. A candidate whose loss or distance is not finite is as
        harmful as the worst of the others, at least -1. All are 0 if ``loss`` is not finite.

    Examples
    --------
    >>> helpfulness(2.0, [1.0, 3.0, 2.0, 1.0, math.nan], [0.5, 4.0, 1.0, 0.0, 1.0])
    [2.0, -0.25, 0.0, 0.0, -1.0]
    """
    if not math.isfinite(loss):
        return [0.0] * len(losses)
    values: list[float | None] = []
    for candidate, distance in zip(losses, distances, strict=True):
        if not (math.isfinite(candidate) and math.isfinite(distance)):
            values.append(None)
        else:
            delta = (loss - candidate) / distance if distance > 0 else 0.0
            values.append(min(max(delta, -_LARGEST), _LARGEST))
    worst = min([-1.0, *(value for value in values if value is not None)])
    return [worst if value is None else value for value in values]


def mixture_weights(deltas: Sequence[float]) -> list[float]:
    r"""Return :math:`w_n = \max(0, \Delta_n) / \sum_m \max(0, \Delta_m)` (equation 4); all 0 if no model helps.

    >>> mixture_weights([3.0, -5.0, 1.0]), mixture_weights([-1.0, 0.0])
    ([0.75, 0.0, 0.25], [0.0, 0.0])
    """
    positive = [max(0.0, delta) for delta in deltas]
    total = math.fsum(positive)
    return [value / total if total else 0.0 for value in positive]


def draw_models(
    affinities: npt.NDArray[np.float64], count: int, epsilon: float, rng: np.random.Generator
) -> list[int]:
    """Return which models a client is sent: of the highest affinity, or with probability ε each any other.

    Parameters
    ----------
    affinities : ndarray
        ``[N]``, the client's affinities to the models that there are.
    count : int
        M. All are sent if there are no more.
    epsilon : float
        ε.
    rng : numpy.random.Generator
        It also decides between equal affinities.

    Returns
    -------
    list of int
        Positions, each once, in the order in which they were drawn.

    Examples
    --------
    >>> draw_models(np.array([0.1, 0.5, -0.2, 0.3]), 2, 0.0, np.random.default_rng(0))
    [1, 3]
    """
    ties = rng.random(len(affinities))
    left = np.lexsort((ties, -affinities)).tolist()
    chosen: list[int] = []
    while left and len(chosen) < count:
        explored = rng.random() < epsilon
        chosen.append(left.pop(int(rng.integers(len(left))) if explored else 0))
    return chosen
