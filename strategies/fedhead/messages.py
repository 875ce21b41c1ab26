"""What travels in FedHEAD besides the models."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flwr_kd.formulas import Situation
from flwr_kd.transport.payload import Payload, PayloadError, array


@dataclass(frozen=True, eq=False)
class SectorEnsemble(Payload, schema="fedhead.sector-ensemble", version=1, hint="smaller sectors"):
    """What a leader needs beside the models, which come as arrays: first z, then the K clients' of its sector.

    Attributes
    ----------
    weights : ndarray
        ``[K]``, p_km / p_m of each client's model, in the order of the models; at least 0, sum 1.
    """

    weights: npt.NDArray[np.float64] = array("float64", "K")

    def check(self) -> None:
        """Refuse weights that are no shares."""
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
