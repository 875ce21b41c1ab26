r"""FedAMP's maths: how much each client's mixture has of each model, :math:`u_i = \sum_j \xi_{ij} w_j`.

Source: Huang et al., "Personalized Cross-Silo Federated Learning on Non-IID Data", AAAI 2021.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["Attention", "bandwidth", "cosine_attention", "distance_attention"]

NDArray = npt.NDArray[Any]


class Attention(NamedTuple):
    """Weights of all clients' mixtures.

    Attributes
    ----------
    weights : ndarray
        ``[N, N]``, float64: row i holds client i's weights over all models, at least 0, of sum 1.
    scaled : ndarray
        ``[N]``, bool: the rows that were scaled down to sum 1.
    """

    weights: NDArray
    scaled: NDArray


def cosine_attention(cosines: NDArray, scale: float) -> Attention:
    r"""Return HeurFedAMP's weights (section 4.3).

    :math:`\xi_{ii} = 1/N`; :math:`\xi_{ij} = (1 - 1/N) \, \mathrm{softmax}_{j \ne i}(\sigma \cos(w_i, w_j))`.

    Parameters
    ----------
    cosines : ndarray
        ``[N, N]``, N at least 1.
    scale : float
        σ.

    Examples
    --------
    >>> cosine_attention(np.eye(3), 25.0).weights[0].round(3).tolist()
    [0.333, 0.333, 0.333]
    """
    count = len(cosines)
    logits = scale * np.asarray(cosines, dtype=np.float64)
    np.fill_diagonal(logits, -np.inf)
    if count == 1:
        return Attention(np.ones((1, 1)), np.zeros(1, dtype=bool))
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    weights = (1 - 1 / count) * powers / powers.sum(axis=1, keepdims=True)
    np.fill_diagonal(weights, 1 / count)
    return Attention(weights, np.zeros(count, dtype=bool))


def distance_attention(squared_distances: NDArray, alpha: float = 0.0) -> Attention:
    r"""Return FedAMP's weights with the attention function :math:`A(x) = 1 - e^{-x/\sigma}` (equation 3).

    :math:`\xi_{ij} = \alpha e^{-\|w_i - w_j\|^2 / \sigma} / \sigma`, and :math:`\xi_{ii}` is the rest to 1. σ is
    :func:`bandwidth`. A row whose weights of others sum to more than 1 is scaled: they sum to 1.

    Parameters
    ----------
    squared_distances : ndarray
        ``[N, N]``, N at least 1; infinite ones have weight 0.
    alpha : float
        α; 0 takes σ/N, with which no row is scaled.

    Examples
    --------
    >>> near = np.array([[0.0, 1.0], [1.0, 0.0]])
    >>> distance_attention(near).weights.round(3).tolist()
    [[0.816, 0.184], [0.184, 0.816]]
    >>> distance_attention(near, alpha=4.0)
    Attention(weights=array([[0., 1.],
           [1., 0.]]), scaled=array([ True,  True]))
    """
    squares = np.asarray(squared_distances, dtype=np.float64)
    sigma = bandwidth(squares)
    factor = alpha / sigma if alpha else 1 / len(squares)
    weights = factor * np.exp(-squares / sigma)
    np.fill_diagonal(weights, 0.0)
    others = weights.sum(axis=1)
    scaled = others > 1
    weights /= np.where(scaled, others, 1.0)[:, None]
    np.fill_diagonal(weights, np.where(scaled, 0.0, 1 - others))
    return Attention(weights, scaled)


def bandwidth(squared_distances: NDArray) -> float:
    """Return σ: the median over pairs of the squared distances between models.

    Where more than half of the pairs are equal models, the mean of the other distances; 1 where all models are
    equal. Infinite distances do not count.

    >>> bandwidth(np.array([[0.0, 1.0, 4.0], [1.0, 0.0, 9.0], [4.0, 9.0, 0.0]]))
    4.0
    """
    pairs = squared_distances[np.triu_indices(len(squared_distances), k=1)]
    pairs = pairs[np.isfinite(pairs)]
    positive = pairs[pairs > 0]
    if not len(positive):
        return 1.0
    return float(np.median(pairs)) or float(positive.mean())
