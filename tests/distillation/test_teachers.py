"""The ensemble's targets, of one architecture and of several, against the oracle."""

from __future__ import annotations

import doctest
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import hierarchy as oracle
import numpy as np
import pytest
import torch
from ensembles import (
    CLASSES,
    CPU,
    FEATURES,
    Arrays,
    ForwardLog,
    draw,
    inputs,
    mixed_logits,
    named,
    net,
    noisy,
    noisy_logits,
    noisy_weights,
    repeatable,
    split,
)
from hierarchy import Linear
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from flwr_kd.distillation import teachers as teachers_module
from flwr_kd.distillation.config import AVERAGES
from flwr_kd.distillation.teachers import Teachers, Weights, ensemble_means, mixed_means, soft_labels
from flwr_kd.learning.weights import get_weights


def test_the_oracles_own_cases() -> None:
    results = doctest.testmod(oracle)
    assert results.attempted > 20
    assert results.failed == 0


def ensemble_targets(
    model: nn.Module,
    teachers: Sequence[Weights],
    weights: Sequence[float],
    batches: Callable[[], Iterable[Tensor]],
    average: str = "probabilities",
) -> tuple[Tensor, tuple[int, ...]]:
    """Return what the product's students of soft labels learn."""
    (targets,), left_out = ensemble_means(model, teachers, weights, batches, soft_labels(average))
    return targets, left_out


