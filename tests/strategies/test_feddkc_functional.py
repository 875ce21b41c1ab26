"""FedDKC's refinements against the paper's equations, row by row, and against the properties it proves of them.

Section 3.1 asks for three: a probability vector, the order of the logits, and the target (the peak T, the
entropy E). They are checked on all kinds of logits, also where the targets are out of reach.
"""

from __future__ import annotations

import doctest
import math
from collections.abc import Callable
from itertools import pairwise

import congruence as oracle
import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.special import softmax
from torch import Tensor

from flwr_kd.strategies.feddkc import check_kernel, entropy_bits, refine_entropy, refine_peak

Kernel = Callable[[Tensor], Tensor]

repeatable = settings(max_examples=40, deadline=None, derandomize=True)
seeds = st.integers(0, 2**32 - 1)
fractions = st.floats(0.02, 0.98)

NUMPY = {torch.float16: np.float16, torch.float32: np.float32, torch.float64: np.float64}
all_dtypes = pytest.mark.parametrize("dtype", list(NUMPY), ids=str)

# Every kernel twice: for the code under test and for the oracle.
KERNELS: dict[str, tuple[Kernel, oracle.Kernel]] = {
    "affine": (lambda x: x + 1, lambda x: x + 1),
    "exp": (torch.exp, np.exp),
    "convex": (lambda x: x**2 + 1, lambda x: x**2 + 1),
    "softplus": (lambda x: torch.logaddexp(x, torch.zeros_like(x)), lambda x: np.logaddexp(x, 0)),
}
all_kernels = pytest.mark.parametrize("name", KERNELS)

REFUSED = {
    "double": (lambda x: 2 * x, "direct proportion"),
    "identity": (lambda x: x, "direct proportion"),
    "tiny slope": (lambda x: 1e-3 * x, "direct proportion"),
    "great slope": (lambda x: 1e3 * x, "direct proportion"),
    "decreasing": (lambda x: torch.exp(-x), "increasing"),
    "constant": (torch.ones_like, "increasing"),
    "sine": (lambda x: torch.sin(x) + 2, "increasing"),
    "hill": (lambda x: 2 + x * torch.exp(-x), "increasing"),
    "below zero": (lambda x: x - 1, "positive"),
    "negative throughout": (lambda x: -torch.exp(-x) - 1, "positive"),
}
refused_kernels = pytest.mark.parametrize(("kernel", "message"), REFUSED.values(), ids=list(REFUSED))

MALFORMED = {
    "vector": torch.ones(4),
    "scalar": torch.tensor(1.0),
    "three axes": torch.ones(2, 3, 4),
    "one class": torch.ones(3, 1),
    "no classes": torch.ones(3, 0),
    "nan": torch.tensor([[0.0, math.nan, 1.0, 2.0]]),
    "inf": torch.tensor([[0.0, 1.0, 2.0, 3.0], [0.0, math.inf, 1.0, 2.0]]),
    "-inf": torch.tensor([[0.0, -math.inf, 1.0, 2.0]]),
}
malformed_logits = pytest.mark.parametrize("logits", MALFORMED.values(), ids=list(MALFORMED))


def _row(kind: str, classes: int, scale: float, rng: np.random.Generator, dtype: torch.dtype) -> np.ndarray:
    if kind == "normal":
        return scale * rng.standard_normal(classes)
    if kind == "ties":
        return scale * rng.integers(0, 3, classes)
    if kind == "one-hot":
        return scale * np.eye(classes)[rng.integers(classes)]
    if kind == "neighbours":  # some units in the last place apart
        return scale * (1 + np.finfo(NUMPY[dtype]).eps * rng.integers(0, 4, classes))
    if kind == "magnitudes":
        return rng.choice([-1, 1], classes) * 10.0 ** rng.uniform(-30, 30, classes)
    assert kind == "uniform"
    return np.full(classes, scale)


