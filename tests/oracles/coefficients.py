"""KT-pFL's knowledge coefficients a second time, in float64, with plain loops over pairs of clients.

Written from the paper (its equations in brackets), its appendices A and C, and the issue's text, never from the
code under test. `c[n][m]` is the weight of client m in client n's target: row n is client n's. Gradients come
twice: term by term, and as finite differences of the losses. The projection comes three times: by trying every
support, by scipy's SLSQP, and by the root of one equation.
Every function carries a case worked by hand; the cases run as doctests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from math import exp, log
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import optimize

Array = NDArray[np.float64]
Models = Sequence[Sequence[NDArray[Any]]]

FLOOR = 1e-7
"""Logs are of numbers not below this."""
NOTHING = 1e-12
"""A row with no more mass than this has none."""


def numbers(values: ArrayLike) -> Array:
    return np.asarray(values, dtype=np.float64)


def differences(f: Callable[[Array], float], at: ArrayLike, step: float = 1e-6) -> Array:
    """∂f/∂x by central differences.

    >>> differences(lambda x: (x**2).sum(), [[1.0, 2.0]]).round(6).tolist()
    [[2.0, 4.0]]
    """
    x = numbers(at)
    actual = np.zeros_like(x)
    for position in np.ndindex(x.shape):
        ahead, behind = x.copy(), x.copy()
        ahead[position] += step
        behind[position] -= step
        actual[position] = (f(ahead) - f(behind)) / (2 * step)
    return actual


# --- appendix A: ensembles of two logistic regressions ---


def logistic(w: ArrayLike, b: float, x: ArrayLike) -> float:
    """h(x) = P(y = 1 | x).

    >>> logistic([1, 2], 0, [2, -1])
    0.5
    """
    return 1 / (1 + exp(-(float(numbers(w) @ numbers(x)) + b)))


def ensemble(weights: Sequence[float], probabilities: Sequence[float]) -> float:
    """Σ_m c_m P_m, one client's personalised probability of one class.

    >>> ensemble([0.5, 0.5], [0.25, 0.75])
    0.5
    """
    return sum(c * p for c, p in zip(weights, probabilities, strict=True))


# --- equations 2 and 7 ---


def personal_targets(c: ArrayLike, s: ArrayLike) -> Array:
    """[2]: Σ_m c_nm s_m, of s [N, K, C].

    >>> personal_targets([[1, 0], [0.25, 0.75]], [[[1.0, 0.0]], [[0.0, 1.0]]]).tolist()
    [[[1.0, 0.0]], [[0.25, 0.75]]]
    """
    c, s = numbers(c), numbers(s)
    actual = np.zeros_like(s)
    for n in range(len(s)):
        for m in range(len(s)):
            actual[n] += c[n, m] * s[m]
    return actual


def floored_log(p: float) -> float:
    """Log of p, or of FLOOR where p is less.

    >>> floored_log(0.0) == floored_log(-1.0) == log(1e-7)
    True
    """
    return log(max(float(p), FLOOR))


def kl(t: ArrayLike, s: ArrayLike) -> float:
    """KL(t ‖ s) of two distributions, where 0 log 0 = 0.

    >>> round(kl([0.5, 0.5], [0.75, 0.25]), 12)
    0.143841036226
    >>> kl([1.0, 0.0], [0.5, 0.5]) == log(2)
    True
    >>> round(kl([0.5, 0.5], [1.0, 0.0]), 12) == round(log(0.5) - 0.5 * log(1e-7), 12)
    True
    """
    terms = (
        p * (floored_log(p) - floored_log(q)) for p, q in zip(numbers(t).flat, numbers(s).flat, strict=True)
    )
    return float(sum(terms))


def count(reduction: str, samples: int) -> float:
    """Return the divisor of the sum over the samples."""
    return {"sum": 1.0, "mean": float(samples)}[reduction]


def knowledge_loss(
    c: ArrayLike,
    s: ArrayLike,
    shares: ArrayLike,
    weight: float = 1.0,
    rho: float = 0.0,
    reduction: str = "sum",
) -> float:
    """Return the objective of [7]: λ Σ_n D_n/D KL(target_n ‖ s_n) + ρ ‖c - 1/N‖².

    Two samples, all alike; the targets of both clients are (1, 1)/2:

    >>> s = [[[0.75, 0.25]] * 2, [[0.25, 0.75]] * 2]
    >>> round(knowledge_loss([[0.5, 0.5]] * 2, s, [0.25, 0.75]), 12)
    0.287682072452
    >>> round(knowledge_loss([[0.5, 0.5]] * 2, s, [0.25, 0.75], weight=3.0, reduction="mean"), 12)
    0.431523108678

    The regularisation has all N² entries; each client here is its own teacher:

    >>> knowledge_loss([[1, 0], [0, 1]], s, [0.25, 0.75], rho=3.0)
    3.0
    """
    c, s, p = numbers(c), numbers(s), numbers(shares)
    targets = personal_targets(c, s)
    total = 0.0
    for n in range(len(s)):
        for k in range(s.shape[1]):
            total += weight * p[n] * kl(targets[n, k], s[n, k]) / count(reduction, s.shape[1])
    return float(total + rho * ((c - 1 / len(c)) ** 2).sum())


def coefficient_gradient(
    c: ArrayLike,
    s: ArrayLike,
    shares: ArrayLike,
    weight: float = 1.0,
    rho: float = 0.0,
    reduction: str = "sum",
) -> Array:
    """[7]: λ D_n/D Σ s_m (log t_n - log s_n + 1) + 2 ρ (c_nm - 1/N), one pair of clients at a time.

    With targets (1, 1)/2 and s_0 = (3, 1)/4 the first row is 1 + 3/4 log 2/3 + 1/4 log 2, 1 + 1/4 log 2/3 + 3/4
    log 2, the second the other way round:

    >>> s = [[[0.75, 0.25]], [[0.25, 0.75]]]
    >>> coefficient_gradient([[0.5, 0.5]] * 2, s, [1, 1]).round(12).tolist()
    [[0.869187964059, 1.418494108393], [1.418494108393, 0.869187964059]]

    and without knowledge it is the regularisation's:

    >>> coefficient_gradient([[1, 0], [0, 1]], s, [1, 1], weight=0.0, rho=2.0).tolist()
    [[2.0, -2.0], [-2.0, 2.0]]
    """
    c, s, p = numbers(c), numbers(s), numbers(shares)
    targets = personal_targets(c, s)
    actual = np.zeros_like(c)
    for n in range(len(s)):
        slope = np.zeros(s.shape[1:])
        for position in np.ndindex(slope.shape):
            slope[position] = floored_log(targets[n][position]) - floored_log(s[n][position]) + 1
        for m in range(len(s)):
            actual[n, m] = weight * p[n] * (s[m] * slope).sum() / count(reduction, s.shape[1])
            actual[n, m] += 2 * rho * (c[n, m] - 1 / len(c))
    return actual


# --- rows on the simplex ---


def project_simplex(row: ArrayLike) -> Array:
    """Return the nearest distribution to a row: over every support, the nearest with that support.

    >>> project_simplex([0.5, 0.5]).tolist(), project_simplex([2.0, 0.0]).tolist()
    ([0.5, 0.5], [1.0, 0.0])
    >>> project_simplex([1.0, 0.5, -3.0]).tolist()
    [0.75, 0.25, 0.0]
    >>> project_simplex([-7.0]).tolist()
    [1.0]
    """
    v = numbers(row)
    best, nearest = np.inf, v
    for size in range(1, len(v) + 1):
        for support in map(list, combinations(range(len(v)), size)):
            point = np.zeros_like(v)
            point[support] = v[support] - (v[support].sum() - 1) / size
            distance = float(((point - v) ** 2).sum())
            if point.min() >= 0 and distance < best:
                best, nearest = distance, point
    return nearest


def project_by_program(row: ArrayLike) -> Array:
    """Solve the same as a quadratic program, to about six digits.

    >>> project_by_program([1.0, 0.5, -3.0]).round(5).tolist()
    [0.75, 0.25, 0.0]
    """
    v = numbers(row)
    actual = optimize.minimize(
        lambda x: ((x - v) ** 2).sum(),
        np.full_like(v, 1 / len(v)),
        jac=lambda x: 2 * (x - v),
        bounds=[(0, 1)] * len(v),
        constraints={"type": "eq", "fun": lambda x: x.sum() - 1, "jac": np.ones_like},
        method="SLSQP",
        options={"ftol": 1e-14, "maxiter": 500},
    )
    assert actual.status in (0, 8), actual.message  # 8: no descent is left that floating point could show
    return numbers(actual.x)


def project_by_root(row: ArrayLike) -> Array:
    """Solve the same for long rows: max(v - τ, 0) with the τ at which it sums to 1.

    >>> project_by_root([1.0, 0.5, -3.0]).round(9).tolist()
    [0.75, 0.25, 0.0]
    """
    v = numbers(row)
    tau = optimize.brentq(
        lambda t: np.maximum(v - t, 0).sum() - 1, v.min() - 1, v.max(), xtol=1e-15, maxiter=500
    )
    return np.asarray(np.maximum(v - tau, 0))


def grid(steps: int) -> Iterator[Array]:
    """Yield all distributions over three whose parts are multiples of 1/steps.

    >>> [point.tolist() for point in grid(1)]
    [[0.0, 0.0, 1.0], [0.0, 1.0, 0.0], [1.0, 0.0, 0.0]]
    """
    for i in range(steps + 1):
        for j in range(steps + 1 - i):
            yield numbers([i, j, steps - i - j]) / steps


def normalize(row: ArrayLike, how: str) -> Array:
    """One row.

    >>> normalize([np.log(3) / 5, 0.0], "softmax").round(12).tolist()
    [0.75, 0.25]
    >>> normalize([2.0, 0.0], "simplex").tolist(), normalize([2.0, 0.0], "none").tolist()
    ([1.0, 0.0], [2.0, 0.0])
    """
    v = numbers(row)
    if how == "simplex":
        return project_simplex(v) if len(v) <= 8 else project_by_root(v)
    if how == "softmax":
        e = np.exp(5 * (v - v.max()))
        return np.asarray(e / e.sum())
    assert how == "none"
    return v


def step(c: ArrayLike, gradient: ArrayLike, rate: float, how: str) -> Array:
    """[7], its rows normalised; one whose gradient is not finite stays.

    >>> step([[1, 0], [0.5, 0.5]], [[0.5, 0], [np.nan, 0]], 1.0, "simplex").tolist()
    [[0.75, 0.25], [0.5, 0.5]]
    """
    rows = []
    for row, slope in zip(numbers(c), numbers(gradient), strict=True):
        rows.append(normalize(row - rate * slope, how) if np.isfinite(slope).all() else row)
    return numbers(rows)


def descend(
    c: ArrayLike, s: ArrayLike, shares: ArrayLike, rate: float, steps: int, how: str, **options: Any
) -> Array:
    """[7] several times, with predictions that stay.

    A client alone has itself:

    >>> descend([[0.3]], [[[0.5, 0.5]]], [1.0], 1.0, 3, "simplex").tolist()
    [[1.0]]
    """
    c = numbers(c)
    for _ in range(steps):
        c = step(c, coefficient_gradient(c, s, shares, **options), rate, how)
    return c


def as_distributions(rows: ArrayLike) -> Array:
    """Rows without what is negative, over their sums.

    >>> as_distributions([[0.5, 1.5], [-1.0, 0.5], [-1.0, 0.0]]).tolist()
    [[0.25, 0.75], [0.0, 1.0], [0.5, 0.5]]
    """
    actual = []
    for row in numbers(rows):
        kept = [max(v, 0.0) for v in row]
        actual.append([v / sum(kept) if sum(kept) else 1 / len(kept) for v in kept])
    return numbers(actual)


# --- who is there ---


def extend(c: ArrayLike, more: int) -> Array:
    """New clients at the end; an old row's sum stays.

    >>> extend([[1.0, 0.0], [0.5, 0.5]], 2).tolist()
    [[0.5, 0.0, 0.25, 0.25], [0.25, 0.25, 0.25, 0.25], [0.25, 0.25, 0.25, 0.25], [0.25, 0.25, 0.25, 0.25]]
    >>> extend(np.zeros((0, 0)), 2).tolist()
    [[0.5, 0.5], [0.5, 0.5]]
    """
    c = numbers(c)
    old, new = len(c), len(c) + more
    rows = [[v * old / new for v in row] + [row.sum() / new] * more for row in c]
    return numbers(rows + [[1 / max(new, 1)] * new] * more).reshape(new, new)


def massless(c: Array, rows: Sequence[int], n: int) -> bool:
    """Whether client n's row has no weight on those present, or no sum."""
    return bool(sum(c[n, m] for m in rows) <= NOTHING or c[n].sum() <= NOTHING)


