r"""Differential privacy of the updates of weights that a client sends, with ``dp-clip`` and ``dp-noise``.

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
"""

from __future__ import annotations

from dataclasses import dataclass

from flwr_kd.checks import number, whole_number
from flwr_kd.privacy import composed_epsilon

__all__ = ["ASSUMPTIONS", "DELTA", "NOT_COVERED", "UpdateBudget", "update_budget"]

DELTA = 1e-5
"""δ of the budget that a run states."""

ASSUMPTIONS: tuple[str, ...] = (
    "the update begins at weights that the client's data did not decide, apart from updates that are counted here: "
    "weights that the client received, built or sent",
    "the noise is secret: a deployed client draws it from the operating system's cryptographic source; a "
    "simulation draws it from the run's seed, which protects nobody",
    "the client follows dp-clip and dp-noise, which the server chooses: read its run config",
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


@dataclass(frozen=True)
class UpdateBudget:
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

    @property
    def assumptions(self) -> tuple[str, ...]:
        """Conditions under which the numbers hold, one line each."""
        return ASSUMPTIONS

    @property
    def not_covered(self) -> tuple[str, ...]:
        """What is sent without protection, one line each."""
        return NOT_COVERED

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
        many = f"{self.releases} update{'' if self.releases == 1 else 's'}"
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
        many = f"{self.releases} update{'' if self.releases == 1 else 's'}"
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