@st.composite
def generated_logits(draw: st.DrawFn, classes: tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> Tensor:
    """Up to four rows, each of another kind and scale."""
    dtype = draw(st.sampled_from(dtypes))
    width = draw(st.sampled_from(classes))
    rng = np.random.default_rng(draw(seeds))
    kinds = st.sampled_from(["normal", "normal", "ties", "one-hot", "neighbours", "magnitudes", "uniform"])
    exponents = st.one_of(st.integers(-2, 2), st.integers(-30, 30))
    rows = [
        _row(draw(kinds), width, 10.0 ** draw(exponents), rng, dtype) for _ in range(draw(st.integers(1, 4)))
    ]
    top = float(np.finfo(NUMPY[dtype]).max) / 4
    return torch.from_numpy(np.clip(np.stack(rows), -top, top)).to(dtype)


@st.composite
def listed_logits(draw: st.DrawFn, dtypes: tuple[torch.dtype, ...]) -> Tensor:
    """A few rows of numbers of hypothesis's choice, which it can shrink."""
    width = draw(st.integers(2, 6))
    values = st.floats(-1e4, 1e4).map(lambda x: x if abs(x) > 1e-30 else 0.0)
    row = st.lists(values, min_size=width, max_size=width)
    rows = draw(st.lists(row, min_size=1, max_size=3))
    return torch.tensor(rows, dtype=torch.float64).to(draw(st.sampled_from(dtypes)))


def any_logits(
    classes: tuple[int, ...] = (2, 3, 4, 10, 1000), dtypes: tuple[torch.dtype, ...] = tuple(NUMPY)
) -> st.SearchStrategy[Tensor]:
    return st.one_of(generated_logits(classes, dtypes), listed_logits(dtypes))


few_classes = any_logits((2, 3, 4, 10))
few_classes_float64 = any_logits((2, 3, 4, 10), (torch.float64,))


def _peak(fraction: float, classes: int) -> float:
    return 1 / classes + fraction * (1 - 1 / classes)


def _bits(fraction: float, classes: int) -> float:
    return fraction * math.log2(classes)


def _rows(tensor: Tensor) -> list[list[float]]:
    return tensor.to(torch.float64).tolist()


def _logarithms(*rows: list[float], dtype: torch.dtype = torch.float64) -> Tensor:
    """Logits whose softmax are the given rows; minus 1e4 for a probability of zero."""
    return torch.tensor([[math.log(p) if p else -1e4 for p in row] for row in rows], dtype=dtype)


def _assert_probabilities(refined: Tensor, logits: Tensor) -> None:
    """Equation (4), in the dtype promised."""
    double = logits.dtype == torch.float64
    assert refined.shape == logits.shape
    assert refined.dtype == (torch.float64 if double else torch.float32)
    assert torch.isfinite(refined).all()
    assert refined.min() >= 0
    assert refined.max() <= 1
    sums = refined.to(torch.float64).sum(1)
    torch.testing.assert_close(sums, torch.ones_like(sums), rtol=0, atol=1e-12 if double else 1e-6)


def _assert_order_is_kept(refined: Tensor, logits: Tensor) -> None:
    """Equation (5), both ways for equal logits."""
    for row, u in zip(_rows(refined), _rows(logits), strict=True):
        ordered = sorted(zip(u, row, strict=True))
        for (u_j, p_j), (u_i, p_i) in pairwise(ordered):
            assert p_i >= p_j
            assert p_i == p_j or u_i > u_j


def _assert_close(actual: list[float], expected: np.ndarray, atol: float) -> None:
    np.testing.assert_allclose(np.array(actual), expected, rtol=0, atol=atol)


def test_the_oracle_agrees_with_its_cases_worked_by_hand() -> None:
    results = doctest.testmod(oracle)
    assert results.attempted > 20
    assert results.failed == 0


class TestRefinePeak:
    def test_by_hand(self) -> None:
        # T = 0.5 below the peak 0.6 and C = 3: (0.5 v + 0.1) / 0.8.
        refined = refine_peak(_logarithms([0.6, 0.3, 0.1], [0.1, 0.6, 0.3]), 0.5)
        expected = torch.tensor([[0.5, 0.3125, 0.1875], [0.1875, 0.5, 0.3125]], dtype=torch.float64)
        torch.testing.assert_close(refined, expected, rtol=0, atol=1e-12)

    def test_above_the_peak_without_a_negative_entry_it_is_not_rectified(self) -> None:
        # T = 0.7 above the peak 0.6: (1.1 v - 0.1) / 0.8, whose last entry is just positive.
        refined = refine_peak(_logarithms([0.6, 0.3, 0.1]), 0.7)
        expected = torch.tensor([[0.7, 0.2875, 0.0125]], dtype=torch.float64)
        torch.testing.assert_close(refined, expected, rtol=0, atol=1e-12)

    def test_theorem_1_is_rectified(self) -> None:
        # Equation (30): 0.005 + (0.3 - 0.5) / (10 · 0.5 - 1) = -0.045 < 0, so (14) is 4 · -0.045 / 2 = -0.09.
        v = [0.3, 0.2, 0.2, 0.1, 0.1, 0.05, 0.03, 0.01, 0.005, 0.005]
        logits = _logarithms(v)
        unrectified = oracle.equation_14(logits[0].tolist(), 0.5)
        assert unrectified.min() == pytest.approx(-0.09)
        expected = [0.5] + [0.5 / 9] * 9
        _assert_close(refine_peak(logits, 0.5)[0].tolist(), np.array(expected), 1e-12)

    @repeatable
    @given(seed=seeds, classes=st.integers(3, 12), fraction=st.floats(0.1, 0.98))
    def test_whatever_meets_equation_30_is_rectified(self, seed: int, classes: int, fraction: float) -> None:
        # v_i → 0 and v_m < T, as in the proof of theorem 1; two classes always have T and 1 - T.
        rng = np.random.default_rng(seed)
        logits = rng.uniform(-0.1, 0.1, classes)
        logits[rng.integers(1, classes)] = -50.0
        v_m, peak = softmax(logits).max(), _peak(fraction, classes)
        assume(v_m + 1e-3 < peak)
        assert oracle.equation_14(logits.tolist(), peak).min() < 0
        expected = np.where(logits == logits.max(), peak, (1 - peak) / (classes - 1))
        _assert_close(refine_peak(torch.from_numpy(logits)[None], peak)[0].tolist(), expected, 1e-12)

    @all_dtypes
    @pytest.mark.parametrize("scale", [1.0, 50.0, 1e4, -1e4])
    def test_one_hot(self, dtype: torch.dtype, scale: float) -> None:
        # A negative scale makes it one-cold: nine tied maxima, 9 · 0.6 > 1.
        logits = scale * torch.eye(10, dtype=dtype)
        refined = refine_peak(logits, 0.6)
        _assert_probabilities(refined, logits)
        high, low = (0.6, 0.4 / 9) if scale > 0 else (0.0, 1 / 9)
        for i, row in enumerate(_rows(refined)):
            _assert_close(row, np.where(np.arange(10) == i, high, low), 1e-7)

    @all_dtypes
    @pytest.mark.parametrize("classes", [2, 3, 10, 1000])
    def test_a_uniform_row_stays_uniform(self, dtype: torch.dtype, classes: int) -> None:
        # Zero rows are what the clients start with.
        logits = torch.tensor([[0.0], [3.7], [-1e4], [1e-6]], dtype=dtype).repeat(1, classes)
        refined = refine_peak(logits, _peak(0.5, classes))
        for row in _rows(refined):
            _assert_close(row, np.full(classes, 1 / classes), 1e-7)
            assert len(set(row)) == 1

    def test_tied_maxima_without_a_negative_entry(self) -> None:
        # C = 5 and T = 0.3: (0.5 v + 0.1) / 1.
        refined = refine_peak(_logarithms([0.4, 0.4, 0.1, 0.05, 0.05]), 0.3)
        _assert_close(refined[0].tolist(), np.array([0.3, 0.3, 0.15, 0.125, 0.125]), 1e-12)

    def test_tied_maxima_rectified(self) -> None:
        # C = 5 and T = 0.45: (1.25 v - 0.15) / 0.5 is -0.05 for v = 0.1. With T = 0.6 two are too many.
        logits = _logarithms([0.3, 0.3, 0.2, 0.1, 0.1])
        third = 0.1 / 3
        _assert_close(
            refine_peak(logits, 0.45)[0].tolist(), np.array([0.45, 0.45, third, third, third]), 1e-12
        )
        _assert_close(refine_peak(logits, 0.6)[0].tolist(), np.array([0.5, 0.5, 0, 0, 0]), 1e-12)

    @repeatable
    @given(logits=any_logits(), fraction=fractions)
    def test_is_a_probability_vector_in_order_with_the_peak(self, logits: Tensor, fraction: float) -> None:
        # Theorem 7. More maxima than 1 / T can have only an equal share each.
        peak = _peak(fraction, logits.shape[1])
        refined = refine_peak(logits, peak)
        _assert_probabilities(refined, logits)
        _assert_order_is_kept(refined, logits)
        for row, u in zip(_rows(refined), _rows(logits), strict=True):
            target = min(peak, 1 / sum(oracle.maxima(u)))
            assert max(row) == pytest.approx(target, rel=0, abs=1e-6)
            assert row[u.index(max(u))] == max(row)

    @repeatable
    @given(logits=few_classes, fraction=fractions)
    def test_matches_oracle(self, logits: Tensor, fraction: float) -> None:
        peak = _peak(fraction, logits.shape[1])
        for row, u in zip(_rows(refine_peak(logits, peak)), _rows(logits), strict=True):
            if not all(oracle.maxima(u)) and abs(oracle.equation_14(u, peak).min()) < 1e-9:
                continue  # on the edge of being rectified
            _assert_close(row, oracle.refine_peak(u, peak), 1e-6)

    @all_dtypes
    @pytest.mark.parametrize("peak", [0.002, 0.3])
    def test_a_thousand_classes_match_the_oracle(self, dtype: torch.dtype, peak: float) -> None:
        rng = np.random.default_rng(0)
        logits = torch.from_numpy(3 * rng.standard_normal((1, 1000))).to(dtype)
        _assert_close(_rows(refine_peak(logits, peak))[0], oracle.refine_peak(_rows(logits)[0], peak), 1e-6)

    @pytest.mark.parametrize("gap", [1e-6, 1e-12, 1e-30])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
    def test_nearly_uniform_rows(self, dtype: torch.dtype, gap: float) -> None:
        # (14) tends to T - (C T - 1) x_i / Σ x_j for gaps x: 0.5 - 0.5 · (0, 1, 2) / 3.
        logits = gap * torch.tensor([[0.0, -1.0, -2.0]], dtype=dtype)
        _assert_close(_rows(refine_peak(logits, 0.5))[0], np.array([1 / 2, 1 / 3, 1 / 6]), 1e-6)

    @repeatable
    @given(seed=seeds, classes=st.integers(2, 12))
    def test_a_row_that_has_the_peak_stays_as_it_is(self, seed: int, classes: int) -> None:
        logits = np.random.default_rng(seed).standard_normal(classes)
        v = softmax(logits)
        _assert_close(refine_peak(torch.from_numpy(logits)[None], v.max())[0].tolist(), v, 1e-9)

    @all_dtypes
    def test_no_rows(self, dtype: torch.dtype) -> None:
        _assert_probabilities_of_nothing(refine_peak(torch.zeros(0, 4, dtype=dtype), 0.5), dtype)
        refined = refine_peak(torch.zeros(0, 4, dtype=dtype), 0.5, kernel=torch.exp)
        _assert_probabilities_of_nothing(refined, dtype)

    def test_the_input_is_not_changed(self) -> None:
        logits = _logarithms([0.6, 0.3, 0.1], [0.4, 0.4, 0.2])
        before = logits.clone()
        for kernel in (None, torch.exp):
            refine_peak(logits, 0.9, kernel=kernel)
            assert torch.equal(logits, before)

    @pytest.mark.parametrize("peak", [0.1, 0.05, 0.0, -0.5, 1.0, 1.5, math.nan, math.inf])
    @pytest.mark.parametrize("kernel", [None, torch.exp])
    def test_peak_out_of_range(self, peak: float, kernel: Kernel | None) -> None:
        with pytest.raises(ValueError, match=r"\(0\.1, 1\)"):
            refine_peak(torch.zeros(2, 10), peak, kernel=kernel)

    def test_the_range_of_the_peak_depends_on_the_classes(self) -> None:
        with pytest.raises(ValueError, match=r"\(0\.25, 1\)"):
            refine_peak(torch.zeros(2, 4), 0.2)
        assert refine_peak(torch.tensor([[1.0] + [0.0] * 9]), 0.2).max().item() == pytest.approx(0.2)

    @malformed_logits
    @pytest.mark.parametrize("kernel", [None, torch.exp])
    def test_malformed_logits(self, logits: Tensor, kernel: Kernel | None) -> None:
        with pytest.raises(ValueError, match="logits"):
            refine_peak(logits, 0.6, kernel=kernel)

    @pytest.mark.parametrize("tolerance", [0.0, -1e-6, math.nan])
    @pytest.mark.parametrize("kernel", [None, torch.exp])
    def test_tolerance_must_be_positive(self, tolerance: float, kernel: Kernel | None) -> None:
        with pytest.raises(ValueError, match="tolerance"):
            refine_peak(torch.eye(3), 0.6, kernel=kernel, tolerance=tolerance)


def _assert_probabilities_of_nothing(refined: Tensor, dtype: torch.dtype) -> None:
    assert refined.shape == (0, 4)
    assert refined.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


class TestRefinePeakWithKernel:
    def test_by_hand(self) -> None:
        # σ(x) = x² + 1 and v = (2/3, 1/3): at 1/t = 2 it is (5, 2) / 7, at 1/t = 3 (10, 3.25) / 13.25.
        logits = _logarithms([2 / 3, 1 / 3])
        for peak in (5 / 7, 10 / 13.25):
            refined = refine_peak(logits, peak, kernel=lambda x: x**2 + 1, tolerance=1e-12)
            _assert_close(refined[0].tolist(), np.array([peak, 1 - peak]), 1e-11)

    def test_by_hand_three_classes(self) -> None:
        # σ(x) = x² + 1 and v = (4, 2, 1) / 7 at 1/t = 4: (17, 5, 2) / 24; equation (14) would have other odds.
        logits = _logarithms([1 / 7, 4 / 7, 2 / 7])
        refined = refine_peak(logits, 17 / 24, kernel=lambda x: x**2 + 1, tolerance=1e-12)
        _assert_close(refined[0].tolist(), np.array([2, 17, 5]) / 24, 1e-11)

    @repeatable
    @given(
        seed=seeds,
        classes=st.integers(2, 12),
        scale=st.sampled_from([0.1, 1.0, 5.0, 1e4]),
        fraction=fractions,
        slope=st.floats(-3, 3),
        offset=st.floats(-3, 3),
    )
    def test_affine_is_equation_14_below_the_peak(
        self, seed: int, classes: int, scale: float, fraction: float, slope: float, offset: float
    ) -> None:
        # Section 3.2: t takes up any k and b of σ(x) = k x + b. Nothing is negative where v_m > T.
        logits = scale * np.random.default_rng(seed).standard_normal(classes)
        v_m = softmax(logits).max()
        peak = 1 / classes + fraction * (v_m - 1 / classes)
        k, b = 10**slope, 10**offset
        refined = refine_peak(
            torch.from_numpy(logits)[None], peak, kernel=lambda x: k * x + b, tolerance=1e-10
        )
        _assert_close(refined[0].tolist(), oracle.equation_14(logits.tolist(), peak), 1e-8)

    @settings(repeatable, max_examples=15)
    @given(
        seed=seeds, classes=st.integers(3, 12), kind=st.sampled_from(["normal", "ties"]), fraction=fractions
    )
    def test_affine_is_rectified_above_the_peak(
        self, seed: int, classes: int, kind: str, fraction: float
    ) -> None:
        # Also where equation (14) has no negative entry: its t is, and section 5.1 wants one that solves (10).
        rng = np.random.default_rng(seed)
        logits = _row(kind, classes, 1.0, rng, torch.float64)
        v_m = softmax(logits).max()
        peak = v_m + fraction * (1 - v_m)
        refined = refine_peak(torch.from_numpy(logits)[None], peak, kernel=lambda x: x + 1)
        _assert_close(refined[0].tolist(), oracle.rectified(logits.tolist(), peak), 1e-9)

    def test_affine_above_the_peak_by_hand(self) -> None:
        # Without a kernel this row is (0.7, 0.2875, 0.0125).
        refined = refine_peak(_logarithms([0.6, 0.3, 0.1]), 0.7, kernel=lambda x: x + 1)
        _assert_close(refined[0].tolist(), np.array([0.7, 0.15, 0.15]), 1e-9)

    @repeatable
    @given(
        name=st.sampled_from(list(KERNELS)),
        seed=seeds,
        classes=st.integers(2, 10),
        kinds=st.lists(
            st.sampled_from(["normal", "normal", "ties", "one-hot", "uniform"]), min_size=1, max_size=4
        ),
        scale=st.floats(0.3, 5),
        fraction=fractions,
    )
    def test_matches_oracle(
        self, name: str, seed: int, classes: int, kinds: list[str], scale: float, fraction: float
    ) -> None:
        kernel, same = KERNELS[name]
        rng = np.random.default_rng(seed)
        logits = torch.from_numpy(
            np.stack([_row(kind, classes, scale, rng, torch.float64) for kind in kinds])
        )
        peak = _peak(fraction, classes)
        refined = refine_peak(logits, peak, kernel=kernel, tolerance=1e-10)
        for row, u in zip(refined.tolist(), logits.tolist(), strict=True):
            if not all(oracle.maxima(u)):
                t, sooner = oracle.solve_t(u, peak, same), oracle.solve_t(u, peak + 1e-6, same)
                if (t is None) != (sooner is None) or (t is not None and t < 1 / 500):
                    continue  # on the edge of being solvable, or where exp overflows
            _assert_close(row, oracle.refine_peak_with(u, peak, same), 1e-7)

    @repeatable
    @given(name=st.sampled_from(list(KERNELS)), logits=any_logits(), fraction=fractions)
    def test_is_a_probability_vector_in_order_with_the_peak(
        self, name: str, logits: Tensor, fraction: float
    ) -> None:
        # Theorem 9. Where (10) has no solution the rectification has the same peak.
        peak = _peak(fraction, logits.shape[1])
        refined = refine_peak(logits, peak, kernel=KERNELS[name][0])
        _assert_probabilities(refined, logits)
        _assert_order_is_kept(refined, logits)
        for row, u in zip(_rows(refined), _rows(logits), strict=True):
            target = min(peak, 1 / sum(oracle.maxima(u)))
            assert max(row) == pytest.approx(target, rel=0, abs=6e-7)

    @all_kernels
    @all_dtypes
    def test_one_hot(self, name: str, dtype: torch.dtype) -> None:
        refined = refine_peak(1e4 * torch.eye(10, dtype=dtype), 0.6, kernel=KERNELS[name][0])
        for i, row in enumerate(_rows(refined)):
            _assert_close(row, np.where(np.arange(10) == i, 0.6, 0.4 / 9), 6e-7)

    @all_kernels
    @pytest.mark.parametrize("classes", [2, 10, 1000])
    def test_a_uniform_row_stays_uniform(self, name: str, classes: int) -> None:
        logits = torch.tensor([[0.0], [3.7], [-1e4], [1e-6]]).repeat(1, classes)
        refined = refine_peak(logits, _peak(0.5, classes), kernel=KERNELS[name][0])
        for row in _rows(refined):
            _assert_close(row, np.full(classes, 1 / classes), 1e-7)
            assert len(set(row)) == 1

    def test_exp_with_tied_maxima(self) -> None:
        # Two maxima can have at most a half each, which exp only tends to; three not even 0.4.
        logits = torch.tensor([[1.0, 1.0, 0.0, -1.0], [1.0, 1.0, 1.0, 0.0]], dtype=torch.float64)
        refined = refine_peak(logits, 0.4, kernel=torch.exp, tolerance=1e-10)
        assert oracle.solve_t(logits[0].tolist(), 0.4, np.exp) is not None
        _assert_close(refined[0].tolist(), oracle.refine_peak_with(logits[0].tolist(), 0.4, np.exp), 1e-9)
        _assert_close(refined[1].tolist(), np.array([1 / 3, 1 / 3, 1 / 3, 0]), 1e-9)
        refined = refine_peak(logits, 0.6, kernel=torch.exp)
        _assert_close(refined[0].tolist(), np.array([1 / 2, 1 / 2, 0, 0]), 1e-9)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
    def test_a_gap_below_the_resolution_is_no_tie(self, dtype: torch.dtype) -> None:
        # The softmax is uniform to the last digit; the logits are not, and v_m < T.
        logits = torch.tensor([[0.0, 1e-30, 0.0]], dtype=dtype)
        refined = refine_peak(logits, 0.6, kernel=lambda x: x + 1)
        _assert_close(_rows(refined)[0], np.array([0.2, 0.6, 0.2]), 1e-6)

    @pytest.mark.parametrize("tolerance", [1e-2, 1e-4, 1e-6, 1e-10])
    @all_kernels
    def test_tolerance(self, name: str, tolerance: float) -> None:
        # Section 5.2: less than half of it from T.
        rng = np.random.default_rng(1)
        logits = torch.from_numpy(5 * rng.standard_normal((20, 5)))
        refined = refine_peak(logits, 0.37, kernel=KERNELS[name][0], tolerance=tolerance)
        assert all(abs(max(row) - 0.37) < tolerance / 2 + 1e-15 for row in refined.tolist())

    @refused_kernels
    def test_refused_kernels(self, kernel: Kernel, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            refine_peak(torch.eye(3), 0.6, kernel=kernel)


class TestCheckKernel:
    @refused_kernels
    def test_refused(self, kernel: Kernel, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            check_kernel(kernel)

    @pytest.mark.parametrize("kernel", [kernel for kernel, _ in KERNELS.values()], ids=list(KERNELS))
    def test_accepted(self, kernel: Kernel) -> None:
        check_kernel(kernel)

    @pytest.mark.parametrize("slope", [1e-3, 1.0, 1e3])
    @pytest.mark.parametrize("offset", [1e-3, 1.0, 1e3])
    def test_every_affine_kernel_is_accepted(self, slope: float, offset: float) -> None:
        check_kernel(lambda x: slope * x + offset)

    @pytest.mark.parametrize("kernel", [lambda x: torch.sqrt(x) + 1, torch.sigmoid], ids=["root", "sigmoid"])
    def test_concave_kernels_are_accepted(self, kernel: Kernel) -> None:
        # Positive, increasing and no proportion; that (10) need not have a t for them is another matter.
        check_kernel(kernel)


class TestRefineEntropy:
    # Pairs whose softmax is one-hot, uniform, or neither.
    PAIRS = ((1.0, 0.0), (1e4, -1e4), (1e30, -1e30), (0.0, -1e-30), (1e-30, -1e30), (1.0, 1.0 - 2.0**-20))

    @pytest.mark.parametrize("pair", PAIRS, ids=str)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
    @pytest.mark.parametrize("p", [0.6, 0.9, 0.999])
    def test_two_classes_by_hand(self, pair: tuple[float, float], dtype: torch.dtype, p: float) -> None:
        # The entropy says it all, whatever the logits: only one (p, 1 - p) with p > 1/2 has it.
        bits = -p * math.log2(p) - (1 - p) * math.log2(1 - p)
        refined = refine_entropy(torch.tensor([pair, pair[::-1]], dtype=dtype), bits, tolerance=1e-8)
        for row, expected in zip(_rows(refined), ([p, 1 - p], [1 - p, p]), strict=True):
            _assert_close(row, np.array(expected), 1e-6)

    @all_dtypes
    @pytest.mark.parametrize("p", [0.55, 0.9])
    @pytest.mark.parametrize("classes", [2, 4, 1000])
    def test_one_hot_by_hand(self, dtype: torch.dtype, p: float, classes: int) -> None:
        # The others are equal at every θ, so only (p, (1 - p) / (C - 1), ...) has its entropy, at any scale.
        rest = (1 - p) / (classes - 1)
        rows = torch.eye(classes)[torch.tensor([0, 1, classes - 1])]
        logits = (rows * torch.tensor([[1e-3], [1.0], [1e4]])).to(dtype)
        bits = oracle.entropy([p] + [rest] * (classes - 1))
        refined = refine_entropy(logits, bits, tolerance=1e-8)
        _assert_probabilities(refined, logits)
        for row, hot in zip(_rows(refined), _rows(rows), strict=True):
            _assert_close(row, np.where(np.array(hot) == 1, p, rest), 1e-6)

    @repeatable
    @given(
        seed=seeds,
        classes=st.integers(2, 12),
        scale=st.sampled_from([1e-30, 1e-3, 1.0, 1e4, 1e30]),
        theta=st.floats(0.3, 5),
    )
    def test_a_softmax_is_found_again(self, seed: int, classes: int, scale: float, theta: float) -> None:
        logits = np.random.default_rng(seed).standard_normal(classes)
        expected = softmax(logits / theta)
        bits = oracle.entropy(expected)
        assume(bits > 1e-3)
        refined = refine_entropy(torch.from_numpy(scale * logits)[None], bits, tolerance=1e-10)
        _assert_close(refined[0].tolist(), expected, 1e-6)

    @all_dtypes
    @pytest.mark.parametrize("classes", [2, 3, 10, 1000])
    def test_a_uniform_row_stays_uniform(self, dtype: torch.dtype, classes: int) -> None:
        logits = torch.tensor([[0.0], [3.7], [-1e4], [1e-6]], dtype=dtype).repeat(1, classes)
        refined = refine_entropy(logits, _bits(0.5, classes))
        for row in _rows(refined):
            _assert_close(row, np.full(classes, 1 / classes), 1e-7)
            assert len(set(row)) == 1

    @pytest.mark.parametrize("bits", [0.1, 0.999, 1.0])
    @all_dtypes
    def test_tied_maxima_that_know_too_little(self, dtype: torch.dtype, bits: float) -> None:
        # Two equal maxima have a bit at least; the limit θ → 0 has just that.
        logits = torch.tensor([[2.0, 1.0, 2.0, 0.0], [1e4, -1e4, -1e4, 1e4]], dtype=dtype)
        refined = refine_entropy(logits, bits)
        _assert_close(_rows(refined)[0], np.array([0.5, 0, 0.5, 0]), 1e-9)
        _assert_close(_rows(refined)[1], np.array([0.5, 0, 0, 0.5]), 1e-9)

    @all_dtypes
    def test_tied_maxima_that_can_have_the_entropy(self, dtype: torch.dtype) -> None:
        # ln 4 apart at θ = 1: (0.4, 0.4, 0.1, 0.1).
        logits = 3 * torch.tensor([[1.0, 0.0, 1.0, 0.0]], dtype=dtype)
        refined = refine_entropy(logits, oracle.entropy([0.4, 0.1, 0.4, 0.1]), tolerance=1e-8)
        _assert_close(_rows(refined)[0], np.array([0.4, 0.1, 0.4, 0.1]), 1e-6)

    @repeatable
    @given(logits=any_logits(), fraction=fractions, tolerance=st.sampled_from([None, 1e-1, 1e-3, 1e-5, 1e-8]))
    def test_is_a_probability_vector_in_order_with_the_entropy(
        self, logits: Tensor, fraction: float, tolerance: float | None
    ) -> None:
        # Theorem 8; the default tolerance is 1e-3. k equal maxima have log2 k at least, an even row log2 C.
        bits = _bits(fraction, logits.shape[1])
        refined = refine_entropy(logits, bits, **({} if tolerance is None else {"tolerance": tolerance}))
        _assert_probabilities(refined, logits)
        _assert_order_is_kept(refined, logits)
        allowed = (tolerance or 1e-3) / 2 + (1e-12 if logits.dtype == torch.float64 else 1e-6)
        for row, u in zip(_rows(refined), _rows(logits), strict=True):
            target = max(bits, math.log2(sum(oracle.maxima(u))))
            assert abs(oracle.entropy(row) - target) < allowed

    @repeatable
    @given(logits=few_classes_float64, fraction=fractions, tolerance=st.sampled_from([1e-3, 1e-6, 1e-9]))
    def test_matches_oracle(self, logits: Tensor, fraction: float, tolerance: float) -> None:
        # The distance to Brent's root is as large as the tolerance allows.
        bits = _bits(fraction, logits.shape[1])
        refined = refine_entropy(logits, bits, tolerance=tolerance)
        for row, u in zip(refined.tolist(), logits.tolist(), strict=True):
            expected = oracle.refine_entropy(u, bits)
            ends = [oracle.refine_entropy(u, bits + sign * tolerance / 2) for sign in (-1, 1)]
            spread = max(float(np.abs(end - expected).max()) for end in ends)
            _assert_close(row, expected, 1.5 * spread + 1e-9)

    @all_dtypes
    @pytest.mark.parametrize("bits", [0.5, 9.9])
    def test_a_thousand_classes_match_the_oracle(self, dtype: torch.dtype, bits: float) -> None:
        rng = np.random.default_rng(0)
        logits = torch.from_numpy(3 * rng.standard_normal((1, 1000))).to(dtype)
        refined = refine_entropy(logits, bits, tolerance=1e-9)
        for row, u in zip(_rows(refined), _rows(logits), strict=True):
            _assert_close(row, oracle.refine_entropy(u, bits), 1e-6)

    @all_dtypes
    @pytest.mark.parametrize("fraction", [0.25, 0.5, 0.9])
    def test_a_thousand_classes_at_the_default_tolerance(self, dtype: torch.dtype, fraction: float) -> None:
        # A softmax in float32 is too coarse for this: its terms may sum to 1 - 5e-6.
        logits = torch.eye(1000, dtype=dtype)[:2]
        _assert_probabilities(refine_entropy(logits, _bits(fraction, 1000)), logits)

    @all_dtypes
    def test_no_rows(self, dtype: torch.dtype) -> None:
        _assert_probabilities_of_nothing(refine_entropy(torch.zeros(0, 4, dtype=dtype), 0.5), dtype)

    def test_the_input_is_not_changed(self) -> None:
        logits = _logarithms([0.6, 0.3, 0.1], [0.4, 0.4, 0.2])
        before = logits.clone()
        refine_entropy(logits, 0.9)
        assert torch.equal(logits, before)

    @pytest.mark.parametrize("bits", [0.0, -1.0, math.log2(10), 3.4, math.nan, math.inf])
    def test_entropy_out_of_range(self, bits: float) -> None:
        with pytest.raises(ValueError, match=r"\(0, 3\.32"):
            refine_entropy(torch.zeros(2, 10), bits)

    def test_the_range_of_the_entropy_depends_on_the_classes(self) -> None:
        with pytest.raises(ValueError, match=r"\(0, 2"):
            refine_entropy(torch.zeros(2, 4), 2.5)
        refined = refine_entropy(torch.eye(10)[:1], 2.5)
        assert oracle.entropy(_rows(refined)[0]) == pytest.approx(2.5, rel=0, abs=5.1e-4)

    @malformed_logits
    def test_malformed_logits(self, logits: Tensor) -> None:
        with pytest.raises(ValueError, match="logits"):
            refine_entropy(logits, 0.6)

    @pytest.mark.parametrize("tolerance", [0.0, -1e-3, math.nan])
    def test_tolerance_must_be_positive(self, tolerance: float) -> None:
        with pytest.raises(ValueError, match="tolerance"):
            refine_entropy(torch.eye(3), 0.6, tolerance=tolerance)


class TestEntropyBits:
    def test_by_hand(self) -> None:
        p = torch.tensor([[0.5, 0.25, 0.25, 0.0], [1.0, 0.0, 0.0, 0.0], [0.25, 0.25, 0.25, 0.25]])
        assert entropy_bits(p).tolist() == pytest.approx([1.5, 0.0, 2.0])

    @repeatable
    @given(seed=seeds, shape=st.lists(st.integers(1, 4), max_size=3), classes=st.integers(1, 20))
    def test_matches_oracle(self, seed: int, shape: list[int], classes: int) -> None:
        # Concentrations far below one make entries that are zero.
        rng = np.random.default_rng(seed)
        p = rng.dirichlet(np.full(classes, 0.01), size=shape) if classes > 1 else np.ones((*shape, 1))
        actual = entropy_bits(torch.from_numpy(p))
        assert actual.shape == tuple(shape)
        expected = [oracle.entropy(row) for row in p.reshape(-1, classes)]
        _assert_close(actual.flatten().tolist(), np.array(expected), 1e-12)

    def test_nothing(self) -> None:
        assert entropy_bits(torch.zeros(0, 4)).shape == (0,)
