"""What travels in FedHKD+DaFKD: FedHKD's hyper-knowledge, from clients with DaFKD's scores."""

from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from flwr_kd.formulas import Situation
from flwr_kd.transport.payload import array

from ..dafkd.messages import check_scores
from ..dafkd.messages import sizes as generator_sizes
from ..fedhkd.messages import HyperKnowledge
from ..fedhkd.messages import sizes as knowledge_sizes


@dataclass(frozen=True, eq=False)
class ScoredKnowledge(
    HyperKnowledge, schema="fedhkd-dafkd.knowledge", version=1, hint="a smaller feature size D"
):
    """A client's hyper-knowledge, with its discriminator's scores of the round's generated samples.

    Attributes
    ----------
    scores : ndarray
        As of :class:`~flwr_kd.strategies.dafkd.DiscriminatorScores`.
    """

    scores: npt.NDArray[np.float32] = array("float32", "Q")

    def check(self) -> None:
        """Refuse what either message refuses."""
        super().check()
        check_scores(self.schema, self.scores)


def with_scores(knowledge: HyperKnowledge, scores: npt.NDArray[np.float32]) -> ScoredKnowledge:
    """Return the message of both."""
    values = {item.name: getattr(knowledge, item.name) for item in fields(HyperKnowledge)}
    return ScoredKnowledge(**values, scores=scores)


def sizes(situation: Situation) -> dict[str, int]:
    """Return FedHKD's K, and DaFKD's G, J and Q."""
    return {**knowledge_sizes(situation), **generator_sizes(situation)}
