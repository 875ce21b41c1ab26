"""FedDKC's refinements a second time: the paper's equations (numbers in brackets), one row at a time.

Written from sections 3.2, 3.3, 5.1 and 5.2 and never from the code under test. Roots are Brent's, not found by
bisection. Equation (14) is in decimals as long as the row needs, for in a nearly uniform row both its numerator
and its denominator are differences of nearly equal numbers. Every function carries a case worked by hand; the
cases run as doctests.
"""

from __future__ import annotations

import decimal
import math
from collections.abc import Callable, Sequence
from decimal import Decimal

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq

Row = Sequence[float]
Array = NDArray[np.float64]
Kernel = Callable[[Array], Array]


def softmax(logits: Row) -> Array:
    """τ, the normalisation of knowledge.

    >>> softmax([math.log(3), 0.0]).round(12).tolist()
    [0.75, 0.25]
    """
    u = np.asarray(logits, dtype=np.float64)
    exponentials = np.exp(u - u.max())
    return exponentials / exponentials.sum()


def entropy(p: Row | Array) -> float:
    """H in bits, with 0 log 0 = 0.

    >>> entropy([0.5, 0.25, 0.25, 0.0])
    1.5
    """
    return -math.fsum(x * math.log2(x) for x in np.asarray(p, dtype=np.float64).tolist() if x > 0)


def maxima(logits: Row) -> list[bool]:
    """Return a mask of the row's maxima.

    >>> maxima([2.0, 1.0, 2.0])
    [True, False, True]
    """
    top = max(logits)
    return [u == top for u in logits]


# --- KKR ---


def equation_14(logits: Row, peak: float) -> Array:
    """Equation (14) as it stands, not rectified.

    v = (0.6, 0.3, 0.1) and T = 0.5: the denominator is 3 · 0.6 - 1 = 0.8, the numerators 0.5 v + 0.1 are 0.4,
    0.25 and 0.15. With T = 0.9 the numerator 1.7 v - 0.3 is -0.13 for the last:

    >>> v = [math.log(p) for p in (0.6, 0.3, 0.1)]
    >>> equation_14(v, 0.5).round(12).tolist()
    [0.5, 0.3125, 0.1875]
    >>> equation_14(v, 0.9).round(12).tolist()
    [0.9, 0.2625, -0.1625]

    It is equation (9) for σ(x) = x + 1 and the t of equation (13):

    >>> t = (0.6 - 0.5) / (0.6 * (3 * 0.5 - 1))
    >>> equation_9(v, lambda x: x + 1, t).round(12).tolist()
    [0.5, 0.3125, 0.1875]

    No gap is too small, none too wide:

    >>> equation_14([1e-30, 0.0, -1e-30], 0.5).round(12).tolist()
    [0.5, 0.333333333333, 0.166666666667]
    >>> equation_14([1e30, 0.0, -1e30], 0.5).round(12).tolist()
    [0.5, 0.25, 0.25]
    """
    gap = Decimal(max(logits)) - Decimal(min(logits))
    digits = 60 + max(0, -gap.adjusted())
    with decimal.localcontext(prec=digits, Emin=decimal.MIN_EMIN, Emax=decimal.MAX_EMAX):
        top, T, C = Decimal(max(logits)), Decimal(peak), len(logits)
        exponentials = [(Decimal(u) - top).exp() for u in logits]
        total = sum(exponentials)
        v = [e / total for e in exponentials]
        v_m = max(v)
        return np.array([float(((C * T - 1) * v_i + v_m - T) / (C * v_m - 1)) for v_i in v])


def rectified(logits: Row, peak: float) -> Array:
    """Section 3.2's rectification, T and (1 - T) / (C - 1); tied maxima get min(T, 1 / k) each.

    >>> rectified([3.0, 1.0, 0.0], 0.75).tolist()
    [0.75, 0.125, 0.125]
    >>> rectified([3.0, 3.0, 1.0, 0.0], 0.375).tolist()
    [0.375, 0.375, 0.125, 0.125]
    >>> rectified([3.0, 3.0, 1.0, 0.0], 0.75).tolist()
    [0.5, 0.5, 0.0, 0.0]
    >>> rectified([3.0, 3.0], 0.75).tolist()
    [0.5, 0.5]
    """
    top = maxima(logits)
    k, C = sum(top), len(logits)
    high = min(peak, 1 / k)
    low = (1 - k * high) / (C - k) if k < C else 0.0
    return np.array([high if each else low for each in top])


