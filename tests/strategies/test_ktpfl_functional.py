"""KT-pFL's maths on predictions: targets, gradient, similarity, against the oracle."""

from __future__ import annotations

import doctest
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import coefficients as oracle
import numpy as np
import pytest
import torch
from distributions import (
    REDUCTIONS,
    distributions,
    draw_models,
    problem,
    repeatable,
    same,
    seeds,
    sizes,
    tensor,
    tensors,
)
from hypothesis import given
from hypothesis import strategies as st
from stored import gram, personal_models
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import flwr_kd
from flwr_kd.strategies.ktpfl import functional
from flwr_kd.strategies.ktpfl.functional import (
    FLOOR,
    NORMALIZATIONS,
    as_distributions,
    coefficient_gradient,
    cosine_coefficients,
    distance_gradient,
    extend,
    knowledge_loss,
    of_participants,
    personal_targets,
    project_simplex,
    step,
    with_participants,
)
from tests.processes import PATIENCE


def test_the_oracles_own_cases() -> None:
    results = doctest.testmod(oracle)
    assert results.attempted > 50
    assert results.failed == 0


def test_names() -> None:
    assert NORMALIZATIONS == ("simplex", "softmax", "none")
    assert FLOOR == oracle.FLOOR == 1e-7


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
        actual = []
        for label, (first, second) in enumerate(probabilities):
            s = pair(first, second, label)
            target = personal_targets(tensor([c, [0, 1]]), tensor(s))
            same(target[1], s[1])
            same(target.sum(dim=2), 1.0)
            actual.append(target[0, 0, label].item())
            assert abs(actual[-1] - oracle.ensemble(c, (first, second))) < 1e-12
        return actual

    def test_the_first_with_printed_numbers(self) -> None:
        # h_1's numbers are not printed: P_1(y = 0|x_0) = 0.40 and P_1(y = 1|x_1) = 0.90 to two digits
        actual = self.ensembles([0.5, 0.5], [(0.92, 0.40), (0.23, 0.90)])
        np.testing.assert_allclose(actual, [0.66, 0.565], rtol=0, atol=1e-9)

    def test_the_first_with_its_hypotheses(self) -> None:
        probabilities = self.of(self.FIRST)
        np.testing.assert_allclose(probabilities, [(0.92, 0.40), (0.23, 0.90)], rtol=0, atol=0.005)
        actual = self.ensembles([0.5, 0.5], probabilities)
        np.testing.assert_allclose(actual, [0.659070, 0.565862], rtol=0, atol=1e-6)
        np.testing.assert_allclose(actual, [0.66, 0.565], rtol=0, atol=0.001)
        alone = self.ensembles([1.0, 0.0], probabilities)
        assert [p > 0.5 for p in alone] == [True, False]  # "50%"
        assert [p > 0.5 for p in actual] == [True, True]  # "100%"
        labels = [oracle.logistic([4, 3], 0, x) > 0.5 for x in self.FIRST["x"]]
        assert labels == [False, True]

    def test_the_second_with_printed_numbers(self) -> None:
        # 1 - 0.43 is client 0's of x_0's label 0; client 1's are 0.40 and 0.90 again
        probabilities = [(1 - 0.43, 0.40), (0.4, 0.90)]
        average = self.ensembles([0.5, 0.5], probabilities)
        np.testing.assert_allclose(average, [0.485, 0.65], rtol=0, atol=1e-9)
        actual = self.ensembles([2 / 3, 1 / 3], probabilities)
        np.testing.assert_allclose(np.round(actual, 3), [0.513, 0.567], rtol=0, atol=1e-9)

    def test_the_second_with_its_hypotheses(self) -> None:
        probabilities = self.of(self.SECOND)
        np.testing.assert_allclose(probabilities, [(0.57, 0.40), (0.40, 0.90)], rtol=0, atol=0.007)
        average, actual = (self.ensembles(c, probabilities) for c in ([0.5, 0.5], [2 / 3, 1 / 3]))
        np.testing.assert_allclose(average, [0.487899, 0.649581], rtol=0, atol=1e-6)
        np.testing.assert_allclose(actual, [0.517561, 0.566025], rtol=0, atol=1e-6)
        np.testing.assert_allclose([average, actual], [[0.485, 0.65], [0.513, 0.567]], rtol=0, atol=0.005)
        alone = self.ensembles([1.0, 0.0], probabilities)
        assert [p > 0.5 for p in alone] == [True, False]
        assert [p > 0.5 for p in average] == [False, True]
        assert [p > 0.5 for p in actual] == [True, True]


