r"""FedGKT's maths: one loss for clients and server, and rows in the order of their samples.

Source: He, Annavaram, Avestimehr, "Group Knowledge Transfer: Federated Learning of Large CNNs at the Edge",
NeurIPS 2020, in the form of FedDKC (Wu et al., ACM TIST 2022), whose equation numbers are given.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from flwr_kd.learning.losses import kl_divergence
from flwr_kd.transport.payload import PayloadError

__all__ = ["FeatureRows", "check_index", "contradicts", "in_sample_order", "transfer_loss"]

_ROUNDING = 1e-9


def transfer_loss(logits: Tensor, labels: Tensor, teacher: Tensor | None, beta: float) -> Tensor:
    r"""Return :math:`L_{CE} + \beta L_{sim}`, equation 1 at a client, 2 or 8 at the server.

    :math:`L_{sim}` is :math:`KL(teacher \,\|\, softmax(logits))`, Hinton's direction; the paper says "KL".

    Parameters
    ----------
    logits : Tensor
        ``[B, C]``, of the student.
    labels : Tensor
        ``[B]``.
    teacher : Tensor or None
        ``[B, C]`` probabilities of the teacher, client or server; without one, only the cross-entropy.
    beta : float
        β, at least 0.

    Returns
    -------
    Tensor
        A scalar, the mean over the batch.

    Raises
    ------
    ValueError
        If the teacher's shape is not the logits'.

    Examples
    --------
    >>> import torch
    >>> logits, labels = torch.zeros(2, 4), torch.tensor([0, 3])
    >>> transfer_loss(logits, labels, torch.full((2, 4), 0.25), 1.5) == transfer_loss(logits, labels, None, 1.5)
    tensor(True)
    """
    loss = F.cross_entropy(logits, labels)
    return loss if teacher is None or beta == 0 else loss + beta * kl_divergence(teacher, logits)


def contradicts(logits: Tensor, labels: Tensor) -> Tensor:
    r"""Return whose knowledge says less of the label than none: :math:`p_y < 1 / C`.

    The client has trained on the label, and the server has it too. Logits by which the label is less likely than by
    chance teach the opposite of it.

    Parameters
    ----------
    logits : Tensor
        ``[N, C]``, finite.
    labels : Tensor
        ``[N]``.

    Returns
    -------
    Tensor
        ``[N]`` bool. Logits that are all alike contradict nothing.

    Examples
    --------
    >>> logits = torch.tensor([[0.0, 0.0, 0.0], [9.0, -9.0, -9.0], [1.0, 0.9, -9.0]])
    >>> contradicts(logits, torch.tensor([2, 1, 1])).tolist()
    [False, True, False]
    """
    exact = logits.double()
    likelihood = exact.gather(1, labels[:, None])[:, 0] - exact.logsumexp(dim=1)
    return likelihood < -math.log(logits.shape[1]) - _ROUNDING


def check_index(index: npt.NDArray[np.int64], what: str = "index") -> None:
    """Refuse an index that does not hold each of 0..N-1 once.

    Raises
    ------
    PayloadError
        With the sample that is missing, repeated or out of range.

    Examples
    --------
    >>> check_index(np.array([2, 0, 1]))
    >>> check_index(np.array([0, 2, 2]))
    Traceback (most recent call last):
    flwr_kd.PayloadError: index must name each of the 3 samples once; 1 is missing, 2 is given twice
    """
    count = len(index)
    outside = index[(index < 0) | (index >= count)]
    if outside.size:
        raise PayloadError(
            f"{what} must name each of the {count} samples once; {outside[0]} is not one of them"
        )
    occurrences = np.bincount(index, minlength=count)
    if (occurrences != 1).any():
        missing, twice = int(np.argmin(occurrences)), int(np.argmax(occurrences))
        raise PayloadError(
            f"{what} must name each of the {count} samples once; {missing} is missing, {twice} is given twice"
        )


def in_sample_order(rows: npt.NDArray[Any], index: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
    """Return rows ``[N, ...]`` reordered so that row i belongs to sample i.

    >>> in_sample_order(np.array([10.0, 30.0, 20.0]), np.array([0, 2, 1])).tolist()
    [10.0, 20.0, 30.0]
    """
    ordered = np.empty_like(rows)
    ordered[index] = rows
    return ordered


class FeatureRows:
    """The rows of several clients as one sequence, without a second copy of their features.

    Parameters
    ----------
    features : sequence of ndarray
        ``[N_k, D]``, of each client.
    labels, teachers : sequence of Tensor
        ``[N_k]`` and ``[N_k, C]``.
    shape : tuple of int
        Shape of one sample's features, with D elements.

    Examples
    --------
    >>> rows = FeatureRows(
    ...     [np.zeros((1, 2)), np.ones((2, 2))],
    ...     [torch.tensor([0]), torch.tensor([1, 2])],
    ...     [torch.zeros(1, 3), torch.ones(2, 3)],
    ...     shape=(2,),
    ... )
    >>> len(rows), [part.tolist() for part in rows.take(torch.tensor([2, 0]))][:2]
    (3, [[[1.0, 1.0], [0.0, 0.0]], [2, 0]])
    """

    def __init__(
        self,
        features: Sequence[npt.NDArray[Any]],
        labels: Sequence[Tensor],
        teachers: Sequence[Tensor],
        *,
        shape: tuple[int, ...],
    ) -> None:
        self.shape = shape
        self.features = list(features)
        self.starts = np.cumsum([0, *(len(part) for part in self.features)])
        self.labels = torch.cat(list(labels))
        self.teachers = torch.cat(list(teachers))

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return features ``[B, ...]`` in float32, labels ``[B]`` and teachers ``[B, C]``."""
        chosen = rows.numpy()
        out = np.empty((len(chosen), self.features[0].shape[1]), dtype=np.float32)
        owner = np.searchsorted(self.starts, chosen, side="right") - 1
        for number in np.unique(owner):
            mine = owner == number
            out[mine] = self.features[number][chosen[mine] - self.starts[number]]
        return torch.from_numpy(out).reshape(-1, *self.shape), self.labels[rows], self.teachers[rows]
