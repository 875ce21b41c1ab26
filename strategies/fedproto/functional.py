"""FedProto's maths: class prototypes, their aggregation, and the distance to them.

Source: Tan et al., "FedProto: Federated Prototype Learning across Heterogeneous Clients", AAAI 2022
(arXiv 2105.00243). FedHKD builds on these functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flwr_kd.learning.losses import safe_norm
from flwr_kd.server.aggregation import MEAN, Rule, robust_average

__all__ = ["ClassMeans", "aggregate_means", "class_means", "prototype_loss"]


@dataclass(frozen=True)
class ClassMeans:
    """A mean per class, and its number of samples.

    Attributes
    ----------
    means : Tensor
        ``[C, D]``; the row of a class with count 0 is zero.
    counts : Tensor
        ``[C]``, int64.
    """

    means: Tensor
    counts: Tensor


def class_means(values: Tensor, labels: Tensor, num_classes: int) -> ClassMeans:
    r"""Return the mean of each class's rows: :math:`\bar h^j = \frac{1}{N^j} \sum_k h^{j,k}`.

    Source: FedProto, the local prototype; FedHKD, equation 4. Differentiable in ``values``.

    Parameters
    ----------
    values : Tensor
        ``[N, D]``.
    labels : Tensor
        ``[N]``, any integer type, in 0..C-1.
    num_classes : int
        C.

    Returns
    -------
    ClassMeans
        A class without samples has count 0 and a zero row.

    Raises
    ------
    ValueError
        If shapes do not fit, or a label on the CPU is outside 0..C-1.

    Notes
    -----
    On other devices than the CPU a value that is not finite affects the means of all classes.

    Examples
    --------
    >>> class_means(torch.tensor([[1.0], [3.0], [5.0]]), torch.tensor([0, 0, 2]), 3).means.flatten()
    tensor([2., 0., 5.])
    """
    if values.ndim != 2 or labels.shape != values.shape[:1]:
        raise ValueError(
            f"values [N, D] and labels [N] expected, got {list(values.shape)}, {list(labels.shape)}"
        )
    index = class_index(labels, num_classes)
    # In float64 where the device has it: a float32 sum of 50,000 equal values is wrong in the fourth digit.
    precise = values.dtype if values.device.type == "mps" else torch.float64
    sums, counts = _class_sums(values.to(precise), index, num_classes)
    return ClassMeans((sums / counts.clamp(min=1).unsqueeze(1)).to(values.dtype), counts)


def _class_sums(values: Tensor, index: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
    """Return the sum of each class's rows ``[C, D]``, and their number ``[C]``."""
    if values.device.type == "cpu":
        sums = values.new_zeros(num_classes, values.shape[1])
        return sums.index_add(0, index, values), torch.bincount(index, minlength=num_classes)
    # A GPU adds the rows of index_add in any order, and bincount lets the host wait.
    members = torch.arange(num_classes, device=index.device).unsqueeze(1) == index
    return members.to(values.dtype) @ values, members.sum(dim=1)


def class_index(labels: Tensor, num_classes: int) -> Tensor:
    """Return labels as an index ``[N]`` into the classes.

    Raises
    ------
    ValueError
        If the labels are not of an integer type, or one on the CPU is not in 0..C-1. On other devices the range is
        not checked, since the host would wait for the answer.
    """
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise ValueError(f"labels must be of an integer type, got {labels.dtype}")
    index = labels.long()
    if index.device.type != "cpu" or not index.numel():
        return index
    if not (int(index.min()) >= 0 and int(index.max()) < num_classes):
        raise ValueError(
            f"labels must be in 0..{num_classes - 1}, got {int(index.min())}..{int(index.max())}"
        )
    return index


