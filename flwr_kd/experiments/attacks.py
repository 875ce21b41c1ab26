"""Malicious clients: what an honest client sends, corrupted on its way out.

An attacker is a wrapper around the honest client of whatever method; no strategy knows of it. It trains on its
own data or on what :meth:`Attack.poison` makes of them, and a
:class:`~flwr_kd.experiments.malicious_client.MaliciousClient` corrupts each of its replies. What the client
keeps to itself, such as a personal model, and what it measures stay honest.

====================== ===============================================================================
attack                 what is corrupted
====================== ===============================================================================
``label-flip``         all training labels become class 0
``label-flip:TARGET``  all training labels become that class
``label-flip:permute`` the training labels are permuted, no class keeps its own; differs by attacker
``gaussian:SIGMA``     noise from N(0, SIGMA²) on each number of the models sent
``sign-flip``          the update is reversed: received - (trained - received)
``sign-flip:SCALE``    the same, SCALE times: received - SCALE · (trained - received)
``nan``                all numbers of the models sent are NaN
``payload:KIND``       knowledge that is valid and wrong; KIND is predictions, prototypes or counts
``payload``            all three kinds
====================== ===============================================================================

Sources: label flipping, with all of a client's labels turned into the target, and Gaussian noise on the model's
parameters are the attacks of FedHyb's section 4, which names Alharbi et al., ECAI 2023, and Tolpegin et al.,
"Data Poisoning Attacks Against Federated Learning Systems", ESORICS 2020, for them. The others are this
library's own. An attack on models changes nothing in a method that sends none, one on knowledge
nothing in a method that sends no such field.

Examples
--------
>>> import numpy as np
>>> attack = parse_attack("sign-flip:2")
>>> sent, received = [np.float32([3.0])], [np.float32([1.0])]
>>> attack.models(sent, received, ("weight",), np.random.default_rng(0))
[array([-3.], dtype=float32)]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.numpy import load, save
from torch import Tensor
from torch.utils.data import Dataset

from flwr_kd.checks import ConfigError, read_number, read_whole_number, whole_number
from flwr_kd.data import ArrayDataset
from flwr_kd.learning.batches import Batches, DatasetError, normalize_labels
from flwr_kd.seeding import numpy_generator
from flwr_kd.server.strategy import KDStrategy
from flwr_kd.text import unknown_name
from flwr_kd.transport import template
from flwr_kd.transport.payload import read_metadata

__all__ = [
    "ATTACKS",
    "PAYLOAD_FIELDS",
    "Attack",
    "Gaussian",
    "LabelFlip",
    "NotANumber",
    "SignFlip",
    "WrongKnowledge",
    "draw_attackers",
    "parse_attack",
]

NDArray = npt.NDArray[Any]
Scalar = bool | int | float | str | bytes
ATTACKS = (
    "label-flip[:TARGET]",
    "label-flip:permute",
    "gaussian:SIGMA",
    "sign-flip[:SCALE]",
    "nan",
    "payload[:KIND]",
)
"""The forms that :func:`parse_attack` takes."""
PAYLOAD_FIELDS: Mapping[str, frozenset[str]] = {
    "predictions": frozenset({"predictions", "probabilities", "logits"}),
    "prototypes": frozenset({"prototypes", "representations", "features"}),
    "counts": frozenset({"counts"}),
}
"""By kind, the names of the messages' fields that a ``payload`` attack changes."""
_LARGEST_FEATURE = 65504.0


