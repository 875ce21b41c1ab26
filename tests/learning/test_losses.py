"""Losses and soft targets: against SciPy and the oracle, by hand, gradients, degenerate input."""

from __future__ import annotations

import math
from collections.abc import Callable

import knowledge as oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import rel_entr, softmax
from scipy.stats import entropy
from tensors import assert_close, both_dtypes, gradient_of, normal, probabilities, random_labels
from torch import Tensor
from torch.nn import functional as F
from torch.nn.functional import cross_entropy, one_hot

from flwr_kd.distillation.teachers import soft_labels
from flwr_kd.learning.losses import kl_divergence, safe_norm, soft_targets

repeatable = settings(max_examples=50, deadline=None, derandomize=True)
Loss = Callable[[Tensor, Tensor], Tensor]


def soft_cross_entropy(teacher: Tensor, logits: Tensor) -> Tensor:
    """Return the loss of an ensemble's student, PyTorch's own cross-entropy against probabilities."""
    return soft_labels().loss((teacher,), (logits,))


def test_no_rows_still_has_a_gradient() -> None:
    logits = torch.zeros(0, 3, requires_grad=True)
    value = kl_divergence(torch.zeros(0, 3), logits)
    assert value.shape == ()
    assert value.item() == 0.0
    value.backward()
    assert logits.grad is not None
    assert logits.grad.shape == (0, 3)


@pytest.mark.parametrize("shape", [(3,), (2, 3, 4), ()], ids=str)
def test_only_rows_of_classes(shape: tuple[int, ...]) -> None:
    text = rf"must both be \[N, C\], got \[{', '.join(map(str, shape))}\] and"
    with pytest.raises(ValueError, match=text):
        kl_divergence(torch.zeros(shape), torch.zeros(shape))


@pytest.mark.parametrize("loss", [kl_divergence, soft_cross_entropy])
def test_saturated_logits_stay_finite(loss: Loss) -> None:
    logits = torch.tensor([[1e4, 0.0, -1e4], [-1e4, 1e4, 0.0]], requires_grad=True)
    value = loss(torch.tensor([[0.0, 0.5, 0.5], [1.0, 0.0, 0.0]]), logits)
    value.backward()
    assert torch.isfinite(value)
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()


@repeatable
@given(seed=st.integers(0, 2**31), rows=st.integers(1, 6), classes=st.integers(1, 5))
def test_cross_entropy_of_soft_labels(seed: int, rows: int, classes: int) -> None:
    teacher = normal(rows, classes, seed=seed).softmax(1)
    logits = 5 * normal(rows, classes, seed=seed + 1)
    expected = -(teacher * F.log_softmax(logits, dim=1)).sum(dim=1).mean()
    torch.testing.assert_close(soft_cross_entropy(teacher, logits), expected)


@repeatable
@given(seed=st.integers(0, 2**31), rows=st.integers(1, 6), classes=st.integers(1, 5))
def test_both_losses_have_the_same_gradient(seed: int, rows: int, classes: int) -> None:
    teacher = normal(rows, classes, seed=seed).softmax(1)
    gradients = []
    for loss in (kl_divergence, soft_cross_entropy):
        logits = normal(rows, classes, seed=seed + 1).requires_grad_()
        gradients.extend(torch.autograd.grad(loss(teacher, logits), logits))
    torch.testing.assert_close(*gradients)


def test_temperature_scales_the_gradient_once() -> None:
    """Hinton's factor T² is the caller's: with it, gradients of soft losses keep their size."""
    teacher, logits = normal(4, 3, seed=0).softmax(1), normal(4, 3, seed=1).requires_grad_()
    (hot,) = torch.autograd.grad(kl_divergence(teacher, logits, 4.0), logits)
    expected = (torch.softmax(logits.detach() / 4, 1) - teacher) / 4 / 4  # 1/T, and the mean over 4 rows
    torch.testing.assert_close(hot, expected)


def test_soft_targets_of_more_axes() -> None:
    logits = normal(2, 3, 4, seed=0)
    actual = soft_targets(logits, 2.0)
    torch.testing.assert_close(actual.sum(-1), torch.ones(2, 3, dtype=torch.float64))
    torch.testing.assert_close(actual[1, 2], soft_targets(logits[1, 2], 2.0))


def test_soft_targets_limits_of_the_temperature() -> None:
    logits = torch.tensor([1.0, 2.0, 3.0])
    torch.testing.assert_close(soft_targets(logits, 1e8), torch.full((3,), 1 / 3))
    assert soft_targets(logits, 1e-3).tolist() == [0.0, 0.0, 1.0]


