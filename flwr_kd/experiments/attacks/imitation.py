"""An attack on methods that choose for each client whom it learns from: a poison that looks like the client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from flwr_kd.checks import ConfigError
from flwr_kd.experiments.attacks.attack import Attack, Crowd, OnModels, Seen
from flwr_kd.experiments.attacks.knowledge import PAYLOAD_FIELDS, OnFields, decoded, least_likely
from flwr_kd.server.strategy import KDStrategy

__all__ = ["Imitation"]

NDArray = npt.NDArray[Any]


@dataclass(frozen=True)
class Imitation(Attack):
    """The attacker sends what its victim sends, of which ``share`` is poison.

    The victim is the first honest client that replied, so that all attackers have the same. Of a model, each array
    has noise from N(0, (share · s)²), where s is the standard deviation of the victim's array. Of soft predictions
    of samples that all clients have, ``share`` of each row's probability goes to the class that the victim finds
    least likely. Other knowledge stays as the attacker has it. This is the library's own attack on methods whose
    weights favour clients that are similar, or that do well on a client's own data.
    """

    share: float
    colludes: ClassVar[bool] = True

    def check_crowd(self, clients: int, attackers: int) -> None:
        """Refuse a run without a victim."""
        if attackers >= clients:
            raise ConfigError(
                f"attack 'imitate' needs at least 1 honest client, got {attackers} attackers of {clients}"
            )

    def concerns(self, strategy: type[KDStrategy]) -> bool:
        """Return whether a method's clients send models or soft predictions."""
        return _Models(self.share).concerns(strategy) or _Predictions(self.share).concerns(strategy)

    def models(
        self,
        sent: Sequence[NDArray],
        received: Sequence[NDArray],
        names: Sequence[str],
        rng: np.random.Generator,
        crowd: Crowd | None = None,
    ) -> list[NDArray]:
        """Return the victim's arrays with noise; the honest ones where nobody is seen."""
        return _Models(self.share).models(sent, received, names, rng, crowd)

    def knowledge(self, payload: bytes, num_examples: int, crowd: Crowd | None = None) -> bytes:
        """Return the message with the victim's predictions, in part poisoned."""
        return _Predictions(self.share).knowledge(payload, num_examples, crowd)


@dataclass(frozen=True)
class _Models(OnModels):
    share: float

    def change(self, array: npt.NDArray[np.float64], seen: Seen) -> NDArray:
        """Return the victim's array with noise."""
        if not len(seen.honest):
            return array
        victim = seen.honest[0]
        return np.asarray(victim + seen.rng.normal(0.0, 1.0, victim.shape) * self.share * victim.std())


@dataclass(frozen=True)
class _Predictions(OnFields):
    share: float

    @property
    def names(self) -> frozenset[str]:
        """The names of fields with probabilities."""
        return PAYLOAD_FIELDS["predictions"] - {"logits"}

    def change(
        self,
        name: str,
        arrays: Mapping[str, NDArray],
        others: Sequence[Mapping[str, NDArray]],
        num_examples: int,
    ) -> NDArray:
        """Return the victim's rows, with some of the probability at the least likely class."""
        array = arrays[name]
        victim = next((other[name] for other in others if name in other), array)
        shared = victim.shape == array.shape and not {"classes", "index"} & arrays.keys()
        rows = decoded(victim if shared else array)
        mixed = (1 - self.share) * rows
        np.add.at(mixed, (np.arange(len(rows)), least_likely(rows)), self.share * rows.sum(axis=1))
        if array.dtype == np.uint8:
            mixed = np.rint(255 * mixed / mixed.max(axis=1, keepdims=True))
        return mixed.astype(array.dtype)
