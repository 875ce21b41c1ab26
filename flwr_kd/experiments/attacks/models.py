"""Attacks on the models that a malicious client sends."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from flwr_kd.checks import ConfigError
from flwr_kd.experiments.attacks.attack import OnModels, Seen

__all__ = [
    "ALittleIsEnough",
    "Gaussian",
    "InnerProduct",
    "ModelReplacement",
    "NotANumber",
    "SignFlip",
    "largest_unseen",
]

NDArray = npt.NDArray[Any]


@dataclass(frozen=True)
class Gaussian(OnModels):
    """Noise from N(0, sigma²) is added to each float that is sent."""

    sigma: float

    def change(self, array: npt.NDArray[np.float64], seen: Seen) -> NDArray:
        """Return the array with noise."""
        return array + seen.rng.normal(0.0, self.sigma, array.shape)


@dataclass(frozen=True)
class SignFlip(OnModels):
    """The update is reversed, ``scale`` times its size; where nothing was received, the arrays are negated."""

    scale: float = 1.0

    def change(self, array: npt.NDArray[np.float64], seen: Seen) -> NDArray:
        """Return the received array less the update."""
        if seen.received is None:
            return -array
        return seen.received - self.scale * (array - seen.received)


@dataclass(frozen=True)
class ModelReplacement(OnModels):
    """The update is sent ``scale`` times its size; where nothing was received, the arrays themselves.

    With as many times as there are clients that weigh the same, the mean becomes the attacker's own model: the
    model replacement of Bagdasaryan et al., "How To Backdoor Federated Learning", AISTATS 2020, equation 3. Here
    the model is honestly trained.
    """

    scale: float

    def change(self, array: npt.NDArray[np.float64], seen: Seen) -> NDArray:
        """Return the received array and the larger update."""
        if seen.received is None:
            return self.scale * array
        return seen.received + self.scale * (array - seen.received)


@dataclass(frozen=True)
class NotANumber(OnModels):
    """All floats of the models are NaN, as after a training that diverged; the payload does not change."""

    def change(self, array: npt.NDArray[np.float64], seen: Seen) -> NDArray:
        """Return an array of NaN."""
        return np.full_like(array, np.nan)


@dataclass(frozen=True)
class ALittleIsEnough(OnModels):
    """Each number is the honest clients' mean less ``z`` of their standard deviations.

    Baruch, Baruch and Goldberg, "A Little Is Enough", NeurIPS 2019, algorithm 3. The attackers see what all honest
    clients send, where the paper's estimate mean and deviation from what they would have sent themselves. If ``z``
    is None it is :func:`largest_unseen`.
    """

    z: float | None = None
    colludes: ClassVar[bool] = True

    def check_crowd(self, clients: int, attackers: int) -> None:
        """Refuse too few attackers for the paper's z, and nobody to see."""
        _check_honest("alie", clients, attackers)
        if self.z is None and largest_unseen(clients, attackers) <= 0:
            raise ConfigError(
                f"attack 'alie': {attackers} of {clients} clients cannot hide behind a majority (the paper's z is "
                f"{largest_unseen(clients, attackers):.2f}); give a deviation, such as alie:1.5, or more attackers"
            )

    def change(self, array: npt.NDArray[np.float64], seen: Seen) -> NDArray:
        """Return the shifted mean; the honest array where nobody is seen."""
        if not len(seen.honest):
            return array
        z = self.z
        if z is None:
            z = max(largest_unseen(len(seen.honest) + seen.attackers, seen.attackers), 0.0)
        return np.asarray(seen.honest.mean(axis=0) - z * seen.honest.std(axis=0))


@dataclass(frozen=True)
class InnerProduct(OnModels):
    """The update is ``-epsilon`` times the mean of the honest clients' updates.

    Xie, Koyejo and Gupta, "Fall of Empires", UAI 2019, section 4: the mean of all updates then has a negative inner
    product with the honest mean if ``epsilon`` is larger than the number of honest clients per attacker. If it is
    None it is twice that number, which turns the mean's update over.
    """

    epsilon: float | None = None
    colludes: ClassVar[bool] = True

    def check_crowd(self, clients: int, attackers: int) -> None:
        """Refuse a run in which nobody is honest."""
        _check_honest("ipm", clients, attackers)

    def change(self, array: npt.NDArray[np.float64], seen: Seen) -> NDArray:
        """Return the received array less the others' mean update; the negated mean where nothing was received."""
        if not len(seen.honest):
            return array
        epsilon = 2 * len(seen.honest) / seen.attackers if self.epsilon is None else self.epsilon
        before = np.zeros_like(array) if seen.received is None else seen.received
        return np.asarray(before - epsilon * (seen.honest.mean(axis=0) - before))


def largest_unseen(clients: int, attackers: int) -> float:
    """Return the z of "A Little Is Enough": how far attackers can go with honest clients still farther away.

    Of n clients, m of which attack, s = ⌊n/2 + 1⌋ - m honest ones must lie beyond, so z is the (n - m - s)/(n - m)
    quantile of the standard normal distribution.

    Examples
    --------
    >>> round(largest_unseen(50, 24), 2), largest_unseen(10, 2)
    (1.43, 0.0)
    """
    honest = clients - attackers
    share = (clients - (clients // 2 + 1)) / honest
    return NormalDist().inv_cdf(share) if 0 < share < 1 else (float("inf") if share >= 1 else -float("inf"))


def _check_honest(name: str, clients: int, attackers: int) -> None:
    if attackers >= clients:
        raise ConfigError(
            f"attack {name!r} needs at least 1 honest client, got {attackers} attackers of {clients}"
        )
