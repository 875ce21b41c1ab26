"""Distillation at the server, against the oracle: one group of models, several groups, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import hierarchy as oracle
import numpy as np
import pytest
import torch
from ensembles import (
    CLASSES,
    FEATURES,
    close,
    configured,
    draw,
    inputs,
    listed,
    mixed_logits,
    named,
    net,
    noisy,
    noisy_weights,
    template,
)
from flwr.app import ArrayRecord
from items import Items
from torch import Tensor, nn
from torch.utils.data import IterableDataset, TensorDataset

from flwr_kd.checks import ConfigError
from flwr_kd.distillation.config import AVERAGES, DistillationConfig
from flwr_kd.distillation.server import Group, ServerDistiller, distil_groups
from flwr_kd.distillation.student import Distillation
from flwr_kd.distillation.teachers import soft_labels
from flwr_kd.learning.batches import DatasetError
from flwr_kd.learning.weights import get_weights
from flwr_kd.server.aggregation import weighted_mean
from flwr_kd.transport.template import ArrayTemplate


def distil_several(
    groups: list[Group], config: DistillationConfig, *, server_round: int, **options: Any
) -> list[list[np.ndarray] | None]:
    how = Distillation.in_round(config, server_round, **options)
    return distil_groups(groups, how, server_round=server_round)


def distil_one(
    distiller: ServerDistiller,
    template: ArrayTemplate,
    models: list[list[np.ndarray]],
    weights: list[int],
    names: list[str],
    config: DistillationConfig,
    **options: Any,
) -> list[np.ndarray]:
    (arrays,) = distil_several([Group(distiller, template, models, weights, names)], config, **options)
    assert arrays is not None
    return arrays


class TestServer:
    @pytest.mark.parametrize("names", [("1.weight", "1.bias"), ("1.bias", "1.weight")])
    @pytest.mark.parametrize("average", AVERAGES)
    def test_equals_the_oracle(self, names: tuple[str, ...], average: str) -> None:
        x, user = inputs(14), net()
        user.train()
        before = get_weights(user)
        distiller = ServerDistiller(user, TensorDataset(x), device="cpu")
        arrays = distil_one(
            distiller,
            template(names),
            [listed(draw(k), names) for k in range(3)],
            [1, 2, 5],
            ["a", "b", "c"],
            configured(learning_rate=0.5, lr_decay=0.5, lr_decay_every=2),
            epochs=6,
            server_round=3,
            seed=0,
            matching=soft_labels(average),
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
        first = distil_one(
            distiller, template(), [listed(draw(k)) for k in (0, 2)], [1, 1], ["a", "b"], config, **options
        )
        kept = [value.copy() for value in first]
        distil_one(
            distiller, template(), [listed(draw(k)) for k in (1, 3)], [1, 1], ["a", "b"], config, **options
        )
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
                arrays = distil_one(
                    distiller,
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
    def test_teachers_without_finite_outputs(self, teachers: list[float], flower_log: list[str]) -> None:
        x = 10 * inputs(9).abs()
        distiller = ServerDistiller(net(), TensorDataset(x), device="cpu")
        models = [listed(draw(k)) for k in range(2)]
        for model, value in zip(models, teachers, strict=True):
            model[0] += np.float32(value)
        arrays = distil_one(
            distiller,
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
            # It is left out of the student as well.
            close(oracle.linear(*arrays), oracle.descend(draw(0), rows, targets, 0.01, 2), atol=1e-5)
            assert any("round 4: the model of node 9 has outputs that are not" in line for line in flower_log)

    def test_a_student_that_explodes_comes_back_as_it_was(self, flower_log: list[str]) -> None:
        distiller = ServerDistiller(net(), TensorDataset(1e3 * inputs(9)), device="cpu")
        models = [listed(draw(k)) for k in (0, 9)]
        kept = weighted_mean(models, [1, 2])
        arrays = distil_one(
            distiller,
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
        """No warning says that a model is left out of a distillation that did not happen."""
        distiller = ServerDistiller(net(), TensorDataset(1e3 * inputs(9).abs()), device="cpu")
        models = [listed(draw(k)) for k in range(3)]
        models[1][0][:] = np.float32(3e38)
        kept = weighted_mean(models, [1, 2, 1])
        arrays = distil_one(
            distiller,
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

    @pytest.mark.parametrize("average", AVERAGES)
    def test_groups_equal_the_oracle(self, average: str) -> None:
        x = inputs(14)
        config = configured(lr_decay=0.5, lr_decay_every=2, learning_rate=0.5)
        matching = soft_labels(average)
        options: dict[str, Any] = {"epochs": 6, "server_round": 3, "seed": 0, "matching": matching}
        linear, other = distil_several(self.groups(x), config, **options)
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
        linear, other = distil_several(self.groups(x, broken=True), configured(learning_rate=0.1), **options)
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
        results = distil_several(groups, configured(), epochs=2, server_round=4, seed=0)
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
        assert second.samples.dataset is first.samples.dataset
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
            (net(), Items([object()]), {}, DatasetError, "tensors and numbers, got .*object"),
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
