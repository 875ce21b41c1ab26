"""Robust means of whole models, in memory and in a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flwr_kd.server.aggregation import (
    RobustMean,
    Rule,
    RunningMean,
    average_by,
    new_mean,
    weighted_mean,
)
from flwr_kd.wording import begin_run

RULES = ["median", "trimmed-mean:0.2", "krum:1", "multi-krum:1:3", "geometric-median", "norm-bound:1.5"]
NDArray = Any


def models(count: int = 6, seed: int = 0) -> list[list[NDArray]]:
    rng = np.random.default_rng(seed)
    return [
        [
            rng.normal(size=(3, 4)).astype(np.float32),
            np.array(rng.integers(0, 50), np.int64),
            rng.normal(size=7),
            rng.random(2).astype(np.float16),
        ]
        for _ in range(count)
    ]


def robust(rule: str, given: list[list[NDArray]], weights: Any = None, **options: Any) -> list[NDArray]:
    mean = RobustMean(Rule.parse(rule), **options)
    for model, weight in zip(given, weights or [1] * len(given), strict=True):
        mean.add(model, weight)
    assert mean.count == len(given)
    return mean.result()


def flat(model: list[NDArray]) -> NDArray:
    return np.concatenate([np.float64(array).reshape(-1) for array in model if array.dtype.kind == "f"])


def test_the_plain_mean_is_a_running_mean() -> None:
    assert isinstance(new_mean(Rule()), RunningMean)
    assert isinstance(new_mean(Rule("median")), RobustMean)
    given = models()
    for one, other in zip(
        average_by(lambda: new_mean(Rule()))(given, [1, 2, 3, 4, 5, 6]),
        weighted_mean(given, [1, 2, 3, 4, 5, 6]),
        strict=True,
    ):
        assert np.array_equal(one, other)
        assert one.dtype == other.dtype


@pytest.mark.parametrize("rule", RULES)
def test_dtypes_and_shapes_are_kept_and_files_change_nothing(rule: str, tmp_path: Path) -> None:
    given = models()
    in_memory = robust(rule, given)
    for array, like in zip(in_memory, given[0], strict=True):
        assert (array.dtype, array.shape) == (like.dtype, like.shape)
    for one, other in zip(in_memory, robust(rule, given, memory=0, folder=tmp_path), strict=True):
        assert np.array_equal(one, other)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("rule", RULES)
def test_equal_models_are_their_own_mean(rule: str) -> None:
    model = models(1)[0]
    for one, other in zip(robust(rule, [model] * 5), model, strict=True):
        np.testing.assert_allclose(np.float64(one), np.float64(other), rtol=1e-6)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("harm", [1e3, 1e38, -1e38])
def test_one_of_six_models_does_little_harm(rule: str, harm: float) -> None:
    """With any weight that it claims, but where clipping bounds its length and not its weight."""
    given = models(6)
    reference = [np.zeros_like(array) for array in given[0]]
    honest = np.stack([flat(model) for model in given[1:]])
    given[0] = [
        np.full_like(a, harm if a.dtype.itemsize > 2 else 6e4) if a.dtype.kind == "f" else a for a in given[0]
    ]
    found = flat(robust(rule, given, [100, 1, 1, 1, 1, 1], reference=reference))
    largest = np.linalg.norm(honest, axis=1).max()
    assert np.linalg.norm(found) <= 1.5 * largest
    with np.errstate(over="ignore"):
        assert np.linalg.norm(flat(weighted_mean(given, [1] * 6))) > 50 * largest


def test_coordinate_rules_are_numpys_on_each_array() -> None:
    given = models(7)
    for index, found in enumerate(robust("median", given)):
        stacked = np.stack([np.float64(model[index]) for model in given])
        expected = np.median(stacked, axis=0)
        np.testing.assert_allclose(
            np.float64(found), expected, rtol=1e-3 if found.dtype == np.float16 else 1e-6
        )
    whole = sorted(int(model[1]) for model in given)
    assert robust("median", given)[1] == whole[3]


def test_krum_returns_one_of_the_models_to_the_last_bit() -> None:
    given = models(6)
    found = robust("krum:1", given)
    assert any(all(np.array_equal(a, b) for a, b in zip(found, model, strict=True)) for model in given)
    distances = np.square(
        np.stack([flat(m) for m in given])[:, None] - np.stack([flat(m) for m in given])
    ).sum(2)
    scores = [np.sort(row)[1:4].sum() for row in distances]
    assert np.array_equal(found[0], given[int(np.argmin(scores))][0])


def test_multi_krum_is_the_plain_mean_of_the_chosen() -> None:
    given = models(6)
    stacked = np.stack([flat(m) for m in given])
    scores = [np.sort(row)[1:4].sum() for row in np.square(stacked[:, None] - stacked).sum(2)]
    chosen = np.argsort(scores)[:3]
    # Each has one vote, whatever it claims.
    found = robust("multi-krum:1:3", given, [1, 9, 1, 9, 1, 9])
    for one, other in zip(found, weighted_mean([given[k] for k in sorted(chosen)], [1, 1, 1]), strict=True):
        assert np.array_equal(one, other)


def test_clipped_updates_are_averaged_by_their_weights() -> None:
    reference = [np.array([1.0, 1.0])]
    given = [[np.array([4.0, 5.0])], [np.array([1.0, 2.0])], [np.array([2.0, 1.0])]]
    # Norms 5, 1 and 1; the median is 1, and 2 the bound: the first update is multiplied by 2/5.
    (found,) = robust("norm-bound:2", given, [2, 1, 1], reference=reference)
    expected = 1 + (2 * 0.4 * np.array([3.0, 4.0]) + np.array([0.0, 1.0]) + np.array([1.0, 0.0])) / 4
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_near_models_keep_their_distances_beside_a_huge_one() -> None:
    """Krum chooses the model in the middle of the others, and not any: the reference is subtracted first."""
    rng = np.random.default_rng(3)
    reference = [rng.normal(size=50) * 1e6]
    updates = [1e-3 * k * np.ones(50) for k in (-2, -1, 0, 1, 2)]
    given = [[reference[0] + update] for update in updates] + [[np.full(50, 1e200)]]
    (found,) = robust("krum:1", given, reference=reference)
    assert np.array_equal(found, given[2][0])


def test_running_statistics_count_for_distances() -> None:
    """A model whose weights are like the others' and whose statistics are huge is not chosen."""
    given = [[np.zeros(3, np.float32), np.float32([k, 0])] for k in range(5)]
    given[2][1] = np.float32([1e6, 1e6])
    (_, statistics) = robust("krum:1", given)
    assert statistics[0] < 10


