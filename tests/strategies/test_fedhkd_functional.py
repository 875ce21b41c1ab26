"""FedHKD's knowledge and regularisers, against the oracle."""

from __future__ import annotations

import doctest
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
    generator,
    gradient_of,
    normal,
    probabilities,
    random_labels,
)
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from flwr_kd.strategies.fedhkd import (
    Knowledge,
    aggregate_knowledge,
    classifier_loss,
    feature_loss,
    local_knowledge,
)

repeatable = settings(max_examples=40, deadline=None, derandomize=True)
seeds = st.integers(0, 2**32 - 1)


def _local(features: Tensor, logits: Tensor, labels: Tensor, **changes: float) -> Knowledge:
    options = {"threshold": 0.25, "temperature": 0.5, "clip": 3.0} | changes
    return local_knowledge(features, logits, labels, num_classes=logits.shape[1], **options)


def _random_client(seed: int, *, samples: int, classes: int, width: int, threshold: float) -> Knowledge:
    return _local(
        normal(samples, width, seed=seed, scale=3.0),
        normal(samples, classes, seed=seed + 1),
        random_labels(samples, classes, seed + 2),
        threshold=threshold,
    )


def _as_mapping(knowledge: Knowledge) -> dict[int, Any]:
    """Only the known classes, in the oracle's form."""
    return {
        j: oracle.ClassKnowledge(
            knowledge.representations[j].tolist(), knowledge.predictions[j].tolist(), int(knowledge.counts[j])
        )
        for j in range(len(knowledge.counts))
        if knowledge.counts[j] > 0
    }


def _assert_matches(actual: Knowledge, expected: Mapping[int, Any], dtype: torch.dtype) -> None:
    """Known classes have the oracle's values; all others are zero rows with count 0."""
    width = actual.representations.shape[1]
    classes = len(actual.counts)
    assert actual.representations.dtype == dtype
    assert actual.predictions.dtype == dtype
    assert actual.counts.dtype == torch.int64
    assert actual.known.dtype == torch.bool
    assert actual.known.tolist() == [j in expected for j in range(classes)]
    nothing = oracle.ClassKnowledge([0.0] * width, [0.0] * classes, 0)
    for j in range(classes):
        want = expected.get(j, nothing)
        assert int(actual.counts[j]) == want.samples
        for got, row in (
            (actual.representations[j], want.representation),
            (actual.predictions[j], want.prediction),
        ):
            assert_close(got, torch.tensor(row, dtype=dtype), dtype)


