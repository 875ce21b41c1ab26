"""Distilling an ensemble, against the oracle: targets, early stopping, what is held out, a server's public data."""

from __future__ import annotations

import doctest
from collections.abc import Callable, Iterator
from typing import Any

import hierarchy as oracle
import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord
from hierarchy import Linear
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    default_collate,
)

from flwr_kd.checks import ConfigError
from flwr_kd.config import DistillationConfig
from flwr_kd.distillation import teachers as teachers_module
from flwr_kd.distillation.server import Group, ServerDistiller, distil_groups
from flwr_kd.distillation.student import Distilled, distil_ensemble, distil_student, hold_out
from flwr_kd.distillation.teachers import Teachers, ensemble_targets, mixed_means
from flwr_kd.learning.batches import Batches, DatasetError
from flwr_kd.learning.weights import get_weights
from flwr_kd.server.aggregation import weighted_mean
from flwr_kd.transport.template import ArrayTemplate

CPU = torch.device("cpu")
FEATURES, CLASSES = 6, 3
repeatable = settings(max_examples=60, deadline=None, derandomize=True)
Arrays = dict[str, np.ndarray]


def net(features: int = FEATURES, classes: int = CLASSES) -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(features, classes))


def draw(seed: int, features: int = FEATURES, classes: int = CLASSES, scale: float = 1.0) -> Linear:
    """Return a linear model whose numbers float32 has exactly."""
    rng = np.random.default_rng(seed)
    w, b = (rng.normal(size=size, scale=scale) for size in ((classes, features), classes))
    return oracle.linear(w.astype(np.float32), b.astype(np.float32))


def named(model: Linear) -> Arrays:
    return {"1.weight": model.W.astype(np.float32), "1.bias": model.b.astype(np.float32)}


def inputs(size: int, seed: int = 0, features: int = FEATURES) -> Tensor:
    return torch.randn(size, features, generator=torch.Generator().manual_seed(seed))


def split(x: Tensor, size: int) -> Callable[[], list[Tensor]]:
    return lambda: list(torch.split(x, size))


def unlabelled(source: Any) -> Batches:
    return Batches(source, num_classes=0, labelled=False)


def configured(**changes: Any) -> DistillationConfig:
    """Return what the oracle does: full batches, plain SGD, nothing held out."""
    values: dict[str, Any] = {"batch_size": 1000, "optimizer": "sgd", "weight_decay": 0.0}
    return DistillationConfig(**(values | {"validation_share": 0.0} | changes))


def distil(
    model: nn.Module, student: Arrays, teachers: list[Arrays], source: Any, **changes: Any
) -> Distilled:
    """Distil with equal weights, ten epochs, learning rate 0.5 and seed 0, unless `changes` say otherwise."""
    options: dict[str, Any] = {"epochs": 10, "learning_rate": 0.5, "seed": 0}
    options["matching"] = teachers_module.soft_labels(changes.pop("average", "probabilities"))
    weights = changes.pop("weights", [1] * len(teachers))
    options |= {name: changes.pop(name) for name in list(options) if name in changes}
    samples = source if isinstance(source, Batches) else unlabelled(source)
    config = configured(**changes)
    return distil_ensemble(model, student, teachers, weights, samples, config, device=CPU, **options)


def found(model: nn.Module) -> Linear:
    weights = get_weights(model)
    return oracle.linear(weights["1.weight"], weights["1.bias"])


def close(a: Linear, b: Linear, atol: float = 3e-6) -> None:
    np.testing.assert_allclose(a.W, b.W, rtol=0, atol=atol)
    np.testing.assert_allclose(a.b, b.b, rtol=0, atol=atol)


class Seen:
    """Which rows of `x` a model saw, pass by pass, and in which mode."""

    def __init__(self, model: nn.Module, x: Tensor) -> None:
        self.row = {value: i for i, value in enumerate(x.flatten(1)[:, 0].tolist())}
        assert len(self.row) == len(x)
        self.passes: list[tuple[bool, list[int]]] = []
        model.register_forward_hook(self._note)

    def _note(self, model: nn.Module, args: tuple[Tensor], _: Tensor) -> None:
        rows = [self.row[value] for value in args[0].flatten(1)[:, 0].tolist()]
        self.passes.append((model.training, rows))

    def rows(self, training: bool) -> list[int]:
        return [row for mode, rows in self.passes for row in rows if mode == training]