def of_participants(c: ArrayLike, rows: Sequence[int]) -> Array:
    """The weights of those present upon each other, each row with its whole sum.

    >>> c = [[0.25, 0.5, 0.25], [0, 1, 0], [0, 0.5, 0.5]]
    >>> of_participants(c, [0, 2]).tolist()
    [[0.5, 0.5], [0.0, 1.0]]
    >>> of_participants(c, [1, 0]).round(12).tolist()
    [[1.0, 0.0], [0.666666666667, 0.333333333333]]
    >>> of_participants(c, [2, 0, 1])[2].tolist()
    [0.0, 0.0, 1.0]

    Client 1 has nothing upon 0 and 2:

    >>> of_participants([[1, 0, 0], [0, 1, 0], [1, 0, 0]], [0, 2]).tolist()
    [[1.0, 0.0], [1.0, 0.0]]
    >>> of_participants([[1, 0, 0], [0, 1, 0], [0, 1, 0]], [2, 0]).tolist()
    [[0.5, 0.5], [0.0, 1.0]]
    """
    c = numbers(c)
    actual = np.zeros((len(rows), len(rows)))
    for i, n in enumerate(rows):
        there = sum(c[n, m] for m in rows)
        for j, m in enumerate(rows):
            actual[i, j] = 1 / len(rows) if massless(c, rows, n) else c[n, m] * c[n].sum() / there
    return actual


