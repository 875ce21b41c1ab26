"""FedGKT's loss, the order of rows, and the checks of its messages."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from feature_rounds import CLASSES, FEATURES, features

from flwr_kd.strategies.fedgkt import (
    transfer_loss,
)
from flwr_kd.strategies.fedgkt.functional import check_index, contradicts, in_sample_order
from flwr_kd.strategies.fedgkt.messages import pack_features
from flwr_kd.transport.payload import PayloadError


def test_the_loss_is_equation_1() -> None:
    draw = np.random.default_rng(0)
    logits, labels = draw.normal(size=(6, 4)), draw.integers(0, 4, 6)
    teacher = draw.dirichlet(np.ones(4), size=6)
    student = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    entropy = -np.log(student[np.arange(6), labels]).mean()
    divergence = (teacher * (np.log(teacher) - np.log(student))).sum(axis=1).mean()
    arguments = (torch.tensor(logits), torch.tensor(labels), torch.tensor(teacher))
    assert float(transfer_loss(*arguments, 1.5)) == pytest.approx(entropy + 1.5 * divergence, rel=1e-12)
    assert float(transfer_loss(*arguments, 0.0)) == pytest.approx(entropy, rel=1e-12)
    assert float(transfer_loss(*arguments[:2], None, 1.5)) == pytest.approx(entropy, rel=1e-12)
    with pytest.raises(ValueError, match=r"\[6, 4\]"):
        transfer_loss(arguments[0], arguments[1], arguments[2][:, :3], 1.5)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ([0, 1, 1], "each of the 3 samples once; 2 is missing, 1 is given twice"),
        ([0, 1, 3], "3 is not one of them"),
        ([-1, 0, 1], "-1 is not one of them"),
        ([2**62, 0, 1], "is not one of them"),
    ],
)
def test_an_index_with_gaps_or_duplicates_is_refused(index: list[int], message: str) -> None:
    with pytest.raises(PayloadError, match=message):
        check_index(np.array(index))
    rows = {"logits": np.zeros((3, CLASSES), np.float32), "index": np.array(index)}
    rows |= {"features": np.zeros((3, FEATURES), np.float32), "labels": np.zeros(3, np.int64)}
    with pytest.raises(PayloadError, match=f"field 'index' must .*{message}"):
        features(**rows)


def test_an_empty_index_is_none_of_no_samples() -> None:
    check_index(np.array([], dtype=np.int64))


def test_knowledge_contradicts_a_label_that_it_finds_less_likely_than_chance() -> None:
    draw = np.random.default_rng(0)
    logits, labels = draw.normal(0, 3, (200, 5)), draw.integers(0, 5, 200)
    expected = []
    for row, label in zip(logits.tolist(), labels.tolist(), strict=True):
        weights = [math.exp(value) for value in row]
        expected.append(weights[label] / sum(weights) < 1 / 5)
    assert contradicts(torch.from_numpy(logits), torch.from_numpy(labels)).tolist() == expected
    assert 100 < sum(expected) < 190
    # What knows nothing contradicts nothing, however large it is.
    alike = torch.tensor([[0.1] * 7, [-1e4] * 7, [3e4] * 7], dtype=torch.float32)
    assert not contradicts(alike, torch.tensor([0, 3, 6])).any()


def test_rows_go_to_their_samples() -> None:
    draw = np.random.default_rng(0)
    index, sorted_rows = draw.permutation(50), draw.normal(size=(50, 3))
    assert np.array_equal(in_sample_order(sorted_rows[index], index), sorted_rows)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"labels": np.array([0, 1, 2, 3])}, r"'labels' must be in 0\.\.2, got 0\.\.3"),
        ({"labels": np.array([0, 1, 2, -1])}, "'labels' must be in"),
        (
            {"test_labels": np.array([7]), "test_features": np.zeros((1, FEATURES), np.float32)},
            "'test_labels'",
        ),
        (
            {"features": np.full((4, FEATURES), 1e6, np.float32)},
            r"'features' must be within ±65504, got 1e\+06",
        ),
        ({"features": np.full((4, FEATURES), -1e6, np.float32)}, "'features' must be within"),
        ({"features": np.zeros((4, FEATURES), np.float64)}, "dtype float64, expected float16 or float32"),
        ({"features": np.zeros((5, FEATURES), np.float32)}, "'features' has shape"),
        ({"test_features": np.zeros((0, 2), np.float32)}, "'test_features' has shape"),
    ],
)
def test_what_a_client_sends_is_checked(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(PayloadError, match=message):
        features(**changes)


def test_float16_keeps_to_its_range() -> None:
    packed = pack_features(np.array([[[1e6, -1e6]], [[0.1, 2.0]]], np.float32), "float16")
    assert packed.dtype == np.float16
    assert packed.shape == (2, 2)
    assert packed[0].tolist() == [65504.0, -65504.0]
    np.testing.assert_allclose(packed[1], [0.1, 2.0], rtol=1e-3)
