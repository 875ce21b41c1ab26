"""Losses and soft targets, as pure functions on tensors."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["kl_divergence", "safe_norm", "soft_targets"]


def soft_targets(logits: Tensor, temperature: float) -> Tensor:
    r"""Return softmax(z / T), the soft target function :math:`Q(z, T)`.

    Source: Hinton et al. 2015; FedHKD, equation 2.

    Parameters
    ----------
    logits : Tensor
        ``[..., C]``.
    temperature : float
        Positive and finite. Above 1 flattens the distribution, below 1 sharpens it.

    Returns
    -------
    Tensor
        ``[..., C]``, rows sum to 1.

    Raises
    ------
    ValueError
        If the temperature is not positive and finite.

    Examples
    --------
    >>> soft_targets(torch.tensor([0.0, 0.0]), 0.5)
    tensor([0.5000, 0.5000])
    """
    _check_temperature(temperature)
    return F.softmax(logits / temperature, dim=-1)


def kl_divergence(teacher: Tensor, student_logits: Tensor, temperature: float = 1.0) -> Tensor:
    r"""Return the mean over rows of :math:`KL(p \,\|\, softmax(z / T))`.

    The mean is over rows, as in ``F.kl_div(..., reduction="batchmean")``; with the default reduction of PyTorch the
    value is C times smaller. In addition, shapes are not broadcast, and no rows give 0, not NaN. There is no factor
    :math:`T^2`; a method that needs Hinton's multiplies by it.

    Parameters
    ----------
    teacher : Tensor
        ``[N, C]`` probabilities; 0 · log 0 counts as 0.
    student_logits : Tensor
        ``[N, C]``.
    temperature : float
        Of the student's softmax.

    Returns
    -------
    Tensor
        A scalar; 0 for no rows.

    Raises
    ------
    ValueError
        If the shapes differ or the temperature is not positive and finite.
    """
    if teacher.ndim != 2 or teacher.shape != student_logits.shape:
        shapes = f"{list(teacher.shape)} and {list(student_logits.shape)}"
        raise ValueError(f"teacher and student must both be [N, C], got {shapes}")
    _check_temperature(temperature)
    student = F.log_softmax(student_logits / temperature, dim=-1)
    total = F.kl_div(student, teacher, reduction="sum")
    return total / max(teacher.shape[0], 1)


def safe_norm(x: Tensor, dim: int = -1) -> Tensor:
    r"""Return the Euclidean norm along an axis, with gradient 0 (not NaN) at 0.

    Parameters
    ----------
    x : Tensor
        ``[..., D]``.
    dim : int
        The axis of the norm.

    Returns
    -------
    Tensor
        The shape of ``x`` without that axis.

    Examples
    --------
    >>> x = torch.zeros(3, requires_grad=True)
    >>> safe_norm(x).backward()
    >>> x.grad
    tensor([0., 0., 0.])
    """
    squared = x.square().sum(dim=dim)
    zero = squared == 0
    # The gradient of the square root at 0 is infinite, and infinity times 0 is NaN: compute it of 1 there.
    return torch.where(zero, torch.ones_like(squared), squared).sqrt().masked_fill(zero, 0.0)


def _check_temperature(temperature: float) -> None:
    if not (math.isfinite(temperature) and temperature > 0):
        raise ValueError(f"temperature must be positive and finite, got {temperature}")