def noisy() -> nn.Sequential:
    """Return a model with running statistics and with dropout."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Flatten(),
            nn.Linear(FEATURES, 8),
            nn.BatchNorm1d(8),
            nn.ReLU(),
            nn.Dropout(0.5),
            nn.Linear(8, CLASSES),
        )


def noisy_weights(seed: int) -> Arrays:
    rng = np.random.default_rng(seed)
    weights = get_weights(noisy())
    for name, value in weights.items():
        if value.dtype.kind == "f":
            weights[name] = rng.normal(size=value.shape).astype(np.float32)
    weights["2.running_var"] = np.abs(weights["2.running_var"]) + np.float32(0.1)
    weights["2.num_batches_tracked"] = np.array(seed + 5)
    return weights


def noisy_logits(x: Tensor, w: Arrays) -> np.ndarray:
    """Evaluate `noisy()` in eval mode, in float64."""
    v = {name: value.astype(np.float64) for name, value in w.items()}
    h = x.double().numpy() @ v["1.weight"].T + v["1.bias"]
    h = (h - v["2.running_mean"]) / np.sqrt(v["2.running_var"] + 1e-5) * v["2.weight"] + v["2.bias"]
    return np.maximum(h, 0) @ v["5.weight"].T + v["5.bias"]


def test_the_oracles_own_cases() -> None:
    results = doctest.testmod(oracle)
    assert results.attempted > 20
    assert results.failed == 0


# ---------------------------------------------------------------------- the ensemble's targets


class TestTargets:
    @pytest.mark.parametrize("average", teachers_module.AVERAGES)
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
            net(classes=classes), [named(m) for m in models], weights, split(x, batch), average=average
        )
        expected = oracle.ensemble(x.double().numpy(), models, weights if any(weights) else [1] * 3, average)
        assert (targets.dtype, targets.device, left_out) == (torch.float32, CPU, ())
        np.testing.assert_allclose(targets.numpy(), expected, rtol=0, atol=1e-6)

    def test_the_two_averages_differ(self) -> None:
        teachers = [named(draw(k, scale=3.0)) for k in range(3)]
        one, other = (
            ensemble_targets(net(), teachers, [1, 2, 3], split(inputs(5), 5), average=average)[0]
            for average in teachers_module.AVERAGES
        )
        assert (one - other).abs().max() > 0.05

    @repeatable
    @given(seed=st.integers(0, 2**32 - 1), weights=st.lists(st.integers(0, 9), min_size=1, max_size=5))
    def test_rows_are_distributions(self, seed: int, weights: list[int]) -> None:
        teachers = [named(draw(seed + k, scale=30.0)) for k in range(len(weights))]
        for average in teachers_module.AVERAGES:
            targets, _ = ensemble_targets(net(), teachers, weights, split(inputs(6), 4), average=average)
            assert (targets >= 0).all()
            np.testing.assert_allclose(targets.sum(dim=1).numpy(), 1, atol=1e-6)

    def test_probabilities_are_the_default(self) -> None:
        teachers, batches = [named(draw(k)) for k in range(2)], split(inputs(5), 2)
        default, _ = ensemble_targets(net(), teachers, [1, 1], batches)
        named_one, _ = ensemble_targets(net(), teachers, [1, 1], batches, average="probabilities")
        assert torch.equal(default, named_one)

    @pytest.mark.parametrize("block", [1, 256 * 1024**2])
    def test_each_teacher_sees_each_sample_once(self, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(teachers_module, "_BLOCK_BYTES", block)
        model, x, calls = net(), inputs(11), []
        seen = Seen(model, x)

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

    @pytest.mark.parametrize("average", teachers_module.AVERAGES)
    def test_eval_mode_and_nothing_moves(self, average: str) -> None:
        model, x = noisy(), inputs(9)
        model.train()
        modes: list[bool] = []
        model[4].register_forward_hook(lambda module, *_: modes.append(module.training))
        teachers = [noisy_weights(k) for k in range(3)]
        before = [{name: value.copy() for name, value in weights.items()} for weights in teachers]
        state, numpy_state = torch.get_rng_state(), repr(np.random.get_state())  # noqa: NPY002
        targets, _ = ensemble_targets(model, teachers, [4, 1, 2], split(x, 4), average=average)
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

    @pytest.mark.parametrize("average", teachers_module.AVERAGES)
    @pytest.mark.parametrize("block", [1, 2**28])
    @pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38])
    def test_a_teacher_beyond_all_numbers_is_left_out(
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
        targets, left_out = ensemble_targets(net(), teachers, [1, 2, 3, 4], split(x, 4), average=average)
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

    @pytest.mark.parametrize("average", teachers_module.AVERAGES)
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
            ensemble_targets(net(), teachers, weights, split(inputs(2), 2), average=average)


# ---------------------------------------------------------------------- teachers of several architectures


def mixed_logits(x: Tensor, linear: list[Linear], noisy: list[Arrays]) -> list[np.ndarray]:
    return [oracle.logits(x.double().numpy(), m) for m in linear] + [noisy_logits(x, w) for w in noisy]


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

    @pytest.mark.parametrize("average", teachers_module.AVERAGES)
    @pytest.mark.parametrize(
        "weights",
        [
            [[1], [1]],
            [[1, 4, 2], [30, 5]],
            [[0.5, 0.25], [1e-3]],
            [[0, 0], [3, 1]],
            [[2, 0, 1], [0]],
            # Nobody has a sample: all are alike, and not the groups.
            [[0, 0, 0], [0]],
        ],
    )
    def test_equal_the_oracles(self, average: str, weights: list[list[float]]) -> None:
        x = inputs(11)
        linear, other, groups = self.groups(weights)
        (targets,), left_out = mixed_means(groups, split(x, 4), teachers_module.soft_labels(average))
        flat = [w for group in weights for w in group]
        expected = oracle.AVERAGES[average](
            mixed_logits(x, linear, other), flat if any(flat) else [1] * len(flat)
        )
        np.testing.assert_allclose(targets.numpy(), expected, rtol=0, atol=1e-5)
        assert (targets.dtype, targets.device) == (torch.float32, CPU)
        assert left_out == ((), ())

    @pytest.mark.parametrize("average", teachers_module.AVERAGES)
    @pytest.mark.parametrize(
        ("bad", "kept"),
        [
            ([(1,), ()], [[1, 0, 2], [30, 5]]),
            ([(0, 2), (1,)], [[0, 4, 0], [30, 0]]),
            ([(0, 1, 2), ()], [[0, 0, 0], [30, 5]]),
            ([(), (0, 1)], [[1, 4, 2], [0, 0]]),
        ],
    )
    def test_who_is_left_out_counts_in_no_sum(
        self, bad: list[tuple[int, ...]], kept: list[list[float]], average: str
    ) -> None:
        x = inputs(11)
        linear, _, groups = self.groups([[1, 4, 2], [30, 5]])
        for group, which, bias in zip(groups, bad, ("1.bias", "5.bias"), strict=True):
            for k in which:
                arrays = dict(group.arrays[k])
                arrays[bias] = np.full_like(arrays[bias], np.inf)
                group.arrays[k] = arrays  # type: ignore[index]
        (targets,), left_out = mixed_means(groups, split(x, 4), teachers_module.soft_labels(average))
        assert left_out == tuple(bad)
        whole = mixed_logits(x, linear, [noisy_weights(k) for k in range(2)])
        flat = [w for group in kept for w in group]
        expected = oracle.AVERAGES[average](whole, flat)
        np.testing.assert_allclose(targets.numpy(), expected, rtol=0, atol=1e-5)

    def test_nobody_is_left(self) -> None:
        _, _, groups = self.groups([[1, 1], [1]])
        for group, bias in zip(groups, ("1.bias", "5.bias"), strict=True):
            for arrays in group.arrays:
                arrays[bias][0] = np.nan
        with pytest.raises(FloatingPointError, match="no teacher has finite outputs"):
            mixed_means(groups, split(inputs(3), 2), teachers_module.soft_labels())

    @pytest.mark.parametrize("average", teachers_module.AVERAGES)
    def test_one_group_is_the_plain_ensemble(self, average: str) -> None:
        teachers, weights = [noisy_weights(k) for k in range(4)], [3, 0, 7, 1.5]
        plain, _ = ensemble_targets(noisy(), teachers, weights, split(inputs(30), 7), average=average)
        groups = [Teachers(noisy(), teachers, weights)]
        (mixed,), _ = mixed_means(groups, split(inputs(30), 7), teachers_module.soft_labels(average))
        assert torch.equal(plain, mixed)

    def test_nothing_moves(self) -> None:
        _, other, groups = self.groups([[1], [2, 1]])
        before = [{name: value.copy() for name, value in weights.items()} for weights in other]
        state = torch.get_rng_state()
        (targets,), _ = mixed_means(groups, split(inputs(9), 4), teachers_module.soft_labels("logits"))
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
            mixed_means(groups, split(inputs(2), 2), teachers_module.soft_labels())


# ---------------------------------------------------------------------- what is held out


class TestHoldOut:
    @repeatable
    @given(st.integers(0, 200), st.floats(0, 1, exclude_max=True), st.integers(0, 2**31))
    def test_a_partition_of_the_rows(self, count: int, share: float, seed: int) -> None:
        train, held_out = hold_out(count, share, torch.Generator().manual_seed(seed))
        assert sorted([*train.tolist(), *held_out.tolist()]) == list(range(count))
        assert train.tolist() == sorted(train.tolist())
        assert held_out.tolist() == sorted(held_out.tolist())
        assert abs(len(held_out) - min(count * share, max(count - 1, 0))) <= 0.5
        assert len(train) or not count

    @pytest.mark.parametrize(
        ("count", "share", "expected"),
        [(20, 0.1, 2), (4, 0.1, 0), (5, 0.1, 1), (1, 0.99, 0), (2, 0.99, 1), (0, 0.5, 0), (100, 0.0, 0)],
    )
    def test_how_many(self, count: int, share: float, expected: int) -> None:
        assert len(hold_out(count, share, torch.Generator())[1]) == expected

    def test_the_generator_decides_and_every_row_has_its_chance(self) -> None:
        drawn = [hold_out(10, 0.3, torch.Generator().manual_seed(seed))[1].tolist() for seed in range(200)]
        again = [hold_out(10, 0.3, torch.Generator().manual_seed(seed))[1].tolist() for seed in range(200)]
        assert drawn == again
        counts = np.bincount([row for rows in drawn for row in rows], minlength=10)
        # 60 each are expected, with a standard deviation of 6.5
        assert 35 < counts.min() <= counts.max() < 85


# ---------------------------------------------------------------------- the distillation


class TestDistillation:
    @pytest.mark.parametrize("average", teachers_module.AVERAGES)
    @pytest.mark.parametrize(
        ("weights", "size", "epochs"), [([1], 9, 5), ([2, 5, 1], 30, 12), ([0, 0], 4, 1), ([1, 3], 300, 6)]
    )
    def test_full_batches_equal_the_oracle(
        self, average: str, weights: list[float], size: int, epochs: int
    ) -> None:
        model, x = net(), inputs(size)
        student, teachers = draw(99), [draw(k, scale=2.0) for k in range(len(weights))]
        done = distil(
            model,
            named(student),
            [named(t) for t in teachers],
            TensorDataset(x),
            weights=weights,
            epochs=epochs,
            average=average,
        )
        rows = x.double().numpy()
        targets = oracle.ensemble(rows, teachers, weights if any(weights) else [1, 1], average)
        close(found(model), oracle.descend(student, rows, targets, 0.5, epochs))
        before = oracle.descend(student, rows, targets, 0.5, epochs - 1)
        assert done.loss == pytest.approx(oracle.cross_entropy(rows, targets, before), abs=1e-5)
        assert (done.epochs, done.validation_loss, done.left_out) == (epochs, None, ())
        assert not model.training

    def test_it_comes_nearer_to_the_teachers(self) -> None:
        model, x = net(), inputs(40)
        student, teachers = draw(9), [draw(k) for k in range(3)]
        done = distil(
            model,
            named(student),
            [named(t) for t in teachers],
            TensorDataset(x),
            batch_size=8,
            optimizer="adam",
            learning_rate=0.05,
            epochs=60,
        )
        rows = x.double().numpy()
        targets = oracle.ensemble(rows, teachers, [1, 1, 1], "probabilities")
        floor = float(-(targets * np.log(targets)).sum(axis=1).mean())
        start = oracle.cross_entropy(rows, targets, student) - floor
        assert oracle.cross_entropy(rows, targets, found(model)) - floor < start / 10
        assert done.loss - floor < start / 5

    def test_a_student_that_is_its_own_teacher_stays(self) -> None:
        model, student = net(), draw(3)
        distil(model, named(student), [named(student)], TensorDataset(inputs(20)), epochs=5)
        close(found(model), student, atol=1e-6)
        model = net()
        distil(model, named(student), [named(draw(4))], TensorDataset(inputs(20)), epochs=5)
        assert np.abs(found(model).W - student.W).max() > 1e-2

    @pytest.mark.parametrize("epochs", [1, 4])
    @pytest.mark.parametrize("share", [0.0, 0.25])
    def test_teachers_are_asked_once(self, epochs: int, share: float) -> None:
        model, x = net(), inputs(12)
        seen = Seen(model, x)
        teachers = [named(draw(k)) for k in range(3)]
        distil(
            model,
            named(draw(9)),
            teachers,
            TensorDataset(x),
            epochs=epochs,
            batch_size=4,
            validation_share=share,
            patience=9,
        )
        held_out = int(12 * share)
        assert len(seen.rows(training=True)) == epochs * (12 - held_out)
        # and the validation, before the first epoch and after each
        assert len(seen.rows(training=False)) == 3 * 12 + (epochs + 1) * held_out

    @pytest.mark.parametrize("keep", ["last", "best"])
    @pytest.mark.parametrize("batch_size", [1, 4, 100])
    def test_held_out_rows_are_never_trained_on(self, keep: str, batch_size: int) -> None:
        model, x = net(), inputs(21)
        seen = Seen(model, x)
        distil(
            model,
            named(draw(9)),
            [named(draw(0))],
            TensorDataset(x),
            epochs=3,
            batch_size=batch_size,
            validation_share=0.3,
            keep=keep,
        )
        trained = seen.rows(training=True)
        held_out = [row for mode, rows in seen.passes[1:] for row in rows if not mode]
        assert len(trained) == 3 * 15
        assert {trained.count(row) for row in set(trained)} == {3}
        assert len(set(held_out)) == 6
        assert {held_out.count(row) for row in held_out} == {4}
        assert set(trained).isdisjoint(held_out)

    def test_epochs_have_an_order_each(self) -> None:
        model, x = net(), inputs(12)
        seen = Seen(model, x)
        distil(model, named(draw(9)), [named(draw(0))], TensorDataset(x), epochs=2, batch_size=5)
        trained = seen.rows(training=True)
        assert sorted(trained[:12]) == sorted(trained[12:]) == list(range(12))
        assert trained[:12] != trained[12:]
        assert trained[:12] != list(range(12))

    @pytest.mark.parametrize("share", [0.0, 0.2])
    def test_students_are_trained_in_training_mode(self, share: float) -> None:
        model, x = noisy(), inputs(20)
        tracked = int(noisy_weights(7)["2.num_batches_tracked"])
        distil(
            model,
            noisy_weights(7),
            [noisy_weights(k) for k in range(2)],
            TensorDataset(x),
            epochs=3,
            batch_size=5,
            validation_share=share,
            patience=9,
            learning_rate=0.01,
        )
        # 20 rows in fours of 5; 16 in 5, 5 and 6, the last one having joined
        batches = 3 * (4 if share == 0 else 3)
        assert int(get_weights(model)["2.num_batches_tracked"]) == tracked + batches
        assert not model.training

    @pytest.mark.parametrize("size", [1, 2, 3])
    @pytest.mark.parametrize("optimizer", ["sgd", "adam"])
    def test_few_samples_still_teach(self, size: int, optimizer: str) -> None:
        model, student = noisy(), noisy_weights(7)
        # the paper's batch size and share
        done = distil(
            model,
            student,
            [noisy_weights(0)],
            TensorDataset(inputs(size)),
            batch_size=128,
            validation_share=0.1,
            epochs=2,
            optimizer=optimizer,
            learning_rate=0.01,
        )
        changed = get_weights(model)
        assert done.epochs == 2
        assert done.validation_loss is None
        assert np.abs(changed["5.weight"] - student["5.weight"]).max() > 1e-4
        assert all(np.isfinite(value).all() for value in changed.values())

    def test_weight_decay_and_momentum_are_the_configs(self) -> None:
        # Without a gradient of its own the student shrinks by 1 - 0.5 · 0.2 per step.
        model, student = net(), draw(3)
        distil(model, named(student), [named(student)], TensorDataset(inputs(20)), epochs=1, weight_decay=0.2)
        close(found(model), oracle.linear(student.W * 0.9, student.b * 0.9))
        other, x = net(), inputs(20)
        distil(other, named(student), [named(draw(0))], TensorDataset(x), epochs=2, momentum=0.5)
        rows = x.double().numpy()
        targets = oracle.ensemble(rows, [draw(0)], [1], "probabilities")
        one = oracle.descend(student, rows, targets, 0.5, 1)
        two = oracle.descend(one, rows, targets, 0.5, 1)
        close(
            found(other), oracle.linear(two.W + 0.5 * (one.W - student.W), two.b + 0.5 * (one.b - student.b))
        )

    @pytest.mark.parametrize("share", [0.0, 0.3])
    def test_seeds_and_the_global_generator(self, share: float) -> None:
        def run(seed: int, outside: int) -> Linear:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(outside)
                before = torch.get_rng_state()
                model = net()
                before = torch.get_rng_state()
                distil(
                    model,
                    named(draw(9)),
                    [named(draw(0)), named(draw(1))],
                    TensorDataset(inputs(23)),
                    batch_size=4,
                    seed=seed,
                    epochs=3,
                    validation_share=share,
                )
                assert torch.equal(torch.get_rng_state(), before)
                return found(model)

        one, again, other = run(1, 5), run(1, 6), run(2, 5)
        np.testing.assert_array_equal(one.W, again.W)
        assert np.abs(one.W - other.W).max() > 1e-5

    def test_a_teacher_without_finite_outputs_is_told(self) -> None:
        x, models = inputs(15), [draw(k) for k in range(3)]
        teachers = [named(m) for m in models]
        teachers[1]["1.bias"][0] = np.inf
        model = net()
        done = distil(model, named(draw(9)), teachers, TensorDataset(x), weights=[1, 8, 2], epochs=4)
        assert done.left_out == (1,)
        rows = x.double().numpy()
        targets = oracle.ensemble(rows, [models[0], models[2]], [1, 2], "probabilities")
        close(found(model), oracle.descend(draw(9), rows, targets, 0.5, 4))

    def test_beyond_all_numbers(self) -> None:
        student = named(draw(9))
        student["1.weight"][:] = np.float32(3e38)
        with pytest.raises(FloatingPointError, match="loss is"):
            distil(net(), student, [named(draw(0))], TensorDataset(10 * inputs(5)), epochs=2)
        with pytest.raises(FloatingPointError, match="no longer finite"):
            # one step, whose loss is still a number
            distil(
                net(),
                named(draw(9)),
                [named(draw(0))],
                TensorDataset(1e3 * inputs(5)),
                epochs=1,
                learning_rate=1e38,
            )
        with pytest.raises(FloatingPointError, match="no teacher"):
            distil(net(), named(draw(9)), [student], TensorDataset(10 * inputs(5)))


class TestGivenTargets:
    def student(
        self, model: nn.Module, targets: tuple[Tensor, ...], samples: Any, **changes: Any
    ) -> Distilled:
        options: dict[str, Any] = {"epochs": 7, "learning_rate": 0.5, "seed": 0, "device": CPU}
        return distil_student(
            model, named(draw(9)), targets, unlabelled(samples), configured(**changes), **options
        )

    def test_equals_the_oracle(self) -> None:
        model, x = net(), inputs(13)
        targets = torch.softmax(inputs(13, seed=4, features=CLASSES), dim=1)
        done = self.student(model, (targets,), TensorDataset(x))
        rows = x.double().numpy()
        close(found(model), oracle.descend(draw(9), rows, targets.double().numpy(), 0.5, 7))
        assert (done.epochs, done.validation_loss, done.left_out) == (7, None, ())
        assert not model.training

    def test_another_matching(self) -> None:
        """A student of a squared distance from the logits: its gradient is 2 (z - t)ᵀ x / (n C)."""
        model, x, targets = net(), inputs(13), inputs(13, seed=4, features=CLASSES)
        matching = teachers_module.Matching(
            outputs=lambda model, x: (model(x),),
            loss=lambda targets, outputs: (outputs[0] - targets[0]).square().mean(),
        )
        distil_student(
            model,
            named(draw(9)),
            (targets,),
            unlabelled(TensorDataset(x)),
            configured(),
            epochs=1,
            learning_rate=0.5,
            seed=0,
            device=CPU,
            matching=matching,
        )
        start, rows = draw(9), x.double().numpy()
        residual = 2 * (oracle.logits(rows, start) - targets.double().numpy()) / (13 * CLASSES)
        expected = oracle.linear(start.W - 0.5 * residual.T @ rows, start.b - 0.5 * residual.sum(axis=0))
        close(found(model), expected)

    def test_refused(self) -> None:
        targets = torch.full((4, CLASSES), 1 / CLASSES)
        text = r"targets must have 5 rows, one per sample, got \[4\]"
        with pytest.raises(ValueError, match=text):
            self.student(net(), (targets,), TensorDataset(inputs(5)))
        with pytest.raises(DatasetError, match="samples is empty"):
            self.student(net(), (targets[:0],), TensorDataset(inputs(0)))


class TestEarlyStopping:
    """Against the oracle run on the very rows that the implementation trains on."""

    FEATURES = 20
    EPOCHS = 60
    CASES = (0, 2, 3, 5, 9, 11)  # no two losses are so close that float32 could take one for the other

    def run(self, case: int, keep: str, patience: int, epochs: int = EPOCHS) -> tuple[Distilled, Linear, Any]:
        model, x = net(self.FEATURES), inputs(24, case, self.FEATURES)
        seen = Seen(model, x)
        student, teachers = self.models(case)
        done = distil(
            model,
            named(student),
            [named(t) for t in teachers],
            TensorDataset(x),
            weights=[1, 2],
            epochs=epochs,
            validation_share=1 / 3,
            keep=keep,
            patience=patience,
        )
        rows = x.double().numpy()
        targets = oracle.ensemble(rows, teachers, [1, 2], "probabilities")
        train = sorted(set(seen.rows(training=True)))
        held_out = sorted(set(range(24)) - set(train))
        assert len(held_out) == 8
        path = [
            oracle.descend(student, rows[train], targets[train], 0.5, epoch) for epoch in range(epochs + 1)
        ]
        losses = [oracle.cross_entropy(rows[held_out], targets[held_out], model) for model in path]
        return done, found(model), (path, losses)

    def models(self, case: int) -> tuple[Linear, list[Linear]]:
        """Return in case 0 a student that is its own teacher but for a little, else one that can learn."""
        teachers = [draw(10 * case + k, self.FEATURES, scale=0.5) for k in range(2)]
        if case == 0:
            return oracle.mean(teachers, [1, 2]), teachers
        return draw(10 * case + 9, self.FEATURES, scale=0.1), teachers

    @pytest.mark.parametrize("keep", ["last", "best"])
    @pytest.mark.parametrize("patience", [1, 3, 5])
    @pytest.mark.parametrize("case", CASES)
    def test_equals_the_oracle(self, case: int, patience: int, keep: str) -> None:
        done, weights, (path, losses) = self.run(case, keep, patience)
        ended, best = oracle.early_stopping(losses[1:], patience, start=losses[0])
        assert done.epochs == ended
        assert done.validation_loss == pytest.approx(losses[best], abs=1e-5)
        close(weights, path[best if keep == "best" else ended], atol=1e-5)

    def test_the_cases_are_different(self) -> None:
        """So that the test above cannot pass by chance: some stop early, some not, best is not always last."""
        ends = [
            oracle.early_stopping(losses[1:], 3, start=losses[0])
            for _, _, (_, losses) in (self.run(case, "last", 3) for case in self.CASES)
        ]
        assert any(ended < self.EPOCHS and best > 1 for ended, best in ends)
        assert any(ended == self.EPOCHS or best > 10 for ended, best in ends)
        assert any(ended > best for ended, best in ends)

    def test_a_student_that_only_gets_worse(self) -> None:
        """Its weights of before the first epoch are the best."""
        student = draw(1)
        kept = {}
        for keep in ("best", "last"):
            model = net()
            done = distil(
                model,
                named(student),
                [named(student)],
                TensorDataset(inputs(20)),
                weight_decay=0.5,
                validation_share=0.5,
                patience=4,
                keep=keep,
                epochs=20,
            )
            assert done.epochs == 4
            kept[keep] = found(model)
        np.testing.assert_array_equal(kept["best"].W, student.W)
        assert np.abs(kept["last"].W - student.W).max() > 0.1

    def test_all_epochs_where_nothing_is_held_out(self) -> None:
        for size, share in [(20, 0.0), (4, 0.1), (1, 0.9)]:
            student = named(draw(1))
            done = distil(
                net(),
                student,
                [student],
                TensorDataset(inputs(size)),
                weight_decay=0.5,
                validation_share=share,
                patience=1,
                epochs=7,
                keep="best",
            )
            assert (done.epochs, done.validation_loss) == (7, None)

    def test_best_restores_running_statistics_too(self) -> None:
        x, student = inputs(30), noisy_weights(7)
        model = noisy()
        # A teacher like the student in eval mode: learning from noise makes it worse at once.
        distil(
            model,
            student,
            [student],
            TensorDataset(x),
            validation_share=0.3,
            keep="best",
            patience=2,
            epochs=5,
            batch_size=7,
            learning_rate=1.0,
        )
        for name, value in get_weights(model).items():
            np.testing.assert_array_equal(value, student[name], err_msg=name)

    def test_validation_is_weighted_by_samples(self) -> None:
        """Its batches are of 256 at least: 300 held-out rows make two of different size."""
        model, x = net(), inputs(600)
        student, teachers = draw(9), [draw(0)]
        done = distil(
            model,
            named(student),
            [named(teachers[0])],
            TensorDataset(x),
            validation_share=0.5,
            epochs=1,
            batch_size=100,
        )
        rows, held_out = x.double().numpy(), hold_out_rows(x, student, teachers)
        targets = oracle.ensemble(rows, teachers, [1], "probabilities")
        assert done.validation_loss == pytest.approx(
            oracle.cross_entropy(rows[held_out], targets[held_out], found(model)), abs=1e-5
        )


def hold_out_rows(x: Tensor, student: Linear, teachers: list[Linear]) -> list[int]:
    """Return the rows that the same run does not train on."""
    model = net()
    seen = Seen(model, x)
    distil(
        model,
        named(student),
        [named(t) for t in teachers],
        TensorDataset(x),
        validation_share=0.5,
        epochs=1,
    )
    return sorted(set(range(len(x))) - set(seen.rows(training=True)))


# ---------------------------------------------------------------------- sources without labels


class Items(Dataset[Any]):
    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.items[index]


SOURCES: dict[str, Callable[[Tensor], Any]] = {
    "one tensor": TensorDataset,
    "bare tensors": lambda x: Items(list(x)),
    "one-tuples": lambda x: Items([(row,) for row in x]),
    "labels -1": lambda x: TensorDataset(x, torch.full((len(x),), -1)),
    "labels beyond": lambda x: TensorDataset(x, torch.arange(len(x)) + 1000),
    "float labels": lambda x: TensorDataset(x, torch.full((len(x),), 0.5)),
    "several labels": lambda x: TensorDataset(x, torch.zeros(len(x), 7)),
    "text labels": lambda x: Items([(row, "cat") for row in x]),
    "dicts without label": lambda x: Items([{"image": row} for row in x]),
    "dicts with text": lambda x: Items([{"image": row, "label": "cat", "id": 3} for row in x]),
    "dicts with two labels": lambda x: Items([{"x": row, "label": 1, "target": 2} for row in x]),
    "subset": lambda x: Subset(TensorDataset(torch.cat([x, x])), range(len(x))),
    "loader": lambda x: DataLoader(TensorDataset(x), batch_size=1000),
    "shuffling loader": lambda x: DataLoader(Items(list(x)), batch_size=1000, shuffle=True),
    "loader of pairs": lambda x: DataLoader(Items([(row, "cat") for row in x]), batch_size=1000),
    "loader without batches": lambda x: DataLoader(TensorDataset(x), batch_size=None),
}


class TestSources:
    @pytest.mark.parametrize("make", SOURCES.values(), ids=SOURCES.keys())
    def test_all_kinds_give_the_same(self, make: Callable[[Tensor], Any]) -> None:
        x, model = inputs(13), net()
        distil(model, named(draw(9)), [named(draw(0)), named(draw(1))], make(x), epochs=4)
        rows = x.double().numpy()
        targets = oracle.ensemble(rows, [draw(0), draw(1)], [1, 1], "probabilities")
        close(found(model), oracle.descend(draw(9), rows, targets, 0.5, 4))

    @pytest.mark.parametrize("make", SOURCES.values(), ids=SOURCES.keys())
    def test_all_kinds_are_taken_by_a_server(self, make: Callable[[Tensor], Any]) -> None:
        distiller = ServerDistiller(net(), make(inputs(13)), device="cpu")
        assert len(distiller.samples) == 13
        assert distiller.num_classes == CLASSES

    def test_small_batches_of_a_loader_that_drops_the_last(self) -> None:
        model, x = net(), inputs(11)
        seen = Seen(model, x)
        loader = DataLoader(TensorDataset(x), batch_size=4, drop_last=True)
        distil(model, named(draw(9)), [named(draw(0))], loader, epochs=3, batch_size=2)
        assert sorted(seen.rows(training=False)) == list(range(11))  # the teacher sees all
        assert [len(rows) for mode, rows in seen.passes if mode] == [4, 4] * 3

    def test_targets_stay_with_their_samples(self) -> None:
        """In small batches, by any source, the student learns from its samples' own targets."""
        x = inputs(23)
        results = []
        loader = DataLoader(Items(list(x)), batch_size=4, shuffle=True)
        for source in (TensorDataset(x), loader):
            model = net()
            distil(
                model,
                named(draw(9)),
                [named(draw(0, scale=3.0))],
                source,
                epochs=200,
                batch_size=4,
                optimizer="adam",
                learning_rate=0.05,
            )
            results.append(found(model))
            rows = x.double().numpy()
            targets = oracle.ensemble(rows, [draw(0, scale=3.0)], [1], "probabilities")
            floor = float(-(targets * np.log(targets + 1e-300)).sum(axis=1).mean())
            assert oracle.cross_entropy(rows, targets, results[-1]) - floor < 0.02
        np.testing.assert_array_equal(results[0].W, results[1].W)

    def test_a_sampler_of_its_own_is_refused(self) -> None:
        """Its samples may not be all that the loader's data set has: a client's share of a common set."""
        loader = DataLoader(TensorDataset(inputs(8)), sampler=SubsetRandomSampler([0, 5]))
        with pytest.raises(DatasetError, match="public_set must not be a loader with a sampler of its own"):
            ServerDistiller(net(), loader, device="cpu")
        with pytest.raises(DatasetError, match="samples must not be a loader with a sampler"):
            distil(net(), named(draw(9)), [named(draw(0))], loader)

    @pytest.mark.parametrize("change", [-1, 1])
    def test_a_collate_fn_that_changes_the_number_is_noticed(self, change: int) -> None:
        def collate(items: list[Any]) -> Any:
            return default_collate(items[:change] if change < 0 else [*items, items[0]])

        loader = DataLoader(TensorDataset(inputs(8)), batch_size=4, collate_fn=collate)
        with pytest.raises(DatasetError, match=r"collate_fn returned \d+ samples of 8"):
            distil(net(), named(draw(9)), [named(draw(0))], loader)

    def test_input_key(self) -> None:
        items = Items([{"a": row, "x": row * 3} for row in inputs(4)])
        assert len(ServerDistiller(net(), items, device="cpu", input_key="a").samples) == 4
        with pytest.raises(DatasetError, match="input_key 'b' is not among"):
            ServerDistiller(net(), items, device="cpu", input_key="b")


