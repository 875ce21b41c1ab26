"""A user's own data sets and loaders, taken as they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pytest
import torch
from items import Items
from PIL import Image
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

from flwr_kd.data import ArrayDataset
from flwr_kd.learning.batches import Batches, DatasetError, into_batches, normalize_labels


def pairs(size: int) -> Items:
    """Input i is [i, -i], its label i % 3."""
    return Items([(torch.tensor([float(i), -float(i)]), i % 3) for i in range(size)])


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def batches(source: Any, num_classes: int = 3, **options: Any) -> Batches:
    return Batches(source, num_classes=num_classes, **options)


def ids(epoch: Iterator[tuple[Tensor, Tensor]]) -> list[list[int]]:
    """Return the indices in each batch, having checked that labels stay with their inputs."""
    read = []
    for x, y in epoch:
        assert y.dtype == torch.int64
        assert y.shape == (len(x),)
        index = x[:, 0].to(torch.int64)
        assert torch.equal(y, index % 3)
        assert torch.equal(x[:, 1], -x[:, 0])
        read.append(index.tolist())
    return read


def flat(epoch: list[list[int]]) -> list[int]:
    return [index for batch in epoch for index in batch]


def stacked(size: int) -> tuple[Tensor, Tensor]:
    x = torch.arange(float(size))
    return torch.stack([x, -x], 1), torch.arange(size) % 3


SOURCES = {
    "pairs": pairs,
    "lists": lambda n: Items([list(item) for item in pairs(n).items]),
    "dicts": lambda n: Items([{"image": x, "label": y} for x, y in pairs(n).items]),
    "tensors": lambda n: TensorDataset(*stacked(n)),
    "arrays": lambda n: ArrayDataset(*stacked(n)),
    "subset": lambda n: torch.utils.data.Subset(pairs(n + 5), range(n)),
    "huggingface": lambda n: datasets.Dataset.from_dict(
        {"x": [x.tolist() for x, _ in pairs(n).items], "label": [y for _, y in pairs(n).items]}
    ).with_format("torch"),
    "loader": lambda n: DataLoader(pairs(n), batch_size=4, shuffle=True),
    "loader of tensors": lambda n: DataLoader(TensorDataset(*stacked(n)), batch_size=4),
    "loader without batches": lambda n: DataLoader(pairs(n), batch_size=None),
}
any_source = pytest.mark.parametrize("make", SOURCES.values(), ids=SOURCES.keys())


class Endless(Sampler[int]):
    """Draws for ever."""

    def __iter__(self) -> Iterator[int]:
        while True:
            yield int(torch.randint(10, ()))


ROWS = [5, 1, 3]
PICKED: dict[str, Callable[[], dict[str, Any]]] = {
    "random": lambda: {"sampler": SubsetRandomSampler(ROWS), "batch_size": 2},
    "own generator": lambda: {"sampler": SubsetRandomSampler(ROWS, generator=generator(5)), "batch_size": 2},
    "list": lambda: {"sampler": ROWS},
    "numbers of numpy": lambda: {"sampler": np.array(ROWS), "batch_size": 2},
    "counted from the end": lambda: {"sampler": [-5, -9, -7]},
    "batches of rows": lambda: {"batch_sampler": BatchSampler(SubsetRandomSampler(ROWS), 2, drop_last=False)},
    "list of batches": lambda: {"batch_sampler": [[5, 1], [3]]},
    "batches without batching": lambda: {
        "batch_size": None,
        "sampler": BatchSampler(ROWS, 2, drop_last=False),
    },
    "weights of rows": lambda: {
        "sampler": WeightedRandomSampler([0, 1, 0, 2, 0, 1, 0, 0, 0, 0], 3, replacement=False)
    },
}
FREE: dict[str, Callable[[], Any]] = {
    "weighted": lambda: WeightedRandomSampler([1.0] * 10, 10),
    "with replacement": lambda: RandomSampler(range(10), replacement=True),
    "a part": lambda: RandomSampler(range(10), num_samples=6),
    "endless": Endless,
}


class TestOrder:
    @any_source
    def test_ordered(self, make: Any) -> None:
        source = batches(make(10))
        assert len(source) == 10
        assert ids(source.ordered(4)) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
        assert ids(source.ordered(100)) == [list(range(10))]
        assert ids(batches(make(9)).ordered(4))[-1] == [8]  # nothing is joined where nothing is trained

    @any_source
    def test_shuffled_is_a_permutation_that_the_generator_decides(self, make: Any) -> None:
        source = batches(make(10))
        first, again, other = (ids(source.shuffled(4, generator(seed))) for seed in (1, 1, 2))
        assert first == again != other
        assert [len(batch) for batch in first] == [4, 4, 2]
        assert sorted(flat(first)) == list(range(10))
        assert flat(first) != list(range(10))

    def test_all_sources_have_the_same_order(self) -> None:
        orders = [ids(batches(make(10)).shuffled(4, generator(3))) for make in SOURCES.values()]
        assert all(order == orders[0] for order in orders)

    def test_epochs_of_one_generator_differ(self) -> None:
        source, rng = batches(pairs(20)), generator()
        assert ids(source.shuffled(5, rng)) != ids(source.shuffled(5, rng))

    @any_source
    def test_global_generators_are_untouched(self, make: Any) -> None:
        source = batches(make(10))
        before, numpy_before = torch.get_rng_state(), repr(np.random.get_state())  # noqa: NPY002
        ids(source.shuffled(4, generator()))
        ids(source.ordered(4))
        assert torch.equal(torch.get_rng_state(), before)
        assert repr(np.random.get_state()) == numpy_before  # noqa: NPY002

    @any_source
    def test_a_last_single_sample_joins_the_batch_before(self, make: Any) -> None:
        read = ids(batches(make(9)).shuffled(4, generator()))
        assert [len(batch) for batch in read] == [4, 5]
        assert sorted(flat(read)) == list(range(9))

    @any_source
    def test_one_sample(self, make: Any) -> None:
        source = batches(make(1))
        assert ids(source.shuffled(4, generator())) == [[0]]
        assert ids(source.ordered(4)) == [[0]]

    @pytest.mark.parametrize("name", ["pairs", "tensors", "arrays", "loader without batches"])
    def test_no_samples(self, name: str) -> None:
        source = batches(SOURCES[name](0))
        assert len(source) == 0
        assert list(source.shuffled(4, generator())) == []
        assert list(source.ordered(4)) == []


class TestLoaders:
    def test_batch_size_is_the_loaders(self) -> None:
        source = batches(DataLoader(pairs(10), batch_size=3))
        assert [len(batch) for batch in ids(source.shuffled(64, generator()))] == [3, 3, 4]

    def test_collate_fn_is_kept(self) -> None:
        def collate(items: list[Any]) -> Any:
            x, y = default_collate(items)
            return {"x": x * 10, "y": y, "length": len(items)}

        source = batches(DataLoader(pairs(5), batch_size=2, collate_fn=collate))
        for epoch in (source.shuffled(64, generator()), source.ordered(2)):
            for x, y in epoch:
                assert torch.equal(y, (x[:, 0] / 10).to(torch.int64) % 3)

    @pytest.mark.parametrize(
        ("size", "expected"), [(10, [4, 4]), (8, [4, 4]), (9, [4, 4]), (3, [3]), (1, [1])]
    )
    def test_drop_last_but_never_everything(self, size: int, expected: list[int]) -> None:
        source = batches(DataLoader(pairs(size), batch_size=4, drop_last=True))
        assert [len(batch) for batch in ids(source.shuffled(64, generator()))] == expected
        assert len(flat(ids(source.ordered(4)))) == size  # evaluation sees every sample

    @pytest.mark.parametrize("options", PICKED.values(), ids=PICKED.keys())
    def test_a_samplers_rows_are_the_data_set(self, options: Callable[[], dict[str, Any]]) -> None:
        loader = DataLoader(pairs(10), **options())
        source = batches(loader)
        assert len(source) == 3
        assert source.free_sampler is None
        assert sorted(flat(ids(source.ordered(2)))) == [1, 3, 5]
        # a seed decides the order, and epochs differ
        first, again = (ids(source.shuffled(2, generator(seed))) for seed in (1, 1))
        assert first == again
        assert sorted(flat(first)) == [1, 3, 5]
        for x, _, positions in source.indexed(2, generator()):
            assert torch.equal(x, torch.cat([x for x, _ in source.ordered(1)])[positions])
        assert source.example()[0, 0] == next(source.ordered(1))[0][0, 0]

    def test_distributed_samplers_share_the_rows(self) -> None:
        parts = [DistributedSampler(pairs(9), num_replicas=3, rank=rank, shuffle=True) for rank in range(3)]
        sources = [batches(DataLoader(pairs(9), sampler=part)) for part in parts]
        assert [len(source) for source in sources] == [3, 3, 3]
        assert sorted(row for s in sources for row in flat(ids(s.ordered(4)))) == list(range(9))

    def test_repeated_rows_are_trained_on_again_but_are_one_sample_each(self) -> None:
        source = batches(DataLoader(pairs(10), batch_size=8, sampler=[4, 4, 4, 2]))
        assert len(source) == 2
        assert flat(ids(source.ordered(4))) == [4, 2]
        assert sorted(flat(ids(source.shuffled(8, generator())))) == [2, 4, 4, 4]
        ((_, _, positions),) = source.indexed(8, generator())
        assert sorted(positions.tolist()) == [0, 0, 0, 1]

    @pytest.mark.parametrize("make", FREE.values(), ids=FREE.keys())
    def test_a_sampler_without_fixed_rows_is_for_training_only(self, make: Callable[[], Any]) -> None:
        before = torch.get_rng_state()
        source = batches(DataLoader(pairs(10), batch_size=4, sampler=make()))
        assert source.free_sampler == type(make()).__name__
        assert len(source) == len(source.whole()) == 10
        assert source.whole().free_sampler is None
        assert flat(ids(source.ordered(4))) == list(range(10))
        rng = generator(1)
        first, second, again = (ids(source.shuffled(4, g)) for g in (rng, rng, generator(1)))
        assert first == again != second
        assert set(flat(first)) <= set(range(10))
        drawn = [(x[:, 0].tolist(), rows.tolist()) for x, _, rows in source.indexed(4, generator(1))]
        assert [x for x, _ in drawn] == [rows for _, rows in drawn] == first
        assert torch.equal(torch.get_rng_state(), before)

    def test_a_row_that_is_not_there(self) -> None:
        with pytest.raises(DatasetError, match="SubsetRandomSampler yields row 10, the data set has 10 rows"):
            batches(DataLoader(pairs(10), sampler=SubsetRandomSampler([1, 10])))

    def test_a_sampler_of_other_keys_than_rows(self) -> None:
        class Keyed(Items):
            def __getitem__(self, key: Any) -> Any:
                return self.items[int(key)]

        keyed = Keyed(pairs(4).items)
        source = batches(DataLoader(keyed, batch_size=2, sampler=["2", "3"]))
        assert sorted(flat(ids(source.shuffled(2, generator())))) == [2, 3]
        with pytest.raises(DatasetError, match=r"the sampler list yields '[23]' in place of a row"):
            list(source.indexed(2, generator()))

    def test_a_batch_sampler_of_its_own_is_kept(self) -> None:
        class Pairs(BatchSampler):
            def __iter__(self) -> Iterator[list[int]]:
                yield from ([0, 9], [3, 4])

        own = Pairs(SequentialSampler(range(10)), 2, False)
        source = batches(DataLoader(pairs(10), batch_sampler=own))
        assert ids(source.shuffled(64, generator())) == [[0, 9], [3, 4]]
        assert flat(ids(source.ordered(64))) == [0, 9, 3, 4]


class TestItems:
    @pytest.mark.parametrize("label", ["label", "labels", "y", "target", "fine_label"])
    @pytest.mark.parametrize("image", ["image", "img", "pixel_values", "x", "features"])
    def test_usual_keys(self, image: str, label: str) -> None:
        items = Items([{label: y, image: x, "id": 7} for x, y in pairs(4).items])
        assert ids(batches(items).ordered(4)) == [[0, 1, 2, 3]]

    def test_named_keys(self) -> None:
        items = Items([{"a": x, "b": y, "x": x * 5, "label": 0} for x, y in pairs(4).items])
        assert ids(batches(items, input_key="a", label_key="b").ordered(4)) == [[0, 1, 2, 3]]

    @pytest.mark.parametrize(
        ("item", "options", "text"),
        [
            (
                {"x": 1.0, "image": 1.0, "y": 0},
                {},
                r"not clear: name input_key, one of \['image', 'x', 'y'\]",
            ),
            ({"x": 1.0, "y": 0, "label": 0}, {}, r"not clear: name label_key, one of \['label', 'x', 'y'\]"),
            ({"sound": 1.0, "y": 0}, {}, r"not clear: name input_key, one of \['sound', 'y'\]"),
            (
                {"x": 1.0, "y": 0},
                {"label_key": "z"},
                r"label_key 'z' is not among the item's keys \['x', 'y'\]",
            ),
            ({"x": "text", "y": 0}, {}, "inputs must be tensors, got list"),
            ((torch.zeros(2), 0, 1), {}, r"items must be pairs \(x, y\) or dicts, got \w+ of 3"),
            (torch.zeros(2), {}, r"items must be pairs \(x, y\) or dicts, got Tensor"),
            ((torch.zeros(2), 7), {}, r"label 7 is not in 0..2; pass classes="),
            ((torch.zeros(2), -1), {}, r"label -1 is not in 0..2"),
            ((torch.zeros(2), 0.5), {}, r"labels must be whole numbers, got \[0.5, 0.5\]"),
            ((torch.zeros(2), float("nan")), {}, r"labels must be whole numbers, got \[nan"),
            ((torch.zeros(2), "cat"), {}, r"labels must be whole numbers, got \w+; pass classes="),
            (
                (torch.zeros(2), torch.tensor([0.0, 1.0, 0.0])),
                {},
                r"one label per sample .* got shape \[2, 3\]; for a one-hot code .*argmax",
            ),
            ((Image.new("L", (2, 2)), 0), {}, r"tensors and numbers, got .*Image'>; .*ToTensor\(\)"),
        ],
    )
    def test_what_cannot_be_used(self, item: Any, options: dict[str, Any], text: str) -> None:
        with pytest.raises(DatasetError, match=text):
            list(batches(Items([item, item]), **options).ordered(2))

    def test_hugging_faces_data_sets_without_a_format(self) -> None:
        source = datasets.Dataset.from_dict({"x": [[0.0], [1.0]], "label": [0, 1]})
        with pytest.raises(DatasetError, match=r'with_format\("torch"\)'):
            list(batches(source).ordered(2))

    def test_text_labels(self) -> None:
        items = Items([(torch.zeros(1), name) for name in ("dog", "cat", "dog")])
        (batch,) = batches(items, 2, classes=["cat", "dog"]).ordered(3)
        assert batch[1].tolist() == [1, 0, 1]

    def test_text_labels_of_a_huggingface_set(self) -> None:
        source = datasets.Dataset.from_dict({"img": [[0.0], [1.0]], "label": ["b", "a"]}).with_format("torch")
        (batch,) = batches(source, 2, classes=["a", "b"]).ordered(2)
        assert batch[0].tolist() == [[0.0], [1.0]]
        assert batch[1].tolist() == [1, 0]


class TestSources:
    def test_iterable_data_sets_are_refused(self) -> None:
        class Stream(IterableDataset[Any]):
            def __iter__(self) -> Iterator[Any]:
                yield torch.zeros(1), 0

        class SizedStream(Stream):
            def __len__(self) -> int:
                return 1

        for source in (Stream(), SizedStream(), DataLoader(Stream()), DataLoader(SizedStream())):
            with pytest.raises(DatasetError, match=r"map-style data set .* is expected, got .*Stream"):
                batches(source)

    @pytest.mark.parametrize("source", [None, 3, {1, 2}, iter([1])], ids=lambda s: type(s).__name__)
    def test_what_is_no_data_set(self, source: Any) -> None:
        with pytest.raises(DatasetError, match=f"is expected, got {type(source).__name__}"):
            batches(source)

    @pytest.mark.parametrize(
        ("source", "text"),
        [
            (
                {"train": pairs(2), "test": pairs(2)},
                r"a dict of splits \('train', 'test'\): pass .* data\['train'\]",
            ),
            (datasets.DatasetDict(train=datasets.Dataset.from_dict({"x": [1]})), "a DatasetDict of splits"),
            ({"x": [1], "y": [0]}, r"a dict \('x', 'y'\): pass torch.utils.data.TensorDataset\(x, y\)"),
            ((pairs(2), pairs(2)), "a tuple of 2 data sets: pass one as train_set and one as test_set"),
            ([DataLoader(pairs(2))], "a list of 1 data sets"),
            ((np.zeros((3, 2)), np.zeros(3)), r"a tuple of 2 arrays: pass .*TensorDataset\(x, y\)"),
            ([torch.zeros(3, 2), [0, 1, 2]], "a list of 2 arrays"),
            (((np.zeros((3, 2)), np.zeros(3)),) * 2, "a tuple of 2 splits of arrays"),
            (np.zeros((3, 2)), "a ndarray without labels"),
            (pd.Series([0, 1]), "a Series: pass .*TensorDataset"),
            (torch.nn.Sequential(torch.nn.ReLU()), r"a model \(Sequential\)"),
            (torch.zeros(3, 2), "a Tensor without labels"),
            (pd.DataFrame({"x": [1.0], "y": [0]}), "a DataFrame: pass .*made of its columns"),
            ("digits", "a str: load the data first"),
        ],
        ids=lambda value: type(value).__name__,
    )
    def test_what_is_given_in_place_of_a_data_set(self, source: Any, text: str) -> None:
        with pytest.raises(DatasetError, match=f"a data set of samples is expected, got {text}"):
            batches(source)

    def test_lists_of_samples_are_data_sets(self) -> None:
        assert ids(batches(pairs(3).items).ordered(4)) == [[0, 1, 2]]
        assert ids(batches([{"x": x, "y": y} for x, y in pairs(2).items]).ordered(4)) == [[0, 1]]

    def test_inputs_become_what_the_model_has(self) -> None:
        source = batches(TensorDataset(stacked(3)[0].double(), stacked(3)[1]), dtype=torch.float32)
        (batch,) = source.ordered(4)
        assert batch[0].dtype == torch.float32
        assert next(source.as_they_are().ordered(4))[0].dtype == torch.float64
        whole = batches(TensorDataset(torch.arange(3), stacked(3)[1]), dtype=torch.float32)
        assert next(whole.ordered(4))[0].dtype == torch.int64

    def test_a_set_without_length(self) -> None:
        class Endless(Dataset[Any]):
            def __getitem__(self, index: int) -> Any:
                return torch.zeros(1), 0

        with pytest.raises(DatasetError, match="__len__ and __getitem__ is expected, got Endless"):
            batches(Endless())

    @pytest.mark.parametrize(("classes", "found"), [([1, 2], 2), ([1, 2, 2], 2), ([1, 2, 3, 4], 4)])
    def test_classes_must_be_as_many_as_outputs(self, classes: list[int], found: int) -> None:
        with pytest.raises(
            DatasetError, match=f"classes has {found} different values, the model has 3 outputs"
        ):
            batches(pairs(3), classes=classes)


class TestLabels:
    @pytest.mark.parametrize(
        "labels",
        [
            *(
                torch.tensor([2, 0, 1], dtype=kind)
                for kind in (torch.int64, torch.int32, torch.int16, torch.int8)
            ),
            *(torch.tensor([2, 0, 1], dtype=kind) for kind in (torch.uint8, torch.uint16, torch.float16)),
            torch.tensor([2.0, 0.0, 1.0]),
            torch.tensor([[2], [0], [1]]),
            torch.tensor([2, 9, 0, 9, 1, 9])[::2],
            torch.tensor([[2, 9], [0, 9], [1, 9]])[:, :1],
            np.array([2, 0, 1], dtype=np.uint8),
            [2, 0, 1],
            (2, 0, 1),
            [np.int64(2), np.int64(0), np.int64(1)],
        ],
        ids=lambda v: f"{type(v).__name__}-{getattr(v, 'dtype', '')}-{tuple(getattr(v, 'shape', ()))}",
    )
    def test_kinds_of_whole_numbers(self, labels: Any) -> None:
        for classes, expected in [(None, [2, 0, 1]), ({2: 0, 1: 1, 0: 2}, [0, 2, 1])]:
            y = normalize_labels(labels, 3, classes)
            assert (y.dtype, y.tolist()) == (torch.int64, expected)

    @pytest.mark.parametrize("classes", [None, {1: 1, 0: 0}])
    def test_zero_dimensional(self, classes: Any) -> None:
        assert normalize_labels(torch.tensor(1), 2, classes).tolist() == [1]

    def test_bools_are_two_classes(self) -> None:
        assert normalize_labels(torch.tensor([True, False]), 2).tolist() == [1, 0]

    @pytest.mark.parametrize("classes", [None, {0: 0, 1: 1}])
    def test_none_at_all(self, classes: Any) -> None:
        y = normalize_labels(torch.tensor([], dtype=torch.uint8), 2, classes)
        assert (y.dtype, y.shape) == (torch.int64, (0,))

    @pytest.mark.parametrize("classes", [None, {0: 0, 1: 1}])
    @pytest.mark.parametrize("labels", [torch.zeros(2, 3), torch.zeros(4, 1, 2), np.zeros((2, 2))], ids=str)
    def test_several_per_sample(self, labels: Any, classes: Any) -> None:
        text = rf"one label per sample expected, \[B\] or \[B, 1\], got shape \[{labels.shape[0]}, "
        with pytest.raises(DatasetError, match=text):
            normalize_labels(labels, 2, classes)

    @pytest.mark.parametrize(
        "labels", [torch.tensor([0.0, torch.inf]), torch.tensor([1e300], dtype=torch.float64)], ids=str
    )
    def test_floats_beyond_integers(self, labels: Tensor) -> None:
        with pytest.raises(DatasetError, match="label"):
            normalize_labels(labels, 2)

    def test_complex(self) -> None:
        with pytest.raises(DatasetError, match="labels must be whole numbers"):
            normalize_labels(torch.tensor([1j]), 2)

    def test_unknown_class_is_named(self) -> None:
        with pytest.raises(DatasetError, match=r"label 5 is not one of the classes \[3, 7\]"):
            normalize_labels(torch.tensor([3, 5]), 2, {3: 0, 7: 1})
        with pytest.raises(DatasetError, match=r"label 'cow' is not one of the classes \['cat', 'dog'\]"):
            normalize_labels(["cat", "cow"], 2, {"cat": 0, "dog": 1})

    def test_the_users_tensor_is_not_changed(self) -> None:
        labels = torch.tensor([[1], [0]], dtype=torch.int32)
        normalize_labels(labels, 2).add_(1)
        assert labels.tolist() == [[1], [0]]


class TestPositions:
    @pytest.mark.parametrize(
        "source",
        [pairs(7), DataLoader(pairs(7), batch_size=3, shuffle=True, num_workers=0)],
        ids=["set", "loader"],
    )
    def test_each_sample_comes_with_its_position(self, source: Any) -> None:
        actual = list(batches(source).indexed(3, generator()))
        for x, y, rows in actual:
            assert x[:, 0].tolist() == rows.tolist()
            assert y.tolist() == [int(row) % 3 for row in rows]
        assert sorted(row for _, _, rows in actual for row in rows.tolist()) == list(range(7))
        # the order is that of an epoch without positions
        plain = [x[:, 0].tolist() for x, _ in batches(source).shuffled(3, generator())]
        assert plain == [rows.tolist() for _, _, rows in actual]

    @pytest.mark.parametrize("change", [-1, 1])
    def test_a_collate_fn_that_changes_the_number_is_noticed(self, change: int) -> None:
        def collate(items: list[Any]) -> Any:
            return default_collate(items[:change] if change < 0 else [*items, items[0]])

        source = batches(DataLoader(pairs(6), batch_size=3, collate_fn=collate))
        with pytest.raises(DatasetError, match=r"collate_fn returned .* of 3 samples"):
            next(source.indexed(3, generator()))
        # a method that needs no positions takes what it gets
        assert len(list(source.shuffled(3, generator()))) == 2


class TestRows:
    """Some of the samples only."""

    ROWS = torch.tensor([8, 1, 5, 3, 6])

    @any_source
    def test_ordered(self, make: Any) -> None:
        source = batches(make(9))
        assert ids(source.ordered(2, self.ROWS)) == [[8, 1], [5, 3], [6]]
        assert ids(source.ordered(100, self.ROWS)) == [self.ROWS.tolist()]
        assert ids(source.ordered(3, self.ROWS[:0])) == []

    @any_source
    def test_indexed(self, make: Any) -> None:
        source = batches(make(9))
        actual = list(source.indexed(2, generator(), self.ROWS))
        # a last single sample joins the batch before; the loaders have a batch size of 4 of their own
        assert [len(rows) for _, _, rows in actual] in ([2, 3], [5])
        for x, y, rows in actual:
            assert x[:, 0].tolist() == rows.tolist()
            assert y.tolist() == [int(row) % 3 for row in rows]
        assert sorted(row for _, _, rows in actual for row in rows.tolist()) == sorted(self.ROWS.tolist())
        assert list(source.indexed(2, generator(), self.ROWS[:0])) == []

    def test_the_generator_decides(self) -> None:
        def order(seed: int) -> list[int]:
            actual = batches(pairs(30)).indexed(4, generator(seed), torch.arange(10, 25))
            return [row for _, _, rows in actual for row in rows.tolist()]

        assert order(1) == order(1) != order(2)
        assert order(1) != sorted(order(1)) == list(range(10, 25))

    def test_all_rows_are_an_epoch(self) -> None:
        source = batches(pairs(7))
        some = [rows.tolist() for _, _, rows in source.indexed(3, generator(), torch.arange(7))]
        assert some == [rows.tolist() for _, _, rows in source.indexed(3, generator())]

    def test_drop_last(self) -> None:
        source = batches(DataLoader(pairs(9), batch_size=2, drop_last=True))
        actual = [rows.tolist() for _, _, rows in source.indexed(5, generator(), self.ROWS)]
        assert [len(rows) for rows in actual] == [2, 2]
        assert set(flat(actual)) < set(self.ROWS.tolist())


def bare(size: int) -> Items:
    return Items([x for x, _ in pairs(size).items])


UNLABELLED = {
    **SOURCES,
    "bare": bare,
    "one-tuples": lambda n: Items([(x,) for x in bare(n).items]),
    "one tensor": lambda n: TensorDataset(stacked(n)[0]),
    "loader of one tensor": lambda n: DataLoader(TensorDataset(stacked(n)[0]), batch_size=4),
    "loader of bare": lambda n: DataLoader(bare(n), batch_size=4, shuffle=True),
    "dicts without": lambda n: Items([{"image": x} for x in bare(n).items]),
    "dicts with two labels": lambda n: Items([{"image": x, "label": 0, "y": 1} for x in bare(n).items]),
    "text labels": lambda n: Items([(x, "cat") for x in bare(n).items]),
    "huge labels": lambda n: Items([(x, 10**6) for x in bare(n).items]),
    "float labels": lambda n: TensorDataset(stacked(n)[0], torch.full((n,), 0.5)),
}


class TestUnlabelled:
    @pytest.mark.parametrize("make", UNLABELLED.values(), ids=UNLABELLED.keys())
    def test_labels_are_not_looked_at(self, make: Any) -> None:
        source = batches(make(9), 0, labelled=False)
        assert source.example().tolist() == [[0.0, 0.0]]
        epochs = [source.ordered(4), source.shuffled(4, generator()), source.indexed(4, generator())]
        for epoch in epochs:
            rows = []
            for x, y, *_ in epoch:
                assert (y.dtype, y.tolist()) == (torch.int64, [0] * len(x))
                assert torch.equal(x[:, 1], -x[:, 0])
                rows += x[:, 0].int().tolist()
            assert sorted(rows) == list(range(9))
        # in the set's order
        ordered = torch.cat([x for x, _ in source.ordered(4)])
        assert ordered[:, 0].tolist() == list(range(9))

    @pytest.mark.parametrize("name", ["bare", "one-tuples", "one tensor", "dicts without"])
    def test_labelled_is_the_default(self, name: str) -> None:
        with pytest.raises(DatasetError, match=r"pairs \(x, y\) or dicts|name label_key"):
            list(batches(UNLABELLED[name](4)).ordered(2))

    @pytest.mark.parametrize(
        ("item", "text"),
        [
            ((torch.zeros(2), 0, 1), r"items must be inputs, pairs \(x, y\) or dicts, got \w+ of 3"),
            ("text", "items must be inputs, pairs|inputs must be tensors"),
            ({"sound": torch.zeros(1)}, "name input_key"),
            ({"x": "text"}, "inputs must be tensors, got list"),
        ],
    )
    def test_what_cannot_be_used(self, item: Any, text: str) -> None:
        with pytest.raises(DatasetError, match=text):
            list(batches(Items([item] * 3), 0, labelled=False).ordered(3))


def test_into_batches() -> None:
    order = torch.arange(7)
    assert [len(b) for b in into_batches(order, 3)] == [3, 4]
    assert [len(b) for b in into_batches(order, 3, drop_last=True)] == [3, 3]
    assert [len(b) for b in into_batches(order, 10, drop_last=True)] == [7]
    assert [len(b) for b in into_batches(order[:1], 3)] == [1]
    assert into_batches(order[:0], 3) == []
