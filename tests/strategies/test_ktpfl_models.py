"""KT-pFL's maths on models, against the oracle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import coefficients as oracle
import numpy as np
import pytest
import torch
from distributions import (
    Arrays,
    draw_models,
    equal,
    problem,
    repeatable,
    same,
    seeds,
    sizes,
    sparse,
    tensor,
    tensors,
)
from hypothesis import given
from hypothesis import strategies as st
from stored import gram, personal_models
from torch import Tensor

from flwr_kd.strategies.ktpfl.functional import (
    distance_gradient,
    distance_scale,
    step,
    transferred,
)


def copied(models: Sequence[Arrays]) -> list[Arrays]:
    return [[array.copy() for array in model] for model in models]


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
        actual = gram(models)
        assert actual.dtype == torch.float64
        same(actual, oracle.gram(models))
        assert torch.equal(actual, actual.T)

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
        actual = distance_gradient(tensor(c), gram(models), tensor(p), **options)
        same(actual, oracle.distance_gradient(c, models, p, **options))
        of_c = tensor(c).requires_grad_()
        loss = plain_distance(of_c, models, p, options)
        same(loss, oracle.distance_loss(c, models, p, **options))
        same(actual, torch.autograd.grad(loss, of_c)[0].numpy())
        numerical = oracle.differences(lambda x: oracle.distance_loss(x, models, p, **options), c, 1e-4)
        same(actual, numerical, atol=1e-6, rtol=1e-6)

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
        actual, expected = personal_models(tensor(c), models), oracle.personal_models(c, models)
        tolerance = {np.float16: 2e-3, np.float32: 1e-6, np.float64: 1e-13}[dtype]
        assert len(actual) == clients
        for mine, theirs in zip(actual, expected, strict=True):
            assert len(mine) == len(theirs)
            for a, b in zip(mine, theirs, strict=True):
                assert isinstance(a, np.ndarray)
                assert (a.dtype, a.shape) == (b.dtype, b.shape)
                np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)
        assert [int(model[1]) for model in actual] == [17 * n + 5 for n in range(clients)]

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
        actual = personal_models(tensor([[2.0, 2.0], [0.5, 0.5]]), models)
        assert actual[0][0].tolist() == [limit, -limit, 4]
        assert actual[1][0].tolist() == [limit, -limit, 1]
        assert actual[0][1] == 3

    def test_models_stay(self) -> None:
        models = draw_models(1, 3)
        before = copied(models)
        c, _, p = tensors(0, 3)
        products = gram(models)
        distance_gradient(c, products, p, rho=1.0)
        actual = personal_models(c, models)
        moved = transferred(models[0], models[1], learning_rate=0.1, steps=2)
        for array in [*actual[0], *moved]:
            if array.dtype.kind == "f":
                array += 1
        assert all(equal(a, b) for a, b in zip(models, before, strict=True))
        assert torch.equal(gram(models), products)

    @pytest.mark.parametrize("identity", [1, 4])
    def test_own_weights_only(self, identity: int) -> None:
        models = draw_models(2, identity)
        actual = personal_models(torch.eye(identity), models)
        assert all(equal(a, b) for a, b in zip(actual, models, strict=True))

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
        actual = transferred(own, target, learning_rate=rate, steps=steps, scale=scale)
        expected = oracle.transferred(own, target, rate, steps, scale)
        tolerance = {np.float32: 2e-6, np.float64: 1e-13}[dtype]
        for i, (array, same_as) in enumerate(zip(actual, expected, strict=True)):
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
