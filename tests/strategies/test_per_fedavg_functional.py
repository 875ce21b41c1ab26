"""Per-FedAvg's gradients against autograd's exact second order, and its draws."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from tensors import both_dtypes, generator, normal
from torch import Tensor

from flwr_kd.strategies.per_fedavg import draw_rows, meta_gradient
from flwr_kd.strategies.per_fedavg.functional import with_gradient

ALPHA = 0.1


class Quadratics:
    """Losses 1/2 wᵀ A w - bᵀ w, one per draw, over a vector and a matrix that are one w."""

    def __init__(self, *seeds: int, dtype: torch.dtype = torch.float64) -> None:
        roots = [normal(6, 6, seed=seed) for seed in seeds]
        self.a = [(root @ root.T / 6).to(dtype) for root in roots]
        self.b = [normal(6, seed=100 + seed, dtype=dtype) for seed in seeds]
        self.called: list[int] = []

    def loss(self, w: Tensor, draw: int) -> Tensor:
        return 0.5 * w @ self.a[draw] @ w - self.b[draw] @ w

    def gradient(self, weights: Sequence[Tensor], draw: int) -> list[Tensor]:
        self.called.append(draw)
        slope = self.a[draw] @ torch.cat([part.flatten() for part in weights]) - self.b[draw]
        return [slope[:2], slope[2:].reshape(2, 2)]


def start(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [normal(2, seed=7, dtype=dtype), normal(2, 2, seed=8, dtype=dtype)]


def flat(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat([part.flatten() for part in parts])


@both_dtypes
def test_hessian_free_is_autograds_second_order_on_a_quadratic(dtype: torch.dtype) -> None:
    """Where B3 is B1, as in the derivative of f(w - α ∇f(w; B1); B2)."""
    losses = Quadratics(1, 2, 1, dtype=dtype)
    weights = start(dtype)
    found = flat(meta_gradient(losses.gradient, weights, alpha=ALPHA, delta=1e-3))
    w = flat(weights).clone().requires_grad_()
    (inner,) = torch.autograd.grad(losses.loss(w, 0), w, create_graph=True)
    (exact,) = torch.autograd.grad(losses.loss(w - ALPHA * inner, 1), w)
    # The difference of two gradients keeps few of float32's digits.
    tolerance = 1e-10 if dtype == torch.float64 else 1e-3
    torch.testing.assert_close(found, exact, rtol=tolerance, atol=tolerance)
    first = flat(meta_gradient(losses.gradient, weights, alpha=ALPHA))
    torch.testing.assert_close(first, losses.a[1] @ (w.detach() - ALPHA * inner.detach()) - losses.b[1])
    assert (first - exact).norm() > 0.05 * exact.norm()
    torch.testing.assert_close(first - ALPHA * losses.a[0] @ first, exact)


def test_the_three_draws_have_their_own_places() -> None:
    losses = Quadratics(1, 2, 3)
    w = flat(start())
    g = losses.a[1] @ (w - ALPHA * (losses.a[0] @ w - losses.b[0])) - losses.b[1]
    found = flat(meta_gradient(losses.gradient, start(), alpha=ALPHA, delta=0.5))
    torch.testing.assert_close(found, g - ALPHA * losses.a[2] @ g)
    assert losses.called == [0, 1, 2, 2]
    losses.called.clear()
    meta_gradient(losses.gradient, start(), alpha=ALPHA)
    assert losses.called == [0, 1]


def test_the_difference_is_centred_at_w() -> None:
    """Of a cubic loss the error is of the order δ²; a difference at w', or to one side, would be off by δ or α."""
    w = [torch.tensor([0.7, -0.4], dtype=torch.float64)]

    def gradient(weights: Sequence[Tensor], draw: int) -> list[Tensor]:
        return [weights[0] ** 3 + (draw + 1) * weights[0]]

    g = meta_gradient(gradient, w, alpha=ALPHA)[0]
    exact = g - ALPHA * (3 * w[0] ** 2 + 3) * g
    errors = [
        (meta_gradient(gradient, w, alpha=ALPHA, delta=delta)[0] - exact).norm().item()
        for delta in (0.1, 0.01)
    ]
    assert errors[0] < 1e-2
    assert errors[0] / errors[1] == pytest.approx(100, rel=1e-3)


def test_weights_are_not_changed() -> None:
    weights = start()
    meta_gradient(Quadratics(1, 2, 3).gradient, weights, alpha=ALPHA, delta=0.1)
    assert all(torch.equal(a, b) for a, b in zip(weights, start(), strict=True))


@pytest.mark.parametrize(
    ("alpha", "delta"), [(-0.1, None), (math.nan, None), (0.1, 0.0), (0.1, -1.0), (0.1, math.nan)]
)
def test_rates_out_of_range(alpha: float, delta: float | None) -> None:
    with pytest.raises(ValueError, match="alpha must be at least 0 and delta greater than 0"):
        meta_gradient(Quadratics(1, 2, 3).gradient, start(), alpha=alpha, delta=delta)


@pytest.mark.parametrize("count", [12, 13, 40])
def test_the_three_batches_of_a_step_are_distinct(count: int) -> None:
    rows = draw_rows(count, 4, 200, generator(0))
    assert rows.shape == (200, 3, 4)
    assert all(len(set(step.flatten().tolist())) == 12 for step in rows)
    assert set(rows.flatten().tolist()) == set(range(count))
    # Drawn anew for each step, and each sample as often in each place.
    assert len({tuple(step.flatten().tolist()) for step in rows}) == 200
    times = torch.stack([torch.bincount(rows[:, i].flatten(), minlength=count) for i in range(3)]).double()
    assert (times / times.mean() - 1).abs().max() < 0.9


@pytest.mark.parametrize("count", [1, 2, 5, 11])
def test_a_client_smaller_than_three_batches_draws_with_replacement(count: int) -> None:
    rows = draw_rows(count, 4, 100, generator(0))
    assert rows.shape == (100, 3, 4)
    assert set(rows.flatten().tolist()) == set(range(count))


def test_the_seed_decides_what_is_drawn() -> None:
    first, again, other = (draw_rows(40, 4, 5, generator(seed)) for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_a_gradient_that_is_not_finite_makes_the_loss_not_finite() -> None:
    w = torch.ones(2, requires_grad=True)
    assert torch.isnan(with_gradient(torch.tensor(1.0), [w], [torch.tensor([torch.inf, 0.0])]))
