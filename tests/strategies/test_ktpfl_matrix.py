"""KT-pFL's coefficient matrix: simplex, steps, descent, and changing participants, against the oracle."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import coefficients as oracle
import numpy as np
import pytest
import torch
from distributions import (
    REDUCTIONS,
    distributions,
    problem,
    repeatable,
    same,
    seeds,
    sizes,
    sparse,
    tensor,
    tensors,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flwr_kd.strategies.ktpfl.functional import (
    NORMALIZATIONS,
    coefficient_gradient,
    cosine_coefficients,
    extend,
    knowledge_loss,
    normalize_rows,
    of_participants,
    personal_targets,
    project_simplex,
    step,
    with_participants,
)


class TestSimplex:
    @repeatable
    @given(st.integers(1, 6), st.sampled_from([0.01, 0.3, 1.0, 5.0, 1e3]), seeds)
    def test_against_all_supports(self, size: int, scale: float, seed: int) -> None:
        rows = np.random.default_rng(seed).normal(scale=scale, size=(3, size))
        actual = project_simplex(tensor(rows))
        same(actual, [oracle.project_simplex(row) for row in rows], atol=1e-12 * max(1, scale))
        assert (actual >= 0).all()
        same(actual.sum(dim=-1), 1.0)

    @settings(max_examples=25, deadline=None, derandomize=True)
    @given(st.integers(1, 12), st.sampled_from([0.05, 0.5, 2.0]), seeds)
    def test_against_a_quadratic_program(self, size: int, scale: float, seed: int) -> None:
        row = np.random.default_rng(seed).normal(1 / size, scale, size=size)
        same(project_simplex(tensor([row]))[0], oracle.project_by_program(row), atol=2e-5)

    @settings(max_examples=20, deadline=None, derandomize=True)
    @given(st.sampled_from([0.1, 0.5, 2.0]), seeds)
    def test_against_a_grid(self, scale: float, seed: int) -> None:
        """No point of a grid over the triangle is nearer, and the nearest of them is near."""
        row = np.random.default_rng(seed).normal(0.3, scale, size=3)
        actual = project_simplex(tensor([row]))[0].numpy()
        points = np.array(list(oracle.grid(200)))
        distances = ((points - row) ** 2).sum(axis=1)
        assert ((actual - row) ** 2).sum() <= distances.min() + 1e-12
        assert np.abs(points[distances.argmin()] - actual).max() < 0.01

    @pytest.mark.parametrize(("size", "dtype"), [(100, torch.float64), (1000, torch.float32)])
    def test_long_rows(self, size: int, dtype: torch.dtype) -> None:
        rows = np.random.default_rng(0).normal(1 / size, 0.1, size=(5, size))
        actual = project_simplex(tensor(rows, dtype))
        assert actual.dtype == dtype
        atol = 1e-10 if dtype == torch.float64 else 1e-5
        same(actual, [oracle.project_by_root(row) for row in rows], atol=atol)
        same(actual.double().sum(dim=-1), 1.0, atol=atol)
        assert (actual >= 0).all()

    @repeatable
    @given(st.integers(1, 6), seeds)
    def test_distributions_stay(self, size: int, seed: int) -> None:
        rows = distributions(np.random.default_rng(seed), 4, size)
        rows[0] = np.eye(size)[0]
        same(project_simplex(tensor(rows)), rows)

    @pytest.mark.parametrize("value", [-1e6, -2.0, 0.0, 0.7, 1e6])
    def test_ties(self, value: float) -> None:
        same(project_simplex(tensor([[value] * 4])), 0.25)
        same(project_simplex(tensor([[value, value - 9, value]])), [[0.5, 0, 0.5]])

    @pytest.mark.parametrize("shift", [-1e6, 1e6])
    def test_a_shift_costs_no_digits(self, shift: float) -> None:
        """Single precision holds these rows, not their sums."""
        rows = np.array([[0.0, -0.5, -0.25, 0.125, -3.0], [0.25, 0.5, 0.25, 0.0, 0.0]])
        actual = project_simplex(tensor(rows + shift, torch.float32))
        same(actual, [oracle.project_simplex(row) for row in rows], atol=1e-6)

    def test_any_number_of_dimensions(self) -> None:
        rows = np.random.default_rng(0).normal(size=(2, 3, 4))
        actual = project_simplex(tensor(rows))
        same(actual, [[oracle.project_simplex(row) for row in block] for block in rows])
        same(project_simplex(tensor(rows[0, 0])), oracle.project_simplex(rows[0, 0]))
        assert project_simplex(torch.zeros(0, 3)).shape == (0, 3)

    def test_the_argument_stays(self) -> None:
        rows = tensor([[3.0, 1.0], [0.0, 9.0]])
        project_simplex(rows)
        assert rows.tolist() == [[3.0, 1.0], [0.0, 9.0]]


class TestStep:
    @repeatable
    @given(sizes, st.sampled_from(NORMALIZATIONS), st.sampled_from([0.0, 0.01, 1.0]), seeds)
    def test_values(self, clients: int, how: str, rate: float, seed: int) -> None:
        rng = np.random.default_rng(seed)
        c, slope = distributions(rng, clients, clients), rng.normal(size=(clients, clients))
        same(step(tensor(c), tensor(slope), rate, how), oracle.step(c, slope, rate, how))
        same(normalize_rows(tensor(c - slope), how), [oracle.normalize(row, how) for row in c - slope])

    @pytest.mark.parametrize("how", NORMALIZATIONS)
    def test_large_numbers(self, how: str) -> None:
        rows = np.array([[1e4, 0.0, -1e4], [-1e4, -1e4, -1e4], [1e4, 1e4, 0.0]])
        actual = normalize_rows(tensor(rows), how)
        assert torch.isfinite(actual).all()
        same(actual, [oracle.normalize(row, how) for row in rows])

    @pytest.mark.parametrize("how", NORMALIZATIONS)
    @pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
    def test_rows_without_a_finite_gradient_stay(self, how: str, bad: float) -> None:
        c = np.array([[0.7, 0.2, 0.3], [0.5, 0.3, 0.2], [0.2, 0.2, 0.6]])
        slope = np.random.default_rng(0).normal(size=(3, 3))
        slope[0, 1] = bad
        actual = step(tensor(c), tensor(slope), 0.1, how)
        assert torch.equal(actual[0], tensor(c[0]))
        same(actual, oracle.step(c, slope, 0.1, how))
        assert not torch.equal(actual[1:], tensor(c[1:]))
        slope[:] = bad
        assert torch.equal(step(tensor(c), tensor(slope), 0.1, how), tensor(c))

    @pytest.mark.parametrize("how", NORMALIZATIONS)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_steps_that_are_not_finite(self, how: str, dtype: torch.dtype) -> None:
        """The gradient is finite, what it is multiplied to is not."""
        slope = torch.tensor([[torch.finfo(dtype).max, 0.0], [0.0, 0.0]], dtype=dtype)
        for sign in (-1, 1):
            assert torch.isfinite(step(torch.eye(2, dtype=dtype), sign * slope, 1e3, how)).all()

    def test_arguments_stay(self) -> None:
        c, slope = tensor([[0.5, 0.5], [1, 0]]), tensor([[1.0, 0.0], [np.nan, 0.0]])
        for how in NORMALIZATIONS:
            step(c, slope, 0.5, how)
        assert c.tolist() == [[0.5, 0.5], [1, 0]]
        assert slope[0].tolist() == [1.0, 0.0]

    @pytest.mark.parametrize("how", NORMALIZATIONS)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_dtype_stays(self, how: str, dtype: torch.dtype) -> None:
        actual = step(torch.eye(3, dtype=dtype), torch.ones(3, 3, dtype=dtype), 0.1, how)
        assert actual.dtype == dtype
        assert normalize_rows(torch.eye(3, dtype=dtype), how).dtype == dtype

    @pytest.mark.parametrize("how", ["", "Simplex", "sparsemax"])
    def test_unknown_normalisations(self, how: str) -> None:
        with pytest.raises(ValueError, match="simplex"):
            normalize_rows(torch.eye(2), how)
        with pytest.raises(ValueError, match="simplex"):
            step(torch.eye(2), torch.eye(2), 0.1, how)


def descend(
    c: Tensor, s: Tensor, shares: Tensor, rate: float, steps: int, how: str = "simplex", **options: Any
) -> Tensor:
    for _ in range(steps):
        c = step(c, coefficient_gradient(c, s, shares, **options), rate, how)
    return c


class TestDescent:
    @pytest.mark.parametrize("how", NORMALIZATIONS)
    @pytest.mark.parametrize("reduction", REDUCTIONS)
    def test_several_steps(self, how: str, reduction: str) -> None:
        c, s, p = problem(5, 4)
        options: Any = {"weight": 2.0, "rho": 0.1, "reduction": reduction}
        actual = descend(tensor(c), tensor(s), tensor(p), 0.03, 6, how, **options)
        same(actual, oracle.descend(c, s, p, 0.03, 6, how, **options))

    def test_the_loss_falls(self) -> None:
        c, s, p = tensors(6, 5)
        options: Any = {"rho": 0.01, "reduction": "mean"}
        losses = [knowledge_loss(c, s, p, **options).item()]
        for _ in range(10):
            c = descend(c, s, p, 0.1, 1, **options)
            losses.append(knowledge_loss(c, s, p, **options).item())
        assert all(after < before for before, after in pairwise(losses))

    @repeatable
    @given(st.integers(1, 6), st.sampled_from(["simplex", "none"]), st.sampled_from(REDUCTIONS), seeds)
    def test_huge_rho_is_uniform(self, clients: int, how: str, reduction: str, seed: int) -> None:
        """At the rate 1/(2 ρ) one step from anywhere forgets where it was."""
        c, s, p = problem(seed, clients)
        c = c + np.random.default_rng(seed).normal(size=c.shape) ** 2
        rho = 1e9
        slope = coefficient_gradient(tensor(c), tensor(s), tensor(p), rho=rho, reduction=reduction)
        same(step(tensor(c), slope, 0.5 / rho, how), 1 / clients, atol=1e-6)

    @pytest.mark.parametrize("twins", [(0, 1), (1, 3)])
    def test_twins_share_evenly(self, twins: tuple[int, int]) -> None:
        """ρ = 0 and two clients that predict the same: each learns from both, and from hardly anyone else."""
        clients = 5
        rng = np.random.default_rng(7)
        s = distributions(rng, clients, 20, 4, scale=2.0)
        s[twins[1]] = s[twins[0]]
        c = descend(
            torch.full((clients, clients), 1 / clients, dtype=torch.float64), tensor(s),
            torch.full((clients,), 1 / clients, dtype=torch.float64), 0.3, 800, reduction="mean",
        ).numpy()  # fmt: skip
        for n in twins:
            np.testing.assert_allclose(c[n, twins[0]], c[n, twins[1]], rtol=0, atol=1e-9)
            assert c[n, list(twins)].sum() > 0.99
        alone = [n for n in range(clients) if n not in twins]
        assert all(c[n, n] > 0.95 for n in alone)
        for n in alone:
            np.testing.assert_allclose(c[n, twins[0]], c[n, twins[1]], rtol=0, atol=1e-9)

    @repeatable
    @given(st.integers(2, 6), st.sampled_from(NORMALIZATIONS), seeds)
    def test_the_order_of_clients(self, clients: int, how: str, seed: int) -> None:
        c, s, p = tensors(seed, clients)
        order = torch.from_numpy(np.random.default_rng(seed).permutation(clients))
        options: Any = {"rho": 0.2, "reduction": "mean"}
        actual = descend(c[order][:, order], s[order], p[order], 0.1, 3, how, **options)
        same(actual, descend(c, s, p, 0.1, 3, how, **options)[order][:, order].numpy())
        moved = knowledge_loss(c[order][:, order], s[order], p[order], **options)
        same(moved, knowledge_loss(c, s, p, **options).numpy())
        same(personal_targets(c[order][:, order], s[order]), personal_targets(c, s)[order].numpy(), rtol=1e-9)
        for k in (None, 2):
            cosines = cosine_coefficients(s[order], k)
            same(cosines, cosine_coefficients(s, k)[order][:, order].numpy())

    @pytest.mark.parametrize(("how", "steps"), [("simplex", 10), ("softmax", 10), ("none", 2)])
    @pytest.mark.parametrize(("reduction", "rate"), [("sum", 0.003), ("mean", 0.18)])
    @pytest.mark.parametrize("rho", [0.0, 0.1])
    def test_groups_find_each_other(
        self, how: str, steps: int, reduction: str, rate: float, rho: float
    ) -> None:
        """Two groups with other frequent classes, as in the paper's non-IID case 1: blocks in the matrix."""
        groups = np.array([0, 1, 1, 0, 0, 1, 0, 1])
        rng = np.random.default_rng(8)
        frequent = np.array([[1.0] * 5 + [0.0] * 5, [0.0] * 5 + [1.0] * 5])
        truth = rng.integers(10, size=60)
        logits = 2 * np.eye(10)[truth] + 1.5 * frequent[groups][:, None] + rng.normal(size=(8, 60, 10))
        e = np.exp(logits)
        s, p = tensor(e / e.sum(axis=-1, keepdims=True)), torch.full((8,), 1 / 8, dtype=torch.float64)
        c = torch.full((8, 8), 1 / 8, dtype=torch.float64)
        c = descend(c, s, p, rate, steps, how, rho=rho, reduction=reduction)
        mates = groups[:, None] == groups[None]
        actual = c.numpy()
        for n in range(8):
            others = np.arange(8) != n
            assert actual[n, mates[n] & others].min() > actual[n, ~mates[n]].max()
            assert actual[n, n] == actual[n].max()
        if how == "simplex":
            assert actual[mates].mean() > 1.5 * actual[~mates].mean()
        similar = cosine_coefficients(s).numpy()
        assert similar[mates].min() > similar[~mates].max()
        nearest = cosine_coefficients(s, 4).numpy()
        assert (nearest[mates] > 0).all()
        assert (nearest[~mates] == 0).all()

    def test_the_bare_equation_loses_mass(self) -> None:
        """With nothing to hold a row's sum and ρ = 0, Σ t log t/s is least at t = s/e: why rows are projected."""
        s, p = tensors(0, 3, samples=30)[1], torch.ones(3, dtype=torch.float64)
        c = torch.full((3, 3), 1 / 3, dtype=torch.float64)
        sums = [c.sum(dim=1)]
        for _ in range(4):
            sums.append((c := descend(c, s, p, 0.1, 200, "none", reduction="mean")).sum(dim=1))
        assert all((after < before + 1e-9).all() for before, after in pairwise(sums))
        assert (c.sum(dim=1) < 0.45).all()
        alone = descend(tensor([[1.0]]), s[:1], p[:1], 0.1, 200, "none", reduction="mean")
        same(alone, 1 / np.e, atol=1e-6)