def with_participants(c: ArrayLike, rows: Sequence[int], weights: ArrayLike) -> Array:
    """Return the matrix after such weights have moved, by the inverse of that scaling.

    >>> c = [[0.25, 0.5, 0.25], [0, 1, 0], [0, 0.5, 0.5]]
    >>> with_participants(c, [0, 2], [[0, 1], [0.5, 0.5]]).tolist()
    [[0.0, 0.5, 0.5], [0.0, 1.0, 0.0], [0.25, 0.5, 0.25]]

    A row with nothing on those present has nothing to share out:

    >>> with_participants([[1, 0, 0], [0, 1, 0], [0, 1, 0]], [2, 0], [[1, 0], [0.5, 0.5]])[[2, 0]].tolist()
    [[0.0, 1.0, 0.0], [0.5, 0.0, 0.5]]
    """
    c, weights = numbers(c), numbers(weights)
    actual = c.copy()
    for i, n in enumerate(rows):
        if massless(c, rows, n):
            continue
        there = sum(c[n, m] for m in rows)
        for j, m in enumerate(rows):
            actual[n, m] = weights[i, j] * there / c[n].sum()
    return actual


# --- Sim-pFL and TopK-pFL ---


def cosine(a: ArrayLike, b: ArrayLike) -> float:
    """Return the cosine of two arrays, 0 where it is negative or one of them is 0.

    >>> cosine([[3.0, 0.0]], [[4.0, 3.0]]), cosine([0.0], [1.0]), cosine([1.0], [-1.0])
    (0.8, 0.0, 0.0)
    """
    u, v = numbers(a).ravel(), numbers(b).ravel()
    if not u.any() or not v.any():
        return 0.0
    return max(0.0, float(u @ v / np.sqrt((u @ u) * (v @ v))))


