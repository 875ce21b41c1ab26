"""A part of the samples on which nothing is trained, for a validation loss."""

from __future__ import annotations

import torch
from torch import Tensor

from flwr_kd.config import rows_to_train_on

__all__ = ["hold_out"]


def hold_out(count: int, share: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw the rows to train on and, disjoint from them, the rows of the validation loss; both ascending.

    The number of held-out rows is the share rounded to the nearest number; it is 0 for few samples.

    >>> train, validation = hold_out(20, 0.1, torch.Generator().manual_seed(0))
    >>> len(train), len(validation), sorted([*train.tolist(), *validation.tolist()]) == list(range(20))
    (18, 2, True)
    """
    order = torch.randperm(count, generator=generator)
    size = count - rows_to_train_on(count, share)
    return order[size:].sort().values, order[:size].sort().values
