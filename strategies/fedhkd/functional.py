"""FedHKD's maths: hyper-knowledge, its noise, its aggregation, and the two regularisers.

Source: Chen, Wang, Vikalo, "The Best of Both Worlds: Accurate Global and Personalized Models through
Federated Learning with Data-Free Hyper-Knowledge Distillation", ICLR 2023. Equation numbers are the paper's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flwr_kd.learning.controls import controlled
from flwr_kd.learning.losses import safe_norm, soft_targets
from flwr_kd.privacy import mean_sensitivity, noise_std
from flwr_kd.secret_noise import lattice_noise
from flwr_kd.server.aggregation import MEAN, Rule

from ..fedproto.functional import aggregate_means, check_features, class_index, class_means

__all__ = [
    "Knowledge",
    "add_noise",
    "aggregate_knowledge",
    "classifier_loss",
    "controlled_knowledge",
    "feature_loss",
    "local_knowledge",
    "noise_predictions",
]


@dataclass(frozen=True)
class Knowledge:
    r"""Hyper-knowledge :math:`\mathcal{K}^j = (\bar h^j, \bar q^j)` of every class j.

    Attributes
    ----------
    representations : Tensor
        ``[C, D]`` mean representations.
    predictions : Tensor
        ``[C, C]`` mean soft predictions.
    counts : Tensor
        ``[C]``, int64, number of samples of each row. 0: there is no knowledge of the class, its rows are zero.
    """

    representations: Tensor
    predictions: Tensor
    counts: Tensor

    @property
    def known(self) -> Tensor:
        """``[C]``, bool: the classes that have knowledge."""
        return self.counts > 0


def local_knowledge(
    features: Tensor,
    logits: Tensor,
    labels: Tensor,
    *,
    num_classes: int,
    threshold: float,
    temperature: float,
    clip: float,
) -> Knowledge:
    r"""Return a client's hyper-knowledge of the classes that it may share (equation 4).

    Parameters
    ----------
    features : Tensor
        ``[N, D]``, the representations of all of the client's training samples, in eval mode.
    logits : Tensor
        ``[N, C]``, the model's outputs for the same samples.
    labels : Tensor
        ``[N]``, any integer type, in 0..C-1.
    num_classes : int
        C.
    threshold : float
        ν in [0, 1]: class j is shared only if :math:`N_i^j / N_i \ge \nu`.
    temperature : float
        T of the soft predictions, positive.
    clip : float
        ζ: each element of a representation is clipped to [-ζ, ζ] before averaging. Lemma 1 needs this, and
        BatchNorm does not guarantee it.

    Returns
    -------
    Knowledge
        Classes that are absent or below the threshold have count 0; without samples, all of them.

    Raises
    ------
    ValueError
        If an option is out of its range, shapes do not fit, or a label is not one of the classes.
    """
    if not 0 <= threshold <= 1:
        raise ValueError(f"threshold must be in [0, 1], got {threshold}")
    if not clip > 0:
        raise ValueError(f"clip must be greater than 0, got {clip}")
    if logits.ndim != 2 or logits.shape[1] != num_classes:
        raise ValueError(f"logits must be [N, {num_classes}], got {list(logits.shape)}")
    means = class_means(features.clamp(-clip, clip), labels, num_classes)
    soft = class_means(soft_targets(logits, temperature), labels, num_classes)
    # Compare N_i^j to ν N_i: the quotient N_i^j / N_i in floats may fall below an exact ν such as 1/4.
    shared = (means.counts > 0) & (means.counts.double() >= threshold * labels.shape[0] - 1e-9)
    return _only(shared, Knowledge(means.means, soft.means, means.counts))


def add_noise(
    knowledge: Knowledge, *, sigma: float, clip: float, generator: torch.Generator | None
) -> Knowledge:
    r"""Add :math:`\chi(l) \sim \mathcal{N}(0, (2\zeta / N^j)^2 \sigma^2)` to each element (equation 7).

    Parameters
    ----------
    knowledge : Knowledge
        Representations bounded by ζ in every element.
    sigma : float
        σ, at least 0; 0 returns the same values.
    clip : float
        ζ, which with the counts gives the sensitivity (Lemma 1).
    generator : torch.Generator or None
        On the CPU; the draw does not depend on the knowledge's device. None: the noise is secret, see
        :func:`flwr_kd.secret_noise.lattice_noise`.

    Returns
    -------
    Knowledge
        Rows without knowledge stay zero; predictions and counts are unchanged.
    """
    noisy = _noisy(knowledge.representations, knowledge.counts, clip, sigma, generator)
    return _only(knowledge.known, Knowledge(noisy, knowledge.predictions, knowledge.counts))


def noise_predictions(knowledge: Knowledge, *, sigma: float, generator: torch.Generator | None) -> Knowledge:
    r"""Add noise to the mean soft predictions, which the paper does not.

    By the argument of Lemma 1: elements lie in [0, 1], so one sample moves a mean by at most
    :math:`1 / N^j`, and the noise is :math:`\mathcal{N}(0, (1 / N^j)^2 \sigma^2)` per element. Afterwards negative
    elements are set to 0 and rows divided by their sum, which is post-processing and costs no privacy.

    Parameters
    ----------
    knowledge : Knowledge
        Its representations and counts are unchanged.
    sigma : float
        σ, at least 0.
    generator : torch.Generator or None
        On the CPU; None as in :func:`add_noise`.

    Returns
    -------
    Knowledge
        Rows without knowledge stay zero. A row without a positive element becomes uniform.
    """
    # [0, 1] is [-1/2, 1/2] shifted, so the bound is 1/2.
    predictions = knowledge.predictions.double()
    noisy = _noisy(predictions, knowledge.counts, 0.5, sigma, generator).clamp(min=0)
    total = noisy.sum(dim=1, keepdim=True)
    noisy = torch.where(total > 0, noisy / total.where(total > 0, 1.0), 1 / noisy.shape[1])
    noisy = noisy.to(knowledge.predictions.dtype)
    return _only(knowledge.known, Knowledge(knowledge.representations, noisy, knowledge.counts))


def aggregate_knowledge(knowledge: Sequence[Knowledge], rule: Rule = MEAN) -> Knowledge:
    r"""Return the global hyper-knowledge :math:`\sum_i \frac{N_i^j}{N^j} \mathcal{K}_i^j` (equation 9).

    Parameters
    ----------
    knowledge : sequence of Knowledge
        One per client, at least one. Their order affects only rounding.
    rule : Rule
        In place of the mean, ``median`` or ``trimmed-mean`` of each element: then each client that shares a class
        has one vote.

    Returns
    -------
    Knowledge
        A class that no client shares has count 0: the server sets :math:`\mathcal{K}^j = \emptyset`.

    Raises
    ------
    ValueError
        If there are no clients or their shapes differ.
    """
    counts = [item.counts for item in knowledge]
    representations = aggregate_means([item.representations for item in knowledge], counts, rule)
    predictions = aggregate_means([item.predictions for item in knowledge], counts, rule)
    return Knowledge(representations.means, predictions.means, representations.counts)


def controlled_knowledge(knowledge: Knowledge, kind: str, generator: torch.Generator) -> Knowledge:
    """Return global hyper-knowledge, or what replaces it as a control that holds no knowledge of the classes.

    Parameters
    ----------
    knowledge : Knowledge
        The global one.
    kind : str
        One of :data:`flwr_kd.config.KNOWLEDGE`. ``"own"``: as it is. ``"uniform"``: every known class has the
        mean of the known classes' representations and a uniform prediction, so that both regularisers still act,
        but alike for all classes. ``"permuted"``: the representations of the known classes are exchanged so that
        none keeps its own; predictions stay. With one known class there is nothing to exchange.
    generator : torch.Generator
        On the CPU; drawn from for ``"permuted"`` alone.

    Returns
    -------
    Knowledge
        With the same counts.

    Raises
    ------
    ValueError
        If the kind is unknown.
    """
    known = knowledge.known
    rows = knowledge.representations[known]
    representations, predictions = knowledge.representations.clone(), knowledge.predictions
    if kind == "uniform" and len(rows):
        representations[known] = rows.double().mean(dim=0).to(rows.dtype)
    else:
        representations[known] = controlled(rows, kind, generator, uniform=0.0)
    uniform = 1 / max(predictions.shape[1], 1)
    if kind == "uniform":
        predictions = torch.where(known[:, None], uniform, predictions)
    return Knowledge(representations, predictions, knowledge.counts)


def classifier_loss(logits: Tensor, predictions: Tensor, known: Tensor, temperature: float) -> Tensor:
    r"""Return :math:`\frac{1}{n} \sum_j \| Q(G(H^j), T) - Q^j \|_2`, the second term of equation 11.

    Parameters
    ----------
    logits : Tensor
        ``[C, C]``, the client's classifier on the global representations.
    predictions : Tensor
        ``[C, C]``, the global soft predictions, constant.
    known : Tensor
        ``[C]``, bool. Classes without knowledge contribute 0, but count in n, the number of classes.
    temperature : float
        T, positive.

    Returns
    -------
    Tensor
        A scalar, without the factor λ. A distance of exactly 0 has gradient 0.

    Raises
    ------
    ValueError
        If the shapes differ.
    """
    if logits.shape != predictions.shape or known.shape != logits.shape[:1]:
        shapes = [list(tensor.shape) for tensor in (logits, predictions, known)]
        raise ValueError(f"logits and predictions must have one shape [C, C] and known [C], got {shapes}")
    rows = known.unsqueeze(1)
    # Replaced before the softmax as well, whose gradient of a row that is not finite would be NaN times 0.
    soft = soft_targets(torch.where(rows, logits, 0.0), temperature)
    distances = safe_norm(torch.where(rows, soft - predictions.detach(), 0.0))
    return distances.sum() / known.shape[0]


def feature_loss(features: Tensor, labels: Tensor, representations: Tensor, known: Tensor) -> Tensor:
    r"""Return :math:`\frac{1}{B} \sum_k \| R(x_k) - H^{y_k} \|_2`, the third term of equation 11.

    Parameters
    ----------
    features : Tensor
        ``[B, D]``.
    labels : Tensor
        ``[B]``, any integer type.
    representations : Tensor
        ``[C, D]``, the global representations, constant.
    known : Tensor
        ``[C]``, bool. Samples of a class without knowledge contribute 0, but count in B.

    Returns
    -------
    Tensor
        A scalar, without the factor γ. A distance of exactly 0 has gradient 0; no samples give 0.

    Raises
    ------
    ValueError
        If shapes do not fit, or a label on the CPU is not one of the classes.
    """
    check_features(features, representations)
    index = class_index(labels, representations.shape[0])
    used = known[index].unsqueeze(1)
    # Not by a mask as index, for whose size the host would wait.
    distances = safe_norm(torch.where(used, features - representations[index].detach(), 0.0))
    return distances.sum() / max(features.shape[0], 1)


def _noisy(
    means: Tensor, counts: Tensor, bound: float, sigma: float, generator: torch.Generator | None
) -> Tensor:
    """Return class means ``[C, ...]`` with the Gaussian mechanism's noise, which is drawn on the CPU in float64."""
    present = counts.clamp(min=1).cpu().numpy()
    if generator is None:
        values = means.detach().cpu().double().numpy()
        secret = lattice_noise(values, mean_sensitivity(present, bound), sigma)
        return torch.from_numpy(secret).to(means)
    draw = torch.randn(means.shape, generator=generator, dtype=torch.float64)
    std = torch.as_tensor(noise_std(present, bound, sigma), dtype=torch.float64)
    return means + (draw * std.unsqueeze(1)).to(means)


def _only(keep: Tensor, knowledge: Knowledge) -> Knowledge:
    rows = keep.unsqueeze(1)
    return Knowledge(
        torch.where(rows, knowledge.representations, 0.0),
        torch.where(rows, knowledge.predictions, 0.0),
        torch.where(keep, knowledge.counts, 0),
    )
