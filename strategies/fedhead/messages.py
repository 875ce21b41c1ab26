"""What travels in FedHEAD besides the clients' models: what a sector's leader distils."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from flwr.app import Array, ArrayRecord

from flwr_kd.formulas import Situation
from flwr_kd.learning.weights import with_prefix
from flwr_kd.transport.payload import Payload, PayloadError, array

NDArray = npt.NDArray[Any]
KNOWLEDGE = "knowledge-aggregation"
"""Scalar that a leader is sent: the rule by which it averages its teachers; the mean without it."""


@dataclass(frozen=True, eq=False)
class SectorEnsemble(Payload, schema="fedhead.sector-ensemble", version=1, hint="smaller sectors"):
    """Weights of the models that a leader distils. The models travel as arrays: z, then the K of its sector.

    Attributes
    ----------
    weights : ndarray
        ``[K]``, p_km / p_m of each client's model, in the order of the models; at least 0, with sum 1.
    """

    weights: npt.NDArray[np.float64] = array("float64", "K")

    def check(self) -> None:
        """Refuse weights that are negative or do not sum to 1."""
        if not len(self.weights) or (self.weights < 0).any() or abs(self.weights.sum() - 1) > 1e-6:
            raise PayloadError(f"{self.schema}: field 'weights' must be at least 0 and sum to 1")


def sizes(situation: Situation) -> dict[str, int]:
    """Return S, the clients of a sector.

    Raises
    ------
    ValueError
        If not all sectors have as many clients.
    """
    clients, left = divmod(len(situation.counts), int(situation.number("sectors")))
    if left:
        raise ValueError(f"sectors must have the same number of clients, got {len(situation.counts)} clients")
    return {"S": clients}


def pack(
    mean: Mapping[str, Array], models: Sequence[Mapping[str, Array]], weights: npt.NDArray[np.float64]
) -> tuple[ArrayRecord, SectorEnsemble]:
    """Return what a leader is sent: z and its sector's models in one record, and the models' weights.

    Parameters
    ----------
    mean : mapping
        z, arrays by name.
    models : sequence of mapping
        The K models, with the same names.
    weights : ndarray
        ``[K]``, p_km / p_m.
    """
    arrays = with_prefix("z", mean)
    for k, model in enumerate(models):
        arrays |= with_prefix(str(k), model)
    return ArrayRecord(arrays), SectorEnsemble(weights=weights)


def unpack(message: SectorEnsemble, arrays: Sequence[NDArray], size: int) -> list[Sequence[NDArray]]:
    """Return z and the K models, each of ``size`` arrays.

    Raises
    ------
    PayloadError
        If the number of arrays is not that of K + 1 models.
    """
    models = 1 + len(message.weights)
    if len(arrays) != models * size:
        raise PayloadError(f"got {len(arrays)} arrays, expected {models} models of {size}")
    return [arrays[i * size : (i + 1) * size] for i in range(models)]
