"""Training a student on an ensemble's outputs, against the oracle: steps, held-out samples, early stopping."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import hierarchy as oracle
import numpy as np
import pytest
import torch
from ensembles import (
    CLASSES,
    CPU,
    Arrays,
    ForwardLog,
    close,
    configured,
    distil,
    draw,
    inputs,
    linear_of,
    named,
    net,
    noisy,
    noisy_logits,
    noisy_weights,
    repeatable,
    unlabelled,
)
from hierarchy import Linear
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from flwr_kd.distillation.config import AVERAGES, BATCHNORMS
from flwr_kd.distillation.student import Distillation, Distilled, EarlyStopping, distil_student
from flwr_kd.distillation.teachers import Matching, soft_labels
from flwr_kd.learning.batches import DatasetError, into_batches
from flwr_kd.learning.held_out import hold_out
from flwr_kd.learning.weights import get_weights
from flwr_kd.seeding import torch_generator


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


class TestDistillation:
    @pytest.mark.parametrize("average", AVERAGES)
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
        close(linear_of(model), oracle.descend(student, rows, targets, 0.5, epochs))
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
        assert oracle.cross_entropy(rows, targets, linear_of(model)) - floor < start / 10
        assert done.loss - floor < start / 5

    def test_a_student_that_is_its_own_teacher_stays(self) -> None:
        model, student = net(), draw(3)
        distil(model, named(student), [named(student)], TensorDataset(inputs(20)), epochs=5)
        close(linear_of(model), student, atol=1e-6)
        model = net()
        distil(model, named(student), [named(draw(4))], TensorDataset(inputs(20)), epochs=5)
        assert np.abs(linear_of(model).W - student.W).max() > 1e-2

    @pytest.mark.parametrize("epochs", [1, 4])
    @pytest.mark.parametrize("share", [0.0, 0.25])
    def test_teachers_are_asked_once(self, epochs: int, share: float) -> None:
        model, x = net(), inputs(12)
        seen = ForwardLog(model, x)
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
        seen = ForwardLog(model, x)
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
        held_out = seen.rows(training=False)[21:]  # after the teacher, which sees each row once
        assert len(trained) == 3 * 15
        assert {trained.count(row) for row in set(trained)} == {3}
        assert len(set(held_out)) == 6
        assert {held_out.count(row) for row in held_out} == {4}
        assert set(trained).isdisjoint(held_out)

    def test_epochs_have_an_order_each(self) -> None:
        model, x = net(), inputs(12)
        seen = ForwardLog(model, x)
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
        close(linear_of(model), oracle.linear(student.W * 0.9, student.b * 0.9))
        other, x = net(), inputs(20)
        distil(other, named(student), [named(draw(0))], TensorDataset(x), epochs=2, momentum=0.5)
        rows = x.double().numpy()
        targets = oracle.ensemble(rows, [draw(0)], [1], "probabilities")
        one = oracle.descend(student, rows, targets, 0.5, 1)
        two = oracle.descend(one, rows, targets, 0.5, 1)
        close(
            linear_of(other),
            oracle.linear(two.W + 0.5 * (one.W - student.W), two.b + 0.5 * (one.b - student.b)),
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
                return linear_of(model)

        one, again, other = run(1, 5), run(1, 6), run(2, 5)
        np.testing.assert_array_equal(one.W, again.W)
        assert np.abs(one.W - other.W).max() > 1e-5

    def test_a_teacher_without_finite_outputs_is_reported(self) -> None:
        x, models = inputs(15), [draw(k) for k in range(3)]
        teachers = [named(m) for m in models]
        teachers[1]["1.bias"][0] = np.inf
        model = net()
        done = distil(model, named(draw(9)), teachers, TensorDataset(x), weights=[1, 8, 2], epochs=4)
        assert done.left_out == (1,)
        rows = x.double().numpy()
        targets = oracle.ensemble(rows, [models[0], models[2]], [1, 2], "probabilities")
        close(linear_of(model), oracle.descend(draw(9), rows, targets, 0.5, 4))

    def test_losses_and_weights_that_are_not_finite(self) -> None:
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


class TestBatchNorm:
    """The modes of a student's BatchNorm, against steps by hand in float64; dropout has its own mode."""

    NAMES = ("2.running_mean", "2.running_var", "2.num_batches_tracked")

    def distil(self, batchnorm: str, **changes: Any) -> tuple[Arrays, Arrays, Tensor]:
        """Return the student before and after, and the samples."""
        model, x, student = noisy(), inputs(20), noisy_weights(7)
        model[4].p = 0.0
        options: dict[str, Any] = {
            "epochs": 3,
            "learning_rate": 0.1,
            "distill_batchnorm": batchnorm,
        } | changes
        distil(model, student, [noisy_weights(k) for k in range(2)], TensorDataset(x), **options)
        assert not any(module.training for module in model.modules())
        return student, get_weights(model), x

    def by_hand(self, student: Arrays, x: Tensor, steps: int) -> nn.Module:
        """Take full-batch steps with the running statistics that the student has."""
        model = noisy().double().eval()
        model.load_state_dict({name: torch.from_numpy(np.array(value)) for name, value in student.items()})
        teachers = [noisy_logits(x, noisy_weights(k)) for k in range(2)]
        targets = torch.stack([torch.softmax(torch.from_numpy(logits), dim=1) for logits in teachers]).mean(
            dim=0
        )
        for _ in range(steps):
            loss = -(targets * torch.log_softmax(model(x.double()), dim=1)).sum(dim=1).mean()
            grads = torch.autograd.grad(loss, list(model.parameters()))
            with torch.no_grad():
                for parameter, grad in zip(model.parameters(), grads, strict=True):
                    parameter -= 0.1 * grad
        return model

    def test_eval_trains_with_the_running_statistics_and_keeps_them(self) -> None:
        student, after, x = self.distil("eval")
        for name in self.NAMES:
            np.testing.assert_array_equal(after[name], student[name])
        for name, value in self.by_hand(student, x, 3).state_dict().items():
            np.testing.assert_allclose(after[name], value.numpy(), rtol=0, atol=3e-6, err_msg=name)
        assert np.abs(after["1.weight"] - student["1.weight"]).max() > 1e-3

    def test_re_estimated_statistics_are_those_of_the_samples_at_the_start(self) -> None:
        student, after, x = self.distil("re-estimated")
        z = x.double().numpy() @ student["1.weight"].astype(np.float64).T + student["1.bias"]
        student |= {"2.running_mean": z.mean(axis=0), "2.running_var": z.var(axis=0, ddof=1)}
        student["2.num_batches_tracked"] = np.array(1)
        for name, value in self.by_hand(student, x, 3).state_dict().items():
            np.testing.assert_allclose(after[name], value.numpy(), rtol=0, atol=3e-6, err_msg=name)

    def test_held_out_samples_are_in_no_statistics(self) -> None:
        student, after, x = self.distil("re-estimated", validation_share=0.3, patience=9, seed=4)
        rows, _ = hold_out(20, 0.3, torch_generator(4, "hold-out"))
        z = x[rows].double().numpy() @ student["1.weight"].astype(np.float64).T + student["1.bias"]
        np.testing.assert_allclose(after["2.running_mean"], z.mean(axis=0), atol=1e-5)

    def test_batches_of_the_training_are_drawn_for_the_statistics(self) -> None:
        """Sorted by class, for example, the samples of a batch would vary less than all do."""
        _, after, _ = self.distil("re-estimated", batch_size=5, epochs=1)
        assert int(after["2.num_batches_tracked"]) == 4
        _, other, _ = self.distil("re-estimated", batch_size=5, epochs=1, seed=1)
        assert np.abs(after["2.running_var"] - other["2.running_var"]).max() > 1e-3

    @pytest.mark.parametrize("batchnorm", BATCHNORMS)
    @pytest.mark.parametrize("training", [False, True])
    def test_dropout_has_the_mode_of_the_matching(self, batchnorm: str, training: bool) -> None:
        model, x, modes = noisy(), inputs(20), []
        model.register_forward_hook(lambda *_: modes.append((model[4].training, model[2].training)))
        how = Distillation(
            configured(distill_batchnorm=batchnorm, batch_size=19),
            epochs=2,
            learning_rate=0.1,
            seed=0,
            matching=replace(soft_labels(), training=training),
        )
        targets = torch.full((20, CLASSES), 1 / CLASSES)
        distil_student(model, noisy_weights(7), (targets,), unlabelled(TensorDataset(x)), how, CPU)
        first = 1 if batchnorm == "re-estimated" else 0
        assert modes[:first] == [(False, True)] * first
        # The last batch of one sample has joined the other.
        assert modes[first:] == [(training, batchnorm == "train")] * 2

    def test_a_batch_of_one_has_no_statistics(self) -> None:
        """It is trained on in eval mode, whatever the mode is."""
        for batchnorm in BATCHNORMS:
            model, student = noisy(), noisy_weights(7)
            how = Distillation(
                configured(distill_batchnorm=batchnorm),
                epochs=2,
                learning_rate=0.1,
                seed=0,
                matching=replace(soft_labels(), training=False),
            )
            targets = torch.full((1, CLASSES), 1 / CLASSES)
            distil_student(model, student, (targets,), unlabelled(TensorDataset(inputs(1))), how, CPU)
            np.testing.assert_array_equal(get_weights(model)["2.running_var"], student["2.running_var"])


