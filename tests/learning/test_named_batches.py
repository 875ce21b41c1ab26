"""Batches of several inputs by name: from tokenised data sets, loaders with a collator, and pairs of dicts."""

from __future__ import annotations

from typing import Any

import datasets
import pytest
import torch
from token_models import MaskedByZeros, texts, tokens
from torch.utils.data import DataLoader, default_collate

from flwr_kd.distillation.samples import digest_of
from flwr_kd.inputs import NamedDataset, NamedInputs
from flwr_kd.learning.batches import Batches, DatasetError
from flwr_kd.learning.divided import is_divisible


def items(size: int = 5, **extra: Any) -> list[dict[str, Any]]:
    ids, mask, labels = tokens(size, 0)
    rows = zip(ids, mask, labels.tolist(), strict=True)
    return [{"input_ids": i, "attention_mask": m, "label": y, **extra} for i, m, y in rows]


def first(source: Any, **options: Any) -> Any:
    x, _ = next(Batches(source, num_classes=3, **options).ordered(3))
    return x


class TestKeys:
    def test_what_a_tokenizer_returns_is_guessed(self) -> None:
        x = first(items(token_type_ids=torch.zeros(6), text="good morning"))
        assert isinstance(x, NamedInputs)
        assert list(x.keys()) == ["input_ids", "attention_mask", "token_type_ids"]
        assert torch.equal(x["input_ids"], tokens(5, 0)[0][:3])

    def test_ids_alone_are_one_tensor(self) -> None:
        rows = [{"input_ids": item["input_ids"], "label": item["label"]} for item in items()]
        assert torch.equal(first(rows), tokens(5, 0)[0][:3])

    def test_keys_are_named(self) -> None:
        x = first(items(extra=torch.ones(1)), input_key=["extra", "input_ids"])
        assert list(x.keys()) == ["extra", "input_ids"]

    def test_a_single_named_key_is_still_by_name(self) -> None:
        assert list(first(items(), input_key=("input_ids",)).keys()) == ["input_ids"]

    def test_one_key_is_one_tensor(self) -> None:
        assert torch.equal(first(items(), input_key="attention_mask"), tokens(5, 0)[1][:3])

    def test_a_key_that_is_missing(self) -> None:
        with pytest.raises(DatasetError, match=r"input_key 'mask' is not among .*attention_mask"):
            first(items(), input_key=["input_ids", "mask"])

    def test_pictures_beside_texts_must_be_named(self) -> None:
        rows = items(pixel_values=torch.zeros(3, 2, 2))
        assert torch.equal(first(rows), torch.zeros(3, 3, 2, 2))
        assert len(list(first(rows, input_key=["input_ids", "pixel_values"]).keys())) == 2

    def test_an_input_that_is_no_tensor_is_named(self) -> None:
        rows = [{"input_ids": torch.ones(2), "text": "a", "label": 0}] * 3
        with pytest.raises(DatasetError, match=r"got list \('text'\)"):
            first(rows, input_key=["input_ids", "text"])

    def test_pairs_may_have_dicts(self) -> None:
        pairs = [({"left": torch.ones(2), "right": torch.zeros(1)}, 1)] * 3
        assert list(first(pairs).keys()) == ["left", "right"]
        assert list(first(pairs, input_key=["right"]).keys()) == ["right"]
        assert torch.equal(first(pairs, input_key="left"), torch.ones(3, 2))

    def test_without_labels(self) -> None:
        rows = [{"input_ids": torch.ones(2), "attention_mask": torch.ones(2)}] * 3
        assert isinstance(first(rows, labelled=False), NamedInputs)
        assert isinstance(first([({"a": torch.ones(2)},)] * 3, labelled=False), NamedInputs)


