"""Differences per seed and intervals, against numbers by hand and against scipy's own tests."""

from __future__ import annotations

import math
import sys
import warnings

import numpy as np
import pytest
from scipy import stats

from flwr_kd.results.errors import ResultError
from flwr_kd.results.statistics import accuracy_interval, differences, mean_interval, paired_difference
from tests.results.examples import a_comparison, a_round, a_run


def test_a_paired_difference_by_hand() -> None:
    """Differences 1, 2 and 6: mean 3, s² = (4 + 1 + 9) / 2 = 7, and t = 4.303 with two degrees of freedom."""
    found = paired_difference({0: 2.0, 1: 4.0, 2: 9.0}, {2: 3.0, 1: 2.0, 0: 1.0})
    assert found is not None
    assert found.mean == pytest.approx(3)
    half = 4.30265273 * math.sqrt(7 / 3)
    assert found.interval == pytest.approx((3 - half, 3 + half))
    assert found.seeds == (0, 1, 2)
    assert not found.decided


@pytest.mark.parametrize("count", [2, 3, 5, 30])
@pytest.mark.parametrize("level", [0.5, 0.95, 0.99])
def test_the_interval_is_that_of_the_paired_t_test(count: int, level: float) -> None:
    generator = np.random.default_rng(count)
    ours, theirs = generator.normal(0.6, 0.1, count), generator.normal(0.5, 0.1, count)
    found = paired_difference(dict(enumerate(ours)), dict(enumerate(theirs)), level=level)
    test = stats.ttest_rel(ours, theirs)
    expected = test.confidence_interval(level)
    assert found is not None
    assert found.interval == pytest.approx((expected.low, expected.high))
    # 0 is outside an interval exactly where the test of the same level rejects.
    assert found.decided == (test.pvalue < 1 - level)


def test_a_shared_part_of_the_seeds_does_not_widen_the_interval() -> None:
    """What both methods owe to a seed, such as an easy partition, cancels."""
    easy = {0: 0.1, 1: 0.5, 2: 0.9}
    better = {
        seed: value + gain for (seed, value), gain in zip(easy.items(), (0.02, 0.03, 0.04), strict=True)
    }
    found = paired_difference(better, easy)
    assert found is not None
    assert found.decided
    assert found.mean == pytest.approx(0.03)
    spread = paired_difference(dict(zip(better, (0.04, 0.93, 0.52), strict=True)), easy)
    assert spread is not None
    assert not spread.decided


def test_only_seeds_with_a_value_on_both_sides_count() -> None:
    found = paired_difference({0: 0.5, 1: None, 2: 0.75, 3: 1.0}, {0: 0.25, 1: 0.5, 2: None, 4: 0.0})
    assert found is not None
    assert (found.mean, found.interval, found.seeds, found.decided) == (0.25, None, (0,), False)
    assert paired_difference({0: None}, {0: 0.5}) is None
    assert paired_difference({0: 0.5}, {1: 0.5}) is None
    assert paired_difference({}, {}) is None


def test_equal_differences_give_an_interval_without_width() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = paired_difference({0: 0.5, 1: 0.75}, {0: 0.25, 1: 0.5})
        none = paired_difference({0: 0.5, 1: 0.75}, {0: 0.5, 1: 0.75})
    assert found is not None
    assert none is not None
    assert (found.interval, found.decided) == ((0.25, 0.25), True)
    assert (none.interval, none.decided) == ((0, 0), False)


def test_differences_of_a_comparison() -> None:
    def runs(method: str, *values: float | None) -> list[object]:
        return [
            a_run(method, seed, rounds=(a_round(local_accuracy=value, global_accuracy=None),))
            for seed, value in enumerate(values)
        ]

    comparison = a_comparison(*runs("fedavg", 0.5, 0.75), *runs("a", 0.75, 0.5), *runs("b", None, None))
    found = differences(comparison, "local_accuracy")
    assert list(found) == ["a", "b"]
    assert found["a"] == paired_difference({0: 0.75, 1: 0.5}, {0: 0.5, 1: 0.75})
    assert found["b"] is None
    assert set(differences(comparison, "global_accuracy").values()) == {None}
    other = differences(comparison, "local_accuracy", "a")
    assert list(other) == ["fedavg", "b"]
    assert other["fedavg"] is not None
    assert other["fedavg"].mean == -found["a"].mean
    with pytest.raises(ResultError, match="reference must be one of fedavg, a, b, got 'c'"):
        differences(comparison, "local_accuracy", "c")
    with pytest.raises(ResultError, match=r"metric must be one of local_accuracy, .*, got 'accuracy'"):
        differences(comparison, "accuracy")