def cosine_coefficients(s: ArrayLike, k: int | None = None) -> Array:
    """Row n: the cosines of client n with the k nearest, itself first, over their sum.

    >>> s = [[[3.0, 0.0]], [[4.0, 3.0]], [[0.0, 1.0]]]
    >>> (cosine_coefficients(s) * [[1.8], [2.4], [1.6]]).round(12).tolist()
    [[1.0, 0.8, 0.0], [0.8, 1.0, 0.6], [0.0, 0.6, 1.0]]
    >>> (cosine_coefficients(s, 2) * [[1.8], [1.8], [1.6]]).round(12).tolist()
    [[1.0, 0.8, 0.0], [0.8, 1.0, 0.0], [0.0, 0.6, 1.0]]

    Of equals the lower index counts:

    >>> cosine_coefficients([[[1.0]], [[1.0]], [[1.0]]], 2).tolist()
    [[0.5, 0.5, 0.0], [0.5, 0.5, 0.0], [0.5, 0.0, 0.5]]
    """
    s = numbers(s)
    actual = np.zeros((len(s), len(s)))
    for n in range(len(s)):
        row = [1.0 if m == n else cosine(s[n], s[m]) for m in range(len(s))]
        order = sorted(range(len(s)), key=lambda m: (m != n, -round(row[m], 12), m))
        for m in order[:k]:
            actual[n, m] = row[m]
        actual[n] /= actual[n].sum()
    return actual


