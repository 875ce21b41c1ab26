"""What travels in FedProto."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from flwr_kd.transport.payload import Payload, PayloadError, array, check_magnitude

from .functional import ClassMeans

LARGEST_COUNT = 2**40
"""Of samples behind a class, in a message; the server's sums end here, too."""


@dataclass(frozen=True, eq=False)
class Prototypes(Payload, schema="fedproto.prototypes", version=2, hint="a smaller feature size D"):
    """Class prototypes, both ways; only of the classes that have one.

    Attributes
    ----------
    classes : ndarray
        ``[K]``, the class of each row, ascending.
    prototypes : ndarray
        ``[K, D]``.
    counts : ndarray
        ``[K]``, samples behind each row, at least 1.
    num_classes : int
        C.
    """

    classes: npt.NDArray[np.int64] = array("int64", "K", positions=True)
    prototypes: npt.NDArray[np.float32] = array("float32", "K D")
    counts: npt.NDArray[np.int64] = array("int64", "K")
    num_classes: int = 0

    def check(self) -> None:
        """Refuse classes out of range or given twice, counts below 1, and huge values."""
        check_classes(self.schema, self.classes, self.counts, self.num_classes)
        check_magnitude(f"{self.schema}: field 'prototypes'", self.prototypes)


def check_classes(
    schema: str, classes: npt.NDArray[np.int64], counts: npt.NDArray[np.int64], num_classes: int
) -> None:
    """Refuse classes beyond the last, and counts outside 1..2^40.

    Raises
    ------
    PayloadError
        With the field and the rule.
    """
    if not 1 <= num_classes <= 2**31:
        raise PayloadError(f"{schema}: field 'num_classes' must be at least 1, got {num_classes}")
    # That they ascend from 0 is checked already: they are positions.
    if classes.size and classes[-1] >= num_classes:
        raise PayloadError(f"{schema}: field 'classes' must be ascending, each once, in 0..{num_classes - 1}")
    if counts.size and (counts.min() < 1 or counts.max() > LARGEST_COUNT):
        raise PayloadError(f"{schema}: field 'counts' must be in 1..2^40, got {counts.min()}..{counts.max()}")


def check_counts(counts: npt.NDArray[np.int64], num_examples: int) -> None:
    """Refuse knowledge of more samples than the client says it has.

    Raises
    ------
    PayloadError
        With both numbers.
    """
    total = int(counts.sum())
    if total > num_examples:
        raise PayloadError(f"knowledge of {total} samples from a client with {num_examples}")


def pack(prototypes: ClassMeans) -> Prototypes:
    """Return the message of the classes that have a prototype."""
    known = torch.nonzero(prototypes.counts > 0).flatten()
    return Prototypes(
        classes=known.numpy().astype(np.int64),
        prototypes=prototypes.means[known].float().numpy(),
        counts=prototypes.counts[known].clamp(max=LARGEST_COUNT).numpy().astype(np.int64),
        num_classes=len(prototypes.counts),
    )


def unpack(message: Prototypes) -> ClassMeans:
    """Return dense means ``[C, D]``; classes that the message lacks have count 0."""
    known = torch.tensor(message.classes)
    means = torch.zeros(message.num_classes, message.prototypes.shape[1])
    counts = torch.zeros(message.num_classes, dtype=torch.int64)
    means[known] = torch.tensor(message.prototypes)
    counts[known] = torch.tensor(message.counts)
    return ClassMeans(means, counts)
