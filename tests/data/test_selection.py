"""Which classes and samples of a set are used, before it is divided."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from flwr_kd.data import DataError, Selection, load, load_public
from flwr_kd.data._source import Part, Source
from flwr_kd.data.selection import chosen_classes


def source(test: bool = True) -> Source:
    """Return five classes of 8 training and 3 test samples, whose inputs are their labels and numbers."""
    parts = []
    for size, first in ((8, 0), (3, 100)):
        labels = np.tile(np.arange(5), size)
        parts.append(Part(np.stack([labels, first + np.arange(len(labels))], axis=1), labels))
    return Source(parts[0], parts[1] if test else None, 5)


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("2", [0, 1]),
        ("10", list(range(10))),
        ("5,0,3", [0, 3, 5]),
        ("10-12", [10, 11, 12]),
        (" 4 - 5 , 1", [1, 4, 5]),
        ("3-3,7", [3, 7]),
    ],
)
def test_classes_are_named_by_number(text: str, numbers: list[int]) -> None:
    assert chosen_classes(text, 26) == numbers


@pytest.mark.parametrize(
    "text", ["", "1", "0", "3,", "3-3", "5-2", "1,1", "1-3,2", "a", "1.5", "-2", "²", 10]
)
def test_classes_that_say_nothing_are_refused(text: Any) -> None:
    with pytest.raises(DataError, match=r"classes must be a number of classes from 2, such as 10.*got"):
        Selection(classes=text)


@pytest.mark.parametrize("text", ["6", "0,5", "3-999999999"])
def test_classes_that_the_set_does_not_have_are_refused(text: str) -> None:
    with pytest.raises(DataError, match=r"classes must be among the data set's 0 \.\. 4, got"):
        Selection(classes=text).of(source(), seed=0)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"class_limit": 0}, "class-limit must be a whole number from 1"),
        ({"held": 1.5}, "hold-back must be a whole number from 1"),
        ({"merge_test": 1}, "merge-test must be true or false, got 1"),
    ],
)
def test_other_values_that_are_not_allowed_are_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        Selection(**values)


def test_chosen_classes_are_numbered_anew() -> None:
    chosen = Selection(classes="1,3-4").of(source(), seed=0)
    assert chosen.num_classes == 3
    for part, size in ((chosen.pool, 8), (chosen.test, 3)):
        assert part is not None
        assert np.bincount(part.labels).tolist() == [size] * 3
        assert np.array_equal(np.array([1, 3, 4])[part.labels], part.inputs[:, 0])


def test_a_merged_set_has_all_samples_and_no_test_part() -> None:
    merged, whole = Selection(merge_test=True).of(source(), seed=0), source()
    assert whole.test is not None
    assert merged.test is not None
    assert len(merged.test) == 0
    assert np.array_equal(merged.pool.inputs, np.concatenate([whole.pool.inputs, whole.test.inputs]))
    assert np.bincount(merged.pool.labels).tolist() == [11] * 5


def test_a_limit_per_class_keeps_random_samples_of_the_training_part() -> None:
    first, again, other = (Selection(class_limit=3).of(source(), seed=seed) for seed in (0, 0, 1))
    assert np.bincount(first.pool.labels).tolist() == [3] * 5
    assert np.array_equal(first.pool.inputs, again.pool.inputs)
    assert not np.array_equal(first.pool.inputs, other.pool.inputs)
    assert first.test is not None
    assert len(first.test) == 15
    assert len(Selection(class_limit=99).of(source(), seed=0).pool) == 40


def test_digits_of_some_classes_are_divided_as_all_are() -> None:
    selection = Selection(classes="0,7")
    bundle, public = (
        load("digits", selection=selection),
        load_public(None, dataset="digits", selection=selection),
    )
    assert bundle.num_classes == 2
    # There are 178 zeros and 179 sevens.
    assert (len(bundle.train), len(bundle.test), len(public)) == (215, 71, 71)
    raw = load_digits()
    for number, digit in enumerate((0, 7)):
        ours = torch.cat(
            [part.x[part.y == number].flatten(1) for part in (bundle.train, bundle.test, public)]
        )
        theirs = raw.data[raw.target == digit] / 16
        assert sorted(map(tuple, ours.tolist())) == sorted(map(tuple, theirs.tolist()))


def test_the_number_of_samples_that_are_held_back_can_be_chosen() -> None:
    selection = Selection(held=100, merge_test=True)
    bundle, public = (
        load("digits", selection=selection),
        load_public(None, dataset="digits", selection=selection),
    )
    assert (len(bundle.train), len(bundle.test), len(public)) == (1697, 0, 100)
    assert bundle.test.x.shape == (0, 1, 8, 8)
    with pytest.raises(DataError, match=r"hold-back must leave a sample of each class, and be at most 1428"):
        load("digits", selection=Selection(held=5000))


def test_a_limit_per_class_is_for_the_whole_of_a_set_without_a_test_part() -> None:
    bundle = load("digits", selection=Selection(class_limit=10))
    assert (len(bundle.train), len(bundle.test)) == (60, 20)
