from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import knowledge as oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensors import (
    LABEL_DTYPES,
    assert_close,
    assert_gradient_close,
    both_dtypes,
    gradient_of,
    normal,
    random_labels,
)

from flwr_kd.strategies.fedproto import ClassMeans, aggregate_means, class_means, prototype_loss

repeatable = settings(max_examples=40, deadline=None, derandomize=True)
seeds = st.integers(0, 2**32 - 1)
label_dtypes = pytest.mark.parametrize("label_dtype", LABEL_DTYPES, ids=str)


def _random_client(seed: int, *, samples: int = 8, classes: int = 4, width: int = 3) -> ClassMeans:
    return class_means(normal(samples, width, seed=seed), random_labels(samples, classes, seed + 1), classes)


def _aggregate(clients: list[ClassMeans]) -> ClassMeans:
    return aggregate_means([client.means for client in clients], [client.counts for client in clients])


def _as_mapping(means: ClassMeans) -> dict[int, Any]:
    return {
        j: oracle.ClassMean(means.means[j].tolist(), int(means.counts[j]))
        for j in range(len(means.counts))
        if means.counts[j] > 0
    }


def _assert_matches(actual: ClassMeans, expected: Mapping[int, Any], dtype: torch.dtype) -> None:
    """Present classes have the oracle's values; all others are zero rows with count 0."""
    classes, width = actual.means.shape
    assert actual.means.dtype == dtype
    assert actual.counts.dtype == torch.int64
    assert actual.counts.shape == (classes,)
    absent = oracle.ClassMean([0.0] * width, 0)
    for j in range(classes):
        want = expected.get(j, absent)
        assert int(actual.counts[j]) == want.samples
        assert_close(actual.means[j], torch.tensor(want.mean, dtype=dtype), dtype)


def _assert_same(a: ClassMeans, b: ClassMeans) -> None:
    torch.testing.assert_close(a.means, b.means, rtol=1e-12, atol=1e-13)
    assert torch.equal(a.counts, b.counts)


class TestClassMeans:
    def test_by_hand(self) -> None:
        values = torch.tensor([[1.0, 0.0], [3.0, 4.0], [5.0, 5.0]])
        actual = class_means(values, torch.tensor([2, 2, 0]), 4)
        assert actual.means.tolist() == [[5.0, 5.0], [0.0, 0.0], [2.0, 2.0], [0.0, 0.0]]
        assert actual.counts.tolist() == [1, 0, 2, 0]

    @both_dtypes
    @repeatable
    @given(seed=seeds, samples=st.integers(1, 40), classes=st.integers(1, 6), width=st.integers(1, 5))
    def test_matches_oracle(
        self, dtype: torch.dtype, seed: int, samples: int, classes: int, width: int
    ) -> None:
        values = normal(samples, width, seed=seed, dtype=dtype)
        labels = random_labels(samples, classes, seed + 1)
        expected = oracle.class_means(values.tolist(), labels.tolist())
        _assert_matches(class_means(values, labels, classes), expected, dtype)

    @label_dtypes
    def test_label_dtypes(self, label_dtype: torch.dtype) -> None:
        values, labels = normal(9, 3, seed=1), torch.tensor([0, 1, 2, 1, 0, 1, 2, 2, 2])
        expected = oracle.class_means(values.tolist(), labels.tolist())
        _assert_matches(class_means(values, labels.to(label_dtype), 3), expected, torch.float64)

    def test_no_samples(self) -> None:
        actual = class_means(torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64), 2)
        assert actual.counts.tolist() == [0, 0]
        assert actual.means.tolist() == [[0.0] * 3] * 2

    @pytest.mark.parametrize("label", [-1, 3, 99])
    def test_label_out_of_range(self, label: int) -> None:
        with pytest.raises(ValueError, match="labels"):
            class_means(torch.ones(2, 2), torch.tensor([0, label]), 3)

    def test_lengths_must_agree(self) -> None:
        with pytest.raises(ValueError, match="labels"):
            class_means(torch.ones(3, 2), torch.tensor([0, 1]), 3)

    def test_many_samples_in_float32(self) -> None:
        # Summed in float32, one after the other, 50,000 tenths have a mean that is off by 5e-4.
        values = torch.full((50_000, 1), 0.1)
        actual = class_means(values, torch.zeros(50_000, dtype=torch.int64), 1)
        assert actual.means.dtype == torch.float32
        assert actual.means.item() == pytest.approx(0.1, rel=1e-5)

    def test_labels_must_be_integers(self) -> None:
        with pytest.raises((TypeError, ValueError), match="labels"):
            class_means(torch.ones(2, 2), torch.tensor([0.0, 1.0]), 3)


