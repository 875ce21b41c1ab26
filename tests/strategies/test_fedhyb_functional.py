"""FedHyb's losses, against the oracle."""

from __future__ import annotations

import doctest
from collections.abc import Sequence
from typing import Any

import hybrid as oracle
import numpy as np
import pytest
import torch
from hybrid_rounds import repeatable, tensors
from hypothesis import given
from hypothesis import strategies as st

from flwr_kd.strategies.fedhyb import (
    ensemble_distillation_loss,
    self_distillation_loss,
    sub_network_weight,
)


def test_the_oracles_own_cases() -> None:
    results = doctest.testmod(oracle)
    assert results.attempted > 40
    assert results.failed == 0


def check_client_loss(
    logits: np.ndarray,
    subs: Sequence[np.ndarray],
    y: np.ndarray,
    a: float,
    atol: float = 1e-9,
    **options: bool,
) -> None:
    own, others = tensors(logits), [tensors(sub) for sub in subs]
    renamed = {"dynamic_weighting": options.get("dynamic", True)}
    renamed |= {name: value for name, value in options.items() if name != "dynamic"}
    value = self_distillation_loss(own, torch.from_numpy(y), others, weight=a, **renamed)
    value.backward()
    expected = oracle.client_loss(logits, subs, y, a, dynamic=options.get("dynamic", True))
    np.testing.assert_allclose(value.item(), expected, rtol=1e-9, atol=atol)
    slopes = oracle.client_gradients(logits, subs, y, a, **options)
    for actual, slope in zip([own, *others], [slopes[0], *slopes[1]], strict=True):
        gradient = torch.zeros_like(actual) if actual.grad is None else actual.grad
        np.testing.assert_allclose(gradient.numpy(), slope, rtol=1e-8, atol=atol)


class TestClientLoss:
    @repeatable
    @given(
        st.integers(1, 4), st.integers(2, 5), st.integers(0, 3), st.sampled_from([0.1, 1.0, 8.0]),
        st.sampled_from([0.0, 0.3, 1.0, 20.0]), st.booleans(), st.booleans(), st.booleans(), st.integers(0, 99),
    )  # fmt: skip
    def test_values_and_gradients(
        self, rows: int, classes: int, subs: int, scale: float, a: float,
        dynamic: bool, detach_target: bool, detach_weight: bool, seed: int,
    ) -> None:  # fmt: skip
        rng = np.random.default_rng(seed)
        logits, *others = rng.normal(scale=scale, size=(1 + subs, rows, classes))
        y = rng.integers(classes, size=rows)
        options = {"dynamic": dynamic, "detach_target": detach_target, "detach_weight": detach_weight}
        check_client_loss(logits, others, y, a, **options)

    @pytest.mark.parametrize("detach_target", [True, False])
    @pytest.mark.parametrize("detach_weight", [True, False])
    @pytest.mark.parametrize("size", [50.0, 300.0, 1000.0])
    def test_extreme_logits(self, size: float, detach_target: bool, detach_weight: bool) -> None:
        """p log p and its gradient are 0 if p is 0 in floating point."""
        logits = np.array([[size, 0.0, -size], [0.0, 1.0, size]])
        subs = [np.array([[1.0, 0.0, 0.5], [-1.0, 1.0, 2.0]]), np.array([[3.0, 0.0, 2.0], [0.0, 0.0, 0.0]])]
        y = np.array([0, 2])
        options = {"detach_target": detach_target, "detach_weight": detach_weight}
        check_client_loss(logits, subs, y, 1.0, **options)

    def test_wrong_and_extreme_sub_networks(self) -> None:
        logits, subs = np.array([[1.0, 0.0], [0.0, 2.0]]), [np.array([[-900.0, 0.0], [0.0, 0.0]])]
        check_client_loss(logits, subs, np.array([0, 1]), 1.0)
        check_client_loss(logits, subs, np.array([0, 1]), 1.0, detach_weight=False)

    @pytest.mark.parametrize("scale", [0.0, 1.0, 40.0, 500.0])
    def test_the_weight(self, scale: float) -> None:
        rng = np.random.default_rng(0)
        logits, y = rng.normal(scale=scale, size=(4, 3)), rng.integers(3, size=4)
        actual = sub_network_weight(tensors(logits), torch.from_numpy(y))
        expected = oracle.beta(oracle.cross_entropy(logits, y))
        np.testing.assert_allclose(actual.item(), expected, rtol=1e-9, atol=1e-300)
        assert 0 <= actual.item() <= 0.5
        own = tensors(logits)
        sub_network_weight(own, torch.from_numpy(y)).backward()
        slope = oracle.gradient(lambda u: oracle.beta(oracle.cross_entropy(u, y)), logits)
        assert own.grad is not None
        np.testing.assert_allclose(own.grad.numpy(), slope, rtol=1e-9, atol=1e-12)

    def test_a_better_sub_network_counts_more(self) -> None:
        y = torch.tensor([0])
        right, wrong = torch.tensor([[2.0, 0.0]]), torch.tensor([[-2.0, 0.0]])
        assert sub_network_weight(right, y) > sub_network_weight(wrong, y)
        assert sub_network_weight(torch.tensor([[99.0, 0.0]]), y) == 0.5

    @pytest.mark.parametrize("weight", [-0.1, float("nan")])
    def test_weights_refused(self, weight: float) -> None:
        with pytest.raises(ValueError, match="weight must be at least 0"):
            self_distillation_loss(torch.zeros(2, 3), torch.zeros(2).long(), [], weight=weight)

    @pytest.mark.parametrize(
        ("logits", "labels", "sub"), [((2, 3), (3,), (2, 3)), ((3,), (3,), (3,)), ((2, 3), (2,), (2, 4))]
    )
    @pytest.mark.parametrize("dynamic", [True, False])
    def test_shapes_refused(self, logits: Any, labels: Any, sub: Any, dynamic: bool) -> None:
        y = torch.zeros(labels, dtype=torch.int64)
        with pytest.raises(ValueError, match=r"\[B, C\]|\[N, C\]"):
            self_distillation_loss(
                torch.zeros(logits), y, [torch.zeros(sub)], weight=1.0, dynamic_weighting=dynamic
            )