def _assert_same(a: Knowledge, b: Knowledge) -> None:
    torch.testing.assert_close(a.representations, b.representations, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(a.predictions, b.predictions, rtol=1e-12, atol=1e-13)
    assert torch.equal(a.counts, b.counts)


def test_the_oracle_agrees_with_its_cases_worked_by_hand() -> None:
    results = doctest.testmod(oracle)
    assert results.attempted > 20
    assert results.failed == 0


class TestLocalKnowledge:
    def test_by_hand(self) -> None:
        # Eight samples: two of class 0 (a quarter, shared), five of class 1, one of class 2 (an eighth, not
        # shared), none of class 3. Class 0: (5, -1) and (1, -5) clip to (3, -1) and (1, -3), mean (2, -2);
        # clipping their mean (3, -3) would not change it. At T = 0.5 Q(ln 2, 0, 0, 0) = (4, 1, 1, 1) / 7.
        features = torch.tensor([[5.0, -1.0], [1.0, -5.0]] + [[0.5, 1.0]] * 5 + [[9.0, 9.0]])
        logits = torch.zeros(8, 4)
        logits[0, 0] = logits[1, 1] = math.log(2)
        actual = _local(features, logits, torch.tensor([0, 0, 1, 1, 1, 1, 1, 2]))
        expected = {
            0: oracle.ClassKnowledge([2.0, -2.0], [2.5 / 7, 2.5 / 7, 1 / 7, 1 / 7], 2),
            1: oracle.ClassKnowledge([0.5, 1.0], [0.25] * 4, 5),
        }
        _assert_matches(actual, expected, torch.float32)

    @both_dtypes
    @repeatable
    @given(
        seed=seeds,
        samples=st.integers(1, 40),
        classes=st.integers(1, 6),
        width=st.integers(1, 5),
        threshold=st.sampled_from([0.0, 0.1, 0.25, 0.5, 1.0]),
        temperature=st.sampled_from([0.5, 1.0, 3.0]),
        clip=st.sampled_from([0.5, 3.0, 100.0]),
    )
    def test_matches_oracle(
        self,
        dtype: torch.dtype,
        seed: int,
        samples: int,
        classes: int,
        width: int,
        threshold: float,
        temperature: float,
        clip: float,
    ) -> None:
        features = normal(samples, width, seed=seed, dtype=dtype, scale=3.0)
        logits = normal(samples, classes, seed=seed + 1, dtype=dtype)
        labels = random_labels(samples, classes, seed + 2)
        options = {"threshold": threshold, "temperature": temperature, "clip": clip}
        expected = oracle.local_knowledge(
            features.tolist(), logits.tolist(), labels.tolist(), num_classes=classes, **options
        )
        _assert_matches(_local(features, logits, labels, **options), expected, dtype)

    @pytest.mark.parametrize(
        ("own", "samples", "threshold"),
        [
            (1, 4, 0.25),
            (7, 10, 0.7),
            (3, 10, 0.3),
            (7, 100, 0.07),
            (29, 100, 0.29),
            (1, 3, 1 / 3),
            (5, 5, 1.0),
        ],
    )
    def test_exactly_at_the_threshold_is_shared(self, own: int, samples: int, threshold: float) -> None:
        # 0.07 · 100 > 7 and 0.29 · 100 < 29 in floating point, and float32's 0.7 is below 0.7.
        labels = torch.tensor([0] * own + [1] * (samples - own))
        features = torch.ones(samples, 2)
        logits = torch.zeros(samples, 2)
        assert _local(features, logits, labels, threshold=threshold).counts[0] == own
        if threshold < 1:
            above = threshold * (1 + 1e-6)
            assert _local(features, logits, labels, threshold=above).counts[0] == 0

    def test_threshold_is_a_fraction_of_the_client_not_of_its_largest_class(self) -> None:
        labels = torch.tensor([0, 0, 0, 0, 0, 1, 1])  # 2/7 ≥ 0.25; 1/7 < 0.25
        assert _local(torch.ones(7, 1), torch.zeros(7, 3), labels).counts.tolist() == [5, 2, 0]
        labels = torch.tensor([0, 1, 1, 2, 2, 2, 2])
        assert _local(torch.ones(7, 1), torch.zeros(7, 3), labels).counts.tolist() == [0, 2, 4]

    def test_threshold_zero_does_not_invent_absent_classes(self) -> None:
        actual = _local(torch.ones(2, 3), torch.zeros(2, 4), torch.tensor([1, 3]), threshold=0.0)
        assert actual.known.tolist() == [False, True, False, True]
        assert actual.representations[0].tolist() == [0.0, 0.0, 0.0]

    def test_client_without_samples(self) -> None:
        nobody = torch.zeros(0, dtype=torch.int64)
        actual = _local(torch.zeros(0, 2), torch.zeros(0, 3), nobody, threshold=0.0)
        _assert_matches(actual, {}, torch.float32)

    def test_client_with_one_sample(self) -> None:
        actual = _local(torch.tensor([[1.0, -9.0]]), torch.zeros(1, 2), torch.tensor([1]))
        _assert_matches(actual, {1: oracle.ClassKnowledge([1.0, -3.0], [0.5, 0.5], 1)}, torch.float32)

    def test_client_with_one_class(self) -> None:
        features = normal(6, 3, seed=1)
        logits = normal(6, 4, seed=2)
        actual = _local(features, logits, torch.full((6,), 2), threshold=1.0, clip=1e6)
        assert actual.counts.tolist() == [0, 0, 6, 0]
        torch.testing.assert_close(actual.representations[2], features.mean(0))
        torch.testing.assert_close(actual.predictions[2], torch.softmax(2 * logits, -1).mean(0))

    def test_order_of_samples_is_irrelevant(self) -> None:
        features, logits, labels = normal(30, 4, seed=1), normal(30, 3, seed=2), random_labels(30, 3, 3)
        order = torch.randperm(30, generator=generator(4))
        _assert_same(_local(features, logits, labels), _local(features[order], logits[order], labels[order]))

    @pytest.mark.parametrize("label_dtype", LABEL_DTYPES, ids=str)
    def test_label_dtypes(self, label_dtype: torch.dtype) -> None:
        features, logits, labels = normal(30, 4, seed=1), normal(30, 3, seed=2), random_labels(30, 3, 3)
        expected = oracle.local_knowledge(
            features.tolist(),
            logits.tolist(),
            labels.tolist(),
            num_classes=3,
            threshold=0.25,
            temperature=0.5,
            clip=3.0,
        )
        assert expected
        _assert_matches(_local(features, logits, labels.to(label_dtype)), expected, torch.float64)

    def test_inputs_are_not_changed(self) -> None:
        features = torch.tensor([[9.0, -9.0]])
        _local(features, torch.zeros(1, 2), torch.tensor([0]))
        assert features.tolist() == [[9.0, -9.0]]

    @pytest.mark.parametrize("label", [-1, 3, 100])
    def test_label_out_of_range(self, label: int) -> None:
        with pytest.raises(ValueError, match="labels"):
            _local(torch.ones(2, 2), torch.zeros(2, 3), torch.tensor([0, label]))

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("threshold", -0.1),
            ("threshold", 1.1),
            ("threshold", math.nan),
            ("temperature", 0.0),
            ("temperature", math.nan),
            ("clip", 0.0),
            ("clip", -3.0),
            ("clip", math.nan),
        ],
    )
    def test_bad_options(self, field: str, value: float) -> None:
        with pytest.raises(ValueError, match=field):
            _local(torch.ones(2, 2), torch.zeros(2, 3), torch.tensor([0, 1]), **{field: value})

    @pytest.mark.parametrize(
        ("features", "logits", "labels"), [((3, 2), (2, 3), 2), ((2, 2), (3, 3), 2), ((2, 2), (2, 3), 3)]
    )
    def test_lengths_must_agree(
        self, features: tuple[int, int], logits: tuple[int, int], labels: int
    ) -> None:
        with pytest.raises(ValueError, match=r"features|logits|labels"):
            _local(torch.ones(features), torch.zeros(logits), torch.zeros(labels, dtype=torch.int64))

    def test_logits_must_have_one_column_per_class(self) -> None:
        with pytest.raises(ValueError, match="logits"):
            local_knowledge(
                torch.ones(2, 2),
                torch.zeros(2, 3),
                torch.tensor([0, 1]),
                num_classes=4,
                threshold=0.25,
                temperature=0.5,
                clip=3.0,
            )