class TestAggregateMeans:
    def test_by_hand(self) -> None:
        # Class 0: (1 · 1 + 3 · 5) / 4 = 4, not the plain mean 3. Class 1: one client's. Class 2: nobody's.
        one = torch.tensor([[1.0], [0.0], [0.0]])
        three = torch.tensor([[5.0], [7.0], [0.0]])
        actual = aggregate_means([one, three], [torch.tensor([1, 0, 0]), torch.tensor([3, 2, 0])])
        assert actual.means.tolist() == [[4.0], [7.0], [0.0]]
        assert actual.counts.tolist() == [4, 2, 0]

    @both_dtypes
    @repeatable
    @given(seed=seeds, clients=st.integers(1, 6), samples=st.integers(1, 20), classes=st.integers(1, 5))
    def test_matches_oracle(
        self, dtype: torch.dtype, seed: int, clients: int, samples: int, classes: int
    ) -> None:
        uploads = []
        for i in range(clients):
            each = _random_client(seed + 10 * i, samples=samples, classes=classes)
            uploads.append(ClassMeans(each.means.to(dtype), each.counts))
        expected = oracle.aggregate_means([_as_mapping(upload) for upload in uploads])
        _assert_matches(_aggregate(uploads), expected, dtype)

    @repeatable
    @given(seed=seeds, clients=st.integers(1, 6), order=st.randoms(use_true_random=False))
    def test_order_of_clients_is_irrelevant(self, seed: int, clients: int, order: Any) -> None:
        uploads = [_random_client(seed + 10 * i) for i in range(clients)]
        shuffled = list(uploads)
        order.shuffle(shuffled)
        _assert_same(_aggregate(uploads), _aggregate(shuffled))

    @repeatable
    @given(seed=seeds, clients=st.integers(1, 4))
    def test_a_client_twice_is_a_client_with_twice_the_samples(self, seed: int, clients: int) -> None:
        uploads = [_random_client(seed + 10 * i) for i in range(clients)]
        doubled = ClassMeans(uploads[0].means, 2 * uploads[0].counts)
        _assert_same(_aggregate([uploads[0], *uploads]), _aggregate([doubled, *uploads[1:]]))

    @repeatable
    @given(seed=seeds)
    def test_one_client_is_the_identity(self, seed: int) -> None:
        upload = _random_client(seed)
        _assert_same(_aggregate([upload]), upload)

    @repeatable
    @given(seed=seeds, sizes=st.lists(st.integers(1, 20), min_size=1, max_size=5))
    def test_global_prototypes_are_the_means_of_the_pooled_samples(self, seed: int, sizes: list[int]) -> None:
        data = [
            (normal(n, 3, seed=seed + i), random_labels(n, 4, seed + 99 + i)) for i, n in enumerate(sizes)
        ]
        values, labels = (torch.cat(parts) for parts in zip(*data, strict=True))
        clients = [class_means(x, y, 4) for x, y in data]
        _assert_same(_aggregate(clients), class_means(values, labels, 4))

    def test_the_row_of_an_absent_class_has_no_weight(self) -> None:
        # Count 0 decides, not the row's content.
        means = [torch.tensor([[2.0], [1e3]]), torch.tensor([[1e3], [1e3]])]
        actual = aggregate_means(means, [torch.tensor([5, 0]), torch.tensor([0, 0])])
        assert actual.means.tolist() == [[2.0], [0.0]]
        assert actual.counts.tolist() == [5, 0]

    def test_sums_are_in_double_precision(self) -> None:
        # In float32 1e8 + 1 is 1e8, and the mean would be 0.
        means = [torch.tensor([[value]]) for value in (1e8, 1.0, -1e8)]
        actual = aggregate_means(means, [torch.tensor([1])] * 3)
        assert actual.means.dtype == torch.float32
        assert actual.means.item() == pytest.approx(1 / 3, rel=1e-6)

    def test_counts_are_exact_beyond_float32(self) -> None:
        counts = [torch.tensor([2**24]), torch.tensor([1])]
        assert aggregate_means([torch.ones(1, 1)] * 2, counts).counts.tolist() == [2**24 + 1]

    def test_inputs_are_not_changed(self) -> None:
        uploads = [_random_client(seed) for seed in (1, 2)]
        before = [(upload.means.clone(), upload.counts.clone()) for upload in uploads]
        _aggregate(uploads)
        for upload, (means, counts) in zip(uploads, before, strict=True):
            assert torch.equal(upload.means, means)
            assert torch.equal(upload.counts, counts)

    def test_no_clients(self) -> None:
        with pytest.raises(ValueError, match="means"):
            aggregate_means([], [])

    def test_one_count_vector_per_client(self) -> None:
        with pytest.raises(ValueError, match="counts"):
            aggregate_means([torch.ones(2, 3)] * 2, [torch.ones(2, dtype=torch.int64)])

    def test_negative_count(self) -> None:
        with pytest.raises(ValueError, match="counts"):
            aggregate_means([torch.ones(2, 3)], [torch.tensor([1, -1])])

    @pytest.mark.parametrize("shape", [(3, 1), (1, 2), (4, 2)])
    def test_shapes_are_not_broadcast(self, shape: tuple[int, int]) -> None:
        counts = [torch.ones(3, dtype=torch.int64), torch.ones(shape[0], dtype=torch.int64)]
        with pytest.raises(ValueError, match=r"shape|means|clients"):
            aggregate_means([torch.ones(3, 2), torch.ones(shape)], counts)


