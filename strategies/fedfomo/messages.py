"""What travels in FedFomo beside models: how much each of them helps a client."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from flwr_kd.formulas import Situation
from flwr_kd.transport.payload import Payload, array

NDArray = npt.NDArray[Any]
CANDIDATES = "candidates"
"""Key of the config that says how many others' models a message has; one without any has the client's first."""


@dataclass(frozen=True, eq=False)
class Affinities(Payload, schema="fedfomo.affinities", version=1):
    """How much each model that a client was sent helps it, in the order in which they came.

    Attributes
    ----------
    values : ndarray
        ``[M]``, Δ, of either sign.
    """

    values: npt.NDArray[np.float32] = array("float32", "M")


def split(arrays: Sequence[NDArray], count: int) -> list[Sequence[NDArray]]:
    """Return the arrays of each of ``count`` models.

    >>> split([np.zeros(1), np.zeros(2), np.ones(1), np.ones(2)], 2)[1]
    [array([1.]), array([1., 1.])]
    """
    size = len(arrays) // count if count else 0
    return [arrays[i * size : (i + 1) * size] for i in range(count)]


def sizes(situation: Situation) -> dict[str, int]:
    """Return M: where all clients take part, all others but at most ``models``."""
    return {"M": min(int(situation.number("models")), len(situation.counts) - 1)}