class Attack:
    """An attack that does nothing; the base of the others, which override what they corrupt."""

    def check_classes(self, num_classes: int) -> None:
        """Raise :class:`ConfigError` if the attack does not fit this number of classes."""

    def concerns(self, strategy: type[KDStrategy]) -> bool:
        """Return whether a method's clients send anything that the attack changes."""
        return True

    def poison(
        self, dataset: Dataset[Any], num_classes: int, seed: int, *, label_key: str | None = None
    ) -> Dataset[Any]:
        """Return the data set that the attacker trains on.

        Parameters
        ----------
        dataset : Dataset
            Map-style, of pairs ``(x, y)`` or dicts. Labels are whole numbers in 0..C-1.
        num_classes : int
            C.
        seed : int
            The attacker's own.
        label_key : str, optional
            Key of the labels in dict items, where it cannot be guessed.

        Returns
        -------
        Dataset
            The same object, unless the attack is on labels: then an :class:`~flwr_kd.data.ArrayDataset` of
            one, and of others a view whose labels are changed as items are taken.

        Raises
        ------
        ConfigError
            If the attack does not fit this number of classes.
        DatasetError
            If the data set is not map-style, such as a loader; of a view, when an item has no label in 0..C-1.
        """
        return dataset

    def models(
        self,
        sent: Sequence[NDArray],
        received: Sequence[NDArray],
        names: Sequence[str],
        rng: np.random.Generator,
    ) -> list[NDArray]:
        """Return what is sent instead of the trained model's arrays, of the same dtypes and shapes.

        Parameters
        ----------
        sent : sequence of ndarray
            The honest reply's arrays; empty if the method sends no models.
        received : sequence of ndarray
            The arrays that the server sent; only the first model of several, as for FedHEAD's leaders.
        names : sequence of str
            The arrays' names, if they are known. Whole-number arrays (BatchNorm's counter) are never
            changed, and those named ``*running_var`` never become negative: the server would drop the reply.
        rng : numpy.random.Generator
            The only source of randomness.
        """
        return list(sent)

    def knowledge(self, payload: bytes, num_examples: int) -> bytes:
        """Return what is sent instead of the encoded payload of a client with ``num_examples`` samples."""
        return payload


@dataclass(frozen=True)
class LabelFlip(Attack):
    """All training labels become ``target``; if that is None, they are permuted without a fixed point."""

    target: int | None = 0

    def check_classes(self, num_classes: int) -> None:
        """Refuse a target that is no class, and a permutation of a single class."""
        if self.target is None and num_classes < 2:
            raise ConfigError(
                f"attack 'label-flip:permute' needs at least 2 classes, there are {num_classes}"
            )
        if self.target is not None and not 0 <= self.target < num_classes:
            raise ConfigError(
                f"attack 'label-flip:{self.target}': TARGET must be in 0..{num_classes - 1}, the classes, "
                f"got {self.target}"
            )

    def mapping(self, num_classes: int, seed: int) -> npt.NDArray[np.int64]:
        """Return the new label of each class, ``[C]``.

        >>> LabelFlip(1).mapping(3, seed=0).tolist()
        [1, 1, 1]
        >>> bool((LabelFlip(None).mapping(3, seed=0) == np.arange(3)).any())
        False
        """
        self.check_classes(num_classes)
        if self.target is not None:
            return np.full(num_classes, self.target, dtype=np.int64)
        rng = numpy_generator(seed, "label-flip")
        # More than a third of all permutations have no fixed point; drawing again keeps them equally likely.
        while True:
            permutation = rng.permutation(num_classes).astype(np.int64)
            if (permutation != np.arange(num_classes)).all():
                return permutation

    def poison(
        self, dataset: Dataset[Any], num_classes: int, seed: int, *, label_key: str | None = None
    ) -> Dataset[Any]:
        """Return the data set with other labels; see :meth:`Attack.poison`."""
        mapping = torch.from_numpy(self.mapping(num_classes, seed))
        if isinstance(dataset, ArrayDataset):
            labels = normalize_labels(dataset.y, num_classes)
            return ArrayDataset(dataset.x, mapping.to(labels.device)[labels])
        return _Relabelled(dataset, mapping, label_key)


class _OnModels(Attack):
    def concerns(self, strategy: type[KDStrategy]) -> bool:
        """Return whether a method's clients send models."""
        return bool(strategy.reply_arrays)

    def models(
        self,
        sent: Sequence[NDArray],
        received: Sequence[NDArray],
        names: Sequence[str],
        rng: np.random.Generator,
    ) -> list[NDArray]:
        """Return the arrays with the floats changed; see :meth:`Attack.models`."""
        before = [*received, *[None] * max(0, len(sent) - len(received))]
        return _changed(sent, names, lambda index, array: self.change(array, before[index], rng))

    def change(
        self, array: npt.NDArray[np.float64], received: NDArray | None, rng: np.random.Generator
    ) -> NDArray:
        """Return what is sent instead of one array; ``received`` is what the server sent in its place."""
        raise NotImplementedError