def aggregate_means(means: Sequence[Tensor], counts: Sequence[Tensor], rule: Rule = MEAN) -> ClassMeans:
    r"""Return per class the mean over clients, weighted by their sample counts, or a robust mean.

    :math:`H^j = \sum_i \frac{N_i^j}{N^j} \bar h_i^j` over the clients that have the class. Source: FedProto,
    the global prototype, without its further factor :math:`1/|\mathcal{N}_j|` (with which the mean of equal
    prototypes would not be that prototype); FedHKD, equation 9.

    Parameters
    ----------
    means : sequence of Tensor
        One ``[C, D]`` per client.
    counts : sequence of Tensor
        One ``[C]`` per client; a row with count 0 is left out.
    rule : Rule
        In place of the mean, ``median`` or ``trimmed-mean``: then each client that has a class has one vote.

    Returns
    -------
    ClassMeans
        In the input's dtype; summed in float64, in the given order. A class that no client has has count 0.

    Raises
    ------
    ValueError
        If there are no clients, or the sequences or their shapes differ.
    """
    if not means or len(means) != len(counts):
        raise ValueError(
            f"as many means as counts and at least one expected, got {len(means)} and {len(counts)}"
        )
    if any(
        m.shape != means[0].shape or c.shape != means[0].shape[:1] for m, c in zip(means, counts, strict=True)
    ):
        raise ValueError("all clients must have the same number of classes and features")
    if any(int(count.min()) < 0 for count in counts if count.numel()):
        raise ValueError("counts must be at least 0")
    if not rule.is_mean:
        votes = torch.stack([count > 0 for count in counts]).unsqueeze(2)
        average = robust_average(torch.stack(list(means)), rule, votes)
        return ClassMeans(
            average.to(means[0].dtype), torch.stack([count.long() for count in counts]).sum(dim=0)
        )
    total = torch.zeros_like(counts[0], dtype=torch.int64)
    sums = torch.zeros_like(means[0], dtype=torch.float64)
    for mean, count in zip(means, counts, strict=True):
        present = (count > 0).unsqueeze(1)
        sums += torch.where(present, mean.double() * count.double().unsqueeze(1), 0.0)
        total += count.long()
    return ClassMeans((sums / total.clamp(min=1).unsqueeze(1)).to(means[0].dtype), total)


def prototype_loss(features: Tensor, labels: Tensor, prototypes: Tensor, known: Tensor) -> Tensor:
    r"""Return :math:`\sum_j d(C_i^j, \bar C^j)`, the distance of the batch's prototypes to the global ones.

    Source: FedProto, the regularisation term :math:`\mathcal{L}_R`, with d the Euclidean distance and the
    local prototype taken over the batch. The factor λ is the caller's.

    Parameters
    ----------
    features : Tensor
        ``[B, D]``.
    labels : Tensor
        ``[B]``, any integer type.
    prototypes : Tensor
        ``[C, D]``, constant.
    known : Tensor
        ``[C]``, bool: the classes that have a global prototype. Others contribute 0 and no gradient.

    Returns
    -------
    Tensor
        A scalar. A distance of exactly 0 has gradient 0.

    Raises
    ------
    ValueError
        If shapes do not fit, or a label on the CPU is not one of the classes.
    """
    check_features(features, prototypes)
    local = class_means(features, labels, prototypes.shape[0])
    used = (known & (local.counts > 0)).unsqueeze(1)
    # Not by a mask as index, for whose size the host would wait.
    return safe_norm(torch.where(used, local.means - prototypes.detach(), 0.0)).sum()


def check_features(features: Tensor, prototypes: Tensor) -> None:
    """Refuse features ``[B, D]`` and prototypes ``[C, D]`` of different D, which PyTorch might broadcast.

    Raises
    ------
    ValueError
        With both shapes.
    """
    if features.ndim != 2 or prototypes.ndim != 2 or features.shape[1] != prototypes.shape[1]:
        raise ValueError(
            f"features [B, D] and prototypes [C, D] expected, got {list(features.shape)}, {list(prototypes.shape)}"
        )