def refine_peak(logits: Row, peak: float) -> Array:
    """Equation (14), rectified where it has a negative entry; a uniform row stays uniform.

    >>> refine_peak([math.log(p) for p in (0.6, 0.3, 0.1)], 0.9).round(12).tolist()
    [0.9, 0.05, 0.05]
    >>> refine_peak([7.0, 7.0], 0.9).tolist()
    [0.5, 0.5]
    """
    if all(maxima(logits)):
        return rectified(logits, peak)
    refined = equation_14(logits, peak)
    return rectified(logits, peak) if refined.min() < 0 else refined


def equation_9(logits: Row, kernel: Kernel, t: float) -> Array:
    """Equation (9) for a given t.

    σ(x) = x² + 1, v = (2/3, 1/3) and t = 1/2: σ(2) = 5 and σ(1) = 2.

    >>> (7 * equation_9([math.log(2), 0.0], lambda x: x**2 + 1, 0.5)).round(12).tolist()
    [5.0, 2.0]
    """
    u = np.asarray(logits, dtype=np.float64)
    values = kernel(np.exp(u - u.max()) / t)
    return values / values.sum()


def solve_t(logits: Row, peak: float, kernel: Kernel) -> float | None:
    """The t > 0 of equation (10), or None where there is none.

    σ(x) = x + 1 has (13), so for v = (0.6, 0.3, 0.1) and T = 0.5 t = 0.1 / 0.3; above v_m there is none, for t
    would have to be negative.

    >>> v = [math.log(p) for p in (0.6, 0.3, 0.1)]
    >>> round(solve_t(v, 0.5, lambda x: x + 1), 12)
    0.333333333333
    >>> solve_t(v, 0.61, lambda x: x + 1) is None
    True

    σ = exp can reach any peak: exp(s) / (exp(s) + 1) = 0.9 at s = 1/t = ln 9 in a one-hot row of two.

    >>> round(1 / solve_t([1e4, 0.0], 0.9, np.exp), 12) == round(math.log(9), 12)
    True
    """

    def miss(log_s: float) -> float:
        with np.errstate(over="ignore", invalid="ignore"):
            return float(equation_9(logits, kernel, math.exp(-log_s)).max()) - peak

    # For s = 1/t to zero the peak is 1/C < T. From there to the first s that is too much.
    before = math.log(1e-12)
    for log_s in np.log(np.geomspace(1e-11, 1e15, 53)).tolist():
        value = miss(log_s)
        if math.isnan(value):
            return None
        if value >= 0:
            return math.exp(-brentq(miss, before, log_s, xtol=1e-14))
        before = log_s
    return None


def refine_peak_with(logits: Row, peak: float, kernel: Kernel) -> Array:
    """Equation (9) with the t of equation (10), rectified where there is none; a uniform row stays uniform.

    >>> refine_peak_with([1e4, 0.0, 0.0], 0.75, np.exp).round(12).tolist()
    [0.75, 0.125, 0.125]
    >>> refine_peak_with([math.log(p) for p in (0.6, 0.3, 0.1)], 0.75, lambda x: x + 1).tolist()
    [0.75, 0.125, 0.125]
    >>> refine_peak_with([1.0, 1.0], 0.75, np.exp).tolist()
    [0.5, 0.5]
    """
    t = None if all(maxima(logits)) else solve_t(logits, peak, kernel)
    return rectified(logits, peak) if t is None else equation_9(logits, kernel, t)


# --- SKR ---


def psi(logits: Row, theta: float) -> Array:
    """Equation (18).

    >>> psi([math.log(2), 0.0], 0.5).round(12).tolist()
    [0.8, 0.2]
    """
    u = np.asarray(logits, dtype=np.float64)
    return softmax((u - u.max()) / theta)


def refine_entropy(logits: Row, bits: float) -> Array:
    """Equation (18) with the root of (19); its limit for θ to zero where k tied maxima have log2 k >= E.

    (2/3, 1/3) at θ = 1/2 is (0.8, 0.2):

    >>> refine_entropy([math.log(2), 0.0], entropy([0.8, 0.2])).round(12).tolist()
    [0.8, 0.2]
    >>> refine_entropy([5.0, 5.0, 4.0], 1.0).tolist()
    [0.5, 0.5, 0.0]
    >>> refine_entropy([5.0, 5.0, 5.0], 1.0).tolist() == [1 / 3] * 3
    True
    """
    top = maxima(logits)
    if math.log2(sum(top)) >= bits or all(top):
        return np.array(top) / sum(top)
    gaps = [max(logits) - u for u in logits if u < max(logits)]
    # At the low end all but the maxima are exp(-1000); at the high end 1e-12 bits are missing to log2 C.
    low, high = math.log(min(gaps)) - math.log(1e3), math.log(max(gaps)) + math.log(1e6)
    root = brentq(lambda x: entropy(psi(logits, math.exp(x))) - bits, low, high, xtol=1e-14)
    return psi(logits, math.exp(root))