@dataclass(frozen=True)
class Gaussian(_OnModels):
    """Noise from N(0, ``sigma``²) is added to each float that is sent."""

    sigma: float

    def change(
        self, array: npt.NDArray[np.float64], received: NDArray | None, rng: np.random.Generator
    ) -> NDArray:
        """Return the array with noise."""
        return array + rng.normal(0.0, self.sigma, array.shape)


@dataclass(frozen=True)
class SignFlip(_OnModels):
    """The update is reversed, ``scale`` times its size; where nothing was received, the arrays are negated."""

    scale: float = 1.0

    def change(
        self, array: npt.NDArray[np.float64], received: NDArray | None, rng: np.random.Generator
    ) -> NDArray:
        """Return the received array less the update."""
        if received is None or received.shape != array.shape:
            return -array
        before = received.astype(np.float64)
        return before - self.scale * (array - before)


@dataclass(frozen=True)
class NotANumber(_OnModels):
    """All floats of the models are NaN, as after a training that diverged; the payload does not change."""

    def change(
        self, array: npt.NDArray[np.float64], received: NDArray | None, rng: np.random.Generator
    ) -> NDArray:
        """Return an array of NaN."""
        return np.full_like(array, np.nan)


@dataclass(frozen=True)
class WrongKnowledge(Attack):
    """Wrong knowledge that the receiver accepts, in a message of the same form.

    Predictions and logits are rolled, so that each class gets the value of the one before. Prototypes,
    representations and features are negated and multiplied by 10, within ±65,504 (FedGKT's bound). Counts
    still add up to the client's samples, more of which a server refuses, but the class with the fewest has all
    of them but one per other class. Features of test data, which are measured only, stay.
    """

    kinds: frozenset[str] = frozenset(PAYLOAD_FIELDS)

    def concerns(self, strategy: type[KDStrategy]) -> bool:
        """Return whether a method's messages have a field of these kinds."""
        messages: list[Any] = [*strategy.reply_payloads.values()]
        names = {field.name for message in messages for field in fields(message)}
        return any(names & PAYLOAD_FIELDS[kind] for kind in self.kinds)

    def knowledge(self, payload: bytes, num_examples: int) -> bytes:
        """Return the message with other values in the same fields; see :meth:`Attack.knowledge`."""
        arrays, metadata = load(payload), read_metadata(payload)
        changes: dict[str, Callable[[NDArray], NDArray]] = {
            "predictions": lambda array: np.roll(array, 1, axis=-1),
            "prototypes": lambda array: np.clip(
                array.astype(np.float64) * -10.0, -_LARGEST_FEATURE, _LARGEST_FEATURE
            ),
            "counts": lambda array: _largest_counts(array, num_examples),
        }
        names = [(kind, name) for kind in self.kinds for name in PAYLOAD_FIELDS[kind] & arrays.keys()]
        for kind, name in names:
            if arrays[name].size:
                arrays[name] = changes[kind](arrays[name]).astype(arrays[name].dtype)
        return save(arrays, metadata=metadata) if names else payload


def parse_attack(spec: str) -> Attack:
    """Return the attack of a text.

    Parameters
    ----------
    spec : str
        See the module's table.

    Raises
    ------
    ConfigError
        If the name is unknown, or what follows the colon is not allowed: a TARGET that is no whole number from
        0, a SIGMA or SCALE that is not a finite number above 0, a KIND that is none of the three.

    Examples
    --------
    >>> parse_attack("gaussian:0.5"), parse_attack("label-flip:permute")
    (Gaussian(sigma=0.5), LabelFlip(target=None))
    >>> parse_attack("gausian:1")
    Traceback (most recent call last):
    flwr_kd.ConfigError: unknown attack 'gausian' (did you mean 'gaussian'?); valid: ...
    """
    if not isinstance(spec, str):
        raise ConfigError(f"attack must be one of {', '.join(ATTACKS)}, got {spec!r}")
    name, colon, value = spec.partition(":")
    known = {form.partition("[")[0].partition(":")[0]: form for form in ATTACKS}
    if name not in known:
        raise ConfigError(f"{unknown_name('attack', name, known)}, in the forms {', '.join(ATTACKS)}")
    if name == "label-flip":
        if not colon or value == "permute":
            return LabelFlip(None if colon else 0)
        return LabelFlip(read_whole_number(f"attack {spec!r}: TARGET, unless it is permute,", value))
    if name == "gaussian":
        return Gaussian(read_number(f"attack {spec!r}: SIGMA", value, 0, open_low=True))
    if name == "sign-flip":
        return (
            SignFlip(read_number(f"attack {spec!r}: SCALE", value, 0, open_low=True)) if colon else SignFlip()
        )
    if name == "nan":
        if colon:
            raise ConfigError(f"attack {spec!r}: nan takes no value")
        return NotANumber()
    if colon and value not in PAYLOAD_FIELDS:
        raise ConfigError(f"attack {spec!r}: KIND must be one of {', '.join(PAYLOAD_FIELDS)}, got {value!r}")
    return WrongKnowledge(frozenset({value})) if colon else WrongKnowledge()