# --- appendix C: weights instead of predictions ---


def flat(model: Sequence[NDArray[Any]]) -> Array:
    """All float numbers of a model, in one row.

    >>> flat([np.array([[1.0, 2.0]]), np.array(7), np.array(3.0, dtype=np.float16)]).tolist()
    [1.0, 2.0, 3.0]
    """
    return numbers([x for array in model if array.dtype.kind == "f" for x in array.ravel().tolist()])


def gram(models: Models) -> Array:
    """⟨w_n, w_m⟩.

    >>> gram([[np.array([1.0, 2.0]), np.array(9)], [np.array([3.0, 0.0]), np.array(9)]]).tolist()
    [[5.0, 3.0], [3.0, 9.0]]
    """
    rows = [flat(model) for model in models]
    return numbers([[a @ b for b in rows] for a in rows]).reshape(len(rows), len(rows))


def distance_loss(
    c: ArrayLike,
    models: Models,
    shares: ArrayLike,
    weight: float = 1.0,
    rho: float = 0.0,
    scale: float = 1.0,
) -> float:
    """Return the objective of [11]: λ Σ_n D_n/D · scale · ‖Σ_m c_nm w_m - w_n‖² + ρ ‖c - 1/N‖².

    >>> models = [[np.array([1.0])], [np.array([3.0])]]
    >>> distance_loss([[0.5, 0.5], [0, 1]], models, [0.5, 0.5], weight=2.0, rho=10.0, scale=3.0)
    8.0
    """
    c, p = numbers(c), numbers(shares)
    rows = [flat(model) for model in models]
    total = 0.0
    for n in range(len(rows)):
        target = sum((c[n, m] * rows[m] for m in range(len(rows))), np.zeros_like(rows[n]))
        total += weight * p[n] * scale * float(((target - rows[n]) ** 2).sum())
    return float(total + rho * ((c - 1 / len(c)) ** 2).sum())


def distance_gradient(
    c: ArrayLike,
    models: Models,
    shares: ArrayLike,
    weight: float = 1.0,
    rho: float = 0.0,
    scale: float = 1.0,
) -> Array:
    """[11], from the models themselves: 2 λ D_n/D · scale · ⟨target_n - w_n, w_m⟩ + 2 ρ (c_nm - 1/N).

    >>> models = [[np.array([1.0])], [np.array([3.0])]]
    >>> distance_gradient([[0.5, 0.5], [0, 1]], models, [0.5, 0.5], weight=2.0, rho=1.0, scale=3.0).tolist()
    [[6.0, 18.0], [-1.0, 1.0]]
    """
    c, p = numbers(c), numbers(shares)
    rows = [flat(model) for model in models]
    actual = np.zeros_like(c)
    for n in range(len(rows)):
        target = sum((c[n, m] * rows[m] for m in range(len(rows))), np.zeros_like(rows[n]))
        for m in range(len(rows)):
            actual[n, m] = 2 * weight * p[n] * scale * float((target - rows[n]) @ rows[m])
            actual[n, m] += 2 * rho * (c[n, m] - 1 / len(c))
    return actual