def test_safe_norm_of_what_underflows() -> None:
    """1e-30 squared is 0 in float32: the norm is 0, and the gradient too."""
    x = torch.full((2, 3), 1e-30, requires_grad=True)
    norm = safe_norm(x)
    norm.sum().backward()
    assert norm.tolist() == [0.0, 0.0]
    assert x.grad is not None
    assert torch.equal(x.grad, torch.zeros(2, 3))


def test_safe_norm_beside_zero_rows() -> None:
    x = torch.tensor([[3.0, 4.0], [0.0, 0.0]], requires_grad=True)
    safe_norm(x).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, torch.tensor([[0.6, 0.8], [0.0, 0.0]]))


def test_safe_norm_of_no_rows_and_no_columns() -> None:
    assert safe_norm(torch.zeros(0, 3)).shape == (0,)
    assert safe_norm(torch.zeros(2, 0)).tolist() == [0.0, 0.0]


class TestSoftTargets:
    @both_dtypes
    @pytest.mark.parametrize("shape", [(5,), (3, 5), (2, 3, 5)])
    @pytest.mark.parametrize("temperature", [0.5, 1.0, 4.0])
    def test_matches_scipy(self, dtype: torch.dtype, shape: tuple[int, ...], temperature: float) -> None:
        logits = normal(*shape, seed=1, dtype=dtype, scale=3.0)
        expected = torch.tensor(softmax(logits.double().numpy() / temperature, axis=-1), dtype=dtype)
        assert_close(soft_targets(logits, temperature), expected, dtype)

    def test_by_hand(self) -> None:
        # exp(ln 2 / 0.5) = 4 against exp(0) = 1.
        actual = soft_targets(torch.tensor([math.log(2), 0.0], dtype=torch.float64), 0.5)
        torch.testing.assert_close(actual, torch.tensor([0.8, 0.2], dtype=torch.float64))

    def test_large_logits_do_not_overflow(self) -> None:
        actual = soft_targets(torch.tensor([1e4, 0.0, -1e4]), 0.5)
        assert actual.tolist() == [1.0, 0.0, 0.0]

    @pytest.mark.parametrize("temperature", [0.0, -0.5, math.nan, math.inf, -math.inf])
    def test_bad_temperature(self, temperature: float) -> None:
        with pytest.raises(ValueError, match="temperature"):
            soft_targets(torch.zeros(2, 3), temperature)


class TestKlDivergence:
    @both_dtypes
    @pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
    def test_matches_scipy(self, dtype: torch.dtype, temperature: float) -> None:
        teacher = probabilities(7, 4, seed=1, dtype=dtype)
        logits = normal(7, 4, seed=2, dtype=dtype, scale=2.0)
        student = softmax(logits.double().numpy() / temperature, axis=-1)
        actual = kl_divergence(teacher, logits, temperature)
        assert actual.shape == ()
        # Two formulas of scipy's: entropy normalises its input, rel_entr does not.
        for expected in (
            entropy(teacher.double().numpy(), student, axis=1).mean(),
            rel_entr(teacher.double().numpy(), student).sum(axis=1).mean(),
            oracle.kl_divergence(teacher.tolist(), logits.tolist(), temperature),
        ):
            assert_close(actual, torch.tensor(expected, dtype=dtype), dtype)

    def test_by_hand(self) -> None:
        # softmax(2 ln 3, 0) = (9, 1) / 10: KL = ln(5/9) / 2 + ln(5) / 2 = ln(5 / 3). No factor T².
        teacher = torch.tensor([[0.5, 0.5]], dtype=torch.float64)
        logits = torch.tensor([[math.log(3), 0.0]], dtype=torch.float64)
        assert kl_divergence(teacher, logits, temperature=0.5).item() == pytest.approx(math.log(5 / 3))
        assert kl_divergence(teacher, logits).item() == pytest.approx(math.log(4 / 3) / 2)

    def test_mean_over_rows_not_elements(self) -> None:
        # A row of KL ln 2 and a row of KL 0: the mean over rows is ln 2 / 2 whatever the number of classes.
        for classes in (2, 8):
            teacher = torch.zeros(2, classes, dtype=torch.float64)
            teacher[:, :2] = torch.tensor([[1.0, 0.0], [0.5, 0.5]])
            logits = torch.full((2, classes), -1e4, dtype=torch.float64)
            logits[:, :2] = 0.0
            assert kl_divergence(teacher, logits).item() == pytest.approx(math.log(2) / 2)

    def test_zero_teacher_probability_counts_nothing(self) -> None:
        # The second class is impossible for both: 0 · ln 0 and 0 · ln(0 / 0) are 0, in value and in gradient.
        teacher = torch.tensor([[1.0, 0.0]])
        logits = torch.tensor([[0.0, -1e4]])
        assert kl_divergence(teacher, logits).item() == 0.0
        assert gradient_of(lambda z: kl_divergence(teacher, z), logits).tolist() == [[0.0, 0.0]]

    def test_is_zero_only_for_the_same_distribution(self) -> None:
        logits = normal(6, 5, seed=3)
        other = normal(6, 5, seed=4)
        assert kl_divergence(soft_targets(logits, 2.0), logits, 2.0).item() == pytest.approx(0.0, abs=1e-14)
        assert kl_divergence(soft_targets(logits, 2.0), other, 2.0).item() > 0.01

    def test_no_rows(self) -> None:
        assert kl_divergence(torch.zeros(0, 3), torch.zeros(0, 3)).item() == 0.0

    def test_gradient_closed_form(self) -> None:
        # d KL / d z = (softmax(z / T) - p) / (T N).
        teacher = probabilities(6, 5, seed=5)
        logits = normal(6, 5, seed=6)
        actual = gradient_of(lambda z: kl_divergence(teacher, z, 2.0), logits)
        torch.testing.assert_close(actual, (torch.softmax(logits / 2, -1) - teacher) / 12)

    @pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan, math.inf])
    def test_bad_temperature(self, temperature: float) -> None:
        with pytest.raises(ValueError, match="temperature"):
            kl_divergence(torch.full((1, 2), 0.5), torch.zeros(1, 2), temperature)

    def test_shapes_are_not_broadcast(self) -> None:
        with pytest.raises(ValueError, match="teacher"):
            kl_divergence(torch.full((1, 2), 0.5), torch.zeros(3, 2))