class TestSources:
    def test_data_sets_of_hugging_face(self) -> None:
        columns = {"text": ["a b", "c"], "label": [1, 0]}
        columns |= {"input_ids": [[4, 5], [6, 0]], "attention_mask": [[1, 1], [1, 0]]}
        data = datasets.Dataset.from_dict(columns).with_format("torch")
        (x, y), *rest = Batches(data, num_classes=2).ordered(2)
        assert not rest
        assert x["input_ids"].tolist() == [[4, 5], [6, 0]]
        assert x["attention_mask"].tolist() == [[1, 1], [1, 0]]
        assert y.tolist() == [1, 0]

    def test_a_collator_pads_each_batch(self) -> None:
        rows = [{"input_ids": [1] * length, "label": 0} for length in (1, 3, 2, 5)]

        def collate(batch: list[Any]) -> dict[str, torch.Tensor]:
            width = max(len(row["input_ids"]) for row in batch)
            ids = torch.tensor([row["input_ids"] + [0] * (width - len(row["input_ids"])) for row in batch])
            labels = torch.tensor([row["label"] for row in batch])
            return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": labels}

        loader: DataLoader[Any] = DataLoader(rows, collate_fn=collate, batch_size=2)  # type: ignore[arg-type]
        shapes = [list(x["input_ids"].shape) for x, _ in Batches(loader, num_classes=2).ordered(2)]
        assert shapes == [[2, 3], [2, 5]]

    def test_in_memory_and_item_by_item_are_the_same(self) -> None:
        """The data set of tensors is indexed at once; the same items in a list go through collate."""
        data = texts(11, 3)
        whole, single = Batches(data, num_classes=3), Batches([data[i] for i in range(11)], num_classes=3)
        passes = (b.indexed(4, torch.Generator().manual_seed(0)) for b in (whole, single))
        for (x, y, rows), (other_x, other_y, other_rows) in zip(*passes, strict=True):
            assert torch.equal(y, other_y)
            assert torch.equal(rows, other_rows)
            for name in ("input_ids", "attention_mask"):
                assert torch.equal(x[name], other_x[name])

    def test_every_sample_once_in_an_epoch(self) -> None:
        ids = torch.arange(7).reshape(7, 1)
        batches = Batches(NamedDataset({"a": ids, "b": -ids}, torch.zeros(7)), num_classes=2)
        seen = [x for x, _ in batches.shuffled(3, torch.Generator().manual_seed(1))]
        assert [len(x) for x in seen] == [3, 4]
        assert sorted(torch.cat([x["a"] for x in seen]).flatten().tolist()) == list(range(7))
        assert all(torch.equal(x["a"], -x["b"]) for x in seen)

    def test_floats_take_the_models_dtype_and_ids_stay(self) -> None:
        data = NamedDataset({"ids": torch.ones(2, 1, dtype=torch.int64), "v": torch.ones(2, 1)})
        x = Batches(data, num_classes=2, dtype=torch.float64).example()
        assert isinstance(x, NamedInputs)
        assert (x["ids"].dtype, x["v"].dtype) == (torch.int64, torch.float64)

    def test_inputs_of_different_lengths_are_refused(self) -> None:
        def collate(batch: list[Any]) -> dict[str, torch.Tensor]:
            return {**default_collate(batch), "attention_mask": torch.ones(1, 2)}

        loader: DataLoader[Any] = DataLoader(items(), collate_fn=collate, batch_size=2)  # type: ignore[arg-type]
        with pytest.raises(
            DatasetError, match=r"same number of samples, got .'input_ids': 3, 'attention_mask': 1"
        ):
            first(loader)


def test_steps_on_named_inputs_are_not_divided() -> None:
    assert not is_divisible(MaskedByZeros(), texts(1, 0).tensors[0], training=False)


class TestDigest:
    def test_depends_on_each_input_and_its_name(self) -> None:
        a, b = torch.tensor([[1], [2]]), torch.tensor([[3], [4]])

        def digest(**inputs: torch.Tensor) -> str:
            return digest_of(Batches(NamedDataset(inputs), num_classes=0, labelled=False))

        same = digest(a=a, b=b)
        assert same == digest(b=b, a=a)
        assert (
            len({same, digest(a=b, b=a), digest(a=a, c=b), digest(a=a, b=b.int()), digest(a=a.flip(0), b=b)})
            == 5
        )

    def test_does_not_depend_on_how_they_are_stored(self) -> None:
        data = texts(9, 0)
        whole, single = ([data[i] for i in range(9)], data)
        digests = {digest_of(Batches(d, num_classes=0, labelled=False)) for d in (whole, single)}
        assert len(digests) == 1

    def test_refuses_values_that_are_not_finite(self) -> None:
        data = NamedDataset({"ids": torch.ones(2, 1), "v": torch.tensor([[1.0], [torch.nan]])})
        with pytest.raises(DatasetError, match="public_set has values that are not finite"):
            digest_of(Batches(data, num_classes=0, labelled=False))