# ---------------------------------------------------------------------- at the server


def template(names: tuple[str, ...] = ("1.weight", "1.bias")) -> ArrayTemplate:
    arrays = named(draw(0))
    return ArrayTemplate.of_ndarrays({name: arrays[name] for name in names})


def listed(model: Linear, names: tuple[str, ...] = ("1.weight", "1.bias")) -> list[np.ndarray]:
    return [named(model)[name] for name in names]


class TestServer:
    @pytest.mark.parametrize("names", [("1.weight", "1.bias"), ("1.bias", "1.weight")])
    @pytest.mark.parametrize("average", teachers_module.AVERAGES)
    def test_equals_the_oracle(self, names: tuple[str, ...], average: str) -> None:
        x, user = inputs(14), net()
        user.train()
        before = get_weights(user)
        distiller = ServerDistiller(user, TensorDataset(x), device="cpu")
        arrays = distiller.distil(
            template(names),
            [listed(draw(k), names) for k in range(3)],
            [1, 2, 5],
            ["a", "b", "c"],
            configured(learning_rate=0.5, lr_decay=0.5, lr_decay_every=2),
            epochs=6,
            server_round=3,
            seed=0,
            matching=teachers_module.soft_labels(average),
        )
        rows = x.double().numpy()
        targets = oracle.ensemble(rows, [draw(k) for k in range(3)], [1, 2, 5], average)
        student = oracle.mean([draw(k) for k in range(3)], [1, 2, 5])
        expected = oracle.descend(student, rows, targets, 0.25, 6)
        got = dict(zip(names, arrays, strict=True))
        close(oracle.linear(got["1.weight"], got["1.bias"]), expected)
        assert [value.dtype for value in arrays] == [np.float32] * 2
        # the user's own model is only looked at
        assert user.training
        assert all(np.array_equal(before[name], value) for name, value in get_weights(user).items())

    def test_what_it_returned_does_not_change_later(self) -> None:
        distiller = ServerDistiller(net(), TensorDataset(inputs(14)), device="cpu")
        options: dict[str, Any] = {"epochs": 3, "server_round": 1, "seed": 0}
        config = configured(learning_rate=0.5)
        first = distiller.distil(
            template(), [listed(draw(k)) for k in (0, 2)], [1, 1], ["a", "b"], config, **options
        )
        kept = [value.copy() for value in first]
        distiller.distil(template(), [listed(draw(k)) for k in (1, 3)], [1, 1], ["a", "b"], config, **options)
        for a, b in zip(first, kept, strict=True):
            np.testing.assert_array_equal(a, b)

    def test_dropout_is_seeded_and_the_global_state_stays(self) -> None:
        weights = noisy_weights(7)
        kind = ArrayTemplate.of_ndarrays(weights)

        def run(seed: int, outside: int) -> list[np.ndarray]:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(outside)
                distiller = ServerDistiller(noisy(), TensorDataset(inputs(14)), device="cpu")
                before = torch.get_rng_state()
                arrays = distiller.distil(
                    kind,
                    [list(weights.values()), list(noisy_weights(0).values())],
                    [1, 1],
                    ["a", "b"],
                    configured(learning_rate=0.1),
                    epochs=2,
                    server_round=1,
                    seed=seed,
                )
                assert torch.equal(torch.get_rng_state(), before)
                return arrays

        one, again, other = run(1, 5), run(1, 6), run(2, 5)
        assert all(np.array_equal(a, b) for a, b in zip(one, again, strict=True))
        assert not all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))

    @pytest.mark.parametrize("teachers", [[3e38, 3e38], [0.0, 3e38]])
    def test_teachers_beyond_all_numbers(self, teachers: list[float], flower_log: list[str]) -> None:
        x = 10 * inputs(9).abs()
        distiller = ServerDistiller(net(), TensorDataset(x), device="cpu")
        models = [listed(draw(k)) for k in range(2)]
        for model, value in zip(models, teachers, strict=True):
            model[0] += np.float32(value)
        arrays = distiller.distil(
            template(),
            models,
            [1, 1],
            ["node 7", "node 9"],
            configured(learning_rate=0.01),
            epochs=2,
            server_round=4,
            seed=0,
        )
        if all(teachers):
            expected = weighted_mean(models, [1, 1])
            assert all(np.array_equal(a, b) for a, b in zip(arrays, expected, strict=True))
            assert any(
                "round 4: the server's distillation is left out: no teacher" in line for line in flower_log
            )
        else:
            rows = x.double().numpy()
            targets = oracle.ensemble(rows, [draw(0)], [1], "probabilities")
            # It has no part in the student, either.
            close(oracle.linear(*arrays), oracle.descend(draw(0), rows, targets, 0.01, 2), atol=1e-5)
            assert any("round 4: the model of node 9 has outputs that are not" in line for line in flower_log)

    def test_a_student_that_explodes_comes_back_as_it_was(self, flower_log: list[str]) -> None:
        distiller = ServerDistiller(net(), TensorDataset(1e3 * inputs(9)), device="cpu")
        models = [listed(draw(k)) for k in (0, 9)]
        kept = weighted_mean(models, [1, 2])
        arrays = distiller.distil(
            template(),
            models,
            [1, 2],
            ["a", "b"],
            configured(learning_rate=1e38),
            epochs=3,
            server_round=1,
            seed=0,
        )
        assert all(np.array_equal(a, b) for a, b in zip(arrays, kept, strict=True))
        assert any("the server's distillation is left out" in line for line in flower_log)

    def test_the_mean_of_all_comes_back_where_a_teacher_is_bad_and_the_student_explodes(
        self, flower_log: list[str]
    ) -> None:
        """Nobody is said to be left out of what was not done."""
        distiller = ServerDistiller(net(), TensorDataset(1e3 * inputs(9).abs()), device="cpu")
        models = [listed(draw(k)) for k in range(3)]
        models[1][0][:] = np.float32(3e38)
        kept = weighted_mean(models, [1, 2, 1])
        arrays = distiller.distil(
            template(),
            models,
            [1, 2, 1],
            ["a", "b", "c"],
            configured(learning_rate=1e38),
            epochs=3,
            server_round=1,
            seed=0,
        )
        assert all(np.array_equal(a, b) for a, b in zip(arrays, kept, strict=True))
        assert len(flower_log) == 1
        assert "round 1: the server's distillation is left out: " in flower_log[0]

    def groups(self, x: Tensor, *, broken: bool = False) -> list[Group]:
        """Return linear models of weights 1 and 2, and models with running statistics of weights 5 and 1."""
        first = ServerDistiller(net(), TensorDataset(x), device="cpu", called="models[0]")
        second = first.beside(noisy(), "models[1]")
        other = [noisy_weights(k) for k in range(2)]
        if broken:
            for weights in other:
                weights["5.bias"][0] = np.float32(3e38)
                weights["5.weight"][:] = np.float32(3e38)
        return [
            Group(first, template(), [listed(draw(k)) for k in range(2)], [1, 2], ["a", "b"]),
            Group(
                second,
                ArrayTemplate.of_ndarrays(other[0]),
                [list(weights.values()) for weights in other],
                [5, 1],
                ["c", "d"],
            ),
        ]

    @pytest.mark.parametrize("average", teachers_module.AVERAGES)
    def test_groups_equal_the_oracle(self, average: str) -> None:
        x = inputs(14)
        config = configured(lr_decay=0.5, lr_decay_every=2, learning_rate=0.5)
        matching = teachers_module.soft_labels(average)
        options: dict[str, Any] = {"epochs": 6, "server_round": 3, "seed": 0, "matching": matching}
        linear, other = distil_groups(self.groups(x), config, **options)
        assert linear is not None
        assert other is not None
        outputs = mixed_logits(x, [draw(k) for k in range(2)], [noisy_weights(k) for k in range(2)])
        targets = oracle.AVERAGES[average](outputs, [1, 2, 5, 1])
        student = oracle.mean([draw(k) for k in range(2)], [1, 2])
        expected = oracle.descend(student, x.double().numpy(), targets, 0.25, 6)
        close(oracle.linear(*linear), expected, atol=1e-5)
        names = list(noisy_weights(0))
        # five and six, and six batches
        assert int(other[names.index("2.num_batches_tracked")]) == 5 + 6
        start = weighted_mean([list(noisy_weights(k).values()) for k in range(2)], [5, 1])
        assert np.abs(other[names.index("5.weight")] - start[names.index("5.weight")]).max() > 1e-4

    def test_a_group_without_usable_models(self, flower_log: list[str]) -> None:
        x = 1 + inputs(14).abs()
        options: dict[str, Any] = {"epochs": 6, "server_round": 2, "seed": 0}
        linear, other = distil_groups(self.groups(x, broken=True), configured(learning_rate=0.1), **options)
        assert other is None
        assert linear is not None
        rows, models = x.double().numpy(), [draw(k) for k in range(2)]
        targets = oracle.ensemble(rows, models, [1, 2], "probabilities")
        close(oracle.linear(*linear), oracle.descend(oracle.mean(models, [1, 2]), rows, targets, 0.1, 6))
        assert flower_log == [
            f"round 2: the model of {name} has outputs that are not finite, and is left out" for name in "cd"
        ]

    def test_no_group_with_usable_models(self, flower_log: list[str]) -> None:
        groups = self.groups(1 + inputs(9).abs(), broken=True)
        for model in groups[0].models:
            model[0][:] = np.float32(3e38)
        results = distil_groups(groups, configured(), epochs=2, server_round=4, seed=0)
        for group, arrays in zip(groups, results, strict=True):
            expected = weighted_mean(group.models, group.weights)
            assert arrays is not None
            assert all(np.array_equal(a, b) for a, b in zip(arrays, expected, strict=True))
        assert flower_log == ["round 4: the server's distillation is left out: no teacher has finite outputs"]

    def test_beside_has_the_same_samples_and_a_model_of_its_own(self) -> None:
        reads: list[int] = []

        class Counted(Items):
            def __getitem__(self, index: int) -> Any:
                reads.append(index)
                return super().__getitem__(index)

        user = noisy()
        first = ServerDistiller(net(), Counted(list(inputs(9))), device="cpu")
        reads.clear()
        second = first.beside(user, "the second")
        assert reads == [0]  # to try the model
        assert second.samples is first.samples
        assert second.model is not user
        assert [second.num_classes, first.called, second.called] == [CLASSES, "model", "the second"]
        assert get_weights(first.model).keys() == named(draw(0)).keys()
        with pytest.raises(ConfigError, match=r"another does not take public_set of shape \[6\]: mat1"):
            first.beside(net(features=5), "another")
        with pytest.raises(ConfigError, match="another cannot be used: Identity ends in"):
            first.beside(nn.Identity(), "another")

    def test_another_architecture_is_refused(self) -> None:
        distiller = ServerDistiller(net(), TensorDataset(inputs(3)), device="cpu")
        distiller.check(template(("1.bias", "1.weight")))
        other = ArrayTemplate.of(ArrayRecord(net(classes=5).state_dict()))
        with pytest.raises(ConfigError, match=r"model is not what initial_arrays are of: array '1\.weight'"):
            distiller.check(other)
        with pytest.raises(ConfigError, match=r"arrays missing .*not expected"):
            distiller.check(ArrayTemplate.of(ArrayRecord(noisy().state_dict())))

    @pytest.mark.parametrize(
        ("model", "source", "options", "kind", "text"),
        [
            (
                net(),
                TensorDataset(inputs(3, features=5)),
                {},
                ConfigError,
                r"public_set of shape \[5\]: mat1",
            ),
            (net(), TensorDataset(inputs(0)), {}, DatasetError, "public_set is empty"),
            (net(), [], {}, DatasetError, "public_set is empty"),
            (
                nn.Identity(),
                TensorDataset(torch.zeros(3, 2, 2)),
                {},
                ConfigError,
                "model cannot be used: Identity ends in its input",
            ),
            (
                nn.Flatten(0),
                TensorDataset(inputs(3)),
                {},
                ConfigError,
                "model cannot be used: Flatten ends in",
            ),
            (net(), TensorDataset(inputs(3)), {"device": "tpu9"}, ConfigError, "device must be auto"),
            (net(), Items([torch.zeros(FEATURES), "x", 3]), {}, DatasetError, "does not go into batches"),
            (
                net(),
                Items([torch.zeros(FEATURES), torch.zeros(2)]),
                {},
                DatasetError,
                "does not go into batches",
            ),
            (net(), Items([object()]), {}, DatasetError, "does not go into batches"),
            (
                net(),
                TensorDataset(torch.full((2, FEATURES), torch.nan)),
                {},
                DatasetError,
                "values that are not finite",
            ),
            ("net", TensorDataset(inputs(3)), {}, ConfigError, "model cannot be used"),
            (net(), Items([(torch.zeros(FEATURES), 1, 2)]), {}, DatasetError, "inputs, pairs .* of 3"),
            (net(), Items([{"sound": 1}]), {}, DatasetError, "name input_key"),
            (net(), Items(["text"]), {}, DatasetError, "inputs"),
        ],
    )
    def test_what_cannot_be_used(
        self, model: nn.Module, source: Any, options: dict[str, Any], kind: Any, text: str
    ) -> None:
        options = {"device": "cpu"} | options
        with pytest.raises(kind, match=text):
            ServerDistiller(model, source, **options)

    def test_a_stream_is_refused(self) -> None:
        class Stream(IterableDataset[Any]):
            def __iter__(self) -> Iterator[Any]:
                yield torch.zeros(FEATURES)

        with pytest.raises(DatasetError, match="a map-style data set"):
            ServerDistiller(net(), Stream(), device="cpu")
