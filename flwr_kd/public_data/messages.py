"""Knowledge exchange on public data: clients predict the same samples, and learn what the server makes of it.

A round has two phases. ``train``: the server draws public samples, a client trains on its own data and predicts
them. ``distill``: each client gets a target for each of the samples, and learns it. Models may differ, and stay at
the clients. A method says what the targets are: :meth:`PublicKnowledgeStrategy.targets`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from flwr_kd.public_data.config import PRECISIONS
from flwr_kd.server.records import NDArray
from flwr_kd.transport.payload import Payload, PayloadError, array

__all__ = [
    "SMALLER",
    "PublicRows",
    "PublicRowsTargets",
    "PublicSamples",
    "PublicSamplesTargets",
    "SoftPredictions",
    "pack_predictions",
    "unpack_predictions",
]

_SUM_TOLERANCE = 0.02
SMALLER = "a smaller public-samples, or precision=float16 or uint8"


@dataclass(frozen=True, eq=False)
class PublicRows(Payload, schema="public.rows", version=2, hint="a smaller public-samples"):
    """What a client is to predict: positions in the public data that it has itself.

    Attributes
    ----------
    rows : ndarray
        ``[K]``, ascending.
    digest : str
        Of the public data, see :func:`digest_of`.
    """

    rows: npt.NDArray[np.int64] = array("int64", "K", positions=True)
    digest: str = ""


@dataclass(frozen=True, eq=False)
class PublicSamples(Payload, schema="public.samples", version=1, hint="a smaller public-samples"):
    """What a client is to predict: the samples themselves, ``[K, ...]``."""

    samples: NDArray = array("*", "K ...")


@dataclass(frozen=True, eq=False)
class SoftPredictions(Payload, schema="public.soft-predictions", version=1, hint=SMALLER):
    """A client's soft predictions of the samples that it was sent, ``[K, C]``; see :func:`pack_predictions`."""

    predictions: NDArray = array("float32|float16|uint8", "K C")

    def check(self) -> None:
        """Refuse what are no distributions."""
        _check_distributions(self.predictions, f"{self.schema}: field 'predictions'")


@dataclass(frozen=True, eq=False)
class PublicRowsTargets(Payload, schema="public.rows-targets", version=2, hint=SMALLER):
    """What a client is to learn: the positions of :class:`PublicRows` again, and a target ``[K, C]`` for each.

    Without a digest: the client has compared it in the round's first phase.
    """

    rows: npt.NDArray[np.int64] = array("int64", "K", positions=True)
    targets: NDArray = array("float32|float16|uint8", "K C")


@dataclass(frozen=True, eq=False)
class PublicSamplesTargets(Payload, schema="public.samples-targets", version=1, hint=SMALLER):
    """What a client is to learn, with samples: :class:`PublicSamples` and a target ``[K, C]`` for each."""

    samples: NDArray = array("*", "K ...")
    targets: NDArray = array("float32|float16|uint8", "K C")


def pack_predictions(probabilities: Tensor, precision: str) -> NDArray:
    """Return distributions ``[K, C]`` as they travel.

    ``uint8`` holds shares of each row's largest probability in 255 steps, so that flat distributions, as a high
    temperature makes them, keep their differences, too.

    Raises
    ------
    ValueError
        If the precision is unknown.

    Examples
    --------
    >>> pack_predictions(torch.tensor([[0.6, 0.3, 0.1]]), "uint8").tolist()
    [[255, 128, 42]]
    """
    if precision not in PRECISIONS:
        raise ValueError(f"precision must be one of {', '.join(PRECISIONS)}, got {precision!r}")
    if precision == "uint8":
        largest = probabilities.amax(dim=1, keepdim=True).clamp_min(torch.finfo(probabilities.dtype).tiny)
        return (probabilities / largest * 255).round().to(torch.uint8).numpy()
    return probabilities.numpy().astype(precision)


def unpack_predictions(packed: NDArray) -> Tensor:
    """Return what :func:`pack_predictions` packed, float32 ``[K, C]``, each row divided by its sum.

    >>> unpack_predictions(np.uint8([[255, 0, 0], [255, 255, 0]])).tolist()
    [[1.0, 0.0, 0.0], [0.5, 0.5, 0.0]]
    """
    found = torch.from_numpy(packed.astype(np.float32))
    return found / found.sum(dim=1, keepdim=True)


def _check_distributions(values: NDArray, where: str) -> None:
    if values.dtype == np.uint8:
        if not (values.max(axis=1, initial=0) == 255).all():
            raise PayloadError(f"{where}: each row's largest code must be 255, as uint8 shares of it are")
        return
    if values.size and not (values.min() >= 0 and values.max() <= 1 + _SUM_TOLERANCE):
        raise PayloadError(f"{where} must be in [0, 1], got {values.min():g}..{values.max():g}")
    sums = values.sum(axis=1, dtype=np.float64)
    if values.size and not np.abs(sums - 1).max() <= _SUM_TOLERANCE:
        raise PayloadError(
            f"{where}: rows must sum to 1 within {_SUM_TOLERANCE}, got {sums.min():g}..{sums.max():g}"
        )