def attending(seed: int, clients: int) -> list[int]:
    rng = np.random.default_rng([seed, 1])
    return [int(n) for n in rng.permutation(clients)[: rng.integers(1, clients + 1)]]


class TestParticipation:
    @repeatable
    @given(st.integers(1, 6), st.booleans(), seeds)
    def test_of_participants(self, clients: int, free: bool, seed: int) -> None:
        c, rows = sparse(seed, clients, free), attending(seed, clients)
        actual = of_participants(tensor(c), torch.tensor(rows))
        assert actual.shape == (len(rows), len(rows))
        same(actual, oracle.of_participants(c, rows))
        if not free:
            same(actual.sum(dim=1), 1.0)
            assert (actual >= 0).all()

    @repeatable
    @given(st.integers(1, 6), st.booleans(), seeds)
    def test_there_and_back(self, clients: int, free: bool, seed: int) -> None:
        c, rows = tensor(sparse(seed, clients, free)), torch.tensor(attending(seed, clients))
        same(with_participants(c, rows, of_participants(c, rows)), c.numpy(), atol=1e-14)

    @repeatable
    @given(st.integers(1, 6), seeds)
    def test_with_participants(self, clients: int, seed: int) -> None:
        c, rows = sparse(seed, clients), attending(seed, clients)
        weights = distributions(np.random.default_rng([seed, 2]), len(rows), len(rows))
        actual = with_participants(tensor(c), torch.tensor(rows), tensor(weights)).numpy()
        np.testing.assert_allclose(actual, oracle.with_participants(c, rows, weights), rtol=1e-12, atol=1e-14)
        np.testing.assert_allclose(actual.sum(axis=1), 1.0, rtol=0, atol=1e-12)
        away = [n for n in range(clients) if n not in rows]
        assert np.array_equal(actual[away], c[away])
        assert np.array_equal(actual[:, away], c[:, away])

    @repeatable
    @given(st.integers(1, 6), seeds)
    def test_all_present_is_the_bare_step(self, clients: int, seed: int) -> None:
        """Without normalisation rows that no longer sum to what they did stay as they are."""
        c = sparse(seed, clients, free=True)
        order = np.random.default_rng([seed, 3]).permutation(clients)
        rows = torch.from_numpy(order)
        same(of_participants(tensor(c), rows), c[order][:, order], atol=1e-13)
        moved = tensor(c * np.random.default_rng([seed, 4]).uniform(0.5, 2.0, size=c.shape))
        same(with_participants(tensor(c), rows, moved[rows][:, rows]), moved.numpy(), atol=1e-13)

    @repeatable
    @given(st.integers(2, 6), seeds)
    def test_the_order_of_participants(self, clients: int, seed: int) -> None:
        c, rows = tensor(sparse(seed, clients)), torch.tensor(attending(seed, clients))
        order = torch.from_numpy(np.random.default_rng(seed).permutation(len(rows)))
        actual = of_participants(c, rows[order])
        same(actual, of_participants(c, rows)[order][:, order].numpy())
        weights = tensor(distributions(np.random.default_rng(seed), len(rows), len(rows)))
        moved = with_participants(c, rows[order], weights[order][:, order])
        same(moved, with_participants(c, rows, weights).numpy())

    @pytest.mark.parametrize("tiny", [0.0, 1e-13, 1e-12])
    def test_rows_without_weight_on_those_present(self, tiny: float) -> None:
        c = np.array([[0.5, 0.25, 0.25], [1 - tiny, tiny, 0], [0.2, 0.2, 0.6]])
        rows = [1, 2]
        actual = of_participants(tensor(c), torch.tensor(rows))
        same(actual, [[0.5, 0.5], [0.25, 0.75]])
        weights = tensor([[0.9, 0.1], [0.5, 0.5]])
        moved = with_participants(tensor(c), torch.tensor(rows), weights).numpy()
        assert np.array_equal(moved[:2], c[:2])
        np.testing.assert_allclose(moved[2], [0.2, 0.4, 0.4])

    @pytest.mark.parametrize("little", [1e-9, 1e-11])
    def test_a_little_weight_counts(self, little: float) -> None:
        c = tensor([[0.2 * little, 0.8 * little, 1 - little], [0, 1, 0], [0, 0, 1]])
        same(of_participants(c, torch.tensor([0, 1])), [[0.2, 0.8], [0, 1]], atol=1e-9)
        moved = with_participants(c, torch.tensor([0, 1]), tensor([[0.5, 0.5], [0, 1]]))
        same(moved[0, :2], [little / 2, little / 2], atol=1e-16)

    @pytest.mark.parametrize(
        "row",
        [
            [0.0, 0.0, 0.0], [-1.0, 0.5, 0.5], [0.5, 0.5, -1.0], [0.4, 0.4, -2.0], [1.0, -0.5, -0.5],
            [-0.3, -0.2, 1.5],
        ],
    )  # fmt: skip
    def test_rows_without_a_sum_above_0(self, row: list[float]) -> None:
        """Rows with weights below 0, which normalize=none allows."""
        c = np.array([row, [0.2, 0.6, 0.2], [0.1, 0.1, 0.8]])
        for rows in ([0, 1], [2, 0], [1, 2, 0], [0]):
            actual = of_participants(tensor(c), torch.tensor(rows))
            assert torch.isfinite(actual).all()
            expected = oracle.of_participants(c, rows)
            same(actual, expected)
            weights = np.full((len(rows), len(rows)), 1 / len(rows))
            moved = with_participants(tensor(c), torch.tensor(rows), tensor(weights))
            same(moved, oracle.with_participants(c, rows, weights))
            same(with_participants(tensor(c), torch.tensor(rows), actual), c)

    def test_a_negative_weight_beside_mass(self) -> None:
        c = np.array([[0.8, -0.2, 0.6], [0.2, 0.6, 0.2], [0.1, 0.1, 0.8]])
        same(of_participants(tensor(c), torch.tensor([0, 1])), oracle.of_participants(c, [0, 1]))
        same(of_participants(tensor(c), torch.tensor([0, 1]))[0], [1.6, -0.4])

    def test_one_alone_changes_nothing(self) -> None:
        c = tensor(sparse(0, 4))
        rows = torch.tensor([2])
        same(of_participants(c, rows), [[1.0]])
        same(with_participants(c, rows, tensor([[1.0]])), c.numpy())

    def test_nobody(self) -> None:
        c, none = tensor(sparse(0, 3)), torch.zeros(0, dtype=torch.int64)
        assert of_participants(c, none).shape == (0, 0)
        assert torch.equal(with_participants(c, none, torch.zeros(0, 0, dtype=torch.float64)), c)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_arguments_and_dtype_stay(self, dtype: torch.dtype) -> None:
        c, rows = tensor(sparse(1, 4), dtype), torch.tensor([3, 1])
        weights = tensor([[1.0, 0.0], [0.0, 1.0]], dtype)
        before = c.clone()
        assert of_participants(c, rows).dtype == dtype
        actual = with_participants(c, rows, weights)
        assert actual.dtype == dtype
        assert extend(c, 2).dtype == dtype
        extend(c, 0).add_(1)
        actual.add_(1)
        with_participants(c, rows[:0], weights[:0, :0]).add_(1)
        assert torch.equal(c, before)
        assert weights.tolist() == [[1, 0], [0, 1]]

    @repeatable
    @given(st.integers(0, 5), st.integers(0, 4), st.booleans(), seeds)
    def test_extend(self, clients: int, more: int, free: bool, seed: int) -> None:
        c = sparse(seed, clients, free) if clients else np.zeros((0, 0))
        actual = extend(tensor(c), more)
        assert actual.shape == (clients + more, clients + more)
        same(actual, oracle.extend(c, more))
        same(actual[:clients].sum(dim=1), c.sum(axis=1))
        if clients + more:
            same(actual[clients:], 1 / (clients + more))

    def test_extended_uniform_is_uniform(self) -> None:
        same(extend(torch.full((3, 3), 1 / 3, dtype=torch.float64), 2), 0.2)
        same(extend(torch.zeros(0, 0, dtype=torch.float64), 4), 0.25)

    @repeatable
    @given(st.integers(1, 4), st.integers(0, 3), st.integers(0, 3), seeds)
    def test_extending_twice_is_extending_once(self, clients: int, a: int, b: int, seed: int) -> None:
        c = tensor(sparse(seed, clients))
        same(extend(extend(c, a), b)[:clients], extend(c, a + b)[:clients].numpy())

    def test_rounds_with_few(self) -> None:
        """A run with three of five per round, as the oracle does it; a sixth client comes later."""
        rng = np.random.default_rng(9)
        c, expected = torch.full((5, 5), 0.2, dtype=torch.float64), np.full((5, 5), 0.2)
        for number in range(8):
            if number == 4:
                c, expected = extend(c, 1), oracle.extend(expected, 1)
            rows = [int(n) for n in rng.permutation(len(expected))[:3]]
            s, p = distributions(rng, 3, 6, 4, scale=2.0), rng.dirichlet(np.ones(3))
            weights, options = of_participants(c, torch.tensor(rows)), {"rho": 0.1, "reduction": "mean"}
            slope = coefficient_gradient(weights, tensor(s), tensor(p), **options)
            c = with_participants(c, torch.tensor(rows), step(weights, slope, 0.5, "simplex"))
            block = oracle.of_participants(expected, rows)
            block = oracle.descend(block, s, p, 0.5, 1, "simplex", **options)
            expected = oracle.with_participants(expected, rows, block)
            same(c, expected)
            same(c.sum(dim=1), 1.0)
        assert expected.std() > 0.05