@pytest.mark.parametrize("rule", RULES)
def test_values_that_are_not_finite_stay_where_they_are_constants(rule: str) -> None:
    mask = np.float32([[0, -np.inf], [0, 0]])
    found = robust(rule, [[mask, np.float32([k])] for k in range(5)])
    assert np.array_equal(found[0], mask)
    assert np.isfinite(found[1]).all()


def test_a_group_that_is_too_small_for_a_rule_has_the_median(flower_log: list[str]) -> None:
    begin_run()
    given = models(4)
    for one, other in zip(robust("krum:1", given), robust("median", given), strict=True):
        assert np.array_equal(one, other)
    (line,) = flower_log
    assert "krum:1 needs 5 models, and a group has 4" in line


@pytest.mark.parametrize("rule", RULES)
def test_one_model_is_its_own_mean(rule: str) -> None:
    (model,) = models(1)
    for one, other in zip(robust(rule, [model]), model, strict=True):
        np.testing.assert_allclose(np.float64(one), np.float64(other), rtol=1e-6)


def test_what_cannot_be_averaged_is_refused() -> None:
    mean = RobustMean(Rule("median"))
    with pytest.raises(ValueError, match="no models"):
        mean.result()
    mean.add([np.zeros(2)], 1)
    with pytest.raises(ValueError, match="same arrays"):
        mean.add([np.zeros(3)], 1)
    for weight in (-1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="weights"):
            mean.add([np.zeros(2)], weight)