class TestGivenTargets:
    def student(
        self, model: nn.Module, targets: tuple[Tensor, ...], samples: Any, **changes: Any
    ) -> Distilled:
        how = Distillation(configured(**changes), epochs=7, learning_rate=0.5, seed=0)
        return distil_student(model, named(draw(9)), targets, unlabelled(samples), how, CPU)

    def test_equals_the_oracle(self) -> None:
        model, x = net(), inputs(13)
        targets = torch.softmax(inputs(13, seed=4, features=CLASSES), dim=1)
        done = self.student(model, (targets,), TensorDataset(x))
        rows = x.double().numpy()
        close(linear_of(model), oracle.descend(draw(9), rows, targets.double().numpy(), 0.5, 7))
        assert (done.epochs, done.validation_loss, done.left_out) == (7, None, ())
        assert not model.training

    def test_another_matching(self) -> None:
        """A student of a squared distance from the logits: its gradient is 2 (z - t)ᵀ x / (n C)."""
        model, x, targets = net(), inputs(13), inputs(13, seed=4, features=CLASSES)
        matching = Matching(
            outputs=lambda model, x: (model(x),),
            loss=lambda targets, outputs: (outputs[0] - targets[0]).square().mean(),
        )
        distil_student(
            model,
            named(draw(9)),
            (targets,),
            unlabelled(TensorDataset(x)),
            Distillation(configured(), epochs=1, learning_rate=0.5, seed=0, matching=matching),
            CPU,
        )
        start, rows = draw(9), x.double().numpy()
        residual = 2 * (oracle.logits(rows, start) - targets.double().numpy()) / (13 * CLASSES)
        expected = oracle.linear(start.W - 0.5 * residual.T @ rows, start.b - 0.5 * residual.sum(axis=0))
        close(linear_of(model), expected)

    def test_refused(self) -> None:
        targets = torch.full((4, CLASSES), 1 / CLASSES)
        text = r"targets must have 5 rows, one per sample, got \[4\]"
        with pytest.raises(ValueError, match=text):
            self.student(net(), (targets,), TensorDataset(inputs(5)))
        with pytest.raises(DatasetError, match="samples is empty"):
            self.student(net(), (targets[:0],), TensorDataset(inputs(0)))


