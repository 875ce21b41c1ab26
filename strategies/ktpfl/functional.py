r"""KT-pFL's maths: the knowledge coefficient matrix, its mixtures of predictions or models, and its updates.

One convention: row n of the matrix holds client n's weights over all clients m, so that client n's target is
:math:`\sum_m c_{nm} s_m`. The paper writes :math:`c_{mn}` in equation 2 and row :math:`c_m` in equation 6.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from flwr_kd.public_data.config import REDUCTIONS

from .config import NORMALIZATIONS

__all__ = [
    "FLOOR",
    "NORMALIZATIONS",
    "as_distributions",
    "coefficient_gradient",
    "cosine_coefficients",
    "distance_gradient",
    "distance_scale",
    "extend",
    "knowledge_loss",
    "normalize_rows",
    "of_participants",
    "personal_targets",
    "project_simplex",
    "step",
    "transferred",
    "with_participants",
]

NDArray = npt.NDArray[Any]
FLOOR = 1e-7
"""Lower bound of probabilities in logarithms."""

_NO_MASS = 1e-12
_SOFTMAX_SCALE = 5.0
_BLOCK_NUMBERS = 2**18


def personal_targets(coefficients: Tensor, predictions: Tensor) -> Tensor:
    r"""Return each client's personalised soft prediction, :math:`\sum_m c_{nm} s(w^m, \hat x)` (equation 2).

    Parameters
    ----------
    coefficients : Tensor
        ``[N, N]``, row n is client n's.
    predictions : Tensor
        ``[N, K, C]``, probabilities of K public samples.

    Returns
    -------
    Tensor
        ``[N, K, C]``; probabilities where each row of the matrix is on the simplex.

    Examples
    --------
    >>> s = torch.tensor([[[0.8, 0.2]], [[0.4, 0.6]]])
    >>> personal_targets(torch.tensor([[0.5, 0.5], [0.0, 1.0]]), s)[:, 0].round(decimals=2).tolist()
    [[0.6000000238418579, 0.4000000059604645], [0.4000000059604645, 0.6000000238418579]]
    """
    clients = len(predictions)
    return (coefficients.to(predictions.dtype) @ predictions.reshape(clients, -1)).reshape(predictions.shape)


def as_distributions(targets: Tensor) -> Tensor:
    """Return targets ``[..., C]`` clipped at 0, each row divided by its sum; a row of sum 0 becomes uniform.

    For a matrix whose rows are not on the simplex.
    """
    clipped = targets.clamp_min(0)
    sums = clipped.sum(dim=-1, keepdim=True)
    uniform = torch.full_like(clipped, 1 / clipped.shape[-1])
    return torch.where(sums > FLOOR, clipped / sums.clamp_min(FLOOR), uniform)


def knowledge_loss(
    coefficients: Tensor,
    predictions: Tensor,
    shares: Tensor,
    *,
    weight: float = 1.0,
    rho: float = 0.0,
    reduction: str = "sum",
) -> Tensor:
    r"""Return the objective of equation 7, a function of the matrix with fixed predictions.

    :math:`\lambda \sum_n \frac{D_n}{D} KL(\sum_m c_{nm} s_m \,\|\, s_n) + \rho \|c - 1/N\|^2`, the divergence
    summed over the public samples, as equation 2 prints it, or their mean.

    Parameters
    ----------
    coefficients, predictions
        See :func:`personal_targets`.
    shares : Tensor
        ``[N]``, :math:`D_n / D`.
    weight, rho : float
        λ and ρ.
    reduction : str
        ``"sum"`` or ``"mean"``, over the samples.

    Returns
    -------
    Tensor
        A scalar. 0 · log 0 counts as 0; in a logarithm, a probability below :data:`FLOOR` counts as that.

    Raises
    ------
    ValueError
        If the reduction is unknown.
    """
    targets = torch.einsum("nm,mkc->nkc", coefficients, predictions)
    logs = targets.clamp_min(FLOOR).log() - predictions.clamp_min(FLOOR).log()
    divergence = (targets * logs).sum(dim=(1, 2)) / _divisor(predictions, reduction)
    return weight * (shares * divergence).sum() + rho * (coefficients - 1 / len(coefficients)).square().sum()


def coefficient_gradient(
    coefficients: Tensor,
    predictions: Tensor,
    shares: Tensor,
    *,
    weight: float = 1.0,
    rho: float = 0.0,
    reduction: str = "sum",
    targets: Tensor | None = None,
) -> Tensor:
    r"""Return the gradient of :func:`knowledge_loss` with respect to the matrix, ``[N, N]`` (equation 7).

    In closed form, with :math:`t_n` the targets:
    :math:`\lambda \frac{D_n}{D} \sum_{\hat x, k} s_{mk} (\log t_{nk} - \log s_{nk} + 1) + 2 \rho (c_{nm} - 1/N)`.
    There is one matrix product per block of samples, in the predictions' dtype; blocks are summed in float64.

    Parameters
    ----------
    coefficients, predictions, shares, weight, rho, reduction
        See :func:`knowledge_loss`.
    targets : Tensor, optional
        The result of :func:`personal_targets`, if it has been computed already.

    Raises
    ------
    ValueError
        If the reduction is unknown.
    """
    weights = coefficients.double()
    targets = personal_targets(coefficients, predictions) if targets is None else targets
    # The 1 of each summand is summed separately: it is far larger than the differences between clients.
    total = predictions.sum(dim=(1, 2), dtype=torch.float64).expand_as(weights).clone()
    for target, block in zip(_blocks(targets), _blocks(predictions), strict=True):
        total += target.clamp_min(FLOOR).div_(block.clamp_min(FLOOR)).log_() @ block.T
    total *= weight * shares.double()[:, None] / _divisor(predictions, reduction)
    return (total + 2 * rho * (weights - 1 / len(weights))).to(coefficients.dtype)


def project_simplex(rows: Tensor) -> Tensor:
    """Return the nearest point of the probability simplex to each row, ``[..., N]``.

    Source: the sort-and-threshold rule of Held, Wolfe and Crowder 1974; Duchi et al., ICML 2008.

    Examples
    --------
    >>> project_simplex(torch.tensor([[0.5, 0.5], [2.0, 0.0], [0.6, 0.2]])).tolist()[:2]
    [[0.5, 0.5], [1.0, 0.0]]
    """
    # A shift of a row does not change its projection, and keeps the digits of a row with a large offset.
    rows = rows - rows.amax(dim=-1, keepdim=True)
    descending = rows.sort(dim=-1, descending=True).values
    counts = torch.arange(1, rows.shape[-1] + 1, dtype=rows.dtype, device=rows.device)
    thresholds = (descending.cumsum(dim=-1) - 1) / counts
    size = (descending > thresholds).sum(dim=-1, keepdim=True)
    projected = (rows - thresholds.gather(-1, size - 1)).clamp_min(0)
    return projected / projected.sum(dim=-1, keepdim=True)


def normalize_rows(rows: Tensor, how: str) -> Tensor:
    """Return rows ``[..., N]`` as distributions.

    ``"simplex"`` projects them, ``"softmax"`` is the softmax of 5 times the row, ``"none"`` returns them unchanged.

    Raises
    ------
    ValueError
        If ``how`` is none of these.
    """
    if how == "simplex":
        return project_simplex(rows)
    if how == "softmax":
        return F.softmax(_SOFTMAX_SCALE * rows, dim=-1)
    if how == "none":
        return rows
    raise ValueError(f"how must be one of {', '.join(NORMALIZATIONS)}, got {how!r}")


def step(weights: Tensor, gradient: Tensor, learning_rate: float, how: str) -> Tensor:
    """Return the matrix after one step of gradient descent and :func:`normalize_rows`, ``[N, N]``.

    A row whose gradient is not finite does not change.
    """
    moved = weights - learning_rate * gradient
    usable = torch.isfinite(moved).all(dim=1)[:, None]
    # Replace unusable rows before the projection as well, where one of them would affect all.
    return torch.where(usable, normalize_rows(torch.where(usable, moved, weights), how), weights)


def extend(coefficients: Tensor, count: int) -> Tensor:
    """Return the matrix with ``count`` more clients at its end, ``[N + count, N + count]``.

    A new row is uniform. In an old row each new client gets the share 1/(N + count), and the other weights are
    scaled down: the row keeps its sum, and a uniform matrix stays uniform.

    >>> extend(torch.tensor([[1.0]]), 1).tolist()
    [[0.5, 0.5], [0.5, 0.5]]
    """
    size = len(coefficients) + count
    out = torch.full((size, size), 1 / max(size, 1), dtype=coefficients.dtype)
    old = len(coefficients)
    if old:
        out[:old, :old] = coefficients * (old / size)
        out[:old, old:] = coefficients.sum(dim=1, keepdim=True) / size
    return out


def of_participants(coefficients: Tensor, rows: Tensor) -> Tensor:
    """Return the participants' block of the matrix, each row renormalised over the participants, ``[P, P]``.

    A row has the sum of its whole row: 1, unless rows are not normalised. A row without weight on participants is
    uniform.

    Parameters
    ----------
    coefficients : Tensor
        ``[N, N]``.
    rows : Tensor
        ``[P]``, int64, the participants' positions.
    """
    block, kept, usable = _block(coefficients, rows)
    uniform = torch.full_like(block, 1 / max(len(rows), 1))
    return torch.where(usable[:, None], block / kept[:, None], uniform)


def with_participants(coefficients: Tensor, rows: Tensor, weights: Tensor) -> Tensor:
    """Return the matrix ``[N, N]`` with new weights ``[P, P]`` in place of :func:`of_participants`.

    Each row keeps its mass on the participants, and so its sum. Rows of absent clients, the weights of other rows
    on them, and rows that had no mass on participants do not change.
    """
    block, kept, usable = _block(coefficients, rows)
    out = coefficients.clone()
    out[rows[:, None], rows] = torch.where(usable[:, None], weights * kept[:, None], block)
    return out


def cosine_coefficients(predictions: Tensor, k: int | None = None) -> Tensor:
    """Return coefficients from the cosine similarity of soft predictions, ``[N, N]``, rows that sum to 1.

    Source: Sim-pFL, and with ``k`` TopK-pFL (section 5.1): only the k most similar clients count, the client
    itself, whose similarity is 1, among them; of equal ones those with the lower position.

    Parameters
    ----------
    predictions : Tensor
        ``[N, K, C]``. A client's predictions are flattened. A client whose predictions are all 0 is similar only to
        itself; a negative similarity counts as 0.
    k : int, optional
        At least 1; all clients if None or more than N.

    Raises
    ------
    ValueError
        If k is below 1.

    Examples
    --------
    >>> s = torch.tensor([[[1.0, 0.0]], [[1.0, 0.0]], [[0.0, 1.0]]])
    >>> cosine_coefficients(s).tolist()
    [[0.5, 0.5, 0.0], [0.5, 0.5, 0.0], [0.0, 0.0, 1.0]]
    """
    if k is not None and k < 1:
        raise ValueError(f"k must be at least 1, got {k}")
    products = torch.zeros(len(predictions), len(predictions), dtype=torch.float64)
    for block in _blocks(predictions):
        flat = block.double()
        products += flat @ flat.T
    norms = products.diagonal().sqrt()
    scales = torch.where(norms > 0, norms, torch.ones_like(norms))
    similarity = (products / scales[:, None] / scales).clamp(0, 1)
    similarity.fill_diagonal_(1)
    if k is not None and k < len(similarity):
        # The sort is stable, so ties are resolved by position; the client itself is first in any case.
        ranked = similarity.clone().fill_diagonal_(2).argsort(dim=1, descending=True, stable=True)
        chosen = torch.zeros_like(similarity, dtype=torch.bool).scatter_(1, ranked[:, :k], True)
        similarity = similarity * chosen
    return (similarity / similarity.sum(dim=1, keepdim=True)).to(predictions.dtype)


def distance_gradient(
    coefficients: Tensor,
    products: Tensor,
    shares: Tensor,
    *,
    weight: float = 1.0,
    rho: float = 0.0,
    scale: float = 1.0,
) -> Tensor:
    r"""Return the gradient of equation 11, which has models for predictions, in the matrix, ``[N, N]``.

    The objective is :math:`\lambda \sum_n \frac{D_n}{D} a \|\sum_m c_{nm} w^m - w^n\|^2 + \rho \|c - 1/N\|^2`.

    Parameters
    ----------
    coefficients : Tensor
        ``[N, N]``.
    products : Tensor
        ``[N, N]``, inner products of the models, see :meth:`flwr_kd.server.model_store.ModelStore.products`. The
        gradient needs nothing else of them.
    shares : Tensor
        ``[N]``.
    weight, rho, scale : float
        λ, ρ, and a: 1 for the squared distance, 1 over the number of weights for its mean.
    """
    identity = torch.eye(len(coefficients), dtype=coefficients.dtype)
    pulled = (coefficients - identity) @ products.to(coefficients.dtype)
    own = weight * scale * shares.to(coefficients.dtype)[:, None]
    return 2 * (own * pulled + rho * (coefficients - 1 / len(coefficients)))


def distance_scale(model: Sequence[NDArray], reduction: str) -> float:
    """Return a of equations 10 and 11: 1 for the squared distance, 1 over the number of floats for its mean.

    >>> distance_scale([np.zeros((2, 2)), np.zeros(1), np.zeros(1, dtype=np.int64)], "mean")
    0.2

    Raises
    ------
    ValueError
        If the reduction is unknown.
    """
    _check_reduction(reduction)
    size = sum(array.size for array in model if array.dtype.kind == "f")
    return 1.0 if reduction == "sum" else 1.0 / max(size, 1)


def transferred(
    own: Sequence[NDArray],
    target: Sequence[NDArray],
    *,
    learning_rate: float,
    steps: int,
    scale: float = 1.0,
) -> list[NDArray]:
    r"""Return a client's model after steps of gradient descent toward its personal global model (equation 10).

    The distance is :math:`a \|w - p\|^2`, so R steps have a closed form: the difference shrinks by
    :math:`(1 - 2 \eta_2 a)^R`.

    Parameters
    ----------
    own, target : sequence of ndarray
        The client's model and its personal global model; counters are the client's own.
    learning_rate, steps, scale
        η₂, R, a. If 2 · η₂ · a is above 1, a step overshoots the target.
    """
    shrink = (1 - 2 * learning_rate * scale) ** steps
    return [
        mine
        if mine.dtype.kind != "f"
        else np.asarray(to.astype(np.float64) + shrink * (mine.astype(np.float64) - to), dtype=mine.dtype)
        for mine, to in zip(own, target, strict=True)
    ]


def _blocks(predictions: Tensor) -> Iterator[Tensor]:
    """Yield blocks of samples of all clients, ``[N, k · C]``: those of 1,000 clients would need 120 MB at once."""
    clients, samples, classes = predictions.shape
    size = max(1, _BLOCK_NUMBERS // max(clients * classes, 1))
    for start in range(0, samples, size):
        yield predictions[:, start : start + size].flatten(1)


def _block(coefficients: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the participants' block, its share of each whole row, and which rows have a usable one."""
    block = coefficients[rows[:, None], rows]
    mass, whole = block.sum(dim=1), coefficients[rows].sum(dim=1)
    usable = (mass > _NO_MASS) & (whole > _NO_MASS)
    kept = torch.where(usable, mass / torch.where(usable, whole, 1.0), 1.0)
    return block, kept, usable


def _divisor(predictions: Tensor, reduction: str) -> float:
    _check_reduction(reduction)
    return 1.0 if reduction == "sum" else float(max(predictions.shape[1], 1))


def _check_reduction(reduction: str) -> None:
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction must be one of {', '.join(REDUCTIONS)}, got {reduction!r}")
