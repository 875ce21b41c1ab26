"""What travels in methods that exchange soft predictions on public data.

A round has two phases. ``train``: the server draws public samples, a client trains on its own data and predicts
them. ``distill``: each client gets a target for each of the samples, and trains on it. Models may be heterogeneous,
and stay at the clients. A method defines the targets:
:meth:`flwr_kd.public_data.server.PublicKnowledgeStrategy.targets`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from flwr_kd.public_data.config import PRECISIONS
from flwr_kd.transport.payload import Payload, PayloadError, array

__all__ = [
    "SMALLER",
    "PublicRows",
    "PublicRowsTargets",
    "PublicSamples",
    "PublicSamplesTargets",
    "SoftPredictions",
    "count_of",
    "pack_predictions",
    "unpack_predictions",
    "with_targets",
]

NDArray = npt.NDArray[Any]
_SUM_TOLERANCE = 0.02
SMALLER = "a smaller public-samples, or precision=float16 or uint8"


@dataclass(frozen=True, eq=False)
class PublicRows(Payload, schema="public.rows", version=2, hint="a smaller public-samples"):
    """The samples that a client must predict, as positions in its own copy of the public data.

    Attributes
    ----------
    rows : ndarray
        ``[K]``, ascending.
    digest : str
        Of the public data; see :func:`flwr_kd.distillation.samples.digest_of`.
    """

    rows: npt.NDArray[np.int64] = array("int64", "K", positions=True)
    digest: str = ""


@dataclass(frozen=True, eq=False)
class PublicSamples(Payload, schema="public.samples", version=1, hint="a smaller public-samples"):
    """The samples that a client must predict, ``[K, ...]``."""

    samples: NDArray = array("*", "K ...")


@dataclass(frozen=True, eq=False)
class SoftPredictions(Payload, schema="public.soft-predictions", version=1, hint=SMALLER):
    """A client's soft predictions of these samples, ``[K, C]``; see :func:`pack_predictions`."""

    predictions: NDArray = array("float32|float16|uint8", "K C")

    def check(self) -> None:
        """Refuse rows that are no distributions."""
        _check_distributions(self.predictions, f"{self.schema}: field 'predictions'")


@dataclass(frozen=True, eq=False)
class PublicRowsTargets(Payload, schema="public.rows-targets", version=2, hint=SMALLER):
    """The positions of :class:`PublicRows`, and a target ``[K, C]`` for each.

    There is no digest, which the client has compared in the round's first phase.
    """

    rows: npt.NDArray[np.int64] = array("int64", "K", positions=True)
    targets: NDArray = array("float32|float16|uint8", "K C")


@dataclass(frozen=True, eq=False)
class PublicSamplesTargets(Payload, schema="public.samples-targets", version=1, hint=SMALLER):
    """The samples of :class:`PublicSamples`, and a target ``[K, C]`` for each."""

    samples: NDArray = array("*", "K ...")
    targets: NDArray = array("float32|float16|uint8", "K C")


def with_targets(
    message: PublicRows | PublicSamples, targets: NDArray
) -> PublicRowsTargets | PublicSamplesTargets:
    """Return the second phase's message, from the first phase's and packed targets ``[K, C]``."""
    if isinstance(message, PublicRows):
        return PublicRowsTargets(rows=message.rows, targets=targets)
    return PublicSamplesTargets(samples=message.samples, targets=targets)


def count_of(message: PublicRows | PublicSamples) -> int:
    """Return K, the number of samples in a message."""
    return len(message.rows if isinstance(message, PublicRows) else message.samples)


def pack_predictions(probabilities: Tensor, precision: str) -> NDArray:
    """Return distributions ``[K, C]`` in the message's dtype.

    ``uint8`` stores each probability as a share of its row's largest one, in 255 steps, so that the differences
    within a flat distribution, as from a high temperature, are kept.

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
    """Return packed distributions as float32 ``[K, C]``, each row divided by its sum.

    >>> unpack_predictions(np.uint8([[255, 0, 0], [255, 255, 0]])).tolist()
    [[1.0, 0.0, 0.0], [0.5, 0.5, 0.0]]
    """
    rows = torch.from_numpy(packed.astype(np.float32))
    return rows / rows.sum(dim=1, keepdim=True)


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