class TestTargets:
    @pytest.mark.parametrize("average", AVERAGES)
    @pytest.mark.parametrize(
        ("classes", "weights"),
        [
            (3, [1]),
            (2, [1, 3]),
            (5, [10, 3, 0.5, 7]),
            (3, [0, 2, 0]),
            (4, [0, 0, 0]),
            (10, [1e-9, 3e-9]),
            (3, [5, 1e12, 4]),
        ],
    )
    @pytest.mark.parametrize(("size", "batch"), [(1, 1), (7, 3), (12, 100)])
    def test_equal_the_oracles(
        self, average: str, classes: int, weights: list[float], size: int, batch: int
    ) -> None:
        models = [draw(k, classes=classes) for k in range(len(weights))]
        x = inputs(size)
        targets, left_out = ensemble_targets(
            net(classes=classes), [named(m) for m in models], weights, split(x, batch), average
        )
        expected = oracle.ensemble(x.double().numpy(), models, weights if any(weights) else [1] * 3, average)
        assert (targets.dtype, targets.device, left_out) == (torch.float32, CPU, ())
        np.testing.assert_allclose(targets.numpy(), expected, rtol=0, atol=1e-6)

    def test_the_two_averages_differ(self) -> None:
        teachers = [named(draw(k, scale=3.0)) for k in range(3)]
        one, other = (
            ensemble_targets(net(), teachers, [1, 2, 3], split(inputs(5), 5), average)[0]
            for average in AVERAGES
        )
        assert (one - other).abs().max() > 0.05

    @repeatable
    @given(seed=st.integers(0, 2**32 - 1), weights=st.lists(st.integers(0, 9), min_size=1, max_size=5))
    def test_rows_are_distributions(self, seed: int, weights: list[int]) -> None:
        teachers = [named(draw(seed + k, scale=30.0)) for k in range(len(weights))]
        for average in AVERAGES:
            targets, _ = ensemble_targets(net(), teachers, weights, split(inputs(6), 4), average)
            assert (targets >= 0).all()
            np.testing.assert_allclose(targets.sum(dim=1).numpy(), 1, atol=1e-6)

    def test_probabilities_are_the_default(self) -> None:
        teachers, batches = [named(draw(k)) for k in range(2)], split(inputs(5), 2)
        (default,), _ = ensemble_means(net(), teachers, [1, 1], batches, soft_labels())
        (by_name,), _ = ensemble_means(net(), teachers, [1, 1], batches, soft_labels("probabilities"))
        assert torch.equal(default, by_name)

    @pytest.mark.parametrize("block", [1, 256 * 1024**2])
    def test_each_teacher_sees_each_sample_once(self, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(teachers_module, "_BLOCK_BYTES", block)
        model, x, calls = net(), inputs(11), []
        seen = ForwardLog(model, x)

        def batches() -> list[Tensor]:
            calls.append(1)
            return list(torch.split(x, 4))

        ensemble_targets(model, [named(draw(k)) for k in range(3)], [1, 2, 3], batches)
        assert sum(len(rows) for _, rows in seen.passes) == 3 * 11
        assert sorted(seen.rows(training=False)) == sorted(list(range(11)) * 3)
        assert len(calls) == 1

    def test_blocks_change_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        loads: list[int] = []
        load = teachers_module.load_weights

        def counting(model: nn.Module, weights: Any) -> None:
            loads.append(1)
            load(model, weights)

        monkeypatch.setattr(teachers_module, "load_weights", counting)
        teachers, results = [noisy_weights(k) for k in range(3)], []
        for block, expected in [(1, 9), (2 * 4 * FEATURES * 4, 6), (2**28, 3)]:
            monkeypatch.setattr(teachers_module, "_BLOCK_BYTES", block)
            loads.clear()
            results.append(ensemble_targets(noisy(), teachers, [1, 5, 2], split(inputs(11), 4))[0])
            # 3 batches: in 3 blocks, in 2, in 1
            assert len(loads) == expected
        assert torch.equal(results[0], results[1])
        assert torch.equal(results[0], results[2])

    @pytest.mark.parametrize("average", AVERAGES)
    def test_eval_mode_and_nothing_moves(self, average: str) -> None:
        model, x = noisy(), inputs(9)
        model.train()
        modes: list[bool] = []
        model[4].register_forward_hook(lambda module, *_: modes.append(module.training))
        teachers = [noisy_weights(k) for k in range(3)]
        before = [{name: value.copy() for name, value in weights.items()} for weights in teachers]
        state, numpy_state = torch.get_rng_state(), repr(np.random.get_state())  # noqa: NPY002
        targets, _ = ensemble_targets(model, teachers, [4, 1, 2], split(x, 4), average)
        assert torch.equal(torch.get_rng_state(), state)
        assert repr(np.random.get_state()) == numpy_state  # noqa: NPY002
        assert modes == [False] * 9
        assert not model.training
        for name, value in get_weights(model).items():
            np.testing.assert_array_equal(value, teachers[-1][name], err_msg=name)
        for weights, kept in zip(teachers, before, strict=True):
            for name in kept:
                np.testing.assert_array_equal(weights[name], kept[name])
        expected = oracle.AVERAGES[average]([noisy_logits(x, weights) for weights in teachers], [4, 1, 2])
        np.testing.assert_allclose(targets.numpy(), expected, atol=1e-5)

    def test_no_gradients_are_kept(self) -> None:
        model = net()
        targets, _ = ensemble_targets(model, [named(draw(0))], [1], split(inputs(3), 2))
        assert not targets.requires_grad
        assert all(p.grad is None for p in model.parameters())

    @pytest.mark.parametrize("average", AVERAGES)
    @pytest.mark.parametrize("block", [1, 2**28])
    @pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38])
    def test_a_teacher_without_finite_outputs_is_left_out(
        self, value: float, block: int, average: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(teachers_module, "_BLOCK_BYTES", block)
        models = [draw(k) for k in range(4)]
        teachers = [named(m) for m in models]
        x = inputs(9)
        # Teachers 1 and 3 fail, and only on the last sample of the last batch.
        x[:, 0], x[8, 0] = 0.0, 1e3
        for k in (1, 3):
            teachers[k]["1.weight"][0, 0] = value
        if not np.isfinite(value):
            x[:8] = x[:8].abs()
            teachers[3]["1.weight"][0, 0] = 3e38
        targets, left_out = ensemble_targets(net(), teachers, [1, 2, 3, 4], split(x, 4), average)
        assert left_out == (1, 3)
        expected = oracle.ensemble(x.double().numpy(), [models[0], models[2]], [1, 3], average)
        np.testing.assert_allclose(targets.numpy(), expected, atol=1e-6)

    def test_what_is_left_has_no_weight(self) -> None:
        models = [draw(k) for k in range(3)]
        teachers = [named(m) for m in models]
        teachers[0]["1.bias"][0] = np.nan
        x = inputs(4)
        targets, left_out = ensemble_targets(net(), teachers, [1, 0, 0], split(x, 4))
        assert left_out == (0,)
        expected = oracle.ensemble(x.double().numpy(), models[1:], [1, 1], "probabilities")
        np.testing.assert_allclose(targets.numpy(), expected, atol=1e-6)

    def test_no_teacher_is_left(self) -> None:
        teachers = [named(draw(k)) for k in range(2)]
        for teacher in teachers:
            teacher["1.bias"][:] = np.nan
        with pytest.raises(FloatingPointError, match="no teacher has finite outputs"):
            ensemble_targets(net(), teachers, [1, 1], split(inputs(4), 2))

    @pytest.mark.parametrize("average", AVERAGES)
    def test_huge_and_finite_logits(self, average: str) -> None:
        models = [draw(0), oracle.linear(np.full((CLASSES, FEATURES), 1e30), np.zeros(CLASSES))]
        x = inputs(5)
        targets, left_out = ensemble_targets(
            net(), [named(m) for m in models], [1, 1], split(x, 5), average=average
        )
        assert left_out == ()
        assert torch.isfinite(targets).all()
        np.testing.assert_allclose(targets.sum(dim=1).numpy(), 1, atol=1e-6)

    @pytest.mark.parametrize(
        ("count", "weights", "average", "text"),
        [
            (0, [], "probabilities", "a weight per teacher and at least one expected, got 0, 0"),
            (2, [1], "probabilities", "got 2, 1"),
            (1, [1, 2], "probabilities", "got 1, 2"),
            (2, [1, -1], "probabilities", r"weights must be finite, at least 0 .*\[1, -1\]"),
            (2, [1, float("nan")], "logits", "weights must be finite"),
            (2, [1, float("inf")], "logits", "weights must be finite"),
            (1, [1], "median", "average must be one of logits, probabilities, got 'median'"),
        ],
    )
    def test_refused(self, count: int, weights: list[float], average: str, text: str) -> None:
        teachers = [named(draw(k)) for k in range(count)]
        with pytest.raises(ValueError, match=text):
            ensemble_targets(net(), teachers, weights, split(inputs(2), 2), average)


class TestMixedTargets:
    """Two groups, of linear models and of models with running statistics, against one ensemble of all."""

    def groups(self, weights: list[list[float]]) -> tuple[list[Linear], list[Arrays], list[Teachers]]:
        linear = [draw(k) for k in range(len(weights[0]))]
        other = [noisy_weights(k) for k in range(len(weights[1]))]
        return (
            linear,
            other,
            [
                Teachers(net(), [named(m) for m in linear], weights[0]),
                Teachers(noisy(), other, weights[1]),
            ],
        )

    @pytest.mark.parametrize("average", AVERAGES)
    @pytest.mark.parametrize(
        "weights",
        [
            [[1], [1]],
            [[1, 4, 2], [30, 5]],
            [[0.5, 0.25], [1e-3]],
            [[0, 0], [3, 1]],
            [[2, 0, 1], [0]],
            # No client has a sample: all teachers count as equal, not all groups.
            [[0, 0, 0], [0]],
        ],
    )
    def test_equal_the_oracles(self, average: str, weights: list[list[float]]) -> None:
        x = inputs(11)
        linear, other, groups = self.groups(weights)
        (targets,), left_out = mixed_means(groups, split(x, 4), soft_labels(average))
        flat = [w for group in weights for w in group]
        expected = oracle.AVERAGES[average](
            mixed_logits(x, linear, other), flat if any(flat) else [1] * len(flat)
        )
        np.testing.assert_allclose(targets.numpy(), expected, rtol=0, atol=1e-5)
        assert (targets.dtype, targets.device) == (torch.float32, CPU)
        assert left_out == ((), ())

    @pytest.mark.parametrize("average", AVERAGES)
    @pytest.mark.parametrize(
        ("bad", "kept"),
        [
            ([(1,), ()], [[1, 0, 2], [30, 5]]),
            ([(0, 2), (1,)], [[0, 4, 0], [30, 0]]),
            ([(0, 1, 2), ()], [[0, 0, 0], [30, 5]]),
            ([(), (0, 1)], [[1, 4, 2], [0, 0]]),
        ],
    )
    def test_teachers_that_are_left_out_count_in_no_sum(
        self, bad: list[tuple[int, ...]], kept: list[list[float]], average: str
    ) -> None:
        x = inputs(11)
        linear, _, groups = self.groups([[1, 4, 2], [30, 5]])
        for group, which, bias in zip(groups, bad, ("1.bias", "5.bias"), strict=True):
            for k in which:
                arrays = dict(group.arrays[k])
                arrays[bias] = np.full_like(arrays[bias], np.inf)
                group.arrays[k] = arrays  # type: ignore[index]
        (targets,), left_out = mixed_means(groups, split(x, 4), soft_labels(average))
        assert left_out == tuple(bad)
        whole = mixed_logits(x, linear, [noisy_weights(k) for k in range(2)])
        flat = [w for group in kept for w in group]
        expected = oracle.AVERAGES[average](whole, flat)
        np.testing.assert_allclose(targets.numpy(), expected, rtol=0, atol=1e-5)

    def test_all_teachers_are_left_out(self) -> None:
        _, _, groups = self.groups([[1, 1], [1]])
        for group, bias in zip(groups, ("1.bias", "5.bias"), strict=True):
            for arrays in group.arrays:
                arrays[bias][0] = np.nan
        with pytest.raises(FloatingPointError, match="no teacher has finite outputs"):
            mixed_means(groups, split(inputs(3), 2), soft_labels())

    @pytest.mark.parametrize("average", AVERAGES)
    def test_one_group_is_the_plain_ensemble(self, average: str) -> None:
        teachers, weights = [noisy_weights(k) for k in range(4)], [3, 0, 7, 1.5]
        plain, _ = ensemble_targets(noisy(), teachers, weights, split(inputs(30), 7), average)
        groups = [Teachers(noisy(), teachers, weights)]
        (mixed,), _ = mixed_means(groups, split(inputs(30), 7), soft_labels(average))
        assert torch.equal(plain, mixed)

    def test_nothing_moves(self) -> None:
        _, other, groups = self.groups([[1], [2, 1]])
        before = [{name: value.copy() for name, value in weights.items()} for weights in other]
        state = torch.get_rng_state()
        (targets,), _ = mixed_means(groups, split(inputs(9), 4), soft_labels("logits"))
        assert torch.equal(torch.get_rng_state(), state)
        assert not targets.requires_grad
        for weights, kept in zip(other, before, strict=True):
            assert all(np.array_equal(weights[name], kept[name]) for name in kept)
        for name, value in get_weights(groups[1].model).items():
            np.testing.assert_array_equal(value, other[-1][name], err_msg=name)

    @pytest.mark.parametrize(
        ("groups", "text"),
        [
            ([], "a group of teachers at least expected, got none"),
            (
                [Teachers(net(), [named(draw(0))], [1]), Teachers(net(), [], [])],
                "at least one expected, got 0, 0",
            ),
            ([Teachers(net(), [named(draw(0))], [1, 2])], "got 1, 2"),
            (
                [Teachers(net(), [named(draw(0))], [1]), Teachers(net(), [named(draw(0))], [-1])],
                r"weights must be finite, at least 0 .*\[-1\]",
            ),
        ],
    )
    def test_refused(self, groups: list[Teachers], text: str) -> None:
        with pytest.raises(ValueError, match=text):
            mixed_means(groups, split(inputs(2), 2), soft_labels())