class TestKnowledge:
    @repeatable
    @given(sizes, st.integers(1, 4), st.integers(1, 4), st.booleans(), seeds)
    def test_targets(self, clients: int, samples: int, classes: int, free: bool, seed: int) -> None:
        c, s, _ = problem(seed, clients, samples, classes)
        if free:
            c = np.random.default_rng(seed).normal(size=c.shape)
        actual = personal_targets(tensor(c), tensor(s))
        assert actual.dtype == torch.float64
        same(actual, oracle.personal_targets(c, s))

    def test_rows_are_who_learns(self) -> None:
        """Row n, not column n, is client n's: equation 6's convention."""
        s = torch.eye(3)[:, None]
        c = tensor([[0, 1, 0], [0, 0, 1], [0, 0, 1]])
        assert personal_targets(c, s).argmax(dim=2).flatten().tolist() == [1, 2, 2]

    @pytest.mark.parametrize("of_c", [torch.float32, torch.float64])
    @pytest.mark.parametrize("of_s", [torch.float32, torch.float64])
    def test_targets_have_the_predictions_dtype(self, of_c: torch.dtype, of_s: torch.dtype) -> None:
        c, s, _ = problem(0, 4)
        actual = personal_targets(tensor(c, of_c), tensor(s, of_s))
        assert actual.dtype == of_s
        assert actual.shape == (4, 3, 4)
        same(actual, oracle.personal_targets(c, s), rtol=1e-6)

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
        actual = coefficient_gradient(tensor(c), tensor(s), tensor(p), **options)
        (slope,) = torch.autograd.grad(loss, of_c)
        same(actual, slope.numpy())
        same(actual, oracle.coefficient_gradient(c, s, p, **options))
        numerical = oracle.differences(lambda x: oracle.knowledge_loss(x, s, p, **options), c)
        same(actual, numerical, atol=1e-6, rtol=1e-6)

    def test_defaults_are_the_bare_sum(self) -> None:
        c, s, p = problem(1, 3)
        same(knowledge_loss(tensor(c), tensor(s), tensor(p)), oracle.knowledge_loss(c, s, p, 1.0, 0.0, "sum"))
        actual = coefficient_gradient(tensor(c), tensor(s), tensor(p))
        same(actual, oracle.coefficient_gradient(c, s, p, 1.0, 0.0, "sum"))

    def test_targets_can_be_given(self) -> None:
        """Those that the clients are sent are those of the gradient: made once."""
        c, s, p = tensors(2, 4)
        targets = personal_targets(c, s)
        options: Any = {"weight": 2.0, "rho": 0.3, "reduction": "mean"}
        actual = coefficient_gradient(c, s, p, targets=targets, **options)
        same(actual, coefficient_gradient(c, s, p, **options).numpy())

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
        actual, expected = coefficient_gradient(*args, **options), coefficient_gradient(*exact, **options)
        assert actual.dtype == torch.float32
        same(actual, expected.numpy(), rtol=1e-4)
        loss = knowledge_loss(*args, **options)
        assert loss.dtype == torch.float32
        same(loss, knowledge_loss(*exact, **options).numpy(), rtol=1e-4)

    @pytest.mark.parametrize("samples", [1, 2, 5])
    def test_what_the_reductions_divide_by(self, samples: int) -> None:
        c, s, p = tensors(4, 3, samples)
        ratio = knowledge_loss(c, s, p) / knowledge_loss(c, s, p, reduction="mean")
        assert abs(ratio.item() - samples) < 1e-9
        actual, mean = (coefficient_gradient(c, s, p, reduction=r) for r in REDUCTIONS)
        same(actual, samples * mean.numpy())

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
        actual = coefficient_gradient(tensor(c), tensor(s), tensor(p), reduction=reduction)
        expected = oracle.coefficient_gradient(c, s, p, reduction=reduction)
        # where p log p goes on as p log(floor), its derivative has no 1: either is a gradient there
        floored = oracle.personal_targets(c, s) <= FLOOR
        slack = np.einsum("nkc,mkc->nm", floored, s) * p[:, None] / oracle.count(reduction, samples)
        difference = np.abs(actual.numpy() - expected)
        assert np.isfinite(actual.numpy()).all()
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
        actual = as_distributions(tensor(rows))
        same(actual, [oracle.as_distributions(block) for block in rows])
        same(actual.sum(dim=2), 1.0)
        assert (actual >= 0).all()
        of_floats = as_distributions(tensor(rows, torch.float32))
        assert of_floats.dtype == torch.float32
        same(of_floats, actual.numpy(), atol=1e-6)

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
        actual = cosine_coefficients(tensor(s), k)
        same(actual, oracle.cosine_coefficients(s, k))
        same(actual.sum(dim=1), 1.0)
        assert (actual >= 0).all()
        assert actual.dtype == torch.float64

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
        actual = cosine_coefficients(tensor(s, dtype), k)
        assert actual.dtype == dtype
        same(actual, oracle.cosine_coefficients(s, k), atol=1e-6)
        assert all(actual[n, n] > 0 for n in range(6))

    def test_ties_among_many(self) -> None:
        """Sorting must be stable where a vectorised sort of many equal numbers is not."""
        s = torch.cat([torch.eye(2)[:1].repeat(40, 1), torch.eye(2)[1:].repeat(40, 1)])[:, None]
        actual = cosine_coefficients(s, 5)
        for n in range(80):
            first = 40 * (n // 40)
            expected = {n} | set([m for m in range(first, first + 6) if m != n][:4])
            assert set(actual[n].nonzero().flatten().tolist()) == expected

    def test_nothing_predicted(self) -> None:
        s = np.array([[[0.0, 0.0]], [[1.0, 0.0]], [[0.0, 0.0]], [[1.0, 1.0]]])
        actual = cosine_coefficients(tensor(s))
        assert torch.isfinite(actual).all()
        assert actual[0].tolist() == [1, 0, 0, 0]
        assert actual[2].tolist() == [0, 0, 1, 0]
        same(actual, oracle.cosine_coefficients(s))
        same(cosine_coefficients(tensor(s), 2), oracle.cosine_coefficients(s, 2))

    def test_scale_does_not_matter(self) -> None:
        s = tensors(4, 4)[1]
        factors = tensor([1e-9, 1.0, 3.0, 1e9])[:, None, None]
        same(cosine_coefficients(s * factors), cosine_coefficients(s).numpy())

    def test_all_samples_count_together(self) -> None:
        """The cosine is of all predictions together, and not a mean over samples."""
        s = [[[3.0, 0.0], [0.0, 0.0]], [[1.0, 0.0], [0.0, 1.0]]]
        row = cosine_coefficients(tensor(s))[0]
        same(row[1] / row[0], 1 / np.sqrt(2))


class Ops(TorchDispatchMode):
    """Counts tensor operations, and notes the largest result."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.largest = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        actual = func(*args, **(kwargs or {}))
        self.calls += 1
        results = actual if isinstance(actual, tuple | list) else [actual]
        self.largest = max([self.largest, *(r.numel() for r in results if isinstance(r, Tensor))])
        return actual


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
            [sys.executable, "-c", MEMORY],
            env=env,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        assert run.returncode == 0, run.stderr
        grown, kept = json.loads(run.stdout)
        assert kept == 2 * 4 * 100 * 3000 * 10 + 4 * 100 * 100
        assert kept <= grown < 200e6
