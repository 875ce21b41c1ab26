"""Weighted means of models, against loops over Python's floats."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flwr_kd.server.aggregation import shares, weighted_mean

repeatable = settings(max_examples=60, deadline=None, derandomize=True)
weight_lists = st.lists(st.integers(0, 10_000) | st.floats(0, 1e6), min_size=1, max_size=6)


def _models(seed: int, count: int, dtype: str = "float32") -> list[list[np.ndarray]]:
    rng = np.random.default_rng(seed)
    shapes: list[tuple[int, ...]] = [(3, 2), (4,), (), (0, 3)]
    return [
        [np.asarray(rng.normal(size=shape, scale=10)).astype(dtype) for shape in shapes] for _ in range(count)
    ]


def _by_hand(values: list[float], weights: list[float]) -> float:
    total = math.fsum(weights)
    shares = [w / total for w in weights] if total > 0 else [1 / len(weights)] * len(weights)
    return math.fsum(p * v for p, v in zip(shares, values, strict=True))


@pytest.mark.parametrize(("dtype", "rtol"), [("float64", 1e-12), ("float32", 6e-8), ("float16", 5e-4)])
@repeatable
@given(seed=st.integers(0, 2**32 - 1), weights=weight_lists)
def test_matches_loops(dtype: str, rtol: float, seed: int, weights: list[float]) -> None:
    models = _models(seed, len(weights), dtype)
    for index, mean in enumerate(weighted_mean(models, weights)):
        assert (mean.dtype, mean.shape) == (models[0][index].dtype, models[0][index].shape)
        columns = zip(*(model[index].ravel().tolist() for model in models), strict=True)
        expected = np.array([_by_hand(list(values), weights) for values in columns]).reshape(mean.shape)
        scale = max((float(np.abs(model[index]).max(initial=0)) for model in models), default=0.0)
        np.testing.assert_allclose(
            mean.astype(np.float64), expected, rtol=rtol, atol=scale * 1e-14 + 1e-7 * (dtype == "float16")
        )


@repeatable
@given(seed=st.integers(0, 2**32 - 1), weights=weight_lists, data=st.data())
def test_order_of_clients_is_irrelevant(seed: int, weights: list[float], data: st.DataObject) -> None:
    models = _models(seed, len(weights), "float64")
    order = data.draw(st.permutations(range(len(weights))))
    turned = weighted_mean([models[i] for i in order], [weights[i] for i in order])
    for a, b in zip(weighted_mean(models, weights), turned, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)


@repeatable
@given(seed=st.integers(0, 2**32 - 1), weight=st.floats(0, 1e12))
def test_one_client_is_the_identity(seed: int, weight: float) -> None:
    models = _models(seed, 1)
    for a, b in zip(weighted_mean(models, [weight]), models[0], strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_client_without_weight_counts_nothing() -> None:
    models = [[np.float32([1, 2])], [np.float32([3e38, -3e38])]]
    np.testing.assert_array_equal(weighted_mean(models, [5, 0])[0], models[0][0])


def test_all_weights_zero_is_the_plain_mean() -> None:
    models = [[np.float32([1, 2])], [np.float32([3, 6])], [np.float32([5, 1])]]
    assert weighted_mean(models, [0, 0, 0])[0].tolist() == [3, 3]


def test_scale_of_the_weights_is_irrelevant() -> None:
    models = _models(0, 3, "float64")
    for a, b in zip(weighted_mean(models, [1, 2, 5]), weighted_mean(models, [1e-9, 2e-9, 5e-9]), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-13)


@pytest.mark.parametrize("dtype", ["int64", "int32", "uint8"])
def test_counters_stay_whole_and_0_dimensional(dtype: str) -> None:
    models = [[np.array(value, dtype=dtype)] for value in (3, 4, 4)]
    (mean,) = weighted_mean(models, [1, 1, 1])
    assert isinstance(mean, np.ndarray)
    assert (mean.dtype, mean.shape, mean.item()) == (np.dtype(dtype), (), 4)


def test_counters_are_rounded_not_cut() -> None:
    models = [[np.array([10, -10, 0])], [np.array([13, -13, 1])]]
    assert weighted_mean(models, [1, 2])[0].tolist() == [12, -12, 1]


def test_bools_go_with_the_majority() -> None:
    models = [
        [np.array([True, False, True])],
        [np.array([True, False, False])],
        [np.array([True, True, False])],
    ]
    (mean,) = weighted_mean(models, [1, 1, 1])
    assert (mean.dtype, mean.tolist()) == (np.bool_, [True, False, False])


def test_sums_are_in_double_precision() -> None:
    models = [[np.float32([2.0**24])], *([np.float32([1.0])] for _ in range(1023))]
    (mean,) = weighted_mean(models, [1] * 1024)
    assert mean.item() == np.float32((2**24 + 1023) / 1024)


def test_values_near_the_limit_of_the_dtype_do_not_overflow() -> None:
    top = np.finfo(np.float16).max
    assert weighted_mean([[np.array([top])]] * 5, [1] * 5)[0].tolist() == [top]


def test_inputs_are_not_changed_nor_returned() -> None:
    models = _models(1, 2)
    before = [[array.copy() for array in model] for model in models]
    for mean in weighted_mean(models, [1, 0]):
        mean[...] = 99
    for model, kept in zip(models, before, strict=True):
        for a, b in zip(model, kept, strict=True):
            np.testing.assert_array_equal(a, b)


def test_models_without_arrays() -> None:
    assert weighted_mean([[], []], [1, 2]) == []


@pytest.mark.parametrize(
    ("models", "weights", "text"),
    [
        ([], [], "at least one expected, got 0, 0"),
        ([[np.zeros(1)]], [1, 2], "as many weights as models .* got 1, 2"),
        ([[np.zeros(1)], [np.zeros(1)]], [1], "as many weights as models .* got 2, 1"),
        ([[np.zeros(1)]], [-1], r"weights must be finite, at least 0, .* got -1"),
        ([[np.zeros(1)], [np.zeros(1)]], [1, math.nan], r"weights must be finite, at least 0, .* got nan"),
        ([[np.zeros(1)], [np.zeros(1)]], [1, math.inf], r"weights must be finite, at least 0, .* got inf"),
        ([[np.zeros(1)], [np.zeros(1), np.zeros(1)]], [1, 1], "the same arrays"),
        ([[np.zeros(1)], [np.zeros(2)]], [1, 1], "the same arrays"),
        ([[np.zeros(1)], [np.zeros(1)]], [1e308, 1e308], "with a finite sum"),
    ],
)
def test_refused(models: Any, weights: list[float], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        weighted_mean(models, weights)


@repeatable
@given(weight_lists)
def test_shares_match_loops(weights: list[float]) -> None:
    found = shares(weights)
    assert (found.dtype, found.shape) == (np.float64, (len(weights),))
    total = math.fsum(weights)
    expected = [w / total for w in weights] if total > 0 else [1 / len(weights)] * len(weights)
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    assert math.fsum(found) == pytest.approx(1, abs=1e-12)


def test_shares_are_a_copy() -> None:
    weights = np.array([1.0, 3.0])
    shares(weights)[0] = 9  # type: ignore[arg-type]
    assert weights.tolist() == [1.0, 3.0]


@pytest.mark.parametrize(
    "weights", [[], [-1], [1, -1e-9], [math.nan], [1, math.inf], [math.inf, -math.inf], [2, -1]]
)
def test_no_shares(weights: list[float]) -> None:
    with pytest.raises(ValueError, match="weights must be finite, at least 0 and not none, got"):
        shares(weights)
