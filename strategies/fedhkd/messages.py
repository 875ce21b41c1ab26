"""What travels in FedHKD besides the weights."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from flwr_kd.formulas import Situation
from flwr_kd.transport.payload import Payload, PayloadError, array, check_magnitude

from ..fedproto.messages import LARGEST_COUNT, check_classes
from .functional import Knowledge


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


def pack(knowledge: Knowledge) -> HyperKnowledge:
    """Return the message of the classes that have knowledge."""
    known = torch.nonzero(knowledge.known).flatten()
    return HyperKnowledge(
        classes=known.numpy().astype(np.int64),
        representations=knowledge.representations[known].float().numpy(),
        predictions=knowledge.predictions[known].float().numpy(),
        counts=knowledge.counts[known].clamp(max=LARGEST_COUNT).numpy().astype(np.int64),
    )


def unpack(message: HyperKnowledge, num_classes: int) -> Knowledge:
    """Return dense knowledge of all classes; those that the message lacks have count 0."""
    known = torch.tensor(message.classes)
    representations = torch.zeros(num_classes, message.representations.shape[1])
    predictions = torch.zeros(num_classes, num_classes)
    counts = torch.zeros(num_classes, dtype=torch.int64)
    representations[known] = torch.tensor(message.representations)
    predictions[known] = torch.tensor(message.predictions)
    counts[known] = torch.tensor(message.counts)
    return Knowledge(representations, predictions, counts)


def sizes(situation: Situation) -> dict[str, int]:
    """Return K, the classes that are shared: up those of the client, down those of any client."""
    threshold = situation.number("threshold")
    shared = [
        {c for c, count in enumerate(counts) if count and count >= threshold * sum(counts) - 1e-9}
        for counts in situation.counts
    ]
    return {"K": len(shared[situation.client] if situation.direction == "up" else set().union(*shared))}
