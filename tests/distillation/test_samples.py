"""Samples for a distillation: all kinds of sources give the same result, and unusable ones are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hierarchy as oracle
import numpy as np
import pytest
import torch
from ensembles import (
    CLASSES,
    ForwardLog,
    close,
    distil,
    draw,
    inputs,
    linear_of,
    named,
    net,
)
from items import Items
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

from flwr_kd.distillation.server import ServerDistiller
from flwr_kd.learning.batches import DatasetError

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
        close(linear_of(model), oracle.descend(draw(9), rows, targets, 0.5, 4))

    @pytest.mark.parametrize("make", SOURCES.values(), ids=SOURCES.keys())
    def test_all_kinds_are_taken_by_a_server(self, make: Callable[[Tensor], Any]) -> None:
        distiller = ServerDistiller(net(), make(inputs(13)), device="cpu")
        assert len(distiller.samples) == 13
        assert distiller.num_classes == CLASSES

    def test_small_batches_of_a_loader_that_drops_the_last(self) -> None:
        model, x = net(), inputs(11)
        seen = ForwardLog(model, x)
        loader = DataLoader(TensorDataset(x), batch_size=4, drop_last=True)
        distil(model, named(draw(9)), [named(draw(0))], loader, epochs=3, batch_size=2)
        assert sorted(seen.rows(training=False)) == list(range(11))  # the teacher sees all
        assert [len(rows) for mode, rows in seen.passes if mode] == [4, 4] * 3

    @pytest.mark.long
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
            results.append(linear_of(model))
            rows = x.double().numpy()
            targets = oracle.ensemble(rows, [draw(0, scale=3.0)], [1], "probabilities")
            floor = float(-(targets * np.log(targets + 1e-300)).sum(axis=1).mean())
            assert oracle.cross_entropy(rows, targets, results[-1]) - floor < 0.02
        np.testing.assert_array_equal(results[0].W, results[1].W)

    def test_a_sampler_without_fixed_rows_is_refused(self) -> None:
        """Its samples may not be all that the loader's data set has: a client's share of a common set."""
        loader = DataLoader(TensorDataset(inputs(8)), sampler=WeightedRandomSampler([1.0] * 8, 8))
        with pytest.raises(
            DatasetError, match="public_set must not be a loader whose sampler has no fixed rows"
        ):
            ServerDistiller(net(), loader, device="cpu")
        with pytest.raises(DatasetError, match="samples must not be a loader whose sampler"):
            distil(net(), named(draw(9)), [named(draw(0))], loader)
        some = DataLoader(TensorDataset(inputs(8)), sampler=SubsetRandomSampler([0, 5]))
        assert len(ServerDistiller(net(), some, device="cpu").samples) == 2

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