class TestStopping:
    """The object alone, without a model."""

    def run(self, losses: list[float], patience: int, initial: float = math.inf) -> tuple[int, int, float]:
        """Return the epochs that run, the best of them (0: before the first), and the lowest loss."""
        stopping, best, epochs = EarlyStopping(patience, initial), 0, 0
        while epochs < len(losses) and not stopping.stopped:
            epochs += 1
            if stopping.improves(losses[epochs - 1]):
                best = epochs
        return epochs, best, stopping.lowest

    @repeatable
    @given(st.lists(st.floats(0, 1) | st.just(math.nan), max_size=12), st.integers(1, 4), st.floats(0, 1))
    def test_equals_the_oracle(self, losses: list[float], patience: int, initial: float) -> None:
        epochs, best, lowest = self.run(losses, patience, initial)
        assert (epochs, best) == oracle.early_stopping(losses, patience, start=initial)
        assert lowest == [initial, *losses][best]

    @pytest.mark.parametrize("initial", [math.nan, math.inf])
    def test_a_start_that_is_not_finite_counts_as_infinity(self, initial: float) -> None:
        assert self.run([3.0, 4.0, 5.0], 2, initial) == (3, 1, 3.0)
        assert self.run([math.nan, math.inf], 2, initial) == (2, 0, math.inf)

    def test_an_equal_loss_is_no_improvement(self) -> None:
        assert self.run([1.0, 1.0, 1.0], 2) == (3, 1, 1.0)
        assert self.run([1.0, 1.0], 1, 1.0) == (1, 0, 1.0)


