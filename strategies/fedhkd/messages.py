"""What travels in FedHKD besides the weights."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flwr_kd.formulas import Situation
from flwr_kd.transport.payload import Payload, PayloadError, array, check_magnitude

from ..fedproto.messages import check_classes, pack_classes, unpack_rows
from .functional import Knowledge


@dataclass(frozen=True, eq=False)
class HyperKnowledge(Payload, schema="fedhkd.hyper-knowledge", version=2, hint="a smaller feature size D"):
    """Hyper-knowledge, in both directions; only of the classes that have some.

    Attributes
    ----------
    classes : ndarray
        ``[K]``, the class of each row, ascending.
    representations : ndarray
        ``[K, D]``, mean representations, from a client with its noise.
    predictions : ndarray
        ``[K, C]``, mean soft predictions; rows sum to 1.
    counts : ndarray
        ``[K]``, number of samples of each row, at least 1.
    """

    classes: npt.NDArray[np.int64] = array("int64", "K", positions=True)
    representations: npt.NDArray[np.float32] = array("float32", "K D")
    predictions: npt.NDArray[np.float32] = array("float32", "K C")
    counts: npt.NDArray[np.int64] = array("int64", "K")

    def check(self) -> None:
        """Refuse classes out of range or repeated, counts below 1, huge values, and rows that do not sum to 1."""
        check_classes(self.schema, self.classes, self.counts, self.predictions.shape[1])
        check_magnitude(f"{self.schema}: field 'representations'", self.representations)
        sums = self.predictions.sum(axis=1, dtype=np.float64)
        if (self.predictions < 0).any() or (np.abs(sums - 1) > 1e-3).any():
            raise PayloadError(f"{self.schema}: field 'predictions' must have rows at least 0 that sum to 1")


def pack(knowledge: Knowledge) -> HyperKnowledge:
    """Return the message of the classes that have knowledge."""
    known, classes, counts = pack_classes(knowledge.counts)
    return HyperKnowledge(
        classes=classes,
        representations=knowledge.representations[known].float().numpy(),
        predictions=knowledge.predictions[known].float().numpy(),
        counts=counts,
    )


def unpack(message: HyperKnowledge, num_classes: int) -> Knowledge:
    """Return dense knowledge of all classes; those that are not in the message have count 0."""
    columns = (message.representations, message.predictions, message.counts)
    return Knowledge(*(unpack_rows(message.classes, rows, num_classes) for rows in columns))


def sizes(situation: Situation) -> dict[str, int]:
    """Return K, the classes that are shared: up those of the client, down those of any client."""
    threshold = situation.number("threshold")
    if situation.text("threshold_scale") == "relative":
        threshold /= len(situation.counts[0])
    shared = [
        {c for c, count in enumerate(counts) if count and count >= threshold * sum(counts) - 1e-9}
        for counts in situation.counts
    ]
    return {"K": len(shared[situation.client] if situation.direction == "up" else set().union(*shared))}