class TestServerLoss:
    @repeatable
    @given(
        st.integers(1, 4), st.integers(2, 5), st.integers(1, 5), st.sampled_from([0.1, 1.0, 30.0, 400.0]),
        st.sampled_from([0.0, 0.5, 10.0]), st.sampled_from([0.0, 0.5, 3.0]), st.integers(0, 99),
    )  # fmt: skip
    def test_values_and_gradients(
        self, rows: int, classes: int, dim: int, scale: float, eta: float, nu: float, seed: int
    ) -> None:
        rng = np.random.default_rng(seed)
        logits, of_target = rng.normal(scale=scale, size=(2, rows, classes))
        features, h = rng.normal(scale=scale, size=(2, rows, dim))
        q = oracle.softmax(of_target)
        actual, own, target_q, target_h = tensors(logits), tensors(features), tensors(q), tensors(h)
        value = ensemble_distillation_loss(
            actual, own, target_q, target_h, logits_weight=eta, feature_weight=nu
        )
        value.backward()
        expected = oracle.server_loss(q, h, logits, features, eta, nu)
        np.testing.assert_allclose(value.item(), expected, rtol=1e-9, atol=1e-9)
        assert target_q.grad is None
        assert target_h.grad is None
        assert actual.grad is not None
        assert own.grad is not None
        slope = oracle.gradient(lambda u: oracle.server_loss(q, h, u, features, eta, nu), logits)
        np.testing.assert_allclose(actual.grad.numpy(), slope, rtol=1e-8, atol=1e-9)
        slope = oracle.gradient(lambda f: oracle.server_loss(q, h, logits, f, eta, nu), features)
        np.testing.assert_allclose(own.grad.numpy(), slope, rtol=1e-8, atol=1e-9)

    @pytest.mark.parametrize(("eta", "nu"), [(-1.0, 1.0), (1.0, -1.0), (float("nan"), 1.0)])
    def test_weights_refused(self, eta: float, nu: float) -> None:
        h, q = torch.zeros(2, 3), torch.full((2, 3), 1 / 3)
        with pytest.raises(ValueError, match="weights must be at least 0"):
            ensemble_distillation_loss(h, h, q, h, logits_weight=eta, feature_weight=nu)

    @pytest.mark.parametrize(
        ("features", "targets", "q"),
        [((2, 4), (2, 3), (2, 3)), ((4,), (4,), (2, 3)), ((2, 4), (2, 4), (2, 2))],
    )
    def test_shapes_refused(self, features: Any, targets: Any, q: Any) -> None:
        with pytest.raises(ValueError, match=r"\[N, C\]|\[B, D\]"):
            ensemble_distillation_loss(
                torch.zeros(2, 3), torch.zeros(features), torch.full(q, 0.5), torch.zeros(targets),
                logits_weight=1.0, feature_weight=1.0,
            )  # fmt: skip
