"""Attacks on the knowledge that a malicious client sends beside a model, or instead of one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load, save

from flwr_kd.checks import ConfigError
from flwr_kd.experiments.attacks.attack import Attack, Crowd
from flwr_kd.server.strategy import KDStrategy
from flwr_kd.transport.payload import read_metadata

__all__ = [
    "PAYLOAD_FIELDS",
    "ClaimedCount",
    "ClassPrior",
    "LossMaximizing",
    "OnFields",
    "SwappedPrototypes",
    "WrongKnowledge",
    "decoded",
    "least_likely",
    "least_similar",
]

NDArray = npt.NDArray[Any]
PAYLOAD_FIELDS: Mapping[str, frozenset[str]] = {
    "predictions": frozenset({"predictions", "probabilities", "logits"}),
    "prototypes": frozenset({"prototypes", "representations", "features"}),
    "counts": frozenset({"counts"}),
}
"""By kind, the names of the messages' fields that a ``payload`` attack changes."""
_BY_CLASS = frozenset({"prototypes", "representations"})
_LARGEST_FEATURE = 65504.0
_SURE_LOGIT = 10.0
"""Least distance from 0 of an attacker's logits, at which one class has nearly all of the probability."""


class OnFields(Attack):
    """Base of attacks on fields of the messages."""

    @property
    def names(self) -> frozenset[str]:
        """The fields' names."""
        raise NotImplementedError

    def concerns(self, strategy: type[KDStrategy]) -> bool:
        """Return whether a method's messages have such a field."""
        messages: list[Any] = [*strategy.reply_payloads.values()]
        return any(field.name in self.names for message in messages for field in fields(message))

    def knowledge(self, payload: bytes, num_examples: int, crowd: Crowd | None = None) -> bytes:
        """Return the message with other values in the same fields; see :meth:`Attack.knowledge`."""
        arrays, metadata = load(payload), read_metadata(payload)
        names = [name for name in arrays.keys() & self.names if arrays[name].size]
        others = [load(data) for data in (() if crowd is None else crowd.payloads)]
        new = {name: self.change(name, arrays, others, num_examples) for name in names}
        return save({**arrays, **new}, metadata=metadata) if names else payload

    def change(
        self,
        name: str,
        arrays: Mapping[str, NDArray],
        others: Sequence[Mapping[str, NDArray]],
        num_examples: int,
    ) -> NDArray:
        """Return what is sent instead of the field of this name, in its dtype and shape."""
        raise NotImplementedError


@dataclass(frozen=True)
class WrongKnowledge(OnFields):
    """Wrong knowledge that the receiver accepts, in a message of the same form.

    Predictions and logits are rolled, so that each class gets the value of the one before. Prototypes,
    representations and features are negated and multiplied by 10, within ±65,504 (FedGKT's bound). Counts
    still add up to the client's samples, more of which a server refuses, but the class with the fewest has all
    of them but one per other class. Features of test data, which are measured only, stay.
    """

    kinds: frozenset[str] = frozenset(PAYLOAD_FIELDS)

    @property
    def names(self) -> frozenset[str]:
        """The names of the kinds' fields."""
        return frozenset().union(*(PAYLOAD_FIELDS[kind] for kind in self.kinds))

    def change(
        self,
        name: str,
        arrays: Mapping[str, NDArray],
        others: Sequence[Mapping[str, NDArray]],
        num_examples: int,
    ) -> NDArray:
        """Return the wrong values."""
        array = arrays[name]
        changes: dict[str, Callable[[], NDArray]] = {
            "predictions": lambda: np.roll(array, 1, axis=-1),
            "prototypes": lambda: np.clip(
                array.astype(np.float64) * -10.0, -_LARGEST_FEATURE, _LARGEST_FEATURE
            ),
            "counts": lambda: _largest_counts(array, num_examples),
        }
        (kind,) = (kind for kind, names in PAYLOAD_FIELDS.items() if name in names)
        return changes[kind]().astype(array.dtype)


@dataclass(frozen=True)
class SwappedPrototypes(OnFields):
    """Each class that the client has gets the mean of the next one: valid values of the right size, all wrong."""

    @property
    def names(self) -> frozenset[str]:
        """The names of the fields that have a row per class."""
        return _BY_CLASS

    def change(
        self,
        name: str,
        arrays: Mapping[str, NDArray],
        others: Sequence[Mapping[str, NDArray]],
        num_examples: int,
    ) -> NDArray:
        """Return the rows in another order."""
        return np.roll(arrays[name], 1, axis=0)