@pytest.mark.parametrize(("accuracy", "samples"), [(0.9, 360), (0.5, 10), (0.03, 2000), (1 / 3, 3)])
def test_the_interval_of_an_accuracy_is_what_the_bootstrap_tends_to(accuracy: float, samples: int) -> None:
    correct = np.zeros(samples)
    correct[: round(accuracy * samples)] = 1
    drawn = stats.bootstrap(
        (correct,), np.mean, method="percentile", n_resamples=20_000, random_state=np.random.default_rng(0)
    ).confidence_interval
    # A limit that lies between two counts falls on either.
    assert accuracy_interval(accuracy, samples) == pytest.approx((drawn.low, drawn.high), abs=1.01 / samples)


def test_the_interval_of_an_accuracy_by_hand() -> None:
    """Of 4 draws at 1/2: 0 and 4 correct have a probability of 1/16 each, more than 2.5 % and less than 10 %."""
    assert accuracy_interval(0.5, 4) == (0, 1)
    assert accuracy_interval(0.5, 4, level=0.8) == (0.25, 0.75)
    assert accuracy_interval(1, 20) == (1, 1)
    assert accuracy_interval(0, 20) == (0, 0)
    wide, narrow = accuracy_interval(0.8, 250), accuracy_interval(0.8, 10_000)
    # The normal approximation: ± 1.96 √(p (1 − p) / n).
    assert (wide[1] - wide[0]) / 2 == pytest.approx(0.0496, abs=0.004)
    assert (narrow[1] - narrow[0]) / 2 == pytest.approx(0.00784, abs=0.0001)


def test_the_interval_of_a_mean_over_clients() -> None:
    """The mean of two draws from 0 and 1 is 0, 1/2 or 1, and 0 and 1 have a probability of 1/4 each."""
    assert mean_interval([0.0, 1.0], np.random.default_rng(0)) == (0, 1)
    assert mean_interval([0.0, 1.0], np.random.default_rng(0), level=0.4) == (0.5, 0.5)
    values = np.random.default_rng(1).uniform(0, 1, 400)
    found = mean_interval(list(values), np.random.default_rng(0))
    half = 1.96 * values.std() / 20
    assert found == pytest.approx((values.mean() - half, values.mean() + half), abs=0.004)
    assert mean_interval(list(values), np.random.default_rng(0)) == found
    assert mean_interval([0.5], np.random.default_rng(0)) is None
    assert mean_interval([], np.random.default_rng(0)) is None
    assert mean_interval([0.5, 0.5, 0.5], np.random.default_rng(0)) == (0.5, 0.5)


def test_what_is_not_allowed_is_named() -> None:
    for level in (0, 1, 1.5, float("nan")):
        with pytest.raises(ResultError, match="level must be"):
            paired_difference({0: 1.0}, {0: 1.0}, level=level)
        with pytest.raises(ResultError, match="level must be"):
            accuracy_interval(0.5, 10, level=level)
        with pytest.raises(ResultError, match="level must be"):
            mean_interval([0.5], np.random.default_rng(0), level=level)
    with pytest.raises(ResultError, match="values must be a finite number, got nan"):
        paired_difference({0: float("nan")}, {0: 1.0})
    with pytest.raises(ResultError, match="reference must be a finite number, got inf"):
        paired_difference({0: 1.0}, {0: float("inf")})
    with pytest.raises(ResultError, match="accuracy must be"):
        accuracy_interval(1.5, 10)
    with pytest.raises(ResultError, match="samples must be a whole number from 1, got 0"):
        accuracy_interval(0.5, 0)
    with pytest.raises(ResultError, match="values must be a finite number, got nan"):
        mean_interval([0.5, float("nan")], np.random.default_rng(0))
    with pytest.raises(ResultError, match="resamples must be a whole number from 1, got 0"):
        mean_interval([0.5, 1.0], np.random.default_rng(0), resamples=0)


def test_a_missing_scipy_is_named_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """The core does not need it; tables of one seed do without."""
    monkeypatch.setitem(sys.modules, "scipy", None)
    assert paired_difference({0: 0.5}, {0: 0.25}) is not None
    for compute in (
        lambda: paired_difference({0: 0.5, 1: 0.5}, {0: 0.25, 1: 0.5}),
        lambda: accuracy_interval(0.5, 100),
        lambda: mean_interval([0.5, 0.75], np.random.default_rng(0)),
    ):
        with pytest.raises(ImportError, match=r"intervals need scipy .*pip install 'flwr-kd\[simulation\]'"):
            compute()
