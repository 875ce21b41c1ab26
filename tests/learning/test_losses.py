"""What the losses promise beyond the cases in the methods' own tests: degenerate input, ranks, gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from flwr_kd.learning.losses import cross_entropy_soft, kl_divergence, safe_norm, soft_targets

repeatable = settings(max_examples=50, deadline=None, derandomize=True)
Loss = Callable[[Tensor, Tensor], Tensor]
losses = pytest.mark.parametrize("loss", [kl_divergence, cross_entropy_soft])


def _normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@losses
def test_no_rows_still_has_a_gradient(loss: Loss) -> None:
    logits = torch.zeros(0, 3, requires_grad=True)
    value = loss(torch.zeros(0, 3), logits)
    assert value.shape == ()
    assert value.item() == 0.0
    value.backward()
    assert logits.grad is not None
    assert logits.grad.shape == (0, 3)


@losses
@pytest.mark.parametrize("shape", [(3,), (2, 3, 4), ()], ids=str)
def test_only_rows_of_classes(loss: Loss, shape: tuple[int, ...]) -> None:
    text = rf"must both be \[N, C\], got \[{', '.join(map(str, shape))}\] and"
    with pytest.raises(ValueError, match=text):
        loss(torch.zeros(shape), torch.zeros(shape))


@losses
def test_saturated_logits_stay_finite(loss: Loss) -> None:
    logits = torch.tensor([[1e4, 0.0, -1e4], [-1e4, 1e4, 0.0]], requires_grad=True)
    value = loss(torch.tensor([[0.0, 0.5, 0.5], [1.0, 0.0, 0.0]]), logits)
    value.backward()
    assert torch.isfinite(value)
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()


@repeatable
@given(seed=st.integers(0, 2**31), rows=st.integers(1, 6), classes=st.integers(1, 5))
def test_cross_entropy_is_torchs(seed: int, rows: int, classes: int) -> None:
    teacher = _normal(rows, classes, seed=seed).softmax(1)
    logits = 5 * _normal(rows, classes, seed=seed + 1)
    torch.testing.assert_close(cross_entropy_soft(teacher, logits), F.cross_entropy(logits, teacher))


@repeatable
@given(seed=st.integers(0, 2**31), rows=st.integers(1, 6), classes=st.integers(1, 5))
def test_both_losses_have_the_same_gradient(seed: int, rows: int, classes: int) -> None:
    teacher = _normal(rows, classes, seed=seed).softmax(1)
    gradients = []
    for loss in (kl_divergence, cross_entropy_soft):
        logits = _normal(rows, classes, seed=seed + 1).requires_grad_()
        gradients.extend(torch.autograd.grad(loss(teacher, logits), logits))
    torch.testing.assert_close(*gradients)


def test_temperature_scales_the_gradient_once() -> None:
    """Hinton's factor T² is the caller's: with it, gradients of soft losses keep their size."""
    teacher, logits = _normal(4, 3, seed=0).softmax(1), _normal(4, 3, seed=1).requires_grad_()
    (hot,) = torch.autograd.grad(kl_divergence(teacher, logits, 4.0), logits)
    expected = (torch.softmax(logits.detach() / 4, 1) - teacher) / 4 / 4  # 1/T, and the mean over 4 rows
    torch.testing.assert_close(hot, expected)


def test_soft_targets_of_more_axes() -> None:
    logits = _normal(2, 3, 4, seed=0)
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
