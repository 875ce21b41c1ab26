from __future__ import annotations

import copy
import math

import knowledge as oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensors import both_dtypes, normal
from torch import nn

from flwr_kd.strategies.fedprox import proximal_term

repeatable = settings(max_examples=40, deadline=None, derandomize=True)


def test_by_hand() -> None:
    # 0.1 / 2 · (1 + 4 + 4) = 0.45; without the square 0.15, without the half 0.9.
    parameters = [torch.tensor([1.0, 2.0]), torch.tensor(3.0)]
    reference = [torch.tensor([0.0, 0.0]), torch.tensor(1.0)]
    term = proximal_term(parameters, reference, 0.1)
    assert term.shape == ()
    assert term.item() == pytest.approx(0.45)


@both_dtypes
@repeatable
@given(
    seed=st.integers(0, 2**32 - 1),
    shapes=st.lists(st.lists(st.integers(1, 4), max_size=4), min_size=1, max_size=5),
    mu=st.sampled_from([0.0, 0.01, 0.5, 3.0]),
)
def test_matches_oracle(dtype: torch.dtype, seed: int, shapes: list[list[int]], mu: float) -> None:
    parameters = [normal(*shape, seed=seed + i, dtype=dtype) for i, shape in enumerate(shapes)]
    reference = [normal(*shape, seed=seed + 50 + i, dtype=dtype) for i, shape in enumerate(shapes)]
    leaves = [parameter.clone().requires_grad_() for parameter in parameters]
    term = proximal_term(leaves, reference, mu)
    assert term.dtype == dtype
    expected = oracle.proximal_term(
        [p.flatten().tolist() for p in parameters], [r.flatten().tolist() for r in reference], mu
    )
    rel = 1e-12 if dtype == torch.float64 else 1e-5
    assert term.item() == pytest.approx(expected, rel=rel, abs=1e-15)

    # d / dw = μ (w - w_t), for every parameter.
    total = term + 0.0 * sum(leaf.sum() for leaf in leaves)
    for gradient, w, w_t in zip(torch.autograd.grad(total, leaves), parameters, reference, strict=True):
        torch.testing.assert_close(gradient, mu * (w - w_t))


def test_gradient_at_the_reference_is_zero() -> None:
    # The first batch of a round: the norm without the square would give NaN here.
    w = normal(3, 2, seed=1).requires_grad_()
    term = proximal_term([w], [w.detach().clone()], 1.0)
    assert term.item() == 0.0
    (gradient,) = torch.autograd.grad(term, w)
    assert not gradient.any()


def test_two_sgd_steps_in_closed_form() -> None:
    """The second batch is pulled back to the global weights; a used-up reference would not do that."""
    mu, rate = 0.8, 0.1
    xs = [normal(4, 3, seed=1), normal(4, 3, seed=2)]
    ys = [normal(4, seed=3), normal(4, seed=4)]
    start = normal(1, 3, seed=5)
    model = nn.Linear(3, 1, bias=False, dtype=torch.float64)
    with torch.no_grad():
        model.weight.copy_(start)
    reference = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)

    path, pulls = [], []
    for x, y in zip(xs, ys, strict=True):
        term = proximal_term(model.parameters(), reference, mu)
        (pull,) = torch.autograd.grad(term, model.weight, retain_graph=True)
        pulls.append(pull)
        optimizer.zero_grad()
        loss = 0.5 * (model(x).squeeze(1) - y).square().mean() + term
        loss.backward()
        optimizer.step()
        path.append(model.weight.detach().clone())

    batches = [(x.tolist(), y.tolist()) for x, y in zip(xs, ys, strict=True)]
    expected = oracle.proximal_sgd(start[0].tolist(), batches, mu=mu, learning_rate=rate)
    for step in range(2):
        assert path[step][0].tolist() == pytest.approx(expected[step], rel=1e-12)
    assert not pulls[0].any()
    torch.testing.assert_close(pulls[1], mu * (path[0] - start))
    assert pulls[1].abs().min() > 1e-3

    # In one formula: with A = xᵀx / n, b = xᵀy / n, w_2 = w_1 - η (A_2 w_1 - b_2 + μ (w_1 - w_0)).
    a = [x.T @ x / 4 for x in xs]
    b = [x.T @ y / 4 for x, y in zip(xs, ys, strict=True)]
    w_0 = start[0]
    w_1 = w_0 - rate * (a[0] @ w_0 - b[0])
    w_2 = w_1 - rate * (a[1] @ w_1 - b[1] + mu * (w_1 - w_0))
    torch.testing.assert_close(path[1][0], w_2)
    without = oracle.proximal_sgd(start[0].tolist(), batches, mu=0.0, learning_rate=rate)
    assert path[1][0].tolist() != pytest.approx(without[1], abs=1e-4)


def test_an_exhausted_generator_is_refused() -> None:
    model = nn.Linear(2, 1)
    reference = (parameter.detach() + 1.0 for parameter in model.parameters())
    # Three elements, each one away: 0.5 · 3.
    assert proximal_term(model.parameters(), reference, 1.0).item() == pytest.approx(1.5)
    with pytest.raises(ValueError, match="reference"):
        proximal_term(model.parameters(), reference, 1.0)


def test_nothing_to_pull_is_refused() -> None:
    with pytest.raises(ValueError, match="parameters"):
        proximal_term([], [], 1.0)


@pytest.mark.parametrize("missing", ["parameters", "reference"])
def test_lengths_must_agree(missing: str) -> None:
    tensors = [torch.ones(2), torch.ones(3)]
    arguments = {"parameters": tensors, "reference": tensors} | {missing: tensors[:1]}
    with pytest.raises(ValueError, match="reference"):
        proximal_term(arguments["parameters"], arguments["reference"], 1.0)


@pytest.mark.parametrize("shape", [(1,), (), (3, 3), (3, 1)])
def test_shapes_are_not_broadcast(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"shape|reference"):
        proximal_term([torch.ones(3)], [torch.zeros(shape)], 1.0)


@pytest.mark.parametrize("mu", [-0.1, math.nan, math.inf])
def test_bad_mu(mu: float) -> None:
    with pytest.raises(ValueError, match="mu"):
        proximal_term([torch.ones(3)], [torch.zeros(3)], mu)


def test_buffers_take_no_part() -> None:
    norm = nn.BatchNorm1d(4)
    model = nn.Sequential(nn.Linear(3, 4), norm)
    reference = copy.deepcopy(model)
    model.train()
    model(normal(8, 3, seed=1, dtype=torch.float32))
    assert norm.running_mean is not None
    assert norm.running_mean.abs().max() > 0
    assert proximal_term(model.parameters(), reference.parameters(), 1.0).item() == 0.0
    with torch.no_grad():
        norm.weight.add_(2.0)
    # Four weights of the normalisation, each two away: 0.5 · 16.
    assert proximal_term(model.parameters(), reference.parameters(), 1.0).item() == pytest.approx(8.0)


def test_arguments_are_not_changed() -> None:
    w, w_t = normal(3, seed=1), normal(3, seed=2)
    before = w.clone(), w_t.clone()
    proximal_term([w], [w_t], 1.0)
    assert torch.equal(w, before[0])
    assert torch.equal(w_t, before[1])
