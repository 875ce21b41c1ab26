"""What travels in FedHKD besides the weights."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flwr_kd.payload import Payload, PayloadError, array, check_magnitude

from ..fedproto.messages import check_classes


@dataclass(frozen=True, eq=False)
class HyperKnowledge(Payload, schema="fedhkd.hyper-knowledge", version=2, hint="a smaller feature size D"):
    """Hyper-knowledge, both ways; only of the classes that have some.

    Attributes
    ----------
    classes : ndarray
        ``[K]``, the class of each row, ascending.
    representations : ndarray
        ``[K, D]``, mean representations, noised where the client did so.
    predictions : ndarray
        ``[K, C]``, mean soft predictions; rows sum to 1.
    counts : ndarray
        ``[K]``, samples behind each row, at least 1.
    """

    classes: npt.NDArray[np.int64] = array("int64", "K", positions=True)
    representations: npt.NDArray[np.float32] = array("float32", "K D")
    predictions: npt.NDArray[np.float32] = array("float32", "K C")
    counts: npt.NDArray[np.int64] = array("int64", "K")

    def check(self) -> None:
        """Refuse classes out of range or twice, counts below 1, huge values, and rows that are no distribution."""
        check_classes(self.schema, self.classes, self.counts, self.predictions.shape[1])
        check_magnitude(f"{self.schema}: field 'representations'", self.representations)
        sums = self.predictions.sum(axis=1, dtype=np.float64)
        if (self.predictions < 0).any() or (np.abs(sums - 1) > 1e-3).any():
            raise PayloadError(f"{self.schema}: field 'predictions' must have rows at least 0 that sum to 1")
