r"""FedGKT's maths: one loss for clients and server, and rows that stay with their samples.

Source: He, Annavaram, Avestimehr, "Group Knowledge Transfer: Federated Learning of Large CNNs at the Edge",
NeurIPS 2020, in the form of FedDKC (Wu et al., ACM TIST 2022), whose equation numbers are given.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor
from torch.nn import functional as F

from flwr_kd.learning.losses import kl_divergence
from flwr_kd.transport.payload import PayloadError

__all__ = ["check_index", "in_sample_order", "transfer_loss"]


def transfer_loss(logits: Tensor, labels: Tensor, teacher: Tensor | None, beta: float) -> Tensor:
    r"""Return :math:`L_{CE} + \beta L_{sim}`, equation 1 at a client, 2 or 8 at the server.

    :math:`L_{sim}` is :math:`KL(teacher \,\|\, softmax(logits))`, Hinton's direction; the paper says "KL".

    Parameters
    ----------
    logits : Tensor
        ``[B, C]``, of the model that learns.
    labels : Tensor
        ``[B]``.
    teacher : Tensor or None
        ``[B, C]`` probabilities of the other side; None leaves the cross-entropy alone.
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


def check_index(index: npt.NDArray[np.int64], what: str = "index") -> None:
    """Refuse an index that does not name each of 0..N-1 once.

    Raises
    ------
    PayloadError
        With the sample that is missing, given twice or out of range.

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
    found = np.bincount(index, minlength=count)
    if (found != 1).any():
        missing, twice = int(np.argmin(found)), int(np.argmax(found))
        raise PayloadError(
            f"{what} must name each of the {count} samples once; {missing} is missing, {twice} is given twice"
        )


def in_sample_order(rows: npt.NDArray[Any], index: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
    """Return rows ``[N, ...]`` so that row i is of sample i.

    >>> in_sample_order(np.array([10.0, 30.0, 20.0]), np.array([0, 2, 1])).tolist()
    [10.0, 20.0, 30.0]
    """
    ordered = np.empty_like(rows)
    ordered[index] = rows
    return ordered
