"""What travels in methods that exchange soft predictions on public data.

A round has two phases. ``train``: the server draws public samples, a client trains on its own data and predicts
them. ``distill``: each client gets a target for each of the samples, and trains on it. Models may be heterogeneous,
and stay at the clients. A method defines the targets:
:meth:`flwr_kd.public_data.server.PublicKnowledgeStrategy.targets`.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from flwr_kd.inputs import NamedInputs
from flwr_kd.public_data.config import PRECISIONS
from flwr_kd.transport.payload import DTYPES, Payload, PayloadError, array

__all__ = [
    "SMALLER",
    "Drawn",
    "DrawnTargets",
    "PublicNamedSamples",
    "PublicNamedSamplesTargets",
    "PublicRows",
    "PublicRowsTargets",
    "PublicSamples",
    "PublicSamplesTargets",
    "SoftPredictions",
    "count_of",
    "pack_named",
    "pack_predictions",
    "unpack_named",
    "unpack_predictions",
    "with_targets",
]

NDArray = npt.NDArray[Any]
_SUM_TOLERANCE = 0.02
_LONGEST = 2**31
SMALLER = "a smaller public-samples, or precision=float16 or uint8"
"""How to make messages smaller, for error messages."""


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
class PublicNamedSamples(Payload, schema="public.named-samples", version=1, hint="a smaller public-samples"):
    """The samples that a client must predict, of several inputs; see :func:`pack_named`.

    Attributes
    ----------
    rows : ndarray
        ``[K, bytes]``: the bytes of each sample's inputs, one input after the other.
    layout : str
        JSON: name, dtype and shape of each input, in the order of the bytes.
    """

    rows: npt.NDArray[np.uint8] = array("uint8", "K bytes")
    layout: str = "[]"

    def check(self) -> None:
        """Refuse a layout that is none, or does not fit the bytes."""
        _check_layout(self)


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


@dataclass(frozen=True, eq=False)
class PublicNamedSamplesTargets(Payload, schema="public.named-samples-targets", version=1, hint=SMALLER):
    """The samples of :class:`PublicNamedSamples`, and a target ``[K, C]`` for each."""

    rows: npt.NDArray[np.uint8] = array("uint8", "K bytes")
    targets: NDArray = array("float32|float16|uint8", "K C")
    layout: str = "[]"

    def check(self) -> None:
        """Refuse a layout that is none, or does not fit the bytes."""
        _check_layout(self)


Drawn: TypeAlias = PublicRows | PublicSamples | PublicNamedSamples
"""What a client gets in a round's first phase."""
DrawnTargets: TypeAlias = PublicRowsTargets | PublicSamplesTargets | PublicNamedSamplesTargets
"""What it gets in the second."""


def with_targets(message: Drawn, targets: NDArray) -> DrawnTargets:
    """Return the second phase's message, from the first phase's and packed targets ``[K, C]``."""
    if isinstance(message, PublicRows):
        return PublicRowsTargets(rows=message.rows, targets=targets)
    if isinstance(message, PublicNamedSamples):
        return PublicNamedSamplesTargets(rows=message.rows, targets=targets, layout=message.layout)
    return PublicSamplesTargets(samples=message.samples, targets=targets)


def count_of(message: Drawn) -> int:
    """Return K, the number of samples in a message."""
    return len(message.samples if isinstance(message, PublicSamples) else message.rows)


def pack_named(samples: NamedInputs) -> PublicNamedSamples:
    """Return samples of several inputs as a message.

    >>> message = pack_named(NamedInputs({"ids": torch.tensor([[5, 6]]), "mask": torch.ones(1, 2)}))
    >>> message.rows.shape, message.layout
    ((1, 24), '[["ids", "int64", [2]], ["mask", "float32", [2]]]')
    """
    arrays = {name: np.ascontiguousarray(samples[name].numpy()) for name in samples.keys()}  # noqa: SIM118
    layout = [[name, value.dtype.name, list(value.shape[1:])] for name, value in arrays.items()]
    parts = [value.reshape(len(samples), -1).view(np.uint8) for value in arrays.values()]
    return PublicNamedSamples(rows=np.concatenate(parts, axis=1), layout=json.dumps(layout))


def unpack_named(message: PublicNamedSamples | PublicNamedSamplesTargets, like: NamedInputs) -> NamedInputs:
    """Return the samples of a message.

    Parameters
    ----------
    message
        From :func:`pack_named`, or what a server made up.
    like : NamedInputs
        Inputs of the client's own data, whose names and kinds of numbers those of the message must have.

    Raises
    ------
    PayloadError
        If names or kinds of numbers differ, or a number is not finite.

    Examples
    --------
    >>> inputs = NamedInputs({"ids": torch.tensor([[5, 6]]), "mask": torch.ones(1, 2)})
    >>> unpack_named(pack_named(inputs), inputs)["ids"]
    tensor([[5, 6]])
    """
    own = {name: np.dtype(str(like[name].dtype).removeprefix("torch.")).kind for name in like.keys()}  # noqa: SIM118
    layout = _read_layout(message.layout, message.schema)
    sent = {name: np.dtype(dtype).kind for name, dtype, _ in layout}
    if sent != own:
        raise PayloadError(
            f"{message.schema}: the public samples have the inputs {', '.join(sent)}, this client's model takes "
            f"{', '.join(own)}; names and kinds of numbers must be the same"
        )
    tensors, start = {}, 0
    for name, dtype, shape in layout:
        stop = start + _size(dtype, shape)
        values = np.ascontiguousarray(message.rows[:, start:stop]).view(dtype)
        if values.dtype.kind == "f" and not np.isfinite(values).all():
            raise PayloadError(f"{message.schema}: the input {name!r} has values that are not finite")
        tensors[name] = torch.from_numpy(values.reshape(len(message.rows), *shape).copy())
        start = stop
    return NamedInputs(tensors)


def _check_layout(message: PublicNamedSamples | PublicNamedSamplesTargets) -> None:
    layout = _read_layout(message.layout, message.schema)
    expected, found = sum(_size(dtype, shape) for _, dtype, shape in layout), message.rows.shape[1]
    if expected != found:
        raise PayloadError(
            f"{message.schema}: a sample has {found} bytes, by the layout {expected} are expected"
        )


def _read_layout(text: str, schema: str) -> list[tuple[str, str, list[int]]]:
    try:
        layout = json.loads(text)
        whole = [
            (name, dtype, shape)
            for name, dtype, shape in layout
            if isinstance(name, str)
            and dtype in DTYPES
            and isinstance(shape, list)
            and all(type(size) is int and 0 < size < _LONGEST for size in shape)
        ]
    except (ValueError, TypeError, RecursionError):
        layout, whole = None, []
    if not whole or len(whole) != len(layout) or len({name for name, _, _ in whole}) != len(whole):
        raise PayloadError(
            f"{schema}: the layout must be a list of [name, dtype, shape], each name once, got {text[:80]!r}"
        )
    return whole


def _size(dtype: str, shape: list[int]) -> int:
    return np.dtype(dtype).itemsize * math.prod(shape)


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
