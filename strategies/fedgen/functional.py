"""FedGen's maths: the generator of features, its loss at the server, and the clients' two terms.

Source: Zhu, Hong, Zhou, "Data-Free Knowledge Distillation for Heterogeneous Federated Learning", ICML 2021, and
the authors' code where the two differ (see the method's page).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flwr_kd.learning.losses import kl_divergence
from flwr_kd.models.initialisation import DrawFrom

__all__ = [
    "FeatureGenerator",
    "build_feature_generator",
    "diversity_loss",
    "ensemble_loss",
    "guidance_loss",
    "label_weights",
]


class FeatureGenerator(nn.Module):
    """A network that turns noise and a class into features; built by :func:`build_feature_generator`.

    Attributes
    ----------
    noise_dim, num_classes : int
        Sizes of the noise and of the one-hot class, which are concatenated. The noise has the features' size.
    feature_shape : tuple of int
        Shape of one sample's features.
    """

    def __init__(self, feature_shape: Sequence[int], *, num_classes: int, hidden: int) -> None:
        super().__init__()
        self.feature_shape, self.num_classes = tuple(feature_shape), num_classes
        self.noise_dim = math.prod(self.feature_shape)
        self.hidden = nn.Linear(self.noise_dim + num_classes, hidden)
        self.norm = nn.BatchNorm1d(hidden)
        self.output = nn.Linear(hidden, self.noise_dim)

    def forward(self, noise: Tensor, labels: Tensor) -> Tensor:
        """Return features ``[B, ...]`` of noise ``[B, D]`` and classes ``[B]``."""
        # Not by one_hot, which asks a GPU for the largest label.
        classes = torch.arange(self.num_classes, device=labels.device)
        one_hot = (labels.unsqueeze(1) == classes).to(noise.dtype)
        hidden = F.relu(self.norm(self.hidden(torch.cat([noise, one_hot], dim=1))))
        return cast(Tensor, self.output(hidden)).reshape(-1, *self.feature_shape)


def build_feature_generator(
    feature_shape: Sequence[int], *, num_classes: int, hidden: int, seed: int
) -> FeatureGenerator:
    """Build a generator of features with random weights that depend only on the arguments.

    Linear from noise and class to the hidden units, BatchNorm, ReLU, Linear to the features.

    Examples
    --------
    >>> generator = build_feature_generator((64,), num_classes=10, hidden=512, seed=0)
    >>> sum(p.numel() for p in generator.parameters())
    72256
    """
    with torch.device("cpu"), DrawFrom(torch.Generator().manual_seed(seed)):
        return FeatureGenerator(feature_shape, num_classes=num_classes, hidden=hidden)


def label_weights(counts: Tensor, labels: Tensor) -> Tensor:
    r"""Return each client's weight for each label, :math:`w_u(y) = n_u(y) / \sum_v n_v(y)`.

    Parameters
    ----------
    counts : Tensor
        ``[U, C]``, number of each client's samples of each class, at least 0.
    labels : Tensor
        ``[B]``, in 0..C-1.

    Returns
    -------
    Tensor
        ``[U, B]``, float32; a column sums to 1, and is 0 for a class that no client has.

    Examples
    --------
    >>> label_weights(torch.tensor([[3, 0], [1, 0]]), torch.tensor([0, 1])).tolist()
    [[0.75, 0.0], [0.25, 0.0]]
    """
    chosen = counts[:, labels].double()
    return (chosen / chosen.sum(dim=0).clamp(min=1)).float()


def ensemble_loss(logits: Sequence[Tensor], labels: Tensor, weights: Tensor) -> Tensor:
    r"""Return :math:`\sum_u \frac1B \sum_i w_u(y_i)\, CE(h_u(z_i), y_i)`, with every client's own head.

    Parameters
    ----------
    logits : sequence of Tensor
        ``[B, C]`` of each of the U heads, on the same generated features.
    labels : Tensor
        ``[B]``, for which the features were generated.
    weights : Tensor
        ``[U, B]``, see :func:`label_weights`.

    Raises
    ------
    ValueError
        If there are no heads, or another number of heads than of weights.
    """
    if not logits or weights.shape != (len(logits), len(labels)):
        raise ValueError(
            f"weights [U, B] of U heads expected, got {list(weights.shape)} and {len(logits)} heads"
        )
    losses = torch.stack([F.cross_entropy(each, labels, reduction="none") for each in logits])
    return (weights * losses).mean(dim=1).sum()


def diversity_loss(noise: Tensor, features: Tensor) -> Tensor:
    r"""Return :math:`\exp(-\overline{d_\epsilon(i, j)\, d_z(i, j)})` over all pairs (i, j), in (0, 1].

    :math:`d_\epsilon` is the mean over dimensions of the squared differences of noise, :math:`d_z` that of the
    absolute differences of features. Sums in place of the means would make the term 0 in float32.

    Parameters
    ----------
    noise : Tensor
        ``[B, Z]``.
    features : Tensor
        ``[B, ...]``, of any shape.
    """
    flat = features.flatten(1)
    of_noise = (noise.unsqueeze(1) - noise.unsqueeze(0)).square().mean(dim=2)
    of_features = torch.cdist(flat, flat, p=1) / flat.shape[1]
    return torch.exp(-(of_noise * of_features).mean())


def guidance_loss(
    logits: Tensor,
    teacher_logits: Tensor,
    generated_logits: Tensor,
    generated_labels: Tensor,
    *,
    label_weight: float,
    prediction_weight: float,
) -> Tensor:
    r"""Return the two terms that the generator adds to a client's loss.

    .. math:: a\, CE(h(G(\hat y)), \hat y) + b\, KL(softmax(h(G(y))) \| softmax(f(x)))

    Parameters
    ----------
    logits : Tensor
        ``[B, C]``, f(x) on the batch.
    teacher_logits : Tensor
        ``[B, C]``, the head on features generated for the batch's labels; constant.
    generated_logits, generated_labels : Tensor
        ``[B', C]`` and ``[B']``: the head on features generated for drawn labels.
    label_weight : float
        a, with the factor B'/B.
    prediction_weight : float
        b.

    Raises
    ------
    ValueError
        If shapes do not fit.
    """
    on_labels = F.cross_entropy(generated_logits, generated_labels)
    teacher = F.softmax(teacher_logits.detach(), dim=1)
    return label_weight * on_labels + prediction_weight * kl_divergence(teacher, logits)