def draw_attackers(clients: int, attackers: int, seed: int) -> frozenset[int]:
    """Draw which partitions attack; those of a smaller number are among those of a larger one.

    Parameters
    ----------
    clients : int
        Number of clients, whose partition ids are 0 .. clients - 1.
    attackers : int
        From 0 to ``clients``.
    seed : int
        The run's.

    Raises
    ------
    ConfigError
        If there are more attackers than clients, or fewer than none.

    Examples
    --------
    >>> few, more = (draw_attackers(10, number, seed=0) for number in (2, 4))
    >>> len(few), len(more), few < more
    (2, 4, True)
    """
    whole_number("attackers", attackers, 0, clients)
    order = numpy_generator(seed, "attackers").permutation(clients)
    return frozenset(order[:attackers].tolist())


class _Relabelled(Dataset[Any]):
    """A view of a map-style data set of pairs or dicts with other labels."""

    def __init__(self, dataset: Dataset[Any], mapping: Tensor, label_key: str | None) -> None:
        # Batches checks the data set, and guesses the labels' key.
        source = Batches(dataset, num_classes=len(mapping), label_key=label_key)
        if source.loader is not None:
            raise DatasetError("a map-style data set is expected, got a DataLoader; give the data set in it")
        self._source, self._mapping = source, mapping

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> Any:
        item = self._source.dataset[index]
        if isinstance(item, Mapping):
            key = self._source.key_of_label(item)
            return {**item, key: self._flipped(item[key])}
        if isinstance(item, Sequence) and len(item) == 2:
            return item[0], self._flipped(item[1])
        raise DatasetError(f"items must be pairs (x, y) or dicts, got {type(item).__name__}")

    def _flipped(self, label: Any) -> Any:
        """Return the new label in the old one's form, so that it collates as that did."""
        tensor = torch.as_tensor(label)
        flat = normalize_labels(tensor.reshape(-1), len(self._mapping))
        flipped = self._mapping[flat].reshape(tensor.shape)
        if isinstance(label, Tensor):
            return flipped.to(label.dtype)
        return int(flipped) if isinstance(label, int) else flipped.numpy().astype(np.asarray(label).dtype)


def _changed(
    arrays: Sequence[NDArray],
    names: Sequence[str],
    change: Callable[[int, npt.NDArray[np.float64]], NDArray],
) -> list[NDArray]:
    """Return the arrays with the floats changed, in their own dtype; variances are made positive."""
    changed = []
    for index, array in enumerate(arrays):
        if array.dtype.kind == "f":
            with np.errstate(over="ignore", invalid="ignore"):
                new = np.asarray(change(index, array.astype(np.float64)), dtype=array.dtype)
            variance = index < len(names) and names[index].endswith(template.VARIANCE)
            array = np.abs(new) if variance else new
        changed.append(np.asarray(array).reshape(array.shape))
    return changed


def _largest_counts(counts: NDArray, num_examples: int) -> NDArray:
    """Return the largest counts that pass the check of the message, and of the server that gets it."""
    largest = np.ones_like(counts)
    largest[np.argmin(counts)] = max(num_examples - (len(counts) - 1), 1)
    return largest
