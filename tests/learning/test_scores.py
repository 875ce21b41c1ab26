"""Loss, accuracies and AUROC of logits: against scikit-learn and by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import accuracy_score, log_loss, roc_auc_score, top_k_accuracy_score
from torch.nn import functional as F

from flwr_kd.learning.scores import Scores, label_loss, mean_auroc

repeatable = settings(max_examples=100, deadline=None, derandomize=True)


@given(st.integers(0, 2**32 - 1), st.integers(2, 40), st.integers(1, 5), st.integers(2, 30))
@repeatable
def test_auroc_is_that_of_scikit_learn(seed: int, samples: int, labels: int, values: int) -> None:
    draw = np.random.default_rng(seed)
    # Few values, so that many scores are equal.
    scores = draw.integers(0, values, (samples, labels)).astype(np.float32)
    targets = draw.integers(0, 2, (samples, labels))
    defined = [k for k in range(labels) if 0 < targets[:, k].sum() < samples]
    expected = np.mean([roc_auc_score(targets[:, k], scores[:, k]) for k in defined]) if defined else None
    area = mean_auroc(torch.from_numpy(scores), torch.from_numpy(targets))
    assert area == (None if expected is None else pytest.approx(expected, abs=1e-12))


def test_auroc_of_infinite_and_missing_scores() -> None:
    targets = torch.tensor([[1.0], [0.0], [1.0]])
    assert mean_auroc(torch.tensor([[torch.inf], [-torch.inf], [0.0]]), targets) == 1.0
    assert mean_auroc(torch.tensor([[torch.nan], [0.0], [1.0]]), targets) is None
    assert mean_auroc(torch.zeros(0, 2), torch.zeros(0, 2)) is None


@pytest.mark.parametrize("classes", [3, 8])
def test_scores_of_batches_are_those_of_all_samples(classes: int) -> None:
    draw = np.random.default_rng(classes)
    logits, labels = draw.normal(size=(50, classes)), draw.integers(0, classes, 50)
    parts = [slice(0, 20), slice(20, 21), slice(21, 50)]
    batches = [Scores.of(torch.from_numpy(logits[part]), torch.from_numpy(labels[part])) for part in parts]
    measured, names = Scores.together(batches), np.arange(classes)
    probabilities = torch.from_numpy(logits).softmax(1).numpy()
    assert measured.loss == pytest.approx(log_loss(labels, probabilities, labels=names))
    assert measured.accuracy == pytest.approx(accuracy_score(labels, logits.argmax(1)))
    nearest = top_k_accuracy_score(labels, logits, k=5, labels=names) if classes > 5 else None
    assert measured.top5 == (None if nearest is None else pytest.approx(nearest))
    assert measured.auroc is None


def test_scores_of_several_labels_are_those_of_all_samples() -> None:
    draw = np.random.default_rng(0)
    logits, labels = draw.normal(size=(50, 7)), draw.integers(0, 2, (50, 7))
    parts = [slice(0, 20), slice(20, 21), slice(21, 50)]
    batches = [
        Scores.of(torch.from_numpy(logits[part]), torch.from_numpy(labels[part]).float()) for part in parts
    ]
    measured = Scores.together(batches)
    probabilities = 1 / (1 + np.exp(-logits))
    losses = [log_loss(labels[:, k], probabilities[:, k]) for k in range(7)]
    assert measured.loss == pytest.approx(np.mean(losses))
    assert measured.accuracy == pytest.approx(((probabilities > 0.5) == labels).mean())
    assert measured.auroc == pytest.approx(roc_auc_score(labels, logits, average="macro"))
    assert measured.top5 is None


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_loss_of_one_class_is_pytorchs(reduction: str) -> None:
    logits, labels = torch.randn(9, 4, generator=torch.Generator().manual_seed(0)), torch.arange(9) % 4
    assert torch.equal(
        label_loss(logits, labels, reduction), F.cross_entropy(logits, labels, reduction=reduction)
    )