class TestAggregateKnowledge:
    def test_by_hand(self) -> None:
        # Class 0: (1 · 1 + 3 · 5) / 4 = 4, (1 · 0 + 3 · 4) / 4 = 3; (1 · 0.8 + 3 · 0.4) / 4 = 0.5.
        # Class 1 is known to the second client only, class 2 to nobody.
        one = Knowledge(
            torch.tensor([[1.0, 0.0], [0.0, 0.0], [0.0, 0.0]]),
            torch.tensor([[0.8, 0.2, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]),
            torch.tensor([1, 0, 0]),
        )
        three = Knowledge(
            torch.tensor([[5.0, 4.0], [7.0, 8.0], [0.0, 0.0]]),
            torch.tensor([[0.4, 0.6, 0.0], [0.1, 0.9, 0.0], [0.0, 0.0, 0.0]]),
            torch.tensor([3, 2, 0]),
        )
        expected = {
            0: oracle.ClassKnowledge([4.0, 3.0], [0.5, 0.5, 0.0], 4),
            1: oracle.ClassKnowledge([7.0, 8.0], [0.1, 0.9, 0.0], 2),
        }
        _assert_matches(aggregate_knowledge([one, three]), expected, torch.float32)

    @both_dtypes
    @repeatable
    @given(
        seed=seeds,
        clients=st.integers(1, 6),
        samples=st.integers(1, 25),
        classes=st.integers(1, 5),
        threshold=st.sampled_from([0.0, 0.25, 0.5]),
    )
    def test_matches_oracle(
        self, dtype: torch.dtype, seed: int, clients: int, samples: int, classes: int, threshold: float
    ) -> None:
        uploads = []
        for i in range(clients):
            each = _random_client(
                seed + 10 * i, samples=samples, classes=classes, width=3, threshold=threshold
            )
            uploads.append(Knowledge(each.representations.to(dtype), each.predictions.to(dtype), each.counts))
        expected = oracle.aggregate_knowledge([_as_mapping(upload) for upload in uploads])
        _assert_matches(aggregate_knowledge(uploads), expected, dtype)

    @repeatable
    @given(seed=seeds, clients=st.integers(1, 6), order=st.randoms(use_true_random=False))
    def test_order_of_clients_is_irrelevant(self, seed: int, clients: int, order: Any) -> None:
        uploads = [
            _random_client(seed + 10 * i, samples=12, classes=4, width=3, threshold=0.25)
            for i in range(clients)
        ]
        shuffled = list(uploads)
        order.shuffle(shuffled)
        _assert_same(aggregate_knowledge(uploads), aggregate_knowledge(shuffled))

    @repeatable
    @given(seed=seeds, clients=st.integers(1, 4))
    def test_a_client_twice_is_a_client_with_twice_the_samples(self, seed: int, clients: int) -> None:
        uploads = [
            _random_client(seed + 10 * i, samples=12, classes=4, width=3, threshold=0.25)
            for i in range(clients)
        ]
        first = uploads[0]
        doubled = Knowledge(first.representations, first.predictions, 2 * first.counts)
        _assert_same(aggregate_knowledge([first, *uploads]), aggregate_knowledge([doubled, *uploads[1:]]))

    @repeatable
    @given(seed=seeds)
    def test_one_client_is_the_identity(self, seed: int) -> None:
        upload = _random_client(seed, samples=12, classes=4, width=3, threshold=0.25)
        _assert_same(aggregate_knowledge([upload]), upload)

    @repeatable
    @given(seed=seeds, sizes=st.lists(st.integers(1, 20), min_size=1, max_size=5))
    def test_with_all_classes_shared_the_server_sees_the_pooled_means(
        self, seed: int, sizes: list[int]
    ) -> None:
        # With ν = 0 the weights N_i^j / N^j make (9) the mean over everybody's samples.
        data = [
            (normal(n, 3, seed=seed + i), normal(n, 4, seed=seed + 9 + i), random_labels(n, 4, seed + 99 + i))
            for i, n in enumerate(sizes)
        ]
        pooled = [torch.cat(parts) for parts in zip(*data, strict=True)]
        _assert_same(
            aggregate_knowledge([_local(*samples, threshold=0.0) for samples in data]),
            _local(pooled[0], pooled[1], pooled[2], threshold=0.0),
        )

    def test_only_clients_that_share_a_class_have_weight_in_it(self) -> None:
        # The second client has one sample of class 0 in eight and keeps it: class 0 is the first's alone.
        sharing = _local(torch.full((2, 1), 2.0), torch.zeros(2, 2), torch.tensor([0, 0]))
        keeping = _local(torch.full((8, 1), -1.0), torch.zeros(8, 2), torch.tensor([0] + [1] * 7))
        merged = aggregate_knowledge([sharing, keeping])
        assert merged.counts.tolist() == [2, 7]
        assert merged.representations.tolist() == [[2.0], [-1.0]]

    def test_sums_are_in_double_precision(self) -> None:
        # In float32 1e8 + 1 is 1e8, and the mean would be 0.
        uploads = [
            Knowledge(torch.tensor([[value]]), torch.ones(1, 1), torch.tensor([1]))
            for value in (1e8, 1.0, -1e8)
        ]
        merged = aggregate_knowledge(uploads)
        assert merged.representations.dtype == torch.float32
        assert merged.representations.item() == pytest.approx(1 / 3, rel=1e-6)

    def test_inputs_are_not_changed(self) -> None:
        uploads = [_random_client(i, samples=12, classes=4, width=3, threshold=0.25) for i in (1, 2)]
        before = [(u.representations.clone(), u.predictions.clone(), u.counts.clone()) for u in uploads]
        aggregate_knowledge(uploads)
        for upload, (representations, predictions, counts) in zip(uploads, before, strict=True):
            assert torch.equal(upload.representations, representations)
            assert torch.equal(upload.predictions, predictions)
            assert torch.equal(upload.counts, counts)

    def test_no_clients(self) -> None:
        with pytest.raises(ValueError, match="at least one"):
            aggregate_knowledge([])

    def test_clients_of_different_shapes(self) -> None:
        a = _random_client(1, samples=5, classes=3, width=2, threshold=0.0)
        b = _random_client(2, samples=5, classes=3, width=1, threshold=0.0)
        with pytest.raises(ValueError, match=r"shape|representations|clients"):
            aggregate_knowledge([a, b])


class TestClassifierLoss:
    def test_by_hand(self) -> None:
        # Q(ln 2, 0) = (0.8, 0.2) is 0.3 √2 from (0.5, 0.5); class 1 is unknown and n is 2 all the same.
        # Squared it would be 0.09, and as a KL divergence ln(5 / 4) / 2 ≈ 0.11.
        logits = torch.tensor([[math.log(2), 0.0], [9.0, 9.0]], dtype=torch.float64)
        predictions = torch.tensor([[0.5, 0.5], [0.0, 0.0]], dtype=torch.float64)
        loss = classifier_loss(logits, predictions, torch.tensor([True, False]), temperature=0.5)
        assert loss.shape == ()
        assert loss.item() == pytest.approx(0.15 * math.sqrt(2))

    @both_dtypes
    @repeatable
    @given(seed=seeds, classes=st.integers(1, 8), temperature=st.sampled_from([0.5, 1.0, 3.0]))
    def test_matches_oracle(self, dtype: torch.dtype, seed: int, classes: int, temperature: float) -> None:
        logits = normal(classes, classes, seed=seed, dtype=dtype)
        predictions = probabilities(classes, classes, seed=seed + 1, dtype=dtype)
        known = random_labels(classes, 2, seed + 2).bool()
        knowledge = {j: predictions[j].tolist() for j in range(classes) if known[j]}
        actual = classifier_loss(logits, predictions, known, temperature)
        expected = oracle.classifier_loss(logits.tolist(), knowledge, temperature)
        assert_close(actual, torch.tensor(expected, dtype=dtype), dtype)

        gradient = gradient_of(lambda z: classifier_loss(z, predictions, known, temperature), logits)
        closed = oracle.classifier_loss_gradient(logits.tolist(), knowledge, temperature)
        assert torch.isfinite(gradient).all()
        if dtype == torch.float64 and classes > 1:  # one class: p = 1 whatever the logits
            torch.testing.assert_close(gradient, torch.tensor(closed, dtype=dtype), rtol=1e-9, atol=1e-12)

    def test_gradient_matches_central_differences(self) -> None:
        logits = normal(4, 4, seed=1)
        predictions = probabilities(4, 4, seed=2)
        known = torch.tensor([True, False, True, True])
        knowledge = {j: predictions[j].tolist() for j in (0, 2, 3)}
        numerical = oracle.numerical_gradient(
            lambda z: oracle.classifier_loss(z, knowledge, 0.5), logits.tolist()
        )
        actual = gradient_of(lambda z: classifier_loss(z, predictions, known, 0.5), logits)
        torch.testing.assert_close(actual, torch.tensor(numerical), check_dtype=False, rtol=1e-6, atol=1e-8)
        assert (actual[[0, 2, 3]] != 0).all()
        assert actual[1].tolist() == [0.0] * 4

    @both_dtypes
    def test_gradient_is_zero_at_distance_zero(self, dtype: torch.dtype) -> None:
        # A quarter is exact in floating point, so the distance is exactly 0.
        logits = torch.full((4, 4), 1.5, dtype=dtype)
        predictions = torch.full((4, 4), 0.25, dtype=dtype)
        known = torch.ones(4, dtype=torch.bool)
        assert classifier_loss(logits, predictions, known, 0.5).item() == 0.0
        assert not gradient_of(lambda z: classifier_loss(z, predictions, known, 0.5), logits).any()

    def test_an_unknown_class_counts_nothing_whatever_its_row_holds(self) -> None:
        logits = normal(3, 3, seed=3)
        predictions = probabilities(3, 3, seed=4)
        known = torch.tensor([True, False, True])
        other = predictions.clone()
        other[1] = 1e3
        moved = logits.clone()
        moved[1] = -50.0
        assert torch.equal(
            classifier_loss(logits, predictions, known, 0.5), classifier_loss(moved, other, known, 0.5)
        )
        gradient = gradient_of(lambda z: classifier_loss(z, other, known, 0.5), moved)
        assert gradient[1].tolist() == [0.0, 0.0, 0.0]
        assert gradient[[0, 2]].all()

    def test_nothing_known(self) -> None:
        nothing = torch.zeros(3, dtype=torch.bool)
        logits = normal(3, 3, seed=5)
        assert classifier_loss(logits, torch.zeros(3, 3), nothing, 0.5).item() == 0.0
        assert not gradient_of(lambda z: classifier_loss(z, torch.zeros(3, 3), nothing, 0.5), logits).any()

    @pytest.mark.parametrize("temperature", [0.0, -0.5, math.nan])
    def test_bad_temperature(self, temperature: float) -> None:
        known = torch.ones(2, dtype=torch.bool)
        with pytest.raises(ValueError, match="temperature"):
            classifier_loss(torch.zeros(2, 2), torch.full((2, 2), 0.5), known, temperature)

    def test_shapes_are_not_broadcast(self) -> None:
        known = torch.ones(3, dtype=torch.bool)
        with pytest.raises(ValueError, match=r"shape|predictions"):
            classifier_loss(torch.zeros(3, 3), torch.full((1, 3), 1 / 3), known, 0.5)


class TestFeatureLoss:
    def test_by_hand(self) -> None:
        # Distances 5 and 0, an unknown class that adds nothing but counts, and 1: 6 / 4.
        features = torch.tensor([[3.0, 4.0], [1.0, 1.0], [9.0, 9.0], [1.0, 2.0]])
        representations = torch.tensor([[0.0, 0.0], [1.0, 1.0], [0.0, 0.0]])
        known = torch.tensor([True, True, False])
        loss = feature_loss(features, torch.tensor([0, 1, 2, 1]), representations, known)
        assert loss.shape == ()
        assert loss.item() == pytest.approx(1.5)

    @both_dtypes
    @repeatable
    @given(seed=seeds, batch=st.integers(1, 20), classes=st.integers(1, 6), width=st.integers(1, 5))
    def test_matches_oracle(
        self, dtype: torch.dtype, seed: int, batch: int, classes: int, width: int
    ) -> None:
        features = normal(batch, width, seed=seed, dtype=dtype)
        labels = random_labels(batch, classes, seed + 1)
        representations = normal(classes, width, seed=seed + 2, dtype=dtype)
        known = random_labels(classes, 2, seed + 3).bool()
        knowledge = {j: representations[j].tolist() for j in range(classes) if known[j]}
        actual = feature_loss(features, labels, representations, known)
        expected = oracle.feature_loss(features.tolist(), labels.tolist(), knowledge)
        assert_close(actual, torch.tensor(expected, dtype=dtype), dtype)

        gradient = gradient_of(lambda x: feature_loss(x, labels, representations, known), features)
        closed = oracle.feature_loss_gradient(features.tolist(), labels.tolist(), knowledge)
        assert_gradient_close(gradient, torch.tensor(closed, dtype=dtype), dtype)

    def test_gradient_matches_central_differences(self) -> None:
        features = normal(5, 3, seed=1)
        labels = torch.tensor([0, 1, 2, 1, 0])
        representations = normal(3, 3, seed=2)
        knowledge = {j: representations[j].tolist() for j in (0, 1)}
        numerical = oracle.numerical_gradient(
            lambda x: oracle.feature_loss(x, labels.tolist(), knowledge), features.tolist()
        )
        known = torch.tensor([True, True, False])
        actual = gradient_of(lambda x: feature_loss(x, labels, representations, known), features)
        torch.testing.assert_close(actual, torch.tensor(numerical), check_dtype=False, rtol=1e-6, atol=1e-8)
        assert actual[2].tolist() == [0.0, 0.0, 0.0]

    @both_dtypes
    def test_gradient_is_zero_at_distance_zero(self, dtype: torch.dtype) -> None:
        representations = normal(3, 4, seed=1, dtype=dtype)
        labels = torch.tensor([0, 2, 1, 1])
        known = torch.ones(3, dtype=torch.bool)
        features = representations[labels].clone()
        features[3] += 1.0
        gradient = gradient_of(lambda x: feature_loss(x, labels, representations, known), features)
        assert not gradient[:3].any()
        # (1, 1, 1, 1) / 2 over the batch size 4.
        torch.testing.assert_close(gradient[3], torch.full((4,), 0.125, dtype=dtype))

    @pytest.mark.parametrize("label_dtype", LABEL_DTYPES, ids=str)
    def test_label_dtypes(self, label_dtype: torch.dtype) -> None:
        # With a tensor as a dict key, or uint8 taken for a mask, the term would be zero or wrong without an error.
        features, representations = normal(6, 3, seed=1), normal(3, 3, seed=2)
        labels = torch.tensor([0, 1, 2, 1, 0, 1])
        known = torch.ones(3, dtype=torch.bool)
        expected = oracle.feature_loss(
            features.tolist(), labels.tolist(), dict(enumerate(representations.tolist()))
        )
        assert expected > 0.5
        actual = feature_loss(features, labels.to(label_dtype), representations, known)
        assert actual.item() == pytest.approx(expected, rel=1e-12)

    def test_an_unknown_class_counts_nothing_whatever_its_row_holds(self) -> None:
        features = normal(3, 2, seed=3)
        representations = normal(2, 2, seed=4)
        representations[1] = 1e3
        labels = torch.tensor([0, 1, 1])
        known = torch.tensor([True, False])
        loss = feature_loss(features, labels, representations, known)
        assert loss.item() == pytest.approx((features[0] - representations[0]).norm().item() / 3)
        gradient = gradient_of(lambda x: feature_loss(x, labels, representations, known), features)
        assert not gradient[1:].any()
        assert gradient[0].all()

    def test_nothing_known(self) -> None:
        features = normal(4, 2, seed=5)
        labels = torch.tensor([0, 1, 0, 1])
        nothing = torch.zeros(2, dtype=torch.bool)
        assert feature_loss(features, labels, torch.zeros(2, 2), nothing).item() == 0.0
        assert not gradient_of(lambda x: feature_loss(x, labels, torch.zeros(2, 2), nothing), features).any()

    def test_no_samples(self) -> None:
        nobody, known = torch.zeros(0, dtype=torch.int64), torch.ones(2, dtype=torch.bool)
        assert feature_loss(torch.zeros(0, 3), nobody, torch.zeros(2, 3), known).item() == 0.0

    @pytest.mark.parametrize("label", [-1, 2])
    def test_label_out_of_range(self, label: int) -> None:
        # As an index, -1 would be the last class, without an error.
        with pytest.raises(ValueError, match="labels"):
            feature_loss(
                torch.ones(1, 2), torch.tensor([label]), torch.zeros(2, 2), torch.ones(2, dtype=torch.bool)
            )

    def test_shapes_are_not_broadcast(self) -> None:
        known = torch.ones(2, dtype=torch.bool)
        with pytest.raises(ValueError, match=r"shape|features|representations"):
            feature_loss(torch.ones(3, 4), torch.tensor([0, 1, 0]), torch.zeros(2, 1), known)


def test_whole_objective_through_a_model() -> None:
    """Equation (11) for a linear extractor and classifier: value, and gradient by every weight."""
    samples, inputs, width, classes = 7, 4, 3, 3
    lam, gamma, temperature = 0.7, 0.4, 0.5
    x = normal(samples, inputs, seed=1)
    labels = torch.tensor([0, 1, 2, 0, 1, 0, 2])
    knowledge = aggregate_knowledge(
        [
            _local(
                normal(4, width, seed=10 + i),
                normal(4, classes, seed=20 + i),
                torch.tensor([0, 0, 2, 2]),
            )
            for i in range(2)
        ]
    )
    assert knowledge.known.tolist() == [True, False, True]
    known = _as_mapping(knowledge)
    extractor = nn.Linear(inputs, width, bias=False, dtype=torch.float64)
    classifier = nn.Linear(width, classes, bias=False, dtype=torch.float64)
    with torch.no_grad():
        extractor.weight.copy_(normal(width, inputs, seed=2))
        classifier.weight.copy_(normal(classes, width, seed=3))

    def linear(rows: list[list[float]], weight: list[list[float]]) -> list[list[float]]:
        return [[math.fsum(a * b for a, b in zip(row, w, strict=True)) for w in weight] for row in rows]

    def objective(phi: list[list[float]], omega: list[list[float]]) -> float:
        features = linear(x.tolist(), phi)
        rows = linear(knowledge.representations.tolist(), omega)
        return float(
            oracle.cross_entropy(linear(features, omega), labels.tolist())
            + lam * oracle.classifier_loss(rows, {j: k.prediction for j, k in known.items()}, temperature)
            + gamma
            * oracle.feature_loss(features, labels.tolist(), {j: k.representation for j, k in known.items()})
        )

    features = extractor(x)
    loss = (
        cross_entropy(classifier(features), labels)
        + lam
        * classifier_loss(
            classifier(knowledge.representations), knowledge.predictions, knowledge.known, temperature
        )
        + gamma * feature_loss(features, labels, knowledge.representations, knowledge.known)
    )
    gradients = torch.autograd.grad(loss, (extractor.weight, classifier.weight))

    phi, omega = extractor.weight.tolist(), classifier.weight.tolist()
    assert loss.item() == pytest.approx(objective(phi, omega), rel=1e-12)
    for gradient, numerical in zip(
        gradients,
        (
            oracle.numerical_gradient(lambda p: objective(p, omega), phi),
            oracle.numerical_gradient(lambda w: objective(phi, w), omega),
        ),
        strict=True,
    ):
        torch.testing.assert_close(
            gradient, torch.tensor(numerical, dtype=torch.float64), rtol=1e-6, atol=1e-8
        )
