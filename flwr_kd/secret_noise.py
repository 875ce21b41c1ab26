r"""Gaussian noise that nobody else can reproduce, and that floating point does not give away.

A generator with a seed protects nothing from whoever can try all seeds: PyTorch's ``manual_seed`` uses 32 bits.
Here the noise comes from the operating system's cryptographic source, 64 bits per element.

Noise in floating point protects less than the theory says (Mironov, "On Significance of the Least Significant
Bits for Differential Privacy", CCS 2012): which numbers ``x + noise`` can have at all depends on x, and so the
last bits of the sum tell x from its neighbours. Here each value is rounded to a multiple of a step, and the noise
is a whole number of steps, from the discrete Gaussian distribution (Canonne, Kamath and Steinke, "The Discrete
Gaussian for Differential Privacy", NeurIPS 2020). Every multiple is possible for every x, and what is sent is
computed from that whole number alone. The discrete Gaussian gives the same concentrated differential privacy as
the continuous one of its scale.

**The step** is a whole fraction :math:`\Delta / m` of the sensitivity, so that rounding moves two neighbours
apart by at most m steps, and by one more where the values themselves were rounded. The noise has the scale
:math:`(m + 1) \sigma` in steps, which is a factor :math:`1 + 1/m` more than without rounding: 0.2 % for σ = 7.

**The draw** compares 63 bits with exact thresholds. The distribution of an element differs from the discrete
Gaussian by less than :math:`2^{-42}` in total variation, for σ = 7 by less than :math:`2^{-47}`. The sum over all
elements adds to δ.

**Updates of weights** are bounded in their Euclidean norm, which rounding to the nearest multiple would not keep.
:func:`noisy_update` rounds towards zero instead, so that no norm grows. Its step is the 1024th part of the noise's
standard deviation, and an element differs from the discrete Gaussian by less than :math:`2^{-49}`.
"""

from __future__ import annotations

import functools
import math
import secrets
from decimal import Decimal, localcontext

import numpy as np
import numpy.typing as npt

from flwr_kd.checks import ConfigError, number

__all__ = ["LARGEST_SIGMA", "lattice_noise", "noisy_update", "steps_per_sensitivity"]

LARGEST_SIGMA = 8192.0
"""Largest noise multiplier: with more, nothing is left of any value, and the table of thresholds is large."""
_SCALE = 4096
_FEWEST_STEPS = 16
_STEPS_PER_STD = 1024
_BITS = 63
_FIXED_POINT = 192


def steps_per_sensitivity(sigma: float) -> int:
    """Return m, the number of steps in the sensitivity: many where σ is small, so that the noise has fine steps.

    Examples
    --------
    >>> steps_per_sensitivity(7.0), steps_per_sensitivity(0.5), steps_per_sensitivity(8192.0)
    (586, 8192, 16)
    """
    return max(math.ceil(_SCALE / sigma), _FEWEST_STEPS)


def lattice_noise(
    values: npt.NDArray[np.float64], sensitivity: npt.NDArray[np.float64], sigma: float
) -> npt.NDArray[np.float64]:
    r"""Return rows of values, each rounded to multiples of a step, with secret noise of σ sensitivities.

    Parameters
    ----------
    values : ndarray
        ``[C, D]``, finite.
    sensitivity : ndarray
        ``[C]``, positive: the largest change of one element of a row by one sample. It must be public.
    sigma : float
        The noise multiplier, in [0, 8192]. 0 returns the values as they are.

    Returns
    -------
    ndarray
        ``[C, D]``. Each element is a whole number times its row's step.

    Raises
    ------
    ConfigError
        If σ is out of range.

    Examples
    --------
    >>> noisy = lattice_noise(np.zeros((1, 5)), np.array([2.0]), 3.0)
    >>> steps = noisy / (2.0 / steps_per_sensitivity(3.0))
    >>> bool(np.abs(steps - np.rint(steps)).max() < 1e-9), noisy.shape
    (True, (1, 5))
    """
    number("sigma", sigma, 0)
    if not sigma:
        return values
    if sigma > LARGEST_SIGMA:
        raise ConfigError(f"sigma must be at most {LARGEST_SIGMA:g} where the noise is secret, got {sigma}")
    count = steps_per_sensitivity(sigma)
    step = (sensitivity / count)[:, np.newaxis]
    noise = _discrete_gaussian((count + 1) * sigma, values.size).reshape(values.shape)
    noisy: npt.NDArray[np.float64] = (np.rint(values / step) + noise) * step
    return noisy


def noisy_update(values: npt.NDArray[np.float64], std: float) -> npt.NDArray[np.float64]:
    """Return values, each rounded towards zero to multiples of a step, with secret noise.

    Parameters
    ----------
    values : ndarray
        Of any shape, finite.
    std : float
        The noise's standard deviation, in (0, ∞).

    Returns
    -------
    ndarray
        In the same shape. Each element is a whole number of steps of ``std / 1024``.

    Raises
    ------
    ConfigError
        If ``std`` is out of range.

    Examples
    --------
    >>> steps = noisy_update(np.zeros((2, 3)), 0.5) / (0.5 / 1024)
    >>> bool((steps == np.rint(steps)).all()), steps.shape
    (True, (2, 3))
    """
    step = number("std", std, 0, open_low=True) / _STEPS_PER_STD
    noise = _discrete_gaussian(_STEPS_PER_STD, values.size).reshape(values.shape)
    noisy: npt.NDArray[np.float64] = np.asarray((np.trunc(values / step) + noise) * step)
    return noisy


def _discrete_gaussian(scale: float, size: int) -> npt.NDArray[np.int64]:
    """Draw whole numbers k with probability proportional to ``exp(-k²/(2·scale²))``, from the system's source."""
    raw = np.frombuffer(secrets.token_bytes(8 * size), dtype="<u8")
    # One bit is the sign, the others decide the magnitude: the number of thresholds above them.
    drawn, sign = raw >> np.uint64(1), raw & np.uint64(1)
    ascending = _thresholds(scale)
    magnitude = len(ascending) - np.searchsorted(ascending, drawn, side="right")
    return np.where(sign, -magnitude, magnitude).astype(np.int64)


@functools.lru_cache(maxsize=4)
def _thresholds(scale: float) -> npt.NDArray[np.uint64]:
    """Return ``floor(2^63 · P(|k| >= m))`` for m from the largest with a threshold above 0 down to 1.

    The weights are computed in whole numbers with 192 bits after the point, so that the thresholds are exact.
    """
    with localcontext() as context:
        context.prec = 80
        first = (Decimal(-1) / (2 * Decimal(scale) ** 2)).exp()
        ratio, square = (int(power * 2**_FIXED_POINT) for power in (first, first * first))
    # weight[k] = exp(-k²/(2s²)), and weight[k] / weight[k - 1] = exp(-(2k - 1)/(2s²)).
    weights, weight = [], 1 << _FIXED_POINT
    while weight >> (_FIXED_POINT - _BITS - 32):
        weight = weight * ratio >> _FIXED_POINT
        ratio = ratio * square >> _FIXED_POINT
        weights.append(2 * weight)
    total = (1 << _FIXED_POINT) + sum(weights)
    tail, ascending = 0, []
    for weight in reversed(weights):
        tail += weight
        ascending.append((tail << _BITS) // total)
    table = np.array(ascending, dtype=np.uint64)
    return table[table > 0]
