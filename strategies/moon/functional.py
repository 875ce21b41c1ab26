"""MOON's maths: the model-contrastive loss.

Source: Li, He and Song, "Model-Contrastive Federated Learning", CVPR 2021, equation 3.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from flwr_kd.learning.losses import safe_norm

__all__ = ["contrastive_loss"]


def contrastive_loss(z: Tensor, z_global: Tensor, z_previous: Sequence[Tensor], temperature: float) -> Tensor:
    r"""Return the mean over samples of the model-contrastive loss.

    .. math:: -\log \frac{e^{\cos(z, z_g)/\tau}}{e^{\cos(z, z_g)/\tau} + \sum_p e^{\cos(z, z_p)/\tau}}

    It is in [0, ∞): small where the representation is like that of the global model, and unlike those of the
    client's previous ones. The cosine with a vector of zeros is 0, with gradient 0.

    Parameters
    ----------
    z : Tensor
        ``[B, D]``, representations by the model in training.
    z_global : Tensor
        ``[B, D]``, of the same samples by the received global model. Constant.
    z_previous : sequence of Tensor
        ``[B, D]`` each, by the client's previous models. Constant. Without any the loss is 0.
    temperature : float
        τ, positive and finite.

    Returns
    -------
    Tensor
        A scalar, in float32 for representations in reduced precision; 0 for no samples.

    Raises
    ------
    ValueError
        If shapes differ, or the temperature is not positive and finite.

    Examples
    --------
    >>> z = torch.tensor([[3.0, 0.0]])
    >>> contrastive_loss(z, z, [z], 0.5)
    tensor(0.6931)
    >>> contrastive_loss(z, z, [], 0.5)
    tensor(0.)
    """
    if not (math.isfinite(temperature) and temperature > 0):
        raise ValueError(f"temperature must be positive and finite, got {temperature}")
    others = [z_global, *z_previous]
    if z.ndim != 2 or any(other.shape != z.shape for other in others):
        shapes = [list(each.shape) for each in (z, *others)]
        raise ValueError(f"all representations must have the same shape [B, D], got {shapes}")
    wide = torch.promote_types(z.dtype, torch.float32)
    if not z_previous or not len(z):
        return z.new_zeros((), dtype=wide)
    own = _unit(z.to(wide))
    cosines = torch.stack([(own * _unit(other.detach().to(wide))).sum(dim=1) for other in others], dim=1)
    # The global model's is the first of the logits.
    return -F.log_softmax(cosines / temperature, dim=1)[:, 0].mean()


def _unit(z: Tensor) -> Tensor:
    length = safe_norm(z)[:, None]
    zero = length == 0
    # Without a direction there is no cosine, and no gradient of it.
    return (z / length.masked_fill(zero, 1.0)).masked_fill(zero, 0.0)