def personal_models(c: ArrayLike, models: Models) -> list[list[NDArray[Any]]]:
    """Σ_m c_nm w_m within what the dtype can hold; integers are client n's own.

    >>> models = [[np.array([1.0, 60000.0], dtype=np.float16), np.array(4)]] * 2
    >>> models[1] = [np.array([3.0, 60000.0], dtype=np.float16), np.array(5)]
    >>> [[a.tolist() for a in model] for model in personal_models([[0.5, 0.5], [-1, -1]], models)]
    [[[2.0, 60000.0], 4], [[-4.0, -65504.0], 5]]
    """
    c = numbers(c)
    actual: list[list[NDArray[Any]]] = []
    for n, own in enumerate(models):
        arrays = []
        for i, array in enumerate(own):
            if array.dtype.kind != "f":
                arrays.append(array)
                continue
            total = np.zeros(array.shape)
            for m in range(len(models)):
                total = total + c[n, m] * models[m][i].astype(np.float64)
            limit = float(np.finfo(array.dtype).max)
            arrays.append(np.asarray(np.clip(total, -limit, limit)).astype(array.dtype))
        actual.append(arrays)
    return actual


def transferred(
    own: Sequence[NDArray[Any]],
    target: Sequence[NDArray[Any]],
    rate: float,
    steps: int,
    scale: float = 1.0,
) -> list[NDArray[Any]]:
    """[10] step by step; integers are the own ones.

    From 1 towards 5: 1 + 2 · 1/4 · 4 = 3, then 4:

    >>> [a.tolist() for a in transferred([np.array(1.0), np.array(2)], [np.array(5.0), np.array(3)], 0.25, 2)]
    [4.0, 2]
    """
    actual = []
    for array, goal in zip(own, target, strict=True):
        if array.dtype.kind != "f":
            actual.append(array)
            continue
        w = array.astype(np.float64)
        for _ in range(steps):
            w = w - rate * scale * 2 * (w - goal.astype(np.float64))
        actual.append(np.asarray(w).astype(array.dtype))
    return actual


# --- predictions on their way ---


def codes(p: ArrayLike) -> Array:
    """Return 255 p over the row's largest, before it is rounded.

    >>> codes([[0.5, 0.25, 0.25], [1.0, 0.0, 0.0]]).tolist()
    [[255.0, 127.5, 127.5], [255.0, 0.0, 0.0]]
    """
    rows = numbers(p)
    return numbers([[255 * v / max(row) for v in row] for row in rows])


def unpacked(array: ArrayLike) -> Array:
    """Rows over their sums.

    >>> unpacked([[255, 0, 0], [1, 1, 2]]).tolist()
    [[1.0, 0.0, 0.0], [0.25, 0.25, 0.5]]
    """
    return numbers([[v / sum(row) for v in row] for row in numbers(array)])


def error_bound(p: ArrayLike, precision: str) -> Array:
    """How far a distribution's numbers may be from themselves after packing and unpacking.

    One number is off by no more than δ before the row is divided by its sum, which is then off by no more than
    the δs' sum; float32's own rounding comes on top.

    >>> error_bound([[0.5, 0.5]], "uint8").round(6).tolist()  # δ = 1/1020: (1 + 2/2)/(1 - 2/1020)/1020
    [[0.001965, 0.001965]]
    """
    rows = numbers(p)
    deltas = {
        "float32": rows * 2.0**-24,
        "float16": rows * 2.0**-11 + 2.0**-25,  # half an ulp of a normal number, or of a subnormal one
        "uint8": np.broadcast_to(rows.max(axis=1, keepdims=True) / 510, rows.shape),
    }[precision]
    sums = deltas.sum(axis=1, keepdims=True)
    return np.asarray((deltas + rows * sums) / (1 - sums) + 4e-7 * rows + 1e-12)
