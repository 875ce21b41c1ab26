"""Loss, accuracies and AUROC of logits: for one class per sample, and for several labels per sample."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["Measured", "Scores", "label_loss", "mean_auroc"]


def label_loss(logits: Tensor, labels: Tensor, reduction: str = "mean") -> Tensor:
    """Return the loss of logits: cross-entropy, or binary cross-entropy where samples have several labels.

    Parameters
    ----------
    logits : Tensor
        ``[B, C]``.
    labels : Tensor
        Classes ``[B]``, int64; or ``[B, C]``, floats of 0 and 1, one for each label. Then the loss of a sample is
        the mean over its labels.
    reduction : str
        ``"mean"`` or ``"sum"`` over samples.

    Returns
    -------
    Tensor
        A scalar.

    Examples
    --------
    >>> logits = torch.zeros(2, 4)
    >>> label_loss(logits, torch.tensor([0, 3])), label_loss(logits, torch.tensor([[0.0, 1, 1, 0]] * 2))
    (tensor(1.3863), tensor(0.6931))
    """
    if not labels.is_floating_point():
        return F.cross_entropy(logits, labels, reduction=reduction)
    loss = F.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype), reduction=reduction)
    return loss / logits.shape[1] if reduction == "sum" else loss


def mean_auroc(scores: Tensor, labels: Tensor) -> float | None:
    r"""Return the mean over labels of the area under the ROC curve.

    The area is the probability that a sample with the label has a higher score than one without it; equal scores
    count half (Hanley and McNeil 1982).

    Parameters
    ----------
    scores : Tensor
        ``[N, C]``, such as logits; only their order matters.
    labels : Tensor
        ``[N, C]`` of 0 and 1.

    Returns
    -------
    float or None
        In [0, 1]. Labels that all samples have, or none has, are left out; None if no other is there, or a score is
        NaN.

    Examples
    --------
    >>> scores = torch.tensor([[0.1, 5.0], [0.4, 5.0], [0.3, 5.0]])
    >>> mean_auroc(scores, torch.tensor([[0, 1], [1, 1], [1, 1]])), mean_auroc(scores, torch.ones(3, 2))
    (1.0, None)
    >>> mean_auroc(scores, torch.tensor([[0, 1], [1, 0], [0, 1]]))
    0.75
    """
    # On the CPU: not every device has float64, and each label would let the host wait for a GPU.
    scores, labels = scores.cpu(), labels.cpu()
    if scores.isnan().any():
        return None
    areas = []
    for column, has in zip(scores.T, labels.T > 0.5, strict=True):
        positive = int(has.sum())
        negative = len(has) - positive
        if positive and negative:
            _, place, times = column.unique(return_inverse=True, return_counts=True)
            # The mean rank of equal scores, from 1.
            ranks = (times.cumsum(0).double() - (times - 1) / 2)[place]
            above = float(ranks[has].sum()) - positive * (positive + 1) / 2
            areas.append(above / (positive * negative))
    return sum(areas) / len(areas) if areas else None


class Measured(NamedTuple):
    """A model's results on test data.

    Attributes
    ----------
    loss : float
        Mean of :func:`label_loss`.
    accuracy : float
        Share of samples whose class is the likeliest. Where samples have several labels: share of labels that are
        right, if those count as present whose probability is above one half.
    top5 : float or None
        Share of samples whose class is among the five likeliest; None with five classes or fewer, and where samples
        have several labels.
    auroc : float or None
        Where samples have several labels, :func:`mean_auroc`; else None.
    """

    loss: float
    accuracy: float
    top5: float | None
    auroc: float | None = None

    def metrics(self, kind: str = "local") -> dict[str, float]:
        """Return the accuracies by the names that a reply has for them.

        Parameters
        ----------
        kind : str
            ``"local"``: on the client's test data. ``"common"``: on the common test set. ``"trained"``: on the
            client's test data, before the client distils.

        Examples
        --------
        >>> Measured(0.1, 0.75, None).metrics("common")
        {'common-accuracy': 0.75}
        """
        return {f"{kind}-{name}": value for name, value in self.accuracies().items()}

    def accuracies(self) -> dict[str, float]:
        """Return what was measured beside the loss, as an evaluation names it.

        >>> Measured(0.1, 0.75, None, auroc=0.5).accuracies()
        {'accuracy': 0.75, 'auroc': 0.5}
        """
        values = {"accuracy": self.accuracy, "top5": self.top5, "auroc": self.auroc}
        return {name: value for name, value in values.items() if value is not None}


class Scores(NamedTuple):
    """What is known of one batch; nothing is fetched from a GPU for it.

    Attributes
    ----------
    sums : Tensor
        Loss and samples that are right, ``[2]``; with more than five classes also samples whose class is among the
        five likeliest, ``[3]``.
    samples : int
        B.
    several : tuple of Tensor, or None
        Logits and labels ``[B, C]`` where samples have several labels: AUROC cannot be added up.
    """

    sums: Tensor
    samples: int
    several: tuple[Tensor, Tensor] | None

    @classmethod
    def of(cls, logits: Tensor, labels: Tensor) -> Self:
        """Return those of one batch; ``labels`` as :func:`label_loss` takes them."""
        loss = label_loss(logits, labels, reduction="sum")
        if labels.is_floating_point():
            right = ((logits > 0) == (labels > 0.5)).to(loss.dtype).mean(dim=1).sum()
            return cls(torch.stack([loss, right]), len(logits), (logits, labels))
        counts = [(logits.argmax(dim=1) == labels).sum()]
        if logits.shape[1] > 5:
            counts.append((logits.topk(5, dim=1).indices == labels[:, None]).sum())
        sums = torch.stack([loss, *(count.to(loss.dtype) for count in counts)])
        return cls(sums, len(logits), None)

    @staticmethod
    def together(batches: Sequence[Scores]) -> Measured:
        """Return the results of at least one batch."""
        # Fetched together in the end: the host would wait for a GPU with each number.
        columns = zip(*torch.stack([batch.sums for batch in batches]).tolist(), strict=True)
        samples = sum(batch.samples for batch in batches)
        loss, right, *near = (sum(column) / samples for column in columns)
        several = [batch.several for batch in batches if batch.several is not None]
        auroc = mean_auroc(*map(torch.cat, zip(*several, strict=True))) if several else None
        return Measured(loss, right, near[0] if near else None, auroc)
