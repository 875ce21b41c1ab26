"""What travels in FD: mean logits of the classes that a client has."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from flwr_kd.formulas import Situation
from flwr_kd.transport.payload import Payload, PayloadError, array, check_magnitude

LARGEST_COUNT = 2**40


@dataclass(frozen=True, eq=False)
class ClassLogits(Payload, schema="fd.class-logits", version=1):
    """Mean logits by class, in both directions.

    Attributes
    ----------
    classes : ndarray
        ``[K]``, the class of each row, ascending.
    logits : ndarray
        ``[K, C]``.
    counts : ndarray
        ``[K]``: up, the samples of each row; down, the clients whose mean it is.
    """

    classes: npt.NDArray[np.int64] = array("int64", "K", positions=True)
    logits: npt.NDArray[np.float32] = array("float32", "K C")
    counts: npt.NDArray[np.int64] = array("int64", "K")

    def check(self) -> None:
        """Refuse classes beyond the last, counts below 1, and huge logits."""
        num_classes = self.logits.shape[1]
        if self.classes.size and self.classes[-1] >= num_classes:
            raise PayloadError(f"{self.schema}: field 'classes' must be in 0..{num_classes - 1}")
        if self.counts.size and not 1 <= self.counts.min() <= self.counts.max() <= LARGEST_COUNT:
            raise PayloadError(f"{self.schema}: field 'counts' must be in 1..2^40")
        check_magnitude(f"{self.schema}: field 'logits'", self.logits)


def pack(means: Tensor, counts: Tensor) -> ClassLogits:
    """Return the message of the classes that have samples, of means ``[C, C]`` and counts ``[C]``."""
    known = torch.nonzero(counts > 0).flatten()
    return ClassLogits(known.numpy(), means[known].numpy(), counts[known].numpy())


def unpack(message: ClassLogits) -> tuple[Tensor, Tensor]:
    """Return dense means ``[C, C]`` and counts ``[C]``, zero for classes that are not in the message."""
    num_classes = message.logits.shape[1]
    means, counts = torch.zeros(num_classes, num_classes), torch.zeros(num_classes, dtype=torch.int64)
    rows = torch.tensor(message.classes)
    means[rows], counts[rows] = torch.tensor(message.logits), torch.tensor(message.counts)
    return means, counts


def sizes(situation: Situation) -> dict[str, int]:
    """Return K, the classes of the client itself up, and those of any other client down."""
    present = [{c for c, count in enumerate(counts) if count} for counts in situation.counts]
    others = [classes for i, classes in enumerate(present) if i != situation.client]
    return {"K": len(present[situation.client] if situation.direction == "up" else set().union(*others))}
