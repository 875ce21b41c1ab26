"""Long tails: the profile is exact, and only the seed determines which samples are kept."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from flwr_kd.data import DataError, load, long_tail

FACTORS = [1, 10, 20, 50, 100]
# The labels have gaps and no order, and the classes differ in size.
UNEVEN = np.random.default_rng(0).permutation(np.repeat([1, 2, 5, 9, 40], [700, 130, 400, 101, 55]))


def sizes_of(labels: np.ndarray, rows: np.ndarray) -> list[int]:
    numbers = np.unique(labels)
    return [int((labels[rows] == number).sum()) for number in numbers]


def expected(counts: np.ndarray, factor: float) -> list[int]:
    """Return the profile by trying every size of the smallest class, from the largest on."""
    last = len(counts) - 1
    for smallest in range(int(counts.min()), 0, -1):
        profile = [smallest * factor * factor ** (-c / last) for c in range(last + 1)]
        if all(size <= count + 1e-6 for size, count in zip(profile, counts, strict=True)):
            return [math.floor(size + 0.5 + 1e-9) for size in profile]
    raise AssertionError("no profile")


@pytest.mark.parametrize("factor", [*FACTORS, 2.5, 7.3])
@pytest.mark.parametrize("which", ["digits", "uneven"])
def test_the_profile_is_exact(factor: float, which: str) -> None:
    labels = load("digits").train.y.numpy() if which == "digits" else UNEVEN
    rows = long_tail(labels, factor, seed=0)
    assert rows.dtype == np.int64
    assert (np.diff(rows) > 0).all()
    sizes, counts = sizes_of(labels, rows), np.unique(labels, return_counts=True)[1]
    assert sizes == expected(counts, factor)
    assert sizes == sorted(sizes, reverse=True)
    if factor == int(factor):
        assert sizes[0] == factor * sizes[-1]


def test_known_sizes() -> None:
    labels = np.repeat(np.arange(10), 5000)
    assert sizes_of(labels, long_tail(labels, 100, seed=0)) == [
        5000, 2997, 1797, 1077, 646, 387, 232, 139, 83, 50
    ]  # fmt: skip
    # Class 2 has too few samples: 10 are needed for each sample of the last class.
    labels = np.repeat([0, 2, 3], [1000, 25, 90])
    assert sizes_of(labels, long_tail(labels, 100, seed=0)) == [200, 20, 2]


def test_only_the_seed_decides() -> None:
    one, again, other = (long_tail(UNEVEN, 10, seed=seed) for seed in (0, 0, 1))
    assert np.array_equal(one, again)
    assert not np.array_equal(one, other)
    assert sizes_of(UNEVEN, one) == sizes_of(UNEVEN, other)
    assert np.array_equal(one, long_tail(torch.from_numpy(UNEVEN), 10, seed=0))
    before = np.random.get_state()[1].copy()  # noqa: NPY002
    long_tail(UNEVEN, 10, seed=0)
    assert (np.random.get_state()[1] == before).all()  # noqa: NPY002


def test_no_sample_is_kept_twice_and_each_may_be() -> None:
    kept = [long_tail(UNEVEN, 10, seed=seed) for seed in range(200)]
    assert all(len(set(rows.tolist())) == len(rows) for rows in kept)
    assert len(set(np.concatenate(kept).tolist())) == len(UNEVEN)


def test_one_class_and_one_sample() -> None:
    assert long_tail([3, 3, 3], 50, seed=0).tolist() == [0, 1, 2]
    assert long_tail([7], 1, seed=0).tolist() == [0]


@pytest.mark.parametrize(
    ("labels", "factor", "text"),
    [
        ([0, 1], 0.5, "imbalance factor must be a finite number from 1, got 0.5"),
        ([0, 1], math.nan, "a finite number from 1, got nan"),
        ([0, 1], math.inf, "a finite number from 1, got inf"),
        ([0, 1], True, "a finite number from 1, got True"),
        ([0, 1], "10", "a finite number from 1, got '10'"),
        ([], 10, "at least one sample, labels is empty"),
        ([0, -1], 10, "labels must not be negative, but there is -1"),
        (np.repeat([0, 4], 9), 10, "imbalance factor 10 needs at least 10 samples of class 0 for one of class 4, "
         "there are 9: take a smaller factor or more samples"),
        (np.repeat([0, 2, 3], [100, 9, 9]), 100, "factor 100 needs at least 10 samples of class 2 for one of"),
    ],
)  # fmt: skip
def test_bad_arguments(labels: Any, factor: Any, text: str) -> None:
    with pytest.raises(DataError, match=text):
        long_tail(labels, factor, seed=0)