class TestSafeNorm:
    @both_dtypes
    @pytest.mark.parametrize("dim", [-1, 0, 1])
    def test_matches_loops(self, dtype: torch.dtype, dim: int) -> None:
        x = normal(4, 3, 5, seed=1, dtype=dtype)
        moved = x.movedim(dim, -1)
        expected = torch.empty(moved.shape[:-1], dtype=dtype)
        for i in range(expected.shape[0]):
            for k in range(expected.shape[1]):
                row = moved[i, k].tolist()
                expected[i, k] = oracle.distance(row, [0.0] * len(row))
        assert_close(safe_norm(x, dim=dim), expected, dtype)

    def test_default_is_the_last_dimension(self) -> None:
        assert safe_norm(torch.tensor([[3.0, 4.0], [0.0, 0.0]])).tolist() == [5.0, 0.0]

    @pytest.mark.parametrize("size", [1.0, 1e-12])
    def test_gradient_is_the_unit_vector_and_zero_at_zero(self, size: float) -> None:
        # Small lengths too: a constant under the root, or a clamp, would change value and gradient there.
        x = size * torch.tensor([[3.0, 4.0], [0.0, 0.0], [-4.0, 3.0]], dtype=torch.float64)
        expected = size * torch.tensor([5.0, 0.0, 5.0], dtype=torch.float64)
        torch.testing.assert_close(safe_norm(x), expected, rtol=1e-12, atol=0.0)
        unit = torch.tensor([[0.6, 0.8], [0.0, 0.0], [-0.8, 0.6]], dtype=torch.float64)
        torch.testing.assert_close(gradient_of(lambda v: safe_norm(v).sum(), x), unit, rtol=1e-12, atol=0.0)

    def test_gradcheck(self) -> None:
        x = normal(3, 4, seed=2).requires_grad_()
        assert torch.autograd.gradcheck(safe_norm, (x,))


class TestSoftLabels:
    @both_dtypes
    def test_one_hot_is_cross_entropy(self, dtype: torch.dtype) -> None:
        logits = normal(9, 4, seed=1, dtype=dtype)
        labels = random_labels(9, 4, seed=2)
        actual = soft_cross_entropy(one_hot(labels, 4).to(dtype), logits)
        assert_close(actual, cross_entropy(logits, labels), dtype)

    def test_is_kl_plus_entropy(self) -> None:
        teacher = probabilities(9, 4, seed=3)
        logits = normal(9, 4, seed=4)
        expected = kl_divergence(teacher, logits).item() + entropy(teacher.numpy(), axis=1).mean()
        assert soft_cross_entropy(teacher, logits).item() == pytest.approx(expected, rel=1e-12)

    def test_by_hand(self) -> None:
        # softmax = (3/4, 1/4): -(0.5 ln 3/4 + 0.5 ln 1/4) = ln(16 / 3) / 2.
        teacher = torch.tensor([[0.5, 0.5]], dtype=torch.float64)
        logits = torch.tensor([[math.log(3), 0.0]], dtype=torch.float64)
        assert soft_cross_entropy(teacher, logits).item() == pytest.approx(math.log(16 / 3) / 2)

    def test_shapes_are_not_broadcast(self) -> None:
        with pytest.raises(ValueError, match="batch"):
            soft_cross_entropy(torch.full((1, 2), 0.5), torch.zeros(3, 2))