class TestEarlyStopping:
    """Against the oracle run on the very rows that the implementation trains on."""

    FEATURES = 20
    EPOCHS = 60
    CASES = (0, 2, 3, 5, 9, 11)  # no two losses are so close that float32 could take one for the other

    def run(self, case: int, keep: str, patience: int, epochs: int = EPOCHS) -> tuple[Distilled, Linear, Any]:
        model, x = net(self.FEATURES), inputs(24, case, self.FEATURES)
        seen = ForwardLog(model, x)
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
        return done, linear_of(model), (path, losses)

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
        """The test above is not trivial: only some cases stop early, and the best epoch is not always the last."""
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
            kept[keep] = linear_of(model)
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
            oracle.cross_entropy(rows[held_out], targets[held_out], linear_of(model)), abs=1e-5
        )


def hold_out_rows(x: Tensor, student: Linear, teachers: list[Linear]) -> list[int]:
    """Return the rows that the same run does not train on."""
    model = net()
    seen = ForwardLog(model, x)
    distil(
        model,
        named(student),
        [named(t) for t in teachers],
        TensorDataset(x),
        validation_share=0.5,
        epochs=1,
    )
    return sorted(set(range(len(x))) - set(seen.rows(training=True)))


def test_the_rate_of_a_distillation_falls_with_the_steps_of_the_run() -> None:
    """Steps of decay only: the student shrinks by 1 - rate · weight decay, at the rates of iterations 5 to 10."""
    model, student, x = net(), draw(3), inputs(12)
    targets = torch.softmax(torch.from_numpy(oracle.logits(x.double().numpy(), student)), dim=1).float()
    how = Distillation(
        configured(batch_size=4, weight_decay=0.2, step_decay=0.3),
        epochs=2,
        learning_rate=0.5,
        seed=0,
        matching=Matching(lambda model, x: (model(x),), lambda targets, outputs: 0 * outputs[0].sum()),
        steps_before=5,
    )
    distil_student(model, named(student), (targets,), unlabelled(TensorDataset(x)), how, CPU)
    factor = math.prod(1 - 0.2 * 0.5 / (1 + 0.3 * i) for i in range(5, 11))
    close(linear_of(model), oracle.linear(student.W * factor, student.b * factor))
    assert how.planned_steps(12) == 6


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5])
def test_planned_steps_are_those_of_the_batches_that_are_trained_on(share: float) -> None:
    config = configured(batch_size=4, validation_share=share)
    for size in range(1, 15):
        rows, _ = hold_out(size, share, torch.Generator().manual_seed(0))
        how = Distillation(config, epochs=3, learning_rate=0.5, seed=0)
        assert how.planned_steps(size) == 3 * len(into_batches(rows, 4))