class _OnPredictions(OnFields):
    """Base of attacks that are sure of a wrong class, which the honest clients' mean chooses."""

    colludes: ClassVar[bool] = True

    @property
    def names(self) -> frozenset[str]:
        """The names of fields with a value per class."""
        return PAYLOAD_FIELDS["predictions"]

    def check_classes(self, num_classes: int) -> None:
        """Refuse a single class."""
        if num_classes < 2:
            raise ConfigError(f"attacks 'lma' and 'cpa' need at least 2 classes, there are {num_classes}")

    def change(
        self,
        name: str,
        arrays: Mapping[str, NDArray],
        others: Sequence[Mapping[str, NDArray]],
        num_examples: int,
    ) -> NDArray:
        """Return rows that are sure of the class that :meth:`classes` chooses."""
        array, logits = arrays[name], name == "logits"
        mean = _honest_mean(name, arrays, others)
        sure = np.zeros(array.shape)
        if logits:
            sure -= max(_SURE_LOGIT, float(np.abs(mean).max()))
        top = 255.0 if array.dtype == np.uint8 else -sure.min() if logits else 1.0
        np.put_along_axis(sure, self.classes(mean)[:, None], top, axis=1)
        return sure.astype(array.dtype)

    def classes(self, mean: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
        """Return the class to be sure of, by row of the honest clients' mean."""
        raise NotImplementedError


@dataclass(frozen=True)
class LossMaximizing(_OnPredictions):
    """Each sample gets probability 1 for the class that the honest clients' mean finds least likely.

    The loss maximization attack (LMA) of Roux, Zimmer and Pokutta, "On the Byzantine-Resilience of
    Distillation-Based Federated Learning", ICLR 2025 (arXiv 2402.12265), figure 2. Where the rows are not of the
    same samples for all, as in FedGKT, the attacker's own honest predictions stand for the mean.
    """

    def classes(self, mean: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
        """Return the least likely classes."""
        return least_likely(mean)


@dataclass(frozen=True)
class ClassPrior(_OnPredictions):
    """Each sample gets probability 1 for the class that is least similar to the one that is most likely.

    The class prior attack (CPA) of the same paper as :class:`LossMaximizing`: what is sent is consistent, so that
    the students learn it. Similar are classes that are predicted together: the similarity is the covariance of
    the honest clients' mean predictions in this message, where the paper takes that of a model trained before.
    """

    def classes(self, mean: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
        """Return the classes that are least similar to the most likely ones."""
        return least_similar(mean)


@dataclass(frozen=True)
class ClaimedCount(Attack):
    """The client says in the handshake and in each reply that it has ``count`` samples.

    Its counts by class grow with it. A server believes a reply no more than the handshake, and the handshake up to
    ``max_examples``.
    """

    count: int

    def claimed(self, num_examples: int) -> int:
        """Return the count."""
        return self.count

    def knowledge(self, payload: bytes, num_examples: int, crowd: Crowd | None = None) -> bytes:
        """Return the message with counts that add up to what is claimed, at most."""
        arrays, metadata = load(payload), read_metadata(payload)
        if "counts" not in arrays or not num_examples:
            return payload
        counts = arrays["counts"]
        larger = [int(number) * self.count // num_examples for number in counts.tolist()]
        arrays["counts"] = np.array(larger, dtype=counts.dtype).clip(min=np.minimum(counts, 1))
        return save(arrays, metadata=metadata)


def least_likely(mean: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """Return each row's least likely class.

    >>> least_likely(np.array([[0.7, 0.1, 0.2], [0.2, 0.5, 0.3]])).tolist()
    [1, 0]
    """
    return np.asarray(mean.argmin(axis=1))


def least_similar(mean: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """Return the class least similar to each row's most likely one, by the covariance of the columns.

    >>> least_similar(np.array([[0.6, 0.4, 0.0], [0.5, 0.5, 0.0], [0.2, 0.1, 0.7]])).tolist()
    [2, 2, 0]
    """
    similarity = np.cov(mean, rowvar=False, bias=True)
    np.fill_diagonal(similarity, np.inf)
    return np.asarray(similarity.argmin(axis=1)[mean.argmax(axis=1)])


def _honest_mean(
    name: str, arrays: Mapping[str, NDArray], others: Sequence[Mapping[str, NDArray]]
) -> npt.NDArray[np.float64]:
    """Return the honest clients' mean of a field in the attacker's rows, ``[K, C]``.

    Where nobody else knows a row it is the attacker's own. Rows are of classes, if the message names them, of the
    client's own samples, if it numbers those, and otherwise of the same samples for all.
    """
    own = decoded(arrays[name])
    if "index" in arrays:
        return own
    total, known = np.zeros_like(own), np.zeros(len(own))
    for other in others:
        if name not in other or other[name].shape[1:] != own.shape[1:]:
            continue
        rows = decoded(other[name])
        if "classes" in arrays:
            _, places, theirs = np.intersect1d(_classes(arrays), _classes(other), return_indices=True)
            total[places], known[places] = total[places] + rows[theirs], known[places] + 1
        elif rows.shape == own.shape:
            total, known = total + rows, known + 1
    return np.where(known[:, None] > 0, total / np.maximum(known, 1)[:, None], own)


def _classes(arrays: Mapping[str, NDArray]) -> npt.NDArray[np.int64]:
    """Return the class of each row, which travels as a bit for each class."""
    return np.flatnonzero(np.unpackbits(arrays["classes"], bitorder="little"))


def decoded(array: NDArray) -> npt.NDArray[np.float64]:
    """Return predictions as numbers; codes of 8 bits are shares of each row's largest value."""
    values = array.astype(np.float64)
    return values / values.sum(axis=1, keepdims=True) if array.dtype == np.uint8 else values


def _largest_counts(counts: NDArray, num_examples: int) -> NDArray:
    """Return the largest counts that pass the check of the message, and of the server that gets it."""
    largest = np.ones_like(counts)
    largest[np.argmin(counts)] = max(num_examples - (len(counts) - 1), 1)
    return largest
