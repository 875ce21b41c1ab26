"""The base of all attacks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from torch.utils.data import Dataset

from flwr_kd.server.strategy import KDStrategy
from flwr_kd.transport import template

__all__ = ["Attack", "Crowd", "OnModels", "Seen", "changed"]

NDArray = npt.NDArray[Any]


@dataclass(frozen=True)
class Crowd:
    """What attackers that collude know of a phase.

    Attributes
    ----------
    models : sequence of sequence of ndarray
        The honest clients' arrays; without those whose forms differ from the attacker's.
    payloads : sequence of bytes
        Their encoded payloads.
    attackers : int
        How many of the clients that replied attack.
    """

    models: Sequence[Sequence[NDArray]]
    payloads: Sequence[bytes]
    attackers: int


class Attack:
    """An attack that does nothing; the base of the others, which override what they corrupt."""

    colludes: ClassVar[bool] = False
    """Whether attackers see the honest clients' replies. An :class:`AttackedGrid` shows them, and attacks."""

    def check_classes(self, num_classes: int) -> None:
        """Raise :class:`ConfigError` if the attack does not fit this number of classes."""

    def check_crowd(self, clients: int, attackers: int) -> None:
        """Raise :class:`ConfigError` if the attack does not fit these numbers of clients, all and malicious."""

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
        crowd: Crowd | None = None,
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
        crowd : Crowd, optional
            What the honest clients sent; for attacks that collude.
        """
        return list(sent)

    def knowledge(self, payload: bytes, num_examples: int, crowd: Crowd | None = None) -> bytes:
        """Return what is sent instead of the encoded payload of a client with ``num_examples`` samples."""
        return payload

    def claimed(self, num_examples: int) -> int:
        """Return how many samples the attacker says it has, in the handshake and in its replies."""
        return num_examples


@dataclass(frozen=True)
class Seen:
    """What an attacker knows when it changes one array.

    Attributes
    ----------
    received : ndarray or None
        What the server sent in the array's place; None if it sent nothing of that shape.
    rng : numpy.random.Generator
        The only source of randomness.
    honest : ndarray
        ``[H, ...]``, what the honest clients send, for attacks that collude; H = 0 if nobody does.
    attackers : int
        How many clients attack.
    """

    received: npt.NDArray[np.float64] | None
    rng: np.random.Generator
    honest: npt.NDArray[np.float64]
    attackers: int = 1


class OnModels(Attack):
    """Base of attacks that change each float of a model by itself."""

    def concerns(self, strategy: type[KDStrategy]) -> bool:
        """Return whether a method's clients send models."""
        return bool(strategy.reply_arrays)

    def models(
        self,
        sent: Sequence[NDArray],
        received: Sequence[NDArray],
        names: Sequence[str],
        rng: np.random.Generator,
        crowd: Crowd | None = None,
    ) -> list[NDArray]:
        """Return the arrays with the floats changed; see :meth:`Attack.models`."""

        def seen(index: int, array: npt.NDArray[np.float64]) -> Seen:
            before = None
            if index < len(received) and received[index].shape == array.shape:
                before = received[index].astype(np.float64)
            others = [] if crowd is None else [model[index] for model in crowd.models]
            honest = np.array(others, dtype=np.float64) if others else np.empty((0, *array.shape))
            return Seen(before, rng, honest, 1 if crowd is None else crowd.attackers)

        return changed(sent, names, lambda index, array: self.change(array, seen(index, array)))

    def change(self, array: npt.NDArray[np.float64], seen: Seen) -> NDArray:
        """Return what is sent instead of one array."""
        raise NotImplementedError


def changed(
    arrays: Sequence[NDArray],
    names: Sequence[str],
    change: Callable[[int, npt.NDArray[np.float64]], NDArray],
) -> list[NDArray]:
    """Return the arrays with the floats changed, in their own dtype; variances are made positive."""
    new_arrays = []
    for index, array in enumerate(arrays):
        if array.dtype.kind == "f":
            with np.errstate(over="ignore", invalid="ignore"):
                new = np.asarray(change(index, array.astype(np.float64)), dtype=array.dtype)
            variance = index < len(names) and names[index].endswith(template.VARIANCE)
            array = np.abs(new) if variance else new
        new_arrays.append(np.asarray(array).reshape(array.shape))
    return new_arrays
