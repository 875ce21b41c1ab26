"""``hf:NAME-or-PATH``: local data in the formats of Hugging Face's library, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flwr_kd.data import DataError, Selection, load, load_public, natural, public_name
from flwr_kd.data._hub import HubName, loaded
from flwr_kd.data.presence import data_is_there
from flwr_kd.experiments.data import client_splits, digest_of
from flwr_kd.experiments.experiment import Experiment

datasets = pytest.importorskip("datasets", reason="needs flwr-kd[hf]")
image = pytest.importorskip("PIL.Image", reason="needs flwr-kd[hf]")

ROWS = 60
NAMES = ["ant", "bee", "cat"]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Work in an empty folder, with a cache of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    loaded.cache_clear()
    yield
    loaded.cache_clear()


def pixels(row: int) -> Any:
    """Return an image [4, 6, 3] of bytes that names its row."""
    return np.full((4, 6, 3), (row, 2 * row, 255 - row), dtype=np.uint8)


def photos(rows: int = ROWS, first: int = 0) -> Any:
    """Return images of three classes by four persons."""
    numbers = range(first, first + rows)
    features = datasets.Features(
        {
            "photo": datasets.Image(),
            "species": datasets.ClassLabel(names=NAMES),
            "speaker": datasets.Value("string"),
            "room": datasets.ClassLabel(names=["hall", "yard"]),
            "note": datasets.Value("string"),
        }
    )
    columns = {
        "photo": [image.fromarray(pixels(row)) for row in numbers],
        "species": [row % 3 for row in numbers],
        "speaker": [("eve", "adam", "kim", "bo")[row % 4] for row in numbers],
        "room": [row % 2 for row in numbers],
        "note": [None] * rows,
    }
    return datasets.Dataset.from_dict(columns, features=features)


def rows_of(x: torch.Tensor) -> list[int]:
    """Return the rows that images name."""
    return [round(float(value)) for value in (x[:, 0, 0, 0] + 1) * 127.5]


class TestImages:
    NAME = "hf:photos,label=species"

    @pytest.fixture(autouse=True)
    def saved(self) -> None:
        datasets.DatasetDict(train=photos(), test=photos(12, 100)).save_to_disk("photos")

    def test_a_folder_of_save_to_disk_with_its_splits(self) -> None:
        bundle = load(self.NAME)
        assert (len(bundle.train), len(bundle.test), bundle.input_shape) == (48, 12, (3, 4, 6))
        assert (bundle.num_classes, bundle.class_names) == (3, tuple(NAMES))
        rows = rows_of(bundle.train.x)
        assert bundle.train.y.tolist() == [row % 3 for row in rows]
        assert sorted(rows + rows_of(load_public(None, dataset=self.NAME).x)) == list(range(ROWS))
        assert rows_of(bundle.test.x) == list(range(100, 112))
        expected = torch.from_numpy(pixels(7)).permute(2, 0, 1).float() / 127.5 - 1
        torch.testing.assert_close(bundle.train.x[rows.index(7)], expected)

    def test_columns_are_for_natural_partitions(self) -> None:
        bundle = load(self.NAME)
        rows = rows_of(bundle.train.x)
        # A column with missing values is left out.
        assert sorted(bundle.columns) == ["room", "speaker"]
        assert bundle.columns["speaker"].tolist() == [("eve", "adam", "kim", "bo")[row % 4] for row in rows]
        assert bundle.columns["room"].tolist() == [("hall", "yard")[row % 2] for row in rows]
        parts = natural(bundle.columns, "natural:speaker", num_clients=4)
        assert [{rows[place] % 4 for place in part} for part in parts] == [{1}, {3}, {0}, {2}]

    def test_an_experiment_has_a_client_for_each_speaker(self) -> None:
        experiment = Experiment(dataset=self.NAME, partition="natural:speaker", clients=4)
        speakers = load(self.NAME).columns["speaker"]
        found = [set(speakers[np.concatenate(both)].tolist()) for both in client_splits(experiment)]
        assert found == [{"adam"}, {"bo"}, {"eve"}, {"kim"}]
        assert digest_of(experiment) == digest_of(experiment)
        with pytest.raises(DataError, match="valid: natural:speaker, natural:room"):
            client_splits(Experiment(dataset=self.NAME, partition="natural:person", clients=4))

    def test_some_classes_keep_their_names(self) -> None:
        bundle = load(self.NAME, selection=Selection(classes="0,2"))
        assert (bundle.class_names, bundle.num_classes) == (("ant", "cat"), 2)
        assert {row % 3 for row in rows_of(bundle.train.x)} == {0, 2}

    def test_limits(self) -> None:
        bundle = load(self.NAME, limit=9, test_limit=6)
        assert (len(bundle.train), len(bundle.test)) == (9, 6)
        assert sorted(bundle.train.y.tolist()) == [0] * 3 + [1] * 3 + [2] * 3

    def test_images_are_resized_to_a_shape(self) -> None:
        bundle = load(f"{self.NAME},shape=1x8x8")
        assert bundle.input_shape == (1, 8, 8)
        row = 0.299 * 5 + 0.587 * 10 + 0.114 * 250
        values = load(f"{self.NAME},shape=1x8x8").train.x
        assert any(torch.allclose(x, torch.full_like(x, row / 127.5 - 1), atol=1e-3) for x in values)

    def test_images_of_different_sizes_need_a_shape(self) -> None:
        mixed = datasets.Dataset.from_dict(
            {
                "image": [image.fromarray(pixels(row)[: 3 + row % 2]) for row in range(30)],
                "label": [row % 3 for row in range(30)],
            },
            features=datasets.Features(
                {"image": datasets.Image(), "label": datasets.ClassLabel(names=NAMES)}
            ),
        )
        mixed.save_to_disk("mixed")
        text = r"has images of different sizes, such as 3x6 and 4x6: name the shape .* hf:mixed,shape=3x3x6"
        with pytest.raises(DataError, match=text):
            load("hf:mixed")
        assert load("hf:mixed,shape=3x5x5").input_shape == (3, 5, 5)

    def test_public_data_of_other_images(self) -> None:
        assert public_name("digits", dataset=self.NAME) == "digits"
        assert load_public("digits", dataset=self.NAME, limit=5).x.shape == (5, 3, 4, 6)
        public = load_public(self.NAME, dataset="digits", limit=5)
        assert public.x.shape == (5, 1, 8, 8)
        assert public_name("hf:./photos,label=room", dataset=self.NAME) == self.NAME
        with pytest.raises(DataError, match=r"'letters' \(tables\) cannot take the form of"):
            public_name("letters", dataset=self.NAME)

    def test_data_dir_and_presence(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        assert not data_is_there("hf:photos")
        assert data_is_there("hf:photos,label=x", str(tmp_path))
        assert len(load(self.NAME, data_dir=str(tmp_path)).test) == 12

    def test_an_image_that_is_missing(self) -> None:
        gone = photos(9).map(lambda row, i: {"photo": None if i == 4 else row["photo"]}, with_indices=True)
        gone.save_to_disk("gone")
        with pytest.raises(
            DataError, match="no image in row 4 of 'photo' of data set 'hf:gone,label=species'"
        ):
            load("hf:gone,label=species")


def test_a_folder_of_image_files() -> None:
    for part, names in {"train": ("ant", "bee"), "test": ("bee", "ant")}.items():
        for number, name in enumerate(names):
            for row in range(6):
                file = Path("insects", part, name, f"{row}.png")
                file.parent.mkdir(parents=True, exist_ok=True)
                image.fromarray(pixels(10 * number + row)[..., 0]).save(file)
    bundle = load("hf:insects")
    assert (bundle.input_shape, bundle.class_names, len(bundle.test)) == ((1, 4, 6), ("ant", "bee"), 12)
    assert all(row // 10 == label for row, label in zip(rows_of(bundle.train.x), bundle.train.y, strict=True))


def table(**more: Any) -> dict[str, list[Any]]:
    numbers = np.random.default_rng(0).normal(size=ROWS)
    return {
        "age": numbers.tolist(),
        "weight": [(row * 7) % 5 for row in range(ROWS)],
        "person": [f"p{row % 3}" for row in range(ROWS)],
        "label": ["no" if row % 2 else "yes" for row in range(ROWS)],
        **more,
    }


class TestTables:
    @pytest.mark.parametrize("ending", ["parquet", "csv", "tsv", "json", "jsonl"])
    def test_files(self, ending: str) -> None:
        rows = datasets.Dataset.from_dict(table())
        file = f"t.{ending}"
        if ending == "parquet":
            rows.to_parquet(file)
        elif ending == "json":
            Path(file).write_text(json.dumps(rows.to_list()))
        elif ending == "jsonl":
            rows.to_json(file)
        else:
            rows.to_csv(file, sep="\t" if ending == "tsv" else ",")
        bundle = load(f"hf:{file}")
        assert (bundle.input_shape, bundle.class_names) == ((2,), ("no", "yes"))
        assert (len(bundle.train), len(bundle.test)) == (36, 12)
        assert sorted(bundle.columns) == ["person"]
        # Standardised on the training part and what is held back, as those of csv files.
        torch.testing.assert_close(bundle.train.x.mean(dim=0), torch.zeros(2), atol=1e-5, rtol=0)

    def test_values_and_labels_belong_together(self) -> None:
        signed = [(1 + row) * (-1 if row % 2 else 1) for row in range(ROWS)]
        datasets.Dataset.from_dict(table(weight=signed)).to_parquet("t.parquet")
        for part in (load("hf:t.parquet,input=weight").train, load("hf:t.parquet,input=weight").test):
            yes = part.y == 1
            # Standardising keeps the order: "yes" is above 0, "no" below.
            assert float(part.x[yes].min()) > float(part.x[~yes].max())
            assert yes.sum() == (~yes).sum()

    def test_some_columns(self) -> None:
        datasets.Dataset.from_dict(table(room=[row % 4 for row in range(ROWS)])).to_parquet("t.parquet")
        assert load("hf:t.parquet").input_shape == (3,)
        dropped = load("hf:t.parquet,drop=room")
        assert (dropped.input_shape, sorted(dropped.columns)) == ((2,), ["person", "room"])
        named = load("hf:t.parquet,input=room+age")
        assert (named.input_shape, sorted(named.columns)) == ((2,), ["person", "weight"])

    def test_a_client_for_each_value_of_a_number(self) -> None:
        rows = table(user=[row % 4 for row in range(ROWS)])
        datasets.Dataset.from_dict(rows).to_parquet("t.parquet")
        options = {"partition": "natural:user", "clients": 4}
        with pytest.raises(DataError, match=r"'user' is an input: .* hf:t\.parquet,drop=user"):
            client_splits(Experiment(dataset="hf:t.parquet", **options))  # type: ignore[arg-type]
        name = "hf:t.parquet,drop=user"
        users = load(name).columns["user"]
        splits = client_splits(Experiment(dataset=name, **options))  # type: ignore[arg-type]
        assert [set(users[np.concatenate(both)].tolist()) for both in splits] == [{0}, {1}, {2}, {3}]

    def test_a_column_that_numbers_the_rows(self) -> None:
        datasets.Dataset.from_dict(table(id=list(range(ROWS)))).to_parquet("t.parquet")
        with pytest.raises(
            DataError, match=r"column 'id' numbers the rows .*: leave it out with drop=COLUMN"
        ):
            load("hf:t.parquet")
        assert load("hf:t.parquet,drop=id").input_shape == (2,)

    @pytest.mark.parametrize(
        ("more", "text"),
        [
            ({"age": [None, *range(1, ROWS)]}, "row 0 of 'age' has a value that is missing or not finite"),
            ({"label": [None, *["a", "b"] * 29, "a"]}, r"row 0 has no label in 'label' \(None\)"),
            ({"label": ["a"] * ROWS}, "at least 2 classes, but every row has 'a'"),
            ({"label": [0.5, *[1.0] * 59]}, "looks like a regression target"),
        ],
    )
    def test_values_that_cannot_be_used(self, more: dict[str, Any], text: str) -> None:
        datasets.Dataset.from_dict(table(**more)).to_parquet("t.parquet")
        with pytest.raises(DataError, match=text):
            load("hf:t.parquet")


class TestTensors:
    def test_lists_are_used_as_they_are(self) -> None:
        values = np.arange(ROWS * 6, dtype=np.float32).reshape(ROWS, 2, 3)
        rows = {"x": values.tolist(), "label": [row % 2 for row in range(ROWS)]}
        datasets.Dataset.from_dict(rows).save_to_disk("tensors")
        bundle = load("hf:tensors")
        assert bundle.input_shape == (2, 3)
        for x, y in zip(bundle.train.x, bundle.train.y, strict=True):
            row = int(x[0, 0]) // 6
            assert torch.equal(x, torch.from_numpy(values[row]))
            assert int(y) == row % 2

    def test_arrays_of_a_fixed_shape(self) -> None:
        features = datasets.Features(
            {"x": datasets.Array3D((1, 2, 3), "float32"), "label": datasets.ClassLabel(names=["a", "b"])}
        )
        values = np.random.default_rng(0).normal(size=(ROWS, 1, 2, 3)).astype(np.float32)
        rows = {"x": list(values), "label": [row % 2 for row in range(ROWS)]}
        datasets.Dataset.from_dict(rows, features=features).save_to_disk("arrays")
        bundle = load("hf:arrays")
        assert bundle.input_shape == (1, 2, 3)
        assert all(any(np.array_equal(x, value) for value in values) for x in bundle.train.x.numpy())

    def test_token_ids(self) -> None:
        rows = {
            "input_ids": [[row % 7, 1, 0] for row in range(ROWS)],
            "attention_mask": [[1, 1, 0]] * ROWS,
            "label": [row % 2 for row in range(ROWS)],
        }
        datasets.Dataset.from_dict(rows).save_to_disk("tokens")
        with pytest.raises(DataError, match=r"of which one is used: .* hf:tokens,input=input_ids"):
            load("hf:tokens")
        bundle = load("hf:tokens,input=input_ids")
        assert (bundle.train.x.dtype, bundle.vocabulary, bundle.input_shape) == (torch.int64, 7, (3,))

    def test_rows_of_different_lengths(self) -> None:
        rows = {
            "x": [[0.0] * (1 + row % 2) for row in range(ROWS)],
            "label": [row % 2 for row in range(ROWS)],
        }
        datasets.Dataset.from_dict(rows).save_to_disk("ragged")
        with pytest.raises(DataError, match="rows of 'x' have different shapes"):
            load("hf:ragged")


class TestSplits:
    @staticmethod
    def save(**rows: int) -> None:
        parts = {
            name: datasets.Dataset.from_dict(
                {"x": [[float(i)] for i in range(count)], "label": [i % 2 for i in range(count)]}
            )
            for name, count in rows.items()
        }
        datasets.DatasetDict(parts).save_to_disk("parts")

    def test_validation_is_the_test_set_without_one(self) -> None:
        self.save(train=20, validation=7)
        assert len(load("hf:parts").test) == 7

    def test_test_labels_of_a_contest_are_none(self) -> None:
        self.save(train=20, validation=7, test=5)
        hidden = datasets.load_from_disk("parts")
        hidden["test"] = datasets.Dataset.from_dict({"x": [[0.0]] * 5, "label": [-1] * 5})
        hidden.save_to_disk("contest")
        assert len(load("hf:parts").test) == 5
        assert len(load("hf:contest").test) == 7

    def test_splits_by_name(self) -> None:
        self.save(fit=20, held=8, other=3)
        with pytest.raises(DataError, match=r"has the splits fit, held, other and none called train"):
            load("hf:parts")
        bundle = load("hf:parts,train=fit,test=held")
        assert (len(bundle.train), len(bundle.test)) == (16, 8)
        with pytest.raises(DataError, match=r"unknown train split 'fitt' \(did you mean 'fit'\?\)"):
            load("hf:parts,train=fitt")

    def test_a_single_split_is_divided(self) -> None:
        self.save(everything=40)
        bundle = load("hf:parts")
        assert (len(bundle.train), len(bundle.test)) == (24, 8)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hf:", "has no name or path"),
        ("hf:a,shape=3", "must be CHANNELSxHEIGHTxWIDTH"),
        ("hf:a,shape=3x3", "shape in data set .* must be CHANNELSxHEIGHTxWIDTH with 1 or 3 channels"),
        ("hf:a,lable=x", r"unknown option 'lable' \(did you mean 'label'\?\)"),
        ("hf:a,label=", "label must be given once, with a value"),
        ("hf:a,label=x,label=y", "label must be given once"),
        ("hf:a,label=x,y", "'y' must be KEY=VALUE"),
    ],
)
def test_names_that_are_not_allowed(name: str, text: str) -> None:
    with pytest.raises(DataError, match=text):
        load(name)


def test_a_path_may_have_commas() -> None:
    assert HubName.parse("hf:a, b,c,label=x") == HubName(path="a, b,c", label="x")


class TestColumns:
    @pytest.mark.parametrize(
        ("columns", "options", "text"),
        [
            (
                {"a": [1, 2], "label": [0, 1]},
                ",label=lable",
                r"unknown column 'lable' \(did you mean 'label'\?\)",
            ),
            (
                {"a": [1, 2], "b": [0, 1]},
                "",
                "no column has the labels: name one of a, b, for example .*,label=a",
            ),
            ({"a": [1, 2], "label": [0, 1], "target": [0, 1]}, "", r"several columns .*\(label, target\)"),
            (
                {"text": ["a", "b"], "label": [0, 1]},
                "",
                r"it has text \(a text\), label .*; texts must be tokenized",
            ),
            ({"a": [1, 2], "label": [0, 1]}, ",input=label", "cannot be both"),
            ({"a": ["x", "y"], "label": [0, 1]}, ",input=a", "the input 'a' must have images or numbers"),
            ({"a": [1, 2], "label": [[0], [1]]}, ",label=label", "must have classes, whole numbers or texts"),
        ],
    )
    def test_what_is_not_certain(self, columns: dict[str, Any], options: str, text: str) -> None:
        datasets.Dataset.from_dict(columns).save_to_disk("c")
        with pytest.raises(DataError, match=text) as refused:
            load(f"hf:c{options}")
        assert len(str(refused.value).splitlines()) == 1


class TestWhatIsNotThere:
    @pytest.mark.filterwarnings("ignore")
    def test_offline(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The library itself refuses, as it does where nothing is cached."""
        monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        with pytest.raises(DataError, match="no file or folder 'nobody/nothing', and the hub of") as refused:
            load("hf:nobody/nothing")
        assert len(str(refused.value).splitlines()) == 1

    def test_the_hub_out_of_reach(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*args: Any, **options: Any) -> Any:
            raise ConnectionError(
                "Couldn't reach 'nobody/nothing' on the Hub (LocalEntryNotFoundError)\nmore"
            )

        monkeypatch.setattr(datasets, "load_dataset", fail)
        with pytest.raises(DataError) as refused:
            load("hf:nobody/nothing")
        assert str(refused.value) == (
            "data set 'hf:nobody/nothing': there is no file or folder 'nobody/nothing', and the hub of Hugging "
            "Face does not give a data set of this name: Couldn't reach 'nobody/nothing' on the Hub "
            "(LocalEntryNotFoundError)"
        )

    def test_a_name_that_the_hub_does_not_have(self) -> None:
        with pytest.raises(DataError, match=r"no file or folder 'no such thing!'.*: Repo id must use"):
            load("hf:no such thing!")

    def test_files_that_are_no_data(self) -> None:
        Path("x.pkl").write_bytes(b"x")
        with pytest.raises(DataError, match=r"names of data files end in .parquet, .csv"):
            load("hf:x.pkl")
        Path("x.parquet").write_bytes(b"x")
        with pytest.raises(DataError, match=r"'x.parquet' cannot be read"):
            load("hf:x.parquet")
        Path("empty").mkdir()
        with pytest.raises(DataError, match="'empty' cannot be read"):
            load("hf:empty")
        Path("state.json").write_text("{}")
        with pytest.raises(DataError, match="cannot be read"):
            load("hf:.")
