"""FD's maths: Jeong et al., "Communication-Efficient On-Device Machine Learning", algorithm 1."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def class_logits(logits: Tensor, labels: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
    """Return each class's mean logits ``[C, C]``, zero if it has no samples, and its number of samples ``[C]``.

    >>> means, counts = class_logits(torch.tensor([[1.0, 0.0], [3.0, 2.0]]), torch.tensor([0, 0]), 2)
    >>> means.tolist(), counts.tolist()
    ([[2.0, 1.0], [0.0, 0.0]], [2, 0])
    """
    counts = torch.bincount(labels, minlength=num_classes)
    sums = torch.zeros(num_classes, num_classes, dtype=torch.float64).index_add(0, labels, logits.double())
    return (sums / counts.clamp(min=1)[:, None]).float(), counts


def means_of_others(means: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
    """Return for each client the mean logits over the other clients that have the class.

    Parameters
    ----------
    means : Tensor
        ``[M, C, C]``, by client.
    known : Tensor
        ``[M, C]``, whether the client has the class.

    Returns
    -------
    means : Tensor
        ``[M, C, C]``, zero if no other client has the class.
    others : Tensor
        ``[M, C]``, how many others have it.
    """
    weight = known.double()
    kept = means.double() * weight[..., None]
    others = weight.sum(dim=0) - weight
    return ((kept.sum(dim=0) - kept) / others.clamp(min=1)[..., None]).float(), others.long()


def distillation_term(logits: Tensor, labels: Tensor, teacher: Tensor, known: Tensor) -> Tensor:
    """Return the mean cross-entropy between predictions and their classes' teachers; 0 without any teacher."""
    rows = known[labels]
    # Not by a mask as index, for whose size the host would wait for a GPU.
    losses = F.cross_entropy(logits, teacher[labels].softmax(dim=1), reduction="none")
    return torch.where(rows, losses, 0.0).sum() / rows.sum().clamp(min=1)
