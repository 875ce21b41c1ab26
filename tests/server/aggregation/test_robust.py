"""Robust rules against independent implementations: Flower's, scipy's, and numerical minimisation."""

from __future__ import annotations

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, RecordDict
from flwr.serverapp.strategy.fedtrimmedavg import trim_mean
from flwr.serverapp.strategy.multikrum import select_multikrum
from scipy import optimize, stats

from flwr_kd.server.aggregation import robust

SHAPES = [(1, 3), (2, 4), (5, 7), (10, 33), (13, 6)]


def points(count: int, size: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    made = rng.normal(size=(count, size))
    made[: count // 4] += 1000
    return made


@pytest.mark.parametrize(("count", "size"), SHAPES)
def test_the_median_is_numpys(count: int, size: int) -> None:
    block = points(count, size)
    np.testing.assert_allclose(robust.median(block), np.median(block, axis=0), rtol=1e-13)


def test_the_median_of_huge_values_is_finite() -> None:
    largest = np.finfo(np.float64).max
    assert robust.median(np.array([[largest], [largest]])).tolist() == [largest]
    assert robust.median(np.array([[-largest], [largest]])).tolist() == [0.0]


@pytest.mark.parametrize("share", [0.0, 0.1, 0.2, 0.25, 0.4, 0.49])
@pytest.mark.parametrize(("count", "size"), SHAPES)
def test_the_trimmed_mean_is_scipys_and_flowers(count: int, size: int, share: float) -> None:
    block = points(count, size)
    found = robust.trimmed_mean(block, share)
    np.testing.assert_allclose(found, stats.trim_mean(block, share, axis=0), rtol=1e-11, atol=1e-12)
    np.testing.assert_allclose(found, trim_mean(block, share), rtol=1e-11, atol=1e-12)


def test_a_share_is_rounded_down_to_whole_clients() -> None:
    """0.29 · 100 is 28.999… in floating point."""
    block = np.arange(100.0)[:, None] ** 3
    assert robust.trimmed_mean(block, 0.29)[0] == pytest.approx((block[29:71]).mean())


def distances_of(block: np.ndarray) -> np.ndarray:
    return np.square(block[:, None] - block).sum(axis=2)


@pytest.mark.parametrize(("count", "size"), SHAPES)
def test_distances_follow_from_inner_products(count: int, size: int) -> None:
    block = points(count, size)
    found = robust.squared_distances(block @ block.T)
    np.testing.assert_allclose(found, distances_of(block), rtol=1e-9, atol=1e-6)


def test_a_model_beyond_float64_is_infinitely_far_from_all() -> None:
    products = np.array([[1.0, 0.0, np.inf], [0.0, 1.0, np.nan], [np.inf, np.nan, np.inf]])
    assert robust.squared_distances(products)[2].tolist() == [np.inf, np.inf, 0.0]
    assert robust.squared_distances(products)[0, 1] == 2.0


@pytest.mark.parametrize("attackers", [0, 1, 2, 3])
@pytest.mark.parametrize("seed", range(5))
def test_krum_chooses_what_flowers_multi_krum_chooses(attackers: int, seed: int) -> None:
    block = points(9, 12, seed)
    contents = [
        RecordDict(
            {"arrays": ArrayRecord({"w": Array(row)}), "index": ArrayRecord({"i": Array(np.array(i))})}
        )
        for i, row in enumerate(block)
    ]
    for chosen in (1, 3):
        found = np.argsort(robust.krum_scores(distances_of(block), attackers), kind="stable")[:chosen]
        expected = select_multikrum(contents, attackers, chosen)
        assert sorted(found) == sorted(int(content["index"]["i"].numpy()) for content in expected)


def test_krum_leaves_out_models_that_are_infinitely_far() -> None:
    block = points(7, 3, 1)[2:]
    distances = np.full((7, 7), np.inf)
    distances[2:, 2:] = distances_of(block)
    np.fill_diagonal(distances, 0)
    scores = robust.krum_scores(distances, 2)
    assert np.isinf(scores[:2]).all()
    assert np.isfinite(scores[2:]).all()


def minimised(block: np.ndarray) -> np.ndarray:
    """Return the geometric median by a general minimiser, from the coordinate-wise median."""

    def cost(z: np.ndarray) -> float:
        return float(np.linalg.norm(block - z, axis=1).sum())

    options = {"xatol": 1e-10, "fatol": 1e-12, "maxiter": 100_000, "maxfev": 100_000}
    return np.asarray(
        optimize.minimize(cost, np.median(block, axis=0), method="Nelder-Mead", options=options).x
    )


@pytest.mark.parametrize("seed", range(4))
def test_the_geometric_median_minimises_the_sum_of_distances(seed: int) -> None:
    block = points(9, 3, seed)
    weights = robust.geometric_median_weights(block @ block.T)
    assert weights.sum() == pytest.approx(1)
    assert (weights >= 0).all()
    np.testing.assert_allclose(weights @ block, minimised(block), atol=1e-4)


@pytest.mark.parametrize("scale", [1e3, 1e12, 1e30])
def test_the_geometric_median_of_a_cluster_stays_with_it_however_far_outliers_are(scale: float) -> None:
    rng = np.random.default_rng(0)
    block = np.concatenate([rng.normal(size=(7, 40)), scale * np.ones((3, 40))])
    median = robust.geometric_median_weights(block @ block.T) @ block
    assert np.linalg.norm(median - block[:7].mean(axis=0)) < np.sqrt(40)


def test_the_geometric_median_does_not_use_a_model_beyond_float64() -> None:
    products = np.diag([1.0, 1.0, 1.0, np.inf])
    products[3, :3] = products[:3, 3] = np.nan
    np.testing.assert_allclose(robust.geometric_median_weights(products), [1 / 3, 1 / 3, 1 / 3, 0])
    assert robust.geometric_median_weights(np.array([[np.inf]])).tolist() == [1.0]


def test_the_geometric_median_of_equal_models_and_of_one() -> None:
    np.testing.assert_allclose(robust.geometric_median_weights(np.zeros((3, 3))), [1 / 3] * 3)
    assert robust.geometric_median_weights(np.array([[5.0]])).tolist() == [1.0]


def test_updates_are_clipped_to_a_multiple_of_the_median_norm() -> None:
    norms = np.array([0.0, 1.0, 2.0, 8.0, np.inf])
    assert robust.clip_factors(norms, 1.0).tolist() == [1.0, 1.0, 1.0, 0.25, 0.0]
    assert robust.clip_factors(norms, 0.5).tolist() == [1.0, 1.0, 0.5, 0.125, 0.0]
    # Of an even number the lower median: one of two cannot raise the bound.
    assert robust.clip_factors(np.array([1.0, 100.0]), 2.0).tolist() == [1.0, 0.02]
    assert robust.clip_factors(np.zeros(3), 1.0).tolist() == [1.0, 1.0, 1.0]
