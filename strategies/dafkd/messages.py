"""What travels in DaFKD besides weights: discriminators' scores, and the generator beside the model."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from flwr_kd.formulas import Situation
from flwr_kd.models import build_generator
from flwr_kd.transport.payload import Payload, PayloadError, array

SCORE = "score"
"""The phase in which clients score samples of the round's mean generator."""
PREFIX = "generator/"
"""How the names of the generator's arrays begin, after the model's."""


@dataclass(frozen=True, eq=False)
class DiscriminatorScores(Payload, schema="dafkd.scores", version=1, hint="fewer server-batches"):
    """A client's discriminator on the round's generated samples, from clients to the server.

    Attributes
    ----------
    scores : ndarray
        ``[Q]`` in [0, 1], in the samples' order; empty where the discriminator was never trained.
    """

    scores: npt.NDArray[np.float32] = array("float32", "Q")

    def check(self) -> None:
        """Refuse scores outside [0, 1]."""
        check_scores(self.schema, self.scores)


def check_scores(schema: str, scores: npt.NDArray[np.float32]) -> None:
    """Refuse scores outside [0, 1].

    Raises
    ------
    PayloadError
        With the field and the rule.
    """
    if scores.size and not 0 <= scores.min() <= scores.max() <= 1:
        raise PayloadError(
            f"{schema}: field 'scores' must be in [0, 1], got {scores.min():g}..{scores.max():g}"
        )


def check_number_of_scores(scores: npt.NDArray[np.float32], samples: int) -> None:
    """Refuse another number of scores than of samples; none at all are allowed.

    Raises
    ------
    PayloadError
        With both numbers.
    """
    if len(scores) not in (0, samples):
        raise PayloadError(f"{len(scores)} scores, expected one for each of {samples} samples, or none")


def split(
    names: Sequence[str], arrays: Sequence[npt.NDArray[Any]]
) -> tuple[tuple[str, ...], list[npt.NDArray[Any]], list[npt.NDArray[Any]]]:
    """Return the names and arrays of a model, and the generator's arrays that follow it, if they were sent.

    >>> split(("w", "generator/v"), ["of the model", "of the generator"])
    (('w',), ['of the model'], ['of the generator'])
    """
    own = tuple(name for name in names if not name.startswith(PREFIX))
    count = len(own) if names else len(arrays)
    return own, list(arrays[:count]), list(arrays[count:])


def sizes(situation: Situation) -> dict[str, int]:
    """Return G, J and Q: of the generator its numbers and BatchNorm layers, and the number of samples."""
    generator = build_generator(
        situation.inputs, num_classes=0, latent_dim=int(situation.number("noise_dim")), seed=0
    )
    state = list(generator.state_dict().values())
    return {
        "G": sum(value.numel() for value in state if value.is_floating_point()),
        "J": sum(value.numel() for value in state if not value.is_floating_point()),
        "Q": int(situation.number("server_batches")) * int(situation.number("batch_size")),
    }
