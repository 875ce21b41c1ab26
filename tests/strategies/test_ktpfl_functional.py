"""KT-pFL's maths against its oracle: coefficients, their gradients, who is there, and predictions on their way."""

from __future__ import annotations

import doctest
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import coefficients as oracle
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import flwr_kd
from flwr_kd.public_data.messages import pack_predictions, unpack_predictions
from flwr_kd.strategies.ktpfl import functional
from flwr_kd.strategies.ktpfl.functional import (
    FLOOR,
    NORMALIZATIONS,
    as_distributions,
    coefficient_gradient,
    cosine_coefficients,
    distance_gradient,
    distance_scale,
    extend,
    gram,
    knowledge_loss,
    normalize_rows,
    of_participants,
    personal_models,
    personal_targets,
    project_simplex,
    step,
    transferred,
    with_participants,
)

repeatable = settings(max_examples=60, deadline=None, derandomize=True)
Arrays = list[np.ndarray]
REDUCTIONS = ["sum", "mean"]
sizes = st.integers(1, 5)
seeds = st.integers(0, 999)


def tensor(values: Any, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor(np.asarray(values), dtype=dtype)


def same(found: Tensor, expected: Any, atol: float = 1e-10, rtol: float = 1e-10) -> None:
    np.testing.assert_allclose(found.detach().numpy(), expected, rtol=rtol, atol=atol)


def distributions(rng: np.random.Generator, *shape: int, scale: float = 1.0) -> np.ndarray:
    """Draw distributions over the last axis; with a large scale some numbers are next to nothing."""
    logits = rng.normal(scale=scale, size=shape)
    e = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def problem(
    seed: int, clients: int, samples: int = 3, classes: int = 4
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Draw coefficients, predictions and shares, none of them near 0."""
    rng = np.random.default_rng(seed)
    c = distributions(rng, clients, clients)
    return c, distributions(rng, clients, samples, classes), rng.dirichlet(np.full(clients, 3.0))


def tensors(
    seed: int, clients: int, samples: int = 3, classes: int = 4, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor]:
    c, s, p = problem(seed, clients, samples, classes)
    return tensor(c, dtype), tensor(s, dtype), tensor(p, dtype)


def draw_models(seed: int, clients: int, dtype: Any = np.float32) -> list[Arrays]:
    """Models of several arrays, among them BatchNorm's counter and a number without dimensions."""
    rng = np.random.default_rng(seed)
    return [
        [
            rng.normal(size=(3, 2)).astype(dtype),
            np.array(17 * n + 5, dtype=np.int64),
            rng.normal(size=2).astype(dtype),
            np.array(rng.normal(), dtype=dtype),
            rng.normal(size=(2, 1, 2)).astype(dtype),
        ]
        for n in range(clients)
    ]


def copied(models: Sequence[Arrays]) -> list[Arrays]:
    return [[array.copy() for array in model] for model in models]


def equal(a: Sequence[np.ndarray], b: Sequence[np.ndarray]) -> bool:
    return len(a) == len(b) and all(
        x.dtype == y.dtype and x.shape == y.shape and np.array_equal(x, y) for x, y in zip(a, b, strict=True)
    )


def test_the_oracles_own_cases() -> None:
    results = doctest.testmod(oracle)
    assert results.attempted > 50
    assert results.failed == 0


def test_names() -> None:
    assert NORMALIZATIONS == ("simplex", "softmax", "none")
    assert FLOOR == oracle.FLOOR == 1e-7


# ---------------------------------------------------------------------- theorem 4.1, appendix A


def pair(first: float, second: float, label: int) -> np.ndarray:
    """Return two clients' probabilities of one sample's label, as predictions ``[2, 1, 2]``."""
    rows = [[1 - p, p] if label else [p, 1 - p] for p in (first, second)]
    return np.array(rows)[:, None]


class TestTheorem:
    """The paper's two examples.

    The paper rounds each probability before it adds, and not always to the nearest: the numbers that it prints
    come out of rounded ones, those of the hypotheses themselves differ from it by up to 0.005. In the second
    example P_0(y = 1|x_0) is 0.423, printed as 0.43; so 0.485 and 0.513 would be 0.488 and 0.518. In the first,
    0.565 would be 0.566. And the second's true boundary gives x_0 class 1 (2 · 0.17 - 0.76 + 1 > 0), where the
    text says label 0. What follows, which side of 1/2 each number is on, does not depend on it.
    """

    FIRST: ClassVar[dict[str, Any]] = {"h": (([1, 1], 1), ([1, 0.5], -1)), "x": ([6.2, -9.6], [8.6, -10.8])}
    SECOND: ClassVar[dict[str, Any]] = {"h": (([1, 2], -2), ([1, -1], 1)), "x": ([0.17, 0.76], [1.33, 0.13])}

    @staticmethod
    def of(example: dict[str, Any]) -> list[tuple[float, float]]:
        """Both clients' probabilities of label 0 for x_0, and of label 1 for x_1."""
        of_one = [[oracle.logistic(*h, x) for h in example["h"]] for x in example["x"]]
        return [(1 - of_one[0][0], 1 - of_one[0][1]), (of_one[1][0], of_one[1][1])]

    @staticmethod
    def ensembles(c: Sequence[float], probabilities: Sequence[tuple[float, float]]) -> list[float]:
        """Client 0's personalised probabilities of the labels; client 1 keeps its own."""
        found = []
        for label, (first, second) in enumerate(probabilities):
            s = pair(first, second, label)
            target = personal_targets(tensor([c, [0, 1]]), tensor(s))
            same(target[1], s[1])
            same(target.sum(dim=2), 1.0)
            found.append(target[0, 0, label].item())
            assert abs(found[-1] - oracle.ensemble(c, (first, second))) < 1e-12
        return found

    def test_the_first_with_printed_numbers(self) -> None:
        # h_1's numbers are not printed: P_1(y = 0|x_0) = 0.40 and P_1(y = 1|x_1) = 0.90 to two digits
        found = self.ensembles([0.5, 0.5], [(0.92, 0.40), (0.23, 0.90)])
        np.testing.assert_allclose(found, [0.66, 0.565], rtol=0, atol=1e-9)

    def test_the_first_with_its_hypotheses(self) -> None:
        probabilities = self.of(self.FIRST)
        np.testing.assert_allclose(probabilities, [(0.92, 0.40), (0.23, 0.90)], rtol=0, atol=0.005)
        found = self.ensembles([0.5, 0.5], probabilities)
        np.testing.assert_allclose(found, [0.659070, 0.565862], rtol=0, atol=1e-6)
        np.testing.assert_allclose(found, [0.66, 0.565], rtol=0, atol=0.001)
        alone = self.ensembles([1.0, 0.0], probabilities)
        assert [p > 0.5 for p in alone] == [True, False]  # "50%"
        assert [p > 0.5 for p in found] == [True, True]  # "100%"
        labels = [oracle.logistic([4, 3], 0, x) > 0.5 for x in self.FIRST["x"]]
        assert labels == [False, True]

    def test_the_second_with_printed_numbers(self) -> None:
        # 1 - 0.43 is client 0's of x_0's label 0; client 1's are 0.40 and 0.90 again
        probabilities = [(1 - 0.43, 0.40), (0.4, 0.90)]
        average = self.ensembles([0.5, 0.5], probabilities)
        np.testing.assert_allclose(average, [0.485, 0.65], rtol=0, atol=1e-9)
        found = self.ensembles([2 / 3, 1 / 3], probabilities)
        np.testing.assert_allclose(np.round(found, 3), [0.513, 0.567], rtol=0, atol=1e-9)

    def test_the_second_with_its_hypotheses(self) -> None:
        probabilities = self.of(self.SECOND)
        np.testing.assert_allclose(probabilities, [(0.57, 0.40), (0.40, 0.90)], rtol=0, atol=0.007)
        average, found = (self.ensembles(c, probabilities) for c in ([0.5, 0.5], [2 / 3, 1 / 3]))
        np.testing.assert_allclose(average, [0.487899, 0.649581], rtol=0, atol=1e-6)
        np.testing.assert_allclose(found, [0.517561, 0.566025], rtol=0, atol=1e-6)
        np.testing.assert_allclose([average, found], [[0.485, 0.65], [0.513, 0.567]], rtol=0, atol=0.005)
        alone = self.ensembles([1.0, 0.0], probabilities)
        assert [p > 0.5 for p in alone] == [True, False]
        assert [p > 0.5 for p in average] == [False, True]
        assert [p > 0.5 for p in found] == [True, True]


# ---------------------------------------------------------------------- equations 2 and 7


class TestKnowledge:
    @repeatable
    @given(sizes, st.integers(1, 4), st.integers(1, 4), st.booleans(), seeds)
    def test_targets(self, clients: int, samples: int, classes: int, free: bool, seed: int) -> None:
        c, s, _ = problem(seed, clients, samples, classes)
        if free:
            c = np.random.default_rng(seed).normal(size=c.shape)
        found = personal_targets(tensor(c), tensor(s))
        assert found.dtype == torch.float64
        same(found, oracle.personal_targets(c, s))

    def test_rows_are_who_learns(self) -> None:
        """Row n, not column n, is client n's: equation 6's convention."""
        s = torch.eye(3)[:, None]
        c = tensor([[0, 1, 0], [0, 0, 1], [0, 0, 1]])
        assert personal_targets(c, s).argmax(dim=2).flatten().tolist() == [1, 2, 2]

    @pytest.mark.parametrize("of_c", [torch.float32, torch.float64])
    @pytest.mark.parametrize("of_s", [torch.float32, torch.float64])
    def test_targets_have_the_predictions_dtype(self, of_c: torch.dtype, of_s: torch.dtype) -> None:
        c, s, _ = problem(0, 4)
        found = personal_targets(tensor(c, of_c), tensor(s, of_s))
        assert found.dtype == of_s
        assert found.shape == (4, 3, 4)
        same(found, oracle.personal_targets(c, s), rtol=1e-6)

    @repeatable
    @given(
        sizes, st.integers(1, 4), st.integers(2, 4), st.sampled_from([0.0, 0.5, 1.0, 7.0]),
        st.sampled_from([0.0, 0.6, 20.0]), st.sampled_from(REDUCTIONS), st.booleans(), seeds,
    )  # fmt: skip
    def test_loss_and_gradient(
        self, clients: int, samples: int, classes: int, weight: float, rho: float,
        reduction: str, distinct: bool, seed: int,
    ) -> None:  # fmt: skip
        c, s, p = problem(seed, clients, samples, classes)
        if distinct:  # rows that are no distributions, as the bare equation makes them, nor predictions
            rng = np.random.default_rng(seed)
            c, s = c * rng.uniform(0.3, 2.5, size=c.shape), s * rng.uniform(0.5, 2.0, size=s.shape)
        options: Any = {"weight": weight, "rho": rho, "reduction": reduction}
        of_c = tensor(c).requires_grad_()
        loss = knowledge_loss(of_c, tensor(s), tensor(p), **options)
        assert loss.shape == ()
        same(loss, oracle.knowledge_loss(c, s, p, **options))
        found = coefficient_gradient(tensor(c), tensor(s), tensor(p), **options)
        (slope,) = torch.autograd.grad(loss, of_c)
        same(found, slope.numpy())
        same(found, oracle.coefficient_gradient(c, s, p, **options))
        numerical = oracle.differences(lambda x: oracle.knowledge_loss(x, s, p, **options), c)
        same(found, numerical, atol=1e-6, rtol=1e-6)

    def test_defaults_are_the_bare_sum(self) -> None:
        c, s, p = problem(1, 3)
        same(knowledge_loss(tensor(c), tensor(s), tensor(p)), oracle.knowledge_loss(c, s, p, 1.0, 0.0, "sum"))
        found = coefficient_gradient(tensor(c), tensor(s), tensor(p))
        same(found, oracle.coefficient_gradient(c, s, p, 1.0, 0.0, "sum"))

    def test_targets_can_be_given(self) -> None:
        """Those that the clients are sent are those of the gradient: made once."""
        c, s, p = tensors(2, 4)
        targets = personal_targets(c, s)
        options: Any = {"weight": 2.0, "rho": 0.3, "reduction": "mean"}
        found = coefficient_gradient(c, s, p, targets=targets, **options)
        same(found, coefficient_gradient(c, s, p, **options).numpy())

    @pytest.mark.parametrize("call", [knowledge_loss, coefficient_gradient])
    def test_unknown_reduction(self, call: Callable[..., Tensor]) -> None:
        with pytest.raises(ValueError, match="batchmean"):
            call(*tensors(0, 2), reduction="batchmean")

    @pytest.mark.parametrize("reduction", REDUCTIONS)
    def test_single_precision(self, reduction: str) -> None:
        """Float32 is enough for as many samples as the paper draws."""
        c, s, p = problem(3, 5, 3000, 10)
        args = (tensor(c, torch.float32), tensor(s, torch.float32), tensor(p, torch.float32))
        options: Any = {"weight": 1.5, "rho": 0.6, "reduction": reduction}
        exact = (tensor(c), tensor(s), tensor(p))
        found, expected = coefficient_gradient(*args, **options), coefficient_gradient(*exact, **options)
        assert found.dtype == torch.float32
        same(found, expected.numpy(), rtol=1e-4)
        loss = knowledge_loss(*args, **options)
        assert loss.dtype == torch.float32
        same(loss, knowledge_loss(*exact, **options).numpy(), rtol=1e-4)

    @pytest.mark.parametrize("samples", [1, 2, 5])
    def test_what_the_reductions_divide_by(self, samples: int) -> None:
        c, s, p = tensors(4, 3, samples)
        ratio = knowledge_loss(c, s, p) / knowledge_loss(c, s, p, reduction="mean")
        assert abs(ratio.item() - samples) < 1e-9
        found, mean = (coefficient_gradient(c, s, p, reduction=r) for r in REDUCTIONS)
        same(found, samples * mean.numpy())

    @repeatable
    @given(st.integers(1, 4), st.integers(1, 3), st.integers(2, 4), st.sampled_from(REDUCTIONS), seeds)
    def test_zero_probabilities(
        self, clients: int, samples: int, classes: int, reduction: str, seed: int
    ) -> None:
        """Logs stop at the floor. The gradient is that of the loss but where a target is below it."""
        rng = np.random.default_rng(seed)
        s = np.eye(classes)[rng.integers(classes, size=(clients, samples))]
        s = np.where(
            rng.random((clients, samples, 1)) < 0.5, s, distributions(rng, clients, samples, classes)
        )
        c = np.eye(clients)[rng.permutation(clients)]
        c = np.where(rng.random((clients, 1)) < 0.5, c, distributions(rng, clients, clients))
        p = rng.dirichlet(np.ones(clients))
        loss = knowledge_loss(tensor(c), tensor(s), tensor(p), reduction=reduction)
        same(loss, oracle.knowledge_loss(c, s, p, reduction=reduction))
        found = coefficient_gradient(tensor(c), tensor(s), tensor(p), reduction=reduction)
        expected = oracle.coefficient_gradient(c, s, p, reduction=reduction)
        # where p log p goes on as p log(floor), its derivative has no 1: either is a gradient there
        floored = oracle.personal_targets(c, s) <= FLOOR
        slack = np.einsum("nkc,mkc->nm", floored, s) * p[:, None] / oracle.count(reduction, samples)
        difference = np.abs(found.numpy() - expected)
        assert np.isfinite(found.numpy()).all()
        assert (difference <= slack + 1e-9).all()

    def test_equal_zeros_are_no_distance(self) -> None:
        s = torch.eye(2).repeat(3, 1, 1)
        loss = knowledge_loss(torch.full((3, 3), 1 / 3), s, torch.full((3,), 1 / 3))
        assert abs(loss.item()) < 1e-6

    @repeatable
    @given(st.integers(1, 4), st.integers(1, 4), seeds)
    def test_as_distributions(self, clients: int, classes: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        rows = rng.normal(0.3, 1.0, size=(clients, 2, classes))
        rows[rng.random(rows.shape[:2]) < 0.2] = 0
        found = as_distributions(tensor(rows))
        same(found, [oracle.as_distributions(block) for block in rows])
        same(found.sum(dim=2), 1.0)
        assert (found >= 0).all()
        of_floats = as_distributions(tensor(rows, torch.float32))
        assert of_floats.dtype == torch.float32
        same(of_floats, found.numpy(), atol=1e-6)

    def test_one_client(self) -> None:
        c, s, p = tensor([[1.0]]), tensors(0, 1)[1], tensor([1.0])
        assert torch.equal(personal_targets(c, s), s)
        same(knowledge_loss(c, s, p, rho=5.0), 0.0)
        same(coefficient_gradient(c, s, p, rho=5.0), [[3.0]])
        for how in ("simplex", "softmax"):
            same(step(c, tensor([[3.0]]), 1.0, how), [[1.0]])

    @pytest.mark.parametrize("reduction", REDUCTIONS)
    def test_many_samples(self, reduction: str) -> None:
        """However the samples are cut up, all of them count, once."""
        c, s, p = tensors(5, 12, 5003, 10)
        of_c = c.clone().requires_grad_()
        loss = knowledge_loss(of_c, s, p, rho=0.1, reduction=reduction)
        (slope,) = torch.autograd.grad(loss, of_c)
        same(coefficient_gradient(c, s, p, rho=0.1, reduction=reduction), slope.numpy())
        targets = personal_targets(c, s)
        given_ = coefficient_gradient(c, s, p, rho=0.1, reduction=reduction, targets=targets)
        same(given_, slope.numpy())
        same(targets[7], np.einsum("m,mkc->kc", c[7].numpy(), s.numpy()))
        same(cosine_coefficients(s, 4), oracle.cosine_coefficients(s.numpy(), 4))

    def test_arguments_stay(self) -> None:
        args = tensors(0, 4)
        before = [each.clone() for each in args]
        personal_targets(*args[:2])
        knowledge_loss(*args, rho=1.0)
        coefficient_gradient(*args, rho=1.0, reduction="mean")
        cosine_coefficients(args[1], 2)
        assert all(torch.equal(a, b) for a, b in zip(args, before, strict=True))

    def test_no_graph_is_kept(self) -> None:
        """The closed form needs none, and 3,000 samples of 100 clients would be a large one."""
        c, s, p = tensors(0, 3)
        assert not coefficient_gradient(c, s, p).requires_grad


# ---------------------------------------------------------------------- rows


class TestSimplex:
    @repeatable
    @given(st.integers(1, 6), st.sampled_from([0.01, 0.3, 1.0, 5.0, 1e3]), seeds)
    def test_against_all_supports(self, size: int, scale: float, seed: int) -> None:
        rows = np.random.default_rng(seed).normal(scale=scale, size=(3, size))
        found = project_simplex(tensor(rows))
        same(found, [oracle.project_simplex(row) for row in rows], atol=1e-12 * max(1, scale))
        assert (found >= 0).all()
        same(found.sum(dim=-1), 1.0)

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
        found = project_simplex(tensor([row]))[0].numpy()
        points = np.array(list(oracle.grid(200)))
        distances = ((points - row) ** 2).sum(axis=1)
        assert ((found - row) ** 2).sum() <= distances.min() + 1e-12
        assert np.abs(points[distances.argmin()] - found).max() < 0.01

    @pytest.mark.parametrize(("size", "dtype"), [(100, torch.float64), (1000, torch.float32)])
    def test_long_rows(self, size: int, dtype: torch.dtype) -> None:
        rows = np.random.default_rng(0).normal(1 / size, 0.1, size=(5, size))
        found = project_simplex(tensor(rows, dtype))
        assert found.dtype == dtype
        atol = 1e-10 if dtype == torch.float64 else 1e-5
        same(found, [oracle.project_by_root(row) for row in rows], atol=atol)
        same(found.double().sum(dim=-1), 1.0, atol=atol)
        assert (found >= 0).all()

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
        found = project_simplex(tensor(rows + shift, torch.float32))
        same(found, [oracle.project_simplex(row) for row in rows], atol=1e-6)

    def test_any_number_of_dimensions(self) -> None:
        rows = np.random.default_rng(0).normal(size=(2, 3, 4))
        found = project_simplex(tensor(rows))
        same(found, [[oracle.project_simplex(row) for row in block] for block in rows])
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
        found = normalize_rows(tensor(rows), how)
        assert torch.isfinite(found).all()
        same(found, [oracle.normalize(row, how) for row in rows])

    @pytest.mark.parametrize("how", NORMALIZATIONS)
    @pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
    def test_rows_without_a_finite_gradient_stay(self, how: str, bad: float) -> None:
        c = np.array([[0.7, 0.2, 0.3], [0.5, 0.3, 0.2], [0.2, 0.2, 0.6]])
        slope = np.random.default_rng(0).normal(size=(3, 3))
        slope[0, 1] = bad
        found = step(tensor(c), tensor(slope), 0.1, how)
        assert torch.equal(found[0], tensor(c[0]))
        same(found, oracle.step(c, slope, 0.1, how))
        assert not torch.equal(found[1:], tensor(c[1:]))
        slope[:] = bad
        assert torch.equal(step(tensor(c), tensor(slope), 0.1, how), tensor(c))

    @pytest.mark.parametrize("how", NORMALIZATIONS)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_steps_beyond_all_numbers(self, how: str, dtype: torch.dtype) -> None:
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
        found = step(torch.eye(3, dtype=dtype), torch.ones(3, 3, dtype=dtype), 0.1, how)
        assert found.dtype == dtype
        assert normalize_rows(torch.eye(3, dtype=dtype), how).dtype == dtype

    @pytest.mark.parametrize("how", ["", "Simplex", "sparsemax"])
    def test_unknown_normalisations(self, how: str) -> None:
        with pytest.raises(ValueError, match="simplex"):
            normalize_rows(torch.eye(2), how)
        with pytest.raises(ValueError, match="simplex"):
            step(torch.eye(2), torch.eye(2), 0.1, how)


# ---------------------------------------------------------------------- what the paper says of c


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
        found = descend(tensor(c), tensor(s), tensor(p), 0.03, 6, how, **options)
        same(found, oracle.descend(c, s, p, 0.03, 6, how, **options))

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
        found = descend(c[order][:, order], s[order], p[order], 0.1, 3, how, **options)
        same(found, descend(c, s, p, 0.1, 3, how, **options)[order][:, order].numpy())
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
        found = c.numpy()
        for n in range(8):
            others = np.arange(8) != n
            assert found[n, mates[n] & others].min() > found[n, ~mates[n]].max()
            assert found[n, n] == found[n].max()
        if how == "simplex":
            assert found[mates].mean() > 1.5 * found[~mates].mean()
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


# ---------------------------------------------------------------------- who is there


def attending(seed: int, clients: int) -> list[int]:
    rng = np.random.default_rng([seed, 1])
    return [int(n) for n in rng.permutation(clients)[: rng.integers(1, clients + 1)]]


def sparse(seed: int, clients: int, free: bool = False) -> np.ndarray:
    """Rows with zeros in them, some with a single weight; free ones sum to anything."""
    rng = np.random.default_rng(seed)
    c = rng.random((clients, clients)) * (rng.random((clients, clients)) < 0.5)
    c[np.arange(clients), rng.integers(clients, size=clients)] += 0.1
    c /= c.sum(axis=1, keepdims=True)
    return c * rng.uniform(0.2, 3.0, size=(clients, 1)) if free else c


class TestParticipation:
    @repeatable
    @given(st.integers(1, 6), st.booleans(), seeds)
    def test_of_participants(self, clients: int, free: bool, seed: int) -> None:
        c, rows = sparse(seed, clients, free), attending(seed, clients)
        found = of_participants(tensor(c), torch.tensor(rows))
        assert found.shape == (len(rows), len(rows))
        same(found, oracle.of_participants(c, rows))
        if not free:
            same(found.sum(dim=1), 1.0)
            assert (found >= 0).all()

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
        found = with_participants(tensor(c), torch.tensor(rows), tensor(weights)).numpy()
        np.testing.assert_allclose(found, oracle.with_participants(c, rows, weights), rtol=1e-12, atol=1e-14)
        np.testing.assert_allclose(found.sum(axis=1), 1.0, rtol=0, atol=1e-12)
        away = [n for n in range(clients) if n not in rows]
        assert np.array_equal(found[away], c[away])
        assert np.array_equal(found[:, away], c[:, away])

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
        found = of_participants(c, rows[order])
        same(found, of_participants(c, rows)[order][:, order].numpy())
        weights = tensor(distributions(np.random.default_rng(seed), len(rows), len(rows)))
        moved = with_participants(c, rows[order], weights[order][:, order])
        same(moved, with_participants(c, rows, weights).numpy())

    @pytest.mark.parametrize("tiny", [0.0, 1e-13, 1e-12])
    def test_rows_without_weight_on_those_present(self, tiny: float) -> None:
        c = np.array([[0.5, 0.25, 0.25], [1 - tiny, tiny, 0], [0.2, 0.2, 0.6]])
        rows = [1, 2]
        found = of_participants(tensor(c), torch.tensor(rows))
        same(found, [[0.5, 0.5], [0.25, 0.75]])
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
        """As "none" can leave them, with weights below 0."""
        c = np.array([row, [0.2, 0.6, 0.2], [0.1, 0.1, 0.8]])
        for rows in ([0, 1], [2, 0], [1, 2, 0], [0]):
            found = of_participants(tensor(c), torch.tensor(rows))
            assert torch.isfinite(found).all()
            expected = oracle.of_participants(c, rows)
            same(found, expected)
            weights = np.full((len(rows), len(rows)), 1 / len(rows))
            moved = with_participants(tensor(c), torch.tensor(rows), tensor(weights))
            same(moved, oracle.with_participants(c, rows, weights))
            same(with_participants(tensor(c), torch.tensor(rows), found), c)

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
        found = with_participants(c, rows, weights)
        assert found.dtype == dtype
        assert extend(c, 2).dtype == dtype
        extend(c, 0).add_(1)
        found.add_(1)
        with_participants(c, rows[:0], weights[:0, :0]).add_(1)
        assert torch.equal(c, before)
        assert weights.tolist() == [[1, 0], [0, 1]]

    @repeatable
    @given(st.integers(0, 5), st.integers(0, 4), st.booleans(), seeds)
    def test_extend(self, clients: int, more: int, free: bool, seed: int) -> None:
        c = sparse(seed, clients, free) if clients else np.zeros((0, 0))
        found = extend(tensor(c), more)
        assert found.shape == (clients + more, clients + more)
        same(found, oracle.extend(c, more))
        same(found[:clients].sum(dim=1), c.sum(axis=1))
        if clients + more:
            same(found[clients:], 1 / (clients + more))

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


# ---------------------------------------------------------------------- Sim-pFL and TopK-pFL


class TestCosines:
    @repeatable
    @given(
        st.integers(1, 6), st.integers(1, 4), st.integers(1, 4), st.sampled_from([None, 1, 2, 3, 5, 6, 9]),
        st.booleans(), seeds,
    )  # fmt: skip
    def test_values(
        self, clients: int, samples: int, classes: int, k: int | None, free: bool, seed: int
    ) -> None:
        rng = np.random.default_rng(seed)
        s = distributions(rng, clients, samples, classes, scale=2.0)
        if free:  # cosines below 0
            s = rng.normal(size=s.shape)
        if s[0].size == 1:  # all parallel: equal but for rounding, see the ties below
            s = np.sign(s) * rng.choice([1.0, 2.0, 4.0], size=s.shape)
        found = cosine_coefficients(tensor(s), k)
        same(found, oracle.cosine_coefficients(s, k))
        same(found.sum(dim=1), 1.0)
        assert (found >= 0).all()
        assert found.dtype == torch.float64

    def test_k(self) -> None:
        s = tensors(3, 6)[1]
        everyone = cosine_coefficients(s)
        assert torch.equal(cosine_coefficients(s, 6), everyone)
        assert torch.equal(cosine_coefficients(s, 60), everyone)
        same(cosine_coefficients(s, 1), np.eye(6))
        for k in range(1, 7):
            assert ((cosine_coefficients(s, k) > 0).sum(dim=1) == k).all()

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    @pytest.mark.parametrize("k", [1, 2, 3, 4])
    def test_ties(self, k: int, dtype: torch.dtype) -> None:
        """The lower index first, but none of its twins before a client itself."""
        one, other = [[1.0, 0.0], [0.5, 0.5]], [[0.0, 1.0], [0.5, 0.5]]
        s = [one, other, one, other, one, one]
        found = cosine_coefficients(tensor(s, dtype), k)
        assert found.dtype == dtype
        same(found, oracle.cosine_coefficients(s, k), atol=1e-6)
        assert all(found[n, n] > 0 for n in range(6))

    def test_ties_among_many(self) -> None:
        """Sorting must be stable where a vectorised sort of many equal numbers is not."""
        s = torch.cat([torch.eye(2)[:1].repeat(40, 1), torch.eye(2)[1:].repeat(40, 1)])[:, None]
        found = cosine_coefficients(s, 5)
        for n in range(80):
            first = 40 * (n // 40)
            expected = {n} | set([m for m in range(first, first + 6) if m != n][:4])
            assert set(found[n].nonzero().flatten().tolist()) == expected

    def test_nothing_predicted(self) -> None:
        s = np.array([[[0.0, 0.0]], [[1.0, 0.0]], [[0.0, 0.0]], [[1.0, 1.0]]])
        found = cosine_coefficients(tensor(s))
        assert torch.isfinite(found).all()
        assert found[0].tolist() == [1, 0, 0, 0]
        assert found[2].tolist() == [0, 0, 1, 0]
        same(found, oracle.cosine_coefficients(s))
        same(cosine_coefficients(tensor(s), 2), oracle.cosine_coefficients(s, 2))

    def test_scale_does_not_matter(self) -> None:
        s = tensors(4, 4)[1]
        factors = tensor([1e-9, 1.0, 3.0, 1e9])[:, None, None]
        same(cosine_coefficients(s * factors), cosine_coefficients(s).numpy())

    def test_all_samples_count_together(self) -> None:
        """One cosine of all predictions, no mean over samples."""
        s = [[[3.0, 0.0], [0.0, 0.0]], [[1.0, 0.0], [0.0, 1.0]]]
        row = cosine_coefficients(tensor(s))[0]
        same(row[1] / row[0], 1 / np.sqrt(2))


# ---------------------------------------------------------------------- appendix C


def plain_distance(c: Tensor, models: Sequence[Arrays], shares: Any, options: dict[str, float]) -> Tensor:
    """Equation 11's loss, array by array, for autograd."""
    n = len(models)
    total = options["rho"] * ((c - 1 / n) ** 2).sum()
    for i in range(len(models[0])):
        if models[0][i].dtype.kind != "f":
            continue
        stacked = torch.stack([torch.from_numpy(model[i].astype(np.float64)) for model in models])
        away = torch.tensordot(c, stacked, dims=1) - stacked
        squared = (away**2).reshape(n, -1).sum(dim=1)
        total = total + options["weight"] * options["scale"] * (tensor(shares) * squared).sum()
    return total


class TestWeights:
    @repeatable
    @given(sizes, st.sampled_from([np.float16, np.float32, np.float64]), seeds)
    def test_gram(self, clients: int, dtype: Any, seed: int) -> None:
        models = draw_models(seed, clients, dtype)
        found = gram(models)
        assert found.dtype == torch.float64
        same(found, oracle.gram(models))
        assert torch.equal(found, found.T)

    def test_gram_in_double_precision(self) -> None:
        """Neither half nor single precision holds these products."""
        big = [[np.full(1000, 6e4, dtype=np.float16)], [np.full(1000, -6e4, dtype=np.float16)]]
        assert torch.isfinite(gram(big)).all()
        same(gram(big), oracle.gram(big))
        near = [[np.array([4096.0, 1.0], dtype=np.float32)], [np.array([4096.0, -1.0], dtype=np.float32)]]
        assert gram(near).tolist() == [[2.0**24 + 1, 2.0**24 - 1], [2.0**24 - 1, 2.0**24 + 1]]

    def test_gram_of_mixed_models(self) -> None:
        models = [[np.array([n], dtype=np.float16), np.array(9 * n), np.array([[n]], float)] for n in (1, 2)]
        assert gram(models).tolist() == [[2, 4], [4, 8]]
        counters = [[np.array(3)], [np.array(4)]]
        assert gram(counters).tolist() == [[0, 0], [0, 0]]

    @repeatable
    @given(
        sizes, st.sampled_from([0.0, 1.0, 3.0]), st.sampled_from([0.0, 0.6]),
        st.sampled_from([1.0, 0.05]), st.booleans(), seeds,
    )  # fmt: skip
    def test_distance_gradient(
        self, clients: int, weight: float, rho: float, scale: float, free: bool, seed: int
    ) -> None:
        c, _, p = problem(seed, clients)
        if free:
            c = np.random.default_rng(seed).normal(size=c.shape)
        models = draw_models(seed, clients)
        options = {"weight": weight, "rho": rho, "scale": scale}
        found = distance_gradient(tensor(c), gram(models), tensor(p), **options)
        same(found, oracle.distance_gradient(c, models, p, **options))
        of_c = tensor(c).requires_grad_()
        loss = plain_distance(of_c, models, p, options)
        same(loss, oracle.distance_loss(c, models, p, **options))
        same(found, torch.autograd.grad(loss, of_c)[0].numpy())
        numerical = oracle.differences(lambda x: oracle.distance_loss(x, models, p, **options), c, 1e-4)
        same(found, numerical, atol=1e-6, rtol=1e-6)

    def test_distance_defaults(self) -> None:
        c, _, p = problem(0, 3)
        models = draw_models(0, 3)
        same(distance_gradient(tensor(c), gram(models), tensor(p)), oracle.distance_gradient(c, models, p))

    def test_distance_scale(self) -> None:
        models = draw_models(0, 1)
        assert distance_scale(models[0], "sum") == 1
        assert distance_scale(models[0], "mean") == 1 / len(oracle.flat(models[0])) == 1 / 13
        with pytest.raises(ValueError, match="batchmean"):
            distance_scale(models[0], "batchmean")

    def test_groups_of_models_find_each_other(self) -> None:
        rng = np.random.default_rng(0)
        centres = rng.normal(size=(2, 30))
        groups = np.array([0, 1, 0, 1, 1, 0])
        models = [[centres[g] + 0.3 * rng.normal(size=30)] for g in groups]
        c, p = torch.full((6, 6), 1 / 6, dtype=torch.float64), torch.full((6,), 1 / 6, dtype=torch.float64)
        for _ in range(5):
            c = step(c, distance_gradient(c, gram(models), p, scale=1 / 30), 0.2, "simplex")
        mates = groups[:, None] == groups[None]
        assert c.numpy()[mates].min() > c.numpy()[~mates].max()

    @repeatable
    @given(sizes, st.sampled_from([np.float16, np.float32, np.float64]), st.booleans(), seeds)
    def test_personal_models(self, clients: int, dtype: Any, free: bool, seed: int) -> None:
        c = np.random.default_rng(seed).normal(size=(clients, clients)) if free else sparse(seed, clients)
        models = draw_models(seed, clients, dtype)
        found, expected = personal_models(tensor(c), models), oracle.personal_models(c, models)
        tolerance = {np.float16: 2e-3, np.float32: 1e-6, np.float64: 1e-13}[dtype]
        assert len(found) == clients
        for mine, theirs in zip(found, expected, strict=True):
            assert len(mine) == len(theirs)
            for a, b in zip(mine, theirs, strict=True):
                assert isinstance(a, np.ndarray)
                assert (a.dtype, a.shape) == (b.dtype, b.shape)
                np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)
        assert [int(model[1]) for model in found] == [17 * n + 5 for n in range(clients)]

    def test_personal_models_are_sums_in_double_precision(self) -> None:
        """Large weights that cancel leave the rest."""
        big, small = np.array([2.0**24], dtype=np.float32), np.array([1.0], dtype=np.float32)
        c = np.array([[1.0, 1.0, -1.0]] * 3)
        (first,) = personal_models(tensor(c), [[big], [small], [big]])[0]
        assert first.tolist() == [1.0]

    @pytest.mark.parametrize("dtype", [np.float16, np.float32])
    def test_personal_models_are_clipped(self, dtype: Any) -> None:
        limit = np.finfo(dtype).max
        models = [[np.array([limit, -limit, 1], dtype=dtype), np.array(3)]] * 2
        found = personal_models(tensor([[2.0, 2.0], [0.5, 0.5]]), models)
        assert found[0][0].tolist() == [limit, -limit, 4]
        assert found[1][0].tolist() == [limit, -limit, 1]
        assert found[0][1] == 3

    def test_models_stay(self) -> None:
        models = draw_models(1, 3)
        before = copied(models)
        c, _, p = tensors(0, 3)
        products = gram(models)
        distance_gradient(c, products, p, rho=1.0)
        found = personal_models(c, models)
        moved = transferred(models[0], models[1], learning_rate=0.1, steps=2)
        for array in [*found[0], *moved]:
            if array.dtype.kind == "f":
                array += 1
        assert all(equal(a, b) for a, b in zip(models, before, strict=True))
        assert torch.equal(gram(models), products)

    @pytest.mark.parametrize("identity", [1, 4])
    def test_own_weights_only(self, identity: int) -> None:
        models = draw_models(2, identity)
        found = personal_models(torch.eye(identity), models)
        assert all(equal(a, b) for a, b in zip(found, models, strict=True))

    @repeatable
    @given(
        st.sampled_from([np.float32, np.float64]), st.sampled_from([0.01, 0.3, 0.5, 0.8]), st.integers(0, 6),
        st.sampled_from([1.0, 0.1]), seeds,
    )  # fmt: skip
    def test_transfer_is_gradient_descent(
        self, dtype: Any, rate: float, steps: int, scale: float, seed: int
    ) -> None:
        own, target = draw_models(seed, 2, dtype)
        before = copied([own, target])
        found = transferred(own, target, learning_rate=rate, steps=steps, scale=scale)
        expected = oracle.transferred(own, target, rate, steps, scale)
        tolerance = {np.float32: 2e-6, np.float64: 1e-13}[dtype]
        for i, (array, same_as) in enumerate(zip(found, expected, strict=True)):
            assert isinstance(array, np.ndarray)
            assert (array.dtype, array.shape) == (own[i].dtype, own[i].shape)
            np.testing.assert_allclose(array, same_as, rtol=tolerance, atol=tolerance)
            if array.dtype.kind != "f":
                assert array == own[i]
                continue
            w = torch.from_numpy(own[i].copy()).requires_grad_()
            optimizer = torch.optim.SGD([w], lr=rate)
            for _ in range(steps):
                optimizer.zero_grad()
                (scale * ((w - torch.from_numpy(target[i])) ** 2).sum()).backward()
                optimizer.step()
            np.testing.assert_allclose(array, w.detach().numpy(), rtol=2 * tolerance, atol=2 * tolerance)
        assert equal(own, before[0])
        assert equal(target, before[1])

    def test_no_steps_and_a_full_one(self) -> None:
        own, target = draw_models(3, 2)
        assert equal(transferred(own, target, learning_rate=0.3, steps=0), own)
        full = transferred(own, target, learning_rate=0.25, steps=1, scale=2.0)
        assert all(
            np.array_equal(a, own[1] if i == 1 else b)
            for i, (a, b) in enumerate(zip(full, target, strict=True))
        )


# ---------------------------------------------------------------------- predictions on their way


class TestPacking:
    @repeatable
    @given(
        st.sampled_from(["float32", "float16", "uint8"]), st.integers(1, 5), st.integers(2, 12),
        st.sampled_from([0.0, 0.1, 1.0, 5.0, 30.0]), seeds,
    )  # fmt: skip
    def test_errors_are_bounded(
        self, precision: str, samples: int, classes: int, scale: float, seed: int
    ) -> None:
        p = distributions(np.random.default_rng(seed), samples, classes, scale=scale)
        packed = pack_predictions(tensor(p, torch.float32), precision)
        assert packed.dtype == np.dtype(precision)
        assert packed.shape == (samples, classes)
        found = unpack_predictions(packed)
        assert found.dtype == torch.float32
        same(found, oracle.unpacked(packed), atol=1e-7, rtol=1e-6)
        same(found.double().sum(dim=1), 1.0, atol=1e-6)
        error = np.abs(found.double().numpy() - p)
        assert (error <= oracle.error_bound(p, precision)).all()

    def test_bounds_are_not_idle(self) -> None:
        """Each precision costs more than the one before it, and the bounds are of the errors' size."""
        p = distributions(np.random.default_rng(0), 500, 10)
        errors = []
        for precision in ("float32", "float16", "uint8"):
            found = unpack_predictions(pack_predictions(tensor(p, torch.float32), precision))
            share = np.abs(found.double().numpy() - p) / oracle.error_bound(p, precision)
            assert 0.05 < share.max() <= 1
            errors.append(np.abs(found.double().numpy() - p).max())
        assert errors[0] < 1e-6 < errors[1] < 3e-4 < errors[2] < 6e-3

    def test_codes(self) -> None:
        p = distributions(np.random.default_rng(1), 200, 10, scale=2.0).astype(np.float32)
        packed = pack_predictions(torch.from_numpy(p), "uint8")
        exact = oracle.codes(p)
        np.testing.assert_allclose(packed, exact, rtol=0, atol=0.5 + 1e-4)
        assert (packed.max(axis=1) == 255).all()
        assert np.array_equal(packed.argmax(axis=1), p.argmax(axis=1))

    def test_flat_predictions_keep_their_differences(self) -> None:
        """At T = 10 a row is nearly flat; codes are of the row's largest, so its small differences stay."""
        p = distributions(np.random.default_rng(2), 50, 100, scale=0.1).astype(np.float32)
        found = unpack_predictions(pack_predictions(torch.from_numpy(p), "uint8")).numpy()
        assert np.corrcoef(found.ravel(), p.ravel())[0, 1] > 0.999

    def test_floats_are_the_numbers_themselves(self) -> None:
        p = distributions(np.random.default_rng(3), 20, 10, scale=3.0).astype(np.float32)
        assert np.array_equal(pack_predictions(torch.from_numpy(p), "float32"), p)
        assert np.array_equal(pack_predictions(torch.from_numpy(p), "float16"), p.astype(np.float16))

    def test_certain_predictions(self) -> None:
        p = torch.eye(3)
        for precision in ("float32", "float16", "uint8"):
            assert torch.equal(unpack_predictions(pack_predictions(p, precision)), p)

    @pytest.mark.parametrize(("precision", "width"), [("float32", 4), ("float16", 2), ("uint8", 1)])
    def test_bytes(self, precision: str, width: int) -> None:
        assert pack_predictions(torch.full((3000, 10), 0.1), precision).nbytes == 30_000 * width

    @pytest.mark.filterwarnings("error")
    @pytest.mark.parametrize("precision", ["float32", "float16", "uint8"])
    def test_arrays_from_the_wire_stay(self, precision: str) -> None:
        """They are read-only there, and the packed ones are no view of the predictions."""
        p = torch.tensor([[0.5, 0.25, 0.25], [0.125, 0.75, 0.125]])
        packed = np.frombuffer(pack_predictions(p, precision).tobytes(), dtype=precision).reshape(2, 3)
        before = packed.copy()
        unpack_predictions(packed).add_(1)
        assert np.array_equal(packed, before)
        assert p.tolist() == [[0.5, 0.25, 0.25], [0.125, 0.75, 0.125]]

    def test_unknown_precision(self) -> None:
        with pytest.raises(ValueError, match="bfloat16"):
            pack_predictions(torch.eye(2), "bfloat16")


# ---------------------------------------------------------------------- cost


class Ops(TorchDispatchMode):
    """Counts tensor operations, and notes the largest result."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.largest = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        self.calls += 1
        results = found if isinstance(found, tuple | list) else [found]
        self.largest = max([self.largest, *(r.numel() for r in results if isinstance(r, Tensor))])
        return found


PACKAGE = [str(Path(flwr_kd.__file__).parent), str(Path(functional.__file__).parents[1])]


def bytecodes(call: Callable[[], Any]) -> int:
    """Count the byte codes that the package's own functions execute: what a loop in Python costs, on any clock."""
    steps = 0

    def trace(frame: Any, event: str, argument: Any) -> Any:
        nonlocal steps
        if not frame.f_code.co_filename.startswith(tuple(PACKAGE)):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        steps += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return steps


def calls_on_tensors(clients: int) -> dict[str, Callable[[], Any]]:
    c, s, p = tensors(0, clients, samples=7, classes=5)
    slope, rows = torch.ones_like(c), torch.arange(clients)
    weights = c.clone()
    return {
        "personal_targets": lambda: personal_targets(c, s),
        "knowledge_loss": lambda: knowledge_loss(c, s, p, rho=0.5),
        "coefficient_gradient": lambda: coefficient_gradient(c, s, p, rho=0.5),
        "project_simplex": lambda: project_simplex(c - 0.3),
        "step, simplex": lambda: step(c, slope, 0.1, "simplex"),
        "step, softmax": lambda: step(c, slope, 0.1, "softmax"),
        "extend": lambda: extend(c, 3),
        "of_participants": lambda: of_participants(c, rows),
        "with_participants": lambda: with_participants(c, rows, weights),
        "cosine_coefficients": lambda: cosine_coefficients(s),
        "cosine_coefficients, k": lambda: cosine_coefficients(s, 3),
        "distance_gradient": lambda: distance_gradient(c, slope, p, rho=0.5),
    }


MEMORY = """
import json, re, resource, torch
from flwr_kd.strategies.ktpfl.functional import *
torch.set_num_threads(1)

def kib(name):
    return int(re.search(name + r":\\s+(\\d+) kB", open("/proc/self/status").read()).group(1))

def server(clients, samples):
    draw = torch.Generator().manual_seed(0)
    s = torch.rand(clients, samples, 10, generator=draw)
    s /= s.sum(dim=2, keepdim=True)
    shares = torch.full((clients,), 1 / clients)
    c = torch.full((clients, clients), 1 / clients)
    targets = personal_targets(c, s)
    return s, targets, coefficient_gradient(c, s, shares, rho=0.6)

server(2, 10)  # what the libraries allocate once
resident = kib("VmRSS")
kept = server(100, 3000)
print(json.dumps([(kib("VmHWM") - resident) * 1024, sum(each.nbytes for each in kept)]))
"""


class TestCost:
    @pytest.mark.parametrize("name", sorted(calls_on_tensors(3)))
    def test_no_loop_over_clients(self, name: str) -> None:
        counts = []
        for clients in (4, 17):
            call = calls_on_tensors(clients)[name]
            with Ops() as ops:
                call()
            counts.append((ops.calls, bytecodes(call)))
            # nothing has an entry per pair and prediction: 1,000 clients would take a terabyte
            assert ops.largest <= 2 * (clients + 3) * max(clients + 3, 35)
        assert 0 < counts[0][0] < 80
        assert counts[0] == counts[1]

    @pytest.mark.parametrize("name", ["gram", "personal_models"])
    def test_no_loop_over_pairs_of_models(self, name: str) -> None:
        counts = []
        for clients in (8, 16, 32):
            models, c = draw_models(0, clients), torch.full((clients, clients), 1 / clients)
            call: Callable[[], Any] = (
                (lambda models=models: gram(models))  # type: ignore[misc]
                if name == "gram"
                else (lambda models=models, c=c: personal_models(c, models))  # type: ignore[misc]
            )
            with Ops() as ops:
                call()
            counts.append((ops.calls, bytecodes(call)))
        for first, second, third in zip(*counts, strict=True):
            assert third - second <= 2.1 * (second - first) + 5

    @pytest.mark.program
    @pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's own account of memory")
    def test_memory(self) -> None:
        """N = 100, 3,000 samples, 10 classes, in float32: under 200 MB on top, the predictions included."""
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        run = subprocess.run(
            [sys.executable, "-c", MEMORY], env=env, capture_output=True, text=True, timeout=120, check=False
        )
        assert run.returncode == 0, run.stderr
        grown, kept = json.loads(run.stdout)
        assert kept == 2 * 4 * 100 * 3000 * 10 + 4 * 100 * 100
        assert kept <= grown < 200e6
