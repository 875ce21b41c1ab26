"""What travels in FedProto: class prototypes. FedHKD uses the functions for rows by class."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from flwr_kd.transport.payload import Payload, PayloadError, array, check_magnitude

from .functional import ClassMeans

LARGEST_COUNT = 2**40
"""Largest number of samples of a class in a message, so that the server's sums cannot overflow."""


@dataclass(frozen=True, eq=False)
class Prototypes(Payload, schema="fedproto.prototypes", version=2, hint="a smaller feature size D"):
    """Class prototypes, in both directions; only of the classes that have one.

    Attributes
    ----------
    classes : ndarray
        ``[K]``, the class of each row, ascending.
    prototypes : ndarray
        ``[K, D]``.
    counts : ndarray
        ``[K]``, number of samples of each row, at least 1.
    num_classes : int
        C.
    """

    classes: npt.NDArray[np.int64] = array("int64", "K", positions=True)
    prototypes: npt.NDArray[np.float32] = array("float32", "K D")
    counts: npt.NDArray[np.int64] = array("int64", "K")
    num_classes: int = 0

    def check(self) -> None:
        """Refuse classes that are out of range or repeated, counts below 1, and huge values."""
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
    # The payload has checked that they ascend from 0, since they are declared as positions.
    if classes.size and classes[-1] >= num_classes:
        raise PayloadError(f"{schema}: field 'classes' must be ascending, each once, in 0..{num_classes - 1}")
    if counts.size and (counts.min() < 1 or counts.max() > LARGEST_COUNT):
        raise PayloadError(f"{schema}: field 'counts' must be in 1..2^40, got {counts.min()}..{counts.max()}")


def check_counts(counts: npt.NDArray[np.int64], num_examples: int) -> None:
    """Refuse knowledge of more samples than the client reported.

    Raises
    ------
    PayloadError
        With both numbers.
    """
    total = int(counts.sum())
    if total > num_examples:
        raise PayloadError(f"knowledge of {total} samples from a client with {num_examples}")


def pack_classes(counts: Tensor) -> tuple[Tensor, npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the classes with samples, of counts ``[C]``: as an index, and as a message's classes and counts."""
    known = torch.nonzero(counts > 0).flatten()
    packed = counts[known].clamp(max=LARGEST_COUNT).numpy().astype(np.int64)
    return known, known.numpy().astype(np.int64), packed


def unpack_rows(classes: npt.NDArray[np.int64], rows: npt.NDArray[np.generic], num_classes: int) -> Tensor:
    """Return dense rows ``[C, ...]`` from those of a message ``[K, ...]``; rows of other classes are zero."""
    values = torch.tensor(rows)
    dense = torch.zeros(num_classes, *values.shape[1:], dtype=values.dtype)
    dense[torch.tensor(classes)] = values
    return dense


def pack(prototypes: ClassMeans) -> Prototypes:
    """Return the message of the classes that have a prototype."""
    known, classes, counts = pack_classes(prototypes.counts)
    means = prototypes.means[known].float().numpy()
    return Prototypes(classes, means, counts, num_classes=len(prototypes.counts))


def unpack(message: Prototypes) -> ClassMeans:
    """Return dense means ``[C, D]``; classes that are not in the message have count 0."""
    means, counts = (
        unpack_rows(message.classes, rows, message.num_classes)
        for rows in (message.prototypes, message.counts)
    )
    return ClassMeans(means, counts)
