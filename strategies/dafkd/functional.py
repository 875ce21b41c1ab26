"""DaFKD's maths: the discriminator's losses, and the ensemble whose weights depend on the sample.

Source: Wang et al., "DaFKD: Domain-aware Federated Knowledge Distillation", CVPR 2023, and the authors' code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flwr_kd.learning.losses import kl_divergence, safe_norm, soft_targets
from flwr_kd.models.initialisation import DrawFrom
from flwr_kd.seeding import torch_generator
from flwr_kd.server.aggregation import MEAN, Rule, robust_average

__all__ = [
    "Discriminator",
    "build_discriminator",
    "discriminator_loss",
    "distillation_loss",
    "domain_weights",
    "gradient_penalty",
    "sample_noise",
    "teacher_logits",
]

_SMALLEST = 1e-12


class Discriminator(nn.Module):
    """A ``Linear(D, 1)`` on a model's features; maps are averaged over their places first.

    It returns logits ``[B]``: D(x) is their sigmoid.
    """

    def __init__(self, feature_shape: Sequence[int]) -> None:
        super().__init__()
        self.linear = nn.Linear(feature_shape[0], 1)

    def forward(self, features: Tensor) -> Tensor:
        """Return logits ``[B]`` of features ``[B, D]`` or maps ``[B, D, ...]``."""
        pooled = features.flatten(2).mean(dim=2) if features.ndim > 2 else features
        logits: Tensor = self.linear(pooled).squeeze(1)
        return logits


def build_discriminator(feature_shape: Sequence[int], *, seed: int) -> Discriminator:
    """Build a discriminator with random weights that depend only on the arguments."""
    with torch.device("cpu"), DrawFrom(torch.Generator().manual_seed(seed)):
        return Discriminator(feature_shape)


def discriminator_loss(real: Tensor, generated: Tensor) -> Tensor:
    """Return BCE(D(x), 1) + BCE(D(G(n)), 0), means over the batches, of the logits ``[B]``.

    >>> discriminator_loss(torch.zeros(2), torch.zeros(2))
    tensor(1.3863)
    """
    return F.softplus(-real).mean() + F.softplus(generated).mean()


def gradient_penalty(
    discriminate: Callable[[Tensor], Tensor], real: Tensor, generated: Tensor, shares: Tensor
) -> Tensor:
    r"""Return the batch mean of :math:`(\| \nabla_{\hat x} D(\hat x) \|_2 - 1)^2` at mixed samples.

    The norm is over all axes of a sample. A gradient of exactly 0 has the penalty 1, and no gradient of its own.

    Parameters
    ----------
    discriminate : callable
        Maps samples ``[B, ...]`` to probabilities ``[B]``, each of its own sample.
    real, generated : Tensor
        ``[B, ...]``; constant.
    shares : Tensor
        ``[B]`` in [0, 1]: each sample's u in u x + (1 - u) G(n).
    """
    u = shares.reshape(-1, *[1] * (real.ndim - 1))
    mixed = (u * real.detach() + (1 - u) * generated.detach()).requires_grad_()
    (gradient,) = torch.autograd.grad(discriminate(mixed).sum(), mixed, create_graph=True)
    return (safe_norm(gradient.flatten(1)) - 1).square().mean()


def domain_weights(scores: Sequence[Tensor | None], count: int) -> Tensor:
    r"""Return each client's weight for each sample, :math:`a_k(x) = D_k(x) / \sum_j D_j(x)`.

    Parameters
    ----------
    scores : sequence of (Tensor or None)
        ``[N]`` in [0, 1] of each client; None, or without a value, where its discriminator was never trained. Such
        a client has the weight 0.
    count : int
        N.

    Returns
    -------
    Tensor
        ``[K, N]``, float64; columns sum to 1. Where the sum is below 1e-12, and where no client has scores, weights
        are uniform, over the clients that have scores.

    Examples
    --------
    >>> domain_weights([torch.tensor([0.75, 0.0]), None, torch.tensor([0.25, 0.0])], 2).tolist()
    [[0.75, 0.5], [0.0, 0.0], [0.25, 0.5]]
    """
    has = torch.tensor([each is not None and len(each) > 0 for each in scores])
    rows = [
        torch.zeros(count, dtype=torch.float64) if each is None or not len(each) else each.double()
        for each in scores
    ]
    values = torch.stack(rows)
    sums = values.sum(dim=0)
    among = (has if bool(has.any()) else torch.ones_like(has)).double()
    uniform = (among / among.sum()).unsqueeze(1)
    return torch.where(sums < _SMALLEST, uniform, values / sums.clamp(min=_SMALLEST))


def teacher_logits(logits: Sequence[Tensor], weights: Tensor, rule: Rule = MEAN) -> Tensor:
    r"""Return :math:`t(x) = \sum_k a_k(x) f_k(x)`, ``[N, C]`` in float32, of logits ``[N, C]`` and ``[K, N]``.

    Another rule gives the weighted median or trimmed mean of each logit.
    """
    if not rule.is_mean:
        return robust_average(torch.stack(list(logits)), rule, weights.unsqueeze(2)).float()
    total = sum(a.unsqueeze(1) * f.double() for a, f in zip(weights, logits, strict=True))
    assert isinstance(total, Tensor)
    return total.float()


def distillation_loss(teacher: Tensor, student: Tensor, temperature: float) -> Tensor:
    r"""Return :math:`T^2 KL(softmax(t / T) \| softmax(s / T))`, the mean over samples, of logits ``[N, C]``."""
    return temperature**2 * kl_divergence(soft_targets(teacher, temperature), student, temperature)


def sample_noise(seed: int, server_round: int, *, count: int, size: int) -> Tensor:
    """Return the noise ``[N, Z]`` of a round's samples, which server and clients draw alike from the run's seed."""
    return torch.randn(count, size, generator=torch_generator(seed, "dafkd-samples", server_round))
