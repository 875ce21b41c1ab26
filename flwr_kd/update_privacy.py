r"""Differential privacy of weights: of the updates that a client sends, and of its training by DP-SGD.

**Updates**, with ``dp-clip`` and ``dp-noise``.

A client's update has a norm of at most C = ``dp-clip``, and each of its elements has noise of standard deviation
:math:`\sigma C` with σ = ``dp-noise``; :mod:`flwr_kd.client.private_update` does so. The server sees the update of
each client by itself, so that this is the privacy of a client towards the server.

**Adjacent.** Two cases differ by a factor of 2 in the sensitivity, and both are given:

=============================================  ===========  ================  ==============================
what could have been otherwise                 sensitivity  noise multiplier  field of :class:`UpdateBudget`
=============================================  ===========  ================  ==============================
the client had changed nothing (zero update)   C            σ                 ``absent_epsilon``
any of the client's samples, or all of them    2C           σ/2               ``replaced_epsilon``
=============================================  ===========  ================  ==============================

**Composition.** T Gaussian releases, also if later ones depend on earlier ones, are one with the multiplier
:math:`\sigma / \sqrt{T}`, whose ε is computed exactly. T is the number of updates that one client sends: at most
one per round, and in FedHEAD two, since a client may also lead its sector. That only some clients are drawn in a
round amplifies nothing, because the server knows which.

**DP-SGD**, with ``dp-sgd-clip`` and ``dp-sgd-noise``, protects each sample, and not the client as a whole.
In each step the gradient of a sample has a norm of at most C, and the sum over the batch has noise of σC.
Batches are shuffled and not drawn: a sample is in exactly one batch of an epoch. An epoch is therefore one
Gaussian release, and E epochs in each of T rounds are one with the multiplier :math:`\sigma / \sqrt{ET}`.
Against other content of the sample, instead of none, the sensitivity is 2C. The amplification by sampling
that is usually stated for DP-SGD needs batches into which each sample is drawn by itself, and secretly
(Poisson sampling). Here the server knows the seed of the order. :attr:`SgdBudget.poisson_epsilon` is what
sampling would give, for comparison with the literature only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from flwr_kd.checks import number, whole_number
from flwr_kd.privacy import PrivacyBudget, composed_epsilon
from flwr_kd.text import plural

__all__ = [
    "ASSUMPTIONS",
    "DELTA",
    "NOT_COVERED",
    "SGD_ASSUMPTIONS",
    "SGD_NOT_COVERED",
    "SgdBudget",
    "UpdateBudget",
    "sgd_budget",
    "update_budget",
]

DELTA = 1e-5
"""δ of the budget that a run states."""

ASSUMPTIONS: tuple[str, ...] = (
    "the update begins at weights that the client's data did not decide, apart from updates that are counted here: "
    "weights that the client received, built or sent",
    "the noise is secret: a deployed client draws it from the operating system's cryptographic source; a "
    "simulation draws it from the run's seed, which protects nobody",
    "the server chooses dp-clip and dp-noise: read its run config, or set least-dp-noise in the node config",
)
"""Conditions under which the numbers of an :class:`UpdateBudget` hold."""

NOT_COVERED: tuple[str, ...] = (
    "knowledge that is sent beside the weights: class means, soft predictions, label counts, affinities, scores",
    "the handshake: numbers of samples and, with share-histogram=true, of each class",
    "numbers of a reply: training loss, accuracies, number of samples",
    "arrays of whole numbers, such as BatchNorm's num_batches_tracked",
    "whether and when a client replies, and errors that it reports",
    "personal models, which stay at the client without noise",
)
"""What a client sends or keeps besides the noisy updates, and that the noise does not protect."""


SGD_ASSUMPTIONS: tuple[str, ...] = (
    "each sample is in one batch of an epoch: a loader's sampler draws none twice",
    "the noise is secret: a deployed client draws it from the operating system's cryptographic source; a "
    "simulation draws it from the run's seed, which protects nobody",
    "the client follows dp-sgd-clip and dp-sgd-noise, which the server chooses: read its run config",
)
"""Conditions under which the numbers of an :class:`SgdBudget` hold."""

SGD_NOT_COVERED: tuple[str, ...] = (
    "the client as a whole: the numbers are for one of its samples",
    "the handshake: numbers of samples and, with share-histogram=true, of each class",
    "numbers of a reply: training loss, accuracies, number of samples",
    "hyper-parameters that were chosen on the data",
)
"""What DP-SGD does not protect."""


@dataclass(frozen=True)
class UpdateBudget(PrivacyBudget):
    """The privacy of one client's updates, the result of :func:`update_budget`.

    Attributes
    ----------
    noise, releases, delta, clip
        Arguments of :func:`update_budget`.
    release_epsilon : float
        ε of one update, where the client could have changed nothing.
    absent_epsilon : float
        ε of all updates, where the client could have changed nothing.
    replaced_epsilon : float
        ε of all updates, where any of the client's data could have been others.
    """

    noise: float
    releases: int
    delta: float
    clip: float | None
    release_epsilon: float
    absent_epsilon: float
    replaced_epsilon: float

    assumptions = ASSUMPTIONS
    not_covered = NOT_COVERED

    def rows(self) -> list[tuple[str, str]]:
        """Return the numbers as (label, value) pairs to print.

        Examples
        --------
        >>> for label, value in update_budget(noise=2.0, releases=10, delta=1e-5, clip=0.5).rows():
        ...     print(f"{label}: {value}")
        noise per element of an update, clip 0.5: std 1
        epsilon, one update, or none of it: 1.99
        epsilon, 10 updates, or none of them: 7.51
        epsilon, 10 updates, other data of the client: 17.9
        delta: 1e-05
        """
        rows = (
            []
            if self.clip is None
            else [
                (f"noise per element of an update, clip {self.clip:g}", f"std {self.noise * self.clip:.4g}")
            ]
        )
        many = plural(self.releases, "update")
        return [
            *rows,
            ("epsilon, one update, or none of it", f"{self.release_epsilon:.3g}"),
            (f"epsilon, {many}, or none of them", f"{self.absent_epsilon:.3g}"),
            (f"epsilon, {many}, other data of the client", f"{self.replaced_epsilon:.3g}"),
            ("delta", f"{self.delta:g}"),
        ]

    def sentence(self) -> str:
        """Return the whole run's numbers in one line.

        >>> print(update_budget(noise=2.0, releases=1, delta=1e-5).sentence())
        1 update per client with dp-noise=2: epsilon 1.99 against none, 4.38 against other data, delta 1e-05
        """
        many = plural(self.releases, "update")
        return (
            f"{many} per client with dp-noise={self.noise:g}: epsilon {self.absent_epsilon:.3g} against "
            f"none, {self.replaced_epsilon:.3g} against other data, delta {self.delta:g}"
        )


def update_budget(*, noise: float, releases: int, delta: float, clip: float | None = None) -> UpdateBudget:
    """Compute the privacy that ``dp-noise`` gives to the updates of one client.

    Parameters
    ----------
    noise : float
        ``dp-noise``, in (0, ∞).
    releases : int
        Updates that the client sends, at least 1.
    delta : float
        δ of each ε, in (0, 1).
    clip : float, optional
        ``dp-clip``, in (0, ∞). ε does not depend on it.

    Raises
    ------
    ConfigError
        A value is outside its range.
    ImportError
        ``dp-accounting`` is not installed.

    Examples
    --------
    >>> budget = update_budget(noise=2.0, releases=10, delta=1e-5)
    >>> round(budget.absent_epsilon, 2), round(budget.replaced_epsilon, 1)
    (7.51, 17.9)
    """
    number("noise", noise, 0, open_low=True)
    whole_number("releases", releases, 1)
    if clip is not None:
        number("clip", clip, 0, open_low=True)
    return UpdateBudget(
        noise=noise,
        releases=releases,
        delta=delta,
        clip=clip,
        release_epsilon=composed_epsilon(noise, 1, delta),
        absent_epsilon=composed_epsilon(noise, releases, delta),
        replaced_epsilon=composed_epsilon(noise / 2, releases, delta),
    )


@dataclass(frozen=True)
class SgdBudget(PrivacyBudget):
    """The privacy of one sample in training by DP-SGD, the result of :func:`sgd_budget`.

    Attributes
    ----------
    noise, epochs, delta, rate
        Arguments of :func:`sgd_budget`.
    absent_epsilon : float
        ε of all epochs, where the sample could have had no gradient.
    replaced_epsilon : float
        ε of all epochs, where the sample could have been any other.
    poisson_epsilon : float or None
        ε if batches were drawn by Poisson sampling, which they are not; None without a rate.
    """

    noise: float
    epochs: int
    delta: float
    rate: float | None
    absent_epsilon: float
    replaced_epsilon: float
    poisson_epsilon: float | None

    assumptions = SGD_ASSUMPTIONS
    not_covered = SGD_NOT_COVERED

    def rows(self) -> list[tuple[str, str]]:
        """Return the numbers as (label, value) pairs to print.

        Examples
        --------
        >>> for label, value in sgd_budget(noise=2.0, epochs=10, delta=1e-5).rows():
        ...     print(f"{label}: {value}")
        epsilon, 10 epochs, a sample or none: 7.51
        epsilon, 10 epochs, a sample or another: 17.9
        delta: 1e-05
        """
        many = plural(self.epochs, "epoch")
        poisson = (
            []
            if self.poisson_epsilon is None
            else [
                (
                    f"not this: {many} with Poisson sampling, rate {self.rate:.3g}",
                    f"{self.poisson_epsilon:.3g}",
                )
            ]
        )
        return [
            (f"epsilon, {many}, a sample or none", f"{self.absent_epsilon:.3g}"),
            (f"epsilon, {many}, a sample or another", f"{self.replaced_epsilon:.3g}"),
            *poisson,
            ("delta", f"{self.delta:g}"),
        ]

    def sentence(self) -> str:
        """Return the whole run's numbers in one line.

        >>> print(sgd_budget(noise=2.0, epochs=10, delta=1e-5).sentence())
        10 epochs of DP-SGD with dp-sgd-noise=2: epsilon 7.51 for a sample or none, 17.9 or another, delta 1e-05
        """
        return (
            f"{plural(self.epochs, 'epoch')} of DP-SGD with dp-sgd-noise={self.noise:g}: "
            f"epsilon {self.absent_epsilon:.3g} for a sample or none, {self.replaced_epsilon:.3g} or another, "
            f"delta {self.delta:g}"
        )


def sgd_budget(*, noise: float, epochs: int, delta: float, rate: float | None = None) -> SgdBudget:
    """Compute the privacy that ``dp-sgd-noise`` gives to one sample of a client.

    Parameters
    ----------
    noise : float
        ``dp-sgd-noise``, in (0, ∞).
    epochs : int
        Epochs in all rounds together, at least 1.
    delta : float
        δ of each ε, in (0, 1).
    rate : float, optional
        Batch size over the number of samples, in (0, 1], for ``poisson_epsilon``.

    Raises
    ------
    ConfigError
        A value is outside its range.
    ImportError
        ``dp-accounting`` is not installed.

    Examples
    --------
    >>> budget = sgd_budget(noise=2.0, epochs=10, delta=1e-5)
    >>> round(budget.absent_epsilon, 2), round(budget.replaced_epsilon, 1)
    (7.51, 17.9)
    """
    number("noise", noise, 0, open_low=True)
    whole_number("epochs", epochs, 1)
    if rate is not None:
        number("rate", rate, 0, 1, open_low=True)
    return SgdBudget(
        noise=noise,
        epochs=epochs,
        delta=delta,
        rate=rate,
        absent_epsilon=composed_epsilon(noise, epochs, delta),
        replaced_epsilon=composed_epsilon(noise / 2, epochs, delta),
        poisson_epsilon=None if rate is None else _poisson_epsilon(noise, epochs, delta, rate),
    )


def _poisson_epsilon(noise: float, epochs: int, delta: float, rate: float) -> float:
    """Return ε of epochs whose batches are drawn with a rate, by Rényi accounting."""
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
    from dp_accounting.rdp import RdpAccountant

    step = PoissonSampledDpEvent(rate, GaussianDpEvent(noise))
    steps = SelfComposedDpEvent(step, epochs * math.ceil(1 / rate))
    return float(RdpAccountant().compose(steps).get_epsilon(delta))
