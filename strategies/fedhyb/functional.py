"""FedHyb's maths: the clients' self-distillation, and the server's ensemble distillation.

Source: Liu, Zhang, Zhang, Wang, "Federated Learning with Hybrid Knowledge Distillations on Long-Tailed
Heterogeneous Client Data". Equation numbers are the paper's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from flwr_kd.learning.losses import kl_divergence

__all__ = ["ensemble_distillation_loss", "self_distillation_loss", "sub_network_weight"]


def sub_network_weight(logits: Tensor, labels: Tensor) -> Tensor:
    r"""Return :math:`\beta_m = e^{-L} / (1 + e^{-L})` (equation 4), the sigmoid of minus the cross-entropy L.

    Parameters
    ----------
    logits : Tensor
        ``[B, C]``, of a sub-network on its view of the batch.
    labels : Tensor
        ``[B]``, int64, in 0..C-1.

    Returns
    -------
    Tensor
        A scalar in (0, 1/2]: one weight per sub-network and batch, 1/2 at a cross-entropy of 0.

    Raises
    ------
    ValueError
        If the shapes do not fit.

    Examples
    --------
    >>> sub_network_weight(torch.zeros(3, 4), torch.tensor([0, 1, 2]))
    tensor(0.2000)
    """
    _check_labels(logits, labels)
    return torch.sigmoid(-F.cross_entropy(logits, labels))


def self_distillation_loss(
    logits: Tensor,
    labels: Tensor,
    sub_logits: Sequence[Tensor],
    *,
    weight: float,
    dynamic_weighting: bool = True,
    detach_target: bool = True,
    detach_weight: bool = True,
) -> Tensor:
    r"""Return a client's loss on a batch (equations 1, 3 and 5).

    .. math:: L_{CE}(\omega; x, y) + a \sum_m \beta_m KL(Q(\omega; x) \| Q(S_m(\omega); R_m(x)))

    Parameters
    ----------
    logits : Tensor
        ``[B, C]``, of the full network on the batch itself.
    labels : Tensor
        ``[B]``, int64, in 0..C-1.
    sub_logits : sequence of Tensor
        ``[B, C]`` each, of the M sub-networks on their views; if empty, the loss is the cross-entropy.
    weight : float
        a, at least 0.
    dynamic_weighting : bool
        False: :math:`\beta_m = 1`, which is FedHyb¹.
    detach_target : bool
        Whether the KL's first argument, the full network's output, is a constant. Otherwise the full network is
        also trained towards the sub-networks' outputs, which are less accurate.
    detach_weight : bool
        Whether :math:`\beta_m` is a constant. Otherwise a larger error of a sub-network can lower the loss.

    Returns
    -------
    Tensor
        A scalar: means over the batch, the sum over sub-networks.

    Raises
    ------
    ValueError
        If the shapes do not fit or the weight is negative.

    Examples
    --------
    >>> logits, labels = torch.tensor([[2.0, 0.0]]), torch.tensor([0])
    >>> alone = self_distillation_loss(logits, labels, [], weight=1.0)
    >>> torch.equal(alone, self_distillation_loss(logits, labels, [logits, logits], weight=1.0))
    True
    """
    _check_labels(logits, labels)
    if not weight >= 0:
        raise ValueError(f"weight must be at least 0, got {weight}")
    total = F.cross_entropy(logits, labels)
    # As logarithms, which have a finite gradient also where a probability of the target vanishes.
    target = F.log_softmax(logits.detach() if detach_target else logits, dim=1)
    for narrow in sub_logits:
        if narrow.shape != logits.shape:
            raise ValueError(f"sub_logits must be [B, C] = {list(logits.shape)}, got {list(narrow.shape)}")
        divergence = F.kl_div(F.log_softmax(narrow, dim=1), target, reduction="batchmean", log_target=True)
        if dynamic_weighting:
            beta = sub_network_weight(narrow, labels)
            divergence = (beta.detach() if detach_weight else beta) * divergence
        total = total + weight * divergence
    return total


def ensemble_distillation_loss(
    logits: Tensor,
    features: Tensor,
    target_predictions: Tensor,
    target_features: Tensor,
    *,
    logits_weight: float,
    feature_weight: float,
) -> Tensor:
    r"""Return the server's loss on a batch of unlabelled samples (equations 6 to 8).

    .. math:: \eta\, KL(\tfrac{1}{K} \sum_k Q(\omega_k) \| Q_G) + \nu\, MSE(H_G, \tfrac{1}{K} \sum_k H(\omega_k))

    Parameters
    ----------
    logits, features : Tensor
        ``[B, C]`` and ``[B, D]``, of the global model.
    target_predictions, target_features : Tensor
        ``[B, C]`` probabilities and ``[B, D]``, the clients' means, constant.
    logits_weight, feature_weight : float
        η and ν, at least 0.

    Returns
    -------
    Tensor
        A scalar. The KL is averaged over samples, the squared distance over samples and the D features.

    Raises
    ------
    ValueError
        If the shapes differ or a weight is negative.

    Examples
    --------
    >>> h = torch.zeros(2, 3)
    >>> ensemble_distillation_loss(h, h, torch.full((2, 3), 1 / 3), h + 2, logits_weight=1.0, feature_weight=0.5)
    tensor(2.)
    """
    if not (logits_weight >= 0 and feature_weight >= 0):
        raise ValueError(f"weights must be at least 0, got {logits_weight} and {feature_weight}")
    if features.shape != target_features.shape or features.ndim != 2:
        raise ValueError(
            f"features must both be [B, D], got {list(features.shape)} and {list(target_features.shape)}"
        )
    of_logits = kl_divergence(target_predictions.detach(), logits)
    return logits_weight * of_logits + feature_weight * F.mse_loss(features, target_features.detach())


def _check_labels(logits: Tensor, labels: Tensor) -> None:
    if logits.ndim != 2 or labels.shape != logits.shape[:1]:
        raise ValueError(
            f"logits must be [B, C] and labels [B], got {list(logits.shape)} and {list(labels.shape)}"
        )
