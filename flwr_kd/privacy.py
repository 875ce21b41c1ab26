"""Differential privacy of class means with Gaussian noise: what the noise protects, and what it does not.

A client sends the mean representation ``[D]`` of a class over its ``N`` samples of that class, whose elements lie
in ``[-ζ, ζ]``. It adds noise of standard deviation ``(2ζ/N)·σ`` to each element (FedHKD, eq. 7); ``2ζ/N`` is the
sensitivity of one element (Lemma 1). The paper states the privacy of one element in one round. But a client sends
``D`` elements, of every class that it shares, in every round in which it takes part.

**From one element to a run.** Exchanging one sample moves each element of a class mean by at most ``2ζ/N``, and
therefore the vector by at most ``√D·2ζ/N`` in Euclidean length. The noise of each element is still ``(2ζ/N)·σ``, so
that the vector is released with a noise multiplier (noise over sensitivity) of ``σ/√D``. Gaussian releases compose
exactly, even if later ones depend on earlier ones: ``T`` rounds in which one sample affects ``c`` classes are one
release with multiplier ``σ/√(D·c·T)``. Its ε is computed exactly, not bounded.

=====================================  ====================  ==========================================
release                                noise multiplier      field of :class:`Budget`
=====================================  ====================  ==========================================
one element, one round                 ``σ``                 ``paper_epsilon`` (the paper's bound) and
                                                             ``element_epsilon`` (exact)
the ``D`` elements of a class, once    ``σ/√D``              ``vector_epsilon``
``c`` classes, ``T`` rounds            ``σ/√(D·c·T)``        ``total_epsilon``
=====================================  ====================  ==========================================

**Adjacent data sets.** The numbers hold for two data sets that differ in the content of one sample, but not in
its label (``classes=1``). A sample belongs to one class, and the means of the other classes are then the same, so
classes compose in parallel. If the label may also change, the sample leaves one mean and enters another
(``classes=2``). Lemma 1 is proved for a sample that is added or removed. In that case, and with ``classes=2``, the
class counts change, and with them the scale of the noise. A client that sends its counts without noise then reveals
the change, for any σ. These two cases are covered only if counts are considered public and the noise of every class
is scaled by one public lower bound of ``N``. :func:`noise_std` does this if ``count`` is that bound.

**Sampling of clients** is assumed to give no amplification, because the server knows which clients took part.
``rounds`` is the number of rounds in which a client sends, not the number of rounds of the run.

:data:`ASSUMPTIONS` and :data:`NOT_COVERED` list what else a user must know.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, overload

import numpy as np
import numpy.typing as npt

from flwr_kd.checks import ConfigError, number, whole_number
from flwr_kd.text import plural

__all__ = [
    "ASSUMPTIONS",
    "NOT_COVERED",
    "Budget",
    "PrivacyBudget",
    "budget",
    "composed_epsilon",
    "gaussian_epsilon",
    "gaussian_sigma",
    "mean_sensitivity",
    "noise_std",
]

ASSUMPTIONS: tuple[str, ...] = (
    "every element of every representation lies in [-bound, bound]: only clipping makes sure of that; batch "
    "normalisation keeps about 99.7 % of the elements within 3",
    "the feature extractor does not depend on the sample in question: an extractor trained on it moves every "
    "sample's representation, and then the sensitivity of a mean is up to 2*bound, not 2*bound/count",
    "the class counts are public: neighbouring data sets have the same ones",
    "the noise is secret: a deployed client draws it from the operating system's cryptographic source and sends "
    "multiples of a step, so that floating point gives nothing away; a simulation draws it from the run's seed, "
    "which protects nobody",
)
"""Conditions under which the numbers of a :class:`Budget` hold."""

NOT_COVERED: tuple[str, ...] = (
    "mean soft predictions: sent without noise",
    "model weights, where the method exchanges them: sent without noise unless dp-noise is set, in FedFomo and "
    "FedHEAD also to other clients, as they are",
    "class counts and which classes a client shares: sent in the clear",
    "the number of a client's samples of each class, where the method sends it (FedGen): sent in the clear",
    "a generator that was trained against the client's data, and its scores of samples (DaFKD): sent without noise",
)
"""Values that a client sends besides the noisy means, and that the noise on the means does not protect."""

_CLASSICAL_LIMIT = 1.0
# For smaller multipliers the search for epsilon overflows. Epsilon is above 10^11 there, which is no privacy.
_SMALLEST_MULTIPLIER = 1e-6


def gaussian_sigma(epsilon: float, delta: float) -> float:
    r"""Return the noise multiplier of the classical Gaussian mechanism (FedHKD, Theorem 1).

    .. math:: \sigma = \sqrt{2 \ln(1.25 / \delta)} \, / \, \epsilon

    Any larger σ gives (ε, δ)-differential privacy to a release with sensitivity 1. The theorem is proved for ε < 1.
    For a larger ε the formula may give too little noise: use :func:`composed_epsilon` instead, which is exact.

    Parameters
    ----------
    epsilon : float
        Target ε, in (0, ∞).
    delta : float
        Target δ, in (0, 1).

    Returns
    -------
    float
        σ, in units of the sensitivity.

    Raises
    ------
    ConfigError
        A value is outside its range.

    Examples
    --------
    >>> round(gaussian_sigma(0.5, 0.01), 3)
    6.215
    """
    return _classical(delta) / number("epsilon", epsilon, 0, open_low=True)


def gaussian_epsilon(sigma: float, delta: float) -> float:
    r"""Return ε of the classical Gaussian mechanism, the inverse of :func:`gaussian_sigma`.

    Parameters
    ----------
    sigma : float
        Noise over sensitivity, in (0, ∞).
    delta : float
        δ, in (0, 1).

    Returns
    -------
    float
        :math:`\sqrt{2 \ln(1.25 / \delta)} \, / \, \sigma`. The theorem does not prove a value of 1 or more, which
        therefore guarantees nothing.

    Raises
    ------
    ConfigError
        A value is outside its range.

    Examples
    --------
    >>> round(gaussian_epsilon(7, 0.01), 3)
    0.444
    """
    return _classical(delta) / number("sigma", sigma, 0, open_low=True)


@overload
def mean_sensitivity(count: float, bound: float) -> float: ...
@overload
def mean_sensitivity(count: npt.NDArray[Any], bound: float) -> npt.NDArray[np.float64]: ...
def mean_sensitivity(count: float | npt.NDArray[Any], bound: float) -> float | npt.NDArray[np.float64]:
    """Return the largest change of one element of a mean by one sample (FedHKD, Lemma 1, eq. 8).

    Parameters
    ----------
    count : float or ndarray
        Samples in the mean, each at least 1. An array of any shape, such as ``[C]``, gives an array.
    bound : float
        ζ, in (0, ∞): every element of every sample's representation lies in [-ζ, ζ].

    Returns
    -------
    float or ndarray
        ``2·bound / count``, in the shape of ``count``.

    Raises
    ------
    ConfigError
        A count is below 1 or not finite, or the bound is outside its range.

    Examples
    --------
    >>> mean_sensitivity(256, 3.0)
    0.0234375
    >>> mean_sensitivity(np.array([1, 2, 4]), 1.0).tolist()
    [2.0, 1.0, 0.5]
    """
    width = 2 * number("bound", bound, 0, open_low=True)
    counts = np.asarray(count, dtype=np.float64)
    wrong = ~(np.isfinite(counts) & (counts >= 1))
    if wrong.any():
        raise ConfigError(f"count must be finite and >= 1, got {counts[wrong].flat[0]}")
    sensitivity: npt.NDArray[np.float64] = width / counts
    return sensitivity if isinstance(count, np.ndarray) else float(sensitivity)


@overload
def noise_std(count: float, bound: float, sigma: float) -> float: ...
@overload
def noise_std(count: npt.NDArray[Any], bound: float, sigma: float) -> npt.NDArray[np.float64]: ...
def noise_std(count: float | npt.NDArray[Any], bound: float, sigma: float) -> float | npt.NDArray[np.float64]:
    """Return the standard deviation of the noise on each element of a mean (FedHKD, eq. 7).

    Parameters
    ----------
    count : float or ndarray
        Samples in the mean, each at least 1; or a public lower bound of it.
    bound : float
        ζ, in (0, ∞): every element of every sample's representation lies in [-ζ, ζ].
    sigma : float
        Noise multiplier, in [0, ∞). 0 means no noise and no privacy.

    Returns
    -------
    float or ndarray
        ``2·bound / count · sigma``, in the shape of ``count``.

    Raises
    ------
    ConfigError
        A value is outside its range.

    Examples
    --------
    >>> round(noise_std(256, 3.0, 7.0) ** 2, 4)
    0.0269
    """
    number("sigma", sigma, 0)
    return mean_sensitivity(count, bound) * sigma


def composed_epsilon(
    sigma: float, rounds: int, delta: float, *, dimensions: int = 1, classes: int = 1
) -> float:
    r"""Return the exact ε of everything that one sample affects in a run, by ``dp-accounting``.

    ``rounds · classes · dimensions`` releases, each of one element with noise of σ times its sensitivity, are
    one Gaussian release with noise multiplier :math:`\sigma / \sqrt{rounds · classes · dimensions}`, whose
    trade-off between ε and δ is known in closed form. Unlike :func:`gaussian_epsilon` the result holds for every ε,
    and is the smallest valid one.

    Parameters
    ----------
    sigma : float
        Noise of one element over the sensitivity of one element, in (0, ∞).
    rounds : int
        Rounds in which the client sends, at least 1.
    delta : float
        δ of the whole run, in (0, 1). It is not spent once per round.
    dimensions : int
        ``D``, elements of a class mean, at least 1.
    classes : int
        Number of classes whose means the change of one sample moves, at least 1. 1: its content changes, but not
        its label. 2: its label also changes (the module's docstring has the conditions).

    Returns
    -------
    float
        ε, in [0, ∞]. 0 if δ alone covers the release; ``inf`` if the multiplier is below 1e-6.

    Raises
    ------
    ConfigError
        A value is outside its range.
    ImportError
        ``dp-accounting`` is not installed.

    Examples
    --------
    >>> round(composed_epsilon(7, 1, 0.01), 3)
    0.161
    >>> round(composed_epsilon(7, 50, 0.01, dimensions=64), 1)
    50.6
    """
    number("sigma", sigma, 0, open_low=True)
    number("delta", delta, 0, 1, open_low=True, open_high=True)
    releases = math.prod(
        whole_number(name, value, 1)
        for name, value in (("rounds", rounds), ("dimensions", dimensions), ("classes", classes))
    )
    try:
        from dp_accounting import get_epsilon_gaussian
    except ImportError as error:
        raise ImportError(
            "the composed privacy budget needs dp-accounting: pip install 'flwr-kd[privacy]'"
        ) from error
    multiplier = sigma / math.sqrt(releases)
    if multiplier < _SMALLEST_MULTIPLIER:
        return math.inf
    return float(get_epsilon_gaussian(multiplier, delta))


class PrivacyBudget(ABC):
    """Numbers of differential privacy, with the conditions under which they hold."""

    assumptions: ClassVar[tuple[str, ...]]
    """Conditions under which the numbers hold, one line each."""
    not_covered: ClassVar[tuple[str, ...]]
    """What is sent, or done, without protection, one line each."""

    @abstractmethod
    def rows(self) -> list[tuple[str, str]]:
        """Return the numbers as (label, value) pairs to print."""


@dataclass(frozen=True)
class Budget(PrivacyBudget):
    """The privacy of one sample, for one element in one round (the paper's claim) up to a whole run.

    It is the result of :func:`budget`.

    Attributes
    ----------
    sigma, rounds, delta, dimensions, classes, count, bound
        Arguments of :func:`budget`.
    noise_std : float or None
        Standard deviation of the noise on each element; None without a count.
    paper_epsilon : float
        ε by Theorem 1 of FedHKD, for one element in one round. It guarantees something only below 1.
    element_epsilon : float
        Exact ε of the same release.
    vector_epsilon : float
        ε of all elements of one class in one round.
    total_epsilon : float
        ε of all elements of the affected classes in all rounds.
    """

    sigma: float
    rounds: int
    delta: float
    dimensions: int
    classes: int
    count: float | None
    bound: float
    noise_std: float | None
    paper_epsilon: float
    element_epsilon: float
    vector_epsilon: float
    total_epsilon: float

    assumptions = ASSUMPTIONS
    not_covered = NOT_COVERED

    @property
    def paper_bound_holds(self) -> bool:
        """Whether ``paper_epsilon`` is below 1, where Theorem 1 is proved."""
        return self.paper_epsilon < _CLASSICAL_LIMIT

    def rows(self) -> list[tuple[str, str]]:
        """Return the numbers as (label, value) pairs to print.

        Examples
        --------
        >>> for label, value in budget(sigma=7, rounds=50, delta=0.01, dimensions=64, count=256).rows():
        ...     print(f"{label}: {value}")
        noise per element, 256 samples, bound 3: std 0.1641
        epsilon, one element, one round (the paper's bound): 0.444
        epsilon, one element, one round (exact): 0.161
        epsilon, 64 elements of one class, one round: 2.77
        epsilon, 64 elements, 1 class, 50 rounds: 50.6
        delta: 0.01
        """
        rows: list[tuple[str, str]] = []
        if self.noise_std is not None:
            label = f"noise per element, {self.count:g} samples, bound {self.bound:g}"
            rows.append((label, f"std {self.noise_std:.4g}"))
        note = "" if self.paper_bound_holds else " (not below 1: the paper's theorem claims nothing)"
        per_class = plural(self.dimensions, "element")
        scope = ", ".join([per_class, plural(self.classes, "class", "classes"), plural(self.rounds, "round")])
        return [
            *rows,
            ("epsilon, one element, one round (the paper's bound)", f"{self.paper_epsilon:.3g}{note}"),
            ("epsilon, one element, one round (exact)", f"{self.element_epsilon:.3g}"),
            (f"epsilon, {per_class} of one class, one round", f"{self.vector_epsilon:.3g}"),
            (f"epsilon, {scope}", f"{self.total_epsilon:.3g}"),
            ("delta", f"{self.delta:g}"),
        ]


def budget(
    *,
    sigma: float,
    rounds: int,
    delta: float,
    dimensions: int,
    classes: int = 1,
    count: float | None = None,
    bound: float = 3.0,
) -> Budget:
    """Compute the privacy that noise of multiplier ``sigma`` on class means gives, per element and over a run.

    Parameters
    ----------
    sigma : float
        The method's noise multiplier, in (0, ∞).
    rounds : int
        Rounds in which the client sends, at least 1.
    delta : float
        δ of each ε, in (0, 1). It is usually below one over the number of samples.
    dimensions : int
        ``D``, elements of a class mean, at least 1.
    classes : int
        Number of classes whose means the change of one sample moves, at least 1; see :func:`composed_epsilon`.
    count : float, optional
        Samples in the mean, at least 1. Used only for ``noise_std``; ε does not depend on it.
    bound : float
        ζ, in (0, ∞); 3 in the paper. Used only for ``noise_std``.

    Returns
    -------
    Budget
        Read it with :data:`ASSUMPTIONS` and :data:`NOT_COVERED`.

    Raises
    ------
    ConfigError
        A value is outside its range.
    ImportError
        ``dp-accounting`` is not installed.

    Examples
    --------
    >>> run = budget(sigma=7, rounds=50, delta=0.01, dimensions=64)
    >>> round(run.paper_epsilon, 3), round(run.vector_epsilon, 2), round(run.total_epsilon, 1)
    (0.444, 2.77, 50.6)
    """
    number("bound", bound, 0, open_low=True)
    return Budget(
        sigma=sigma,
        rounds=rounds,
        delta=delta,
        dimensions=dimensions,
        classes=classes,
        count=count,
        bound=bound,
        noise_std=None if count is None else noise_std(count, bound, sigma),
        paper_epsilon=gaussian_epsilon(sigma, delta),
        element_epsilon=composed_epsilon(sigma, 1, delta),
        vector_epsilon=composed_epsilon(sigma, 1, delta, dimensions=dimensions),
        total_epsilon=composed_epsilon(sigma, rounds, delta, dimensions=dimensions, classes=classes),
    )


def _classical(delta: float) -> float:
    return math.sqrt(
        2 * (math.log(1.25) - math.log(number("delta", delta, 0, 1, open_low=True, open_high=True)))
    )