class TestPrototypeLoss:
    def test_by_hand(self) -> None:
        # Class 0: the batch mean of (3, 4) and (-3, 4) is (0, 4), 3 from (0, 1), while each sample is 3 √2
        # away. Class 1: on its prototype, 0. Class 2: no prototype. Class 3: has one, not in the batch.
        # Class 4: 2. The sum over classes is 5, not the mean.
        features = torch.tensor([[3.0, 4.0], [1.0, 1.0], [-3.0, 4.0], [8.0, 8.0], [0.0, 0.0]])
        labels = torch.tensor([0, 1, 0, 2, 4])
        prototypes = torch.tensor([[0.0, 1.0], [1.0, 1.0], [0.0, 0.0], [50.0, 50.0], [0.0, 2.0]])
        known = torch.tensor([True, True, False, True, True])
        loss = prototype_loss(features, labels, prototypes, known)
        assert loss.shape == ()
        assert loss.item() == pytest.approx(5.0)

    @both_dtypes
    @repeatable
    @given(seed=seeds, batch=st.integers(1, 20), classes=st.integers(1, 6), width=st.integers(1, 5))
    def test_matches_oracle(
        self, dtype: torch.dtype, seed: int, batch: int, classes: int, width: int
    ) -> None:
        features = normal(batch, width, seed=seed, dtype=dtype)
        labels = random_labels(batch, classes, seed + 1)
        prototypes = normal(classes, width, seed=seed + 2, dtype=dtype)
        known = random_labels(classes, 2, seed + 3).bool()
        table = {j: prototypes[j].tolist() for j in range(classes) if known[j]}
        actual = prototype_loss(features, labels, prototypes, known)
        expected = oracle.prototype_loss(features.tolist(), labels.tolist(), table)
        assert_close(actual, torch.tensor(expected, dtype=dtype), dtype)

        gradient = gradient_of(lambda x: prototype_loss(x, labels, prototypes, known), features)
        closed = oracle.prototype_loss_gradient(features.tolist(), labels.tolist(), table)
        assert_gradient_close(gradient, torch.tensor(closed, dtype=dtype), dtype)

    def test_gradient_matches_central_differences(self) -> None:
        features, prototypes = normal(5, 3, seed=1), normal(3, 3, seed=2)
        labels = torch.tensor([0, 1, 2, 1, 1])
        known = torch.tensor([True, True, False])
        table = {j: prototypes[j].tolist() for j in (0, 1)}
        numerical = oracle.numerical_gradient(
            lambda x: oracle.prototype_loss(x, labels.tolist(), table), features.tolist()
        )
        actual = gradient_of(lambda x: prototype_loss(x, labels, prototypes, known), features)
        torch.testing.assert_close(actual, torch.tensor(numerical), check_dtype=False, rtol=1e-6, atol=1e-8)
        # The unit vector of a class, split evenly among its three samples.
        assert torch.equal(actual[1], actual[3])
        assert actual[1].norm().item() == pytest.approx(1 / 3)
        assert not actual[2].any()

    @both_dtypes
    def test_gradient_is_zero_at_distance_zero(self, dtype: torch.dtype) -> None:
        # The samples lie around the prototype, only their mean is on it.
        features = torch.tensor([[2.0, 0.0], [0.0, 2.0], [4.0, 5.0]], dtype=dtype)
        prototypes = torch.tensor([[1.0, 1.0], [1.0, 1.0]], dtype=dtype)
        labels, known = torch.tensor([0, 0, 1]), torch.tensor([True, True])
        assert prototype_loss(features, labels, prototypes, known).item() == pytest.approx(5.0)
        gradient = gradient_of(lambda x: prototype_loss(x, labels, prototypes, known), features)
        torch.testing.assert_close(gradient, torch.tensor([[0, 0], [0, 0], [0.6, 0.8]], dtype=dtype))

    @label_dtypes
    def test_label_dtypes(self, label_dtype: torch.dtype) -> None:
        # With a tensor as a dict key, or uint8 taken for a mask, the term would be zero or wrong without an error.
        features, prototypes = normal(6, 3, seed=1), normal(3, 3, seed=2)
        labels = torch.tensor([0, 1, 2, 1, 0, 1])
        expected = oracle.prototype_loss(
            features.tolist(), labels.tolist(), dict(enumerate(prototypes.tolist()))
        )
        assert expected > 0.5
        known = torch.ones(3, dtype=torch.bool)
        actual = prototype_loss(features, labels.to(label_dtype), prototypes, known)
        assert actual.item() == pytest.approx(expected, rel=1e-12)

    def test_order_of_samples_is_irrelevant(self) -> None:
        features, labels, prototypes = normal(20, 3, seed=1), random_labels(20, 4, 2), normal(4, 3, seed=3)
        known = torch.tensor([True, True, False, True])
        order = torch.randperm(20, generator=torch.Generator().manual_seed(4))
        torch.testing.assert_close(
            prototype_loss(features, labels, prototypes, known),
            prototype_loss(features[order], labels[order], prototypes, known),
        )

    def test_an_unknown_class_counts_nothing_whatever_its_row_holds(self) -> None:
        features = torch.tensor([[3.0, 4.0], [1.0, 1.0]])
        prototypes = torch.tensor([[0.0, 0.0], [1e3, 1e3]])
        labels, known = torch.tensor([0, 1]), torch.tensor([True, False])
        assert prototype_loss(features, labels, prototypes, known).item() == pytest.approx(5.0)
        gradient = gradient_of(lambda x: prototype_loss(x, labels, prototypes, known), features)
        torch.testing.assert_close(gradient, torch.tensor([[0.6, 0.8], [0.0, 0.0]]))

    def test_a_class_that_is_not_in_the_batch_counts_nothing(self) -> None:
        # Its batch mean is not a zero row that would be pulled to the prototype.
        features, labels = torch.tensor([[3.0, 4.0]]), torch.tensor([0])
        prototypes = torch.tensor([[0.0, 0.0], [7.0, 7.0]])
        assert prototype_loss(features, labels, prototypes, torch.tensor([True, True])).item() == 5.0

    def test_nothing_known(self) -> None:
        # Round 1: the server has no prototypes yet.
        features, labels = normal(4, 2, seed=5), torch.tensor([0, 1, 0, 1])
        prototypes, nothing = torch.zeros(2, 2, dtype=torch.float64), torch.zeros(2, dtype=torch.bool)
        assert prototype_loss(features, labels, prototypes, nothing).item() == 0.0
        assert not gradient_of(lambda x: prototype_loss(x, labels, prototypes, nothing), features).any()

    def test_no_samples(self) -> None:
        nobody, known = torch.zeros(0, dtype=torch.int64), torch.ones(2, dtype=torch.bool)
        assert prototype_loss(torch.zeros(0, 3), nobody, torch.zeros(2, 3), known).item() == 0.0

    @pytest.mark.parametrize("label", [-1, 2])
    def test_label_out_of_range(self, label: int) -> None:
        known = torch.ones(2, dtype=torch.bool)
        with pytest.raises(ValueError, match="labels"):
            prototype_loss(torch.ones(1, 2), torch.tensor([label]), torch.zeros(2, 2), known)

    def test_shapes_are_not_broadcast(self) -> None:
        known = torch.ones(2, dtype=torch.bool)
        with pytest.raises(ValueError, match=r"shape|features|prototypes"):
            prototype_loss(torch.ones(3, 4), torch.tensor([0, 1, 0]), torch.zeros(2, 1), known)


def test_scale() -> None:
    """Three times as far from everything is three times the loss: a norm, not its square."""
    features, prototypes, labels = normal(9, 3, seed=1), normal(4, 3, seed=2), random_labels(9, 4, 3)
    known = torch.ones(4, dtype=torch.bool)
    one = prototype_loss(features, labels, prototypes, known).item()
    assert math.isclose(prototype_loss(3 * features, labels, 3 * prototypes, known).item(), 3 * one)
