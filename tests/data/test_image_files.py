"""Loaders of image sets, on small files in each set's own format."""

from __future__ import annotations

import gzip
import hashlib
import pickle
import struct
import tarfile
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.error import URLError

import numpy as np
import pytest
import torch

from flwr_kd.data import DataError, Selection, _images, load, load_public

RNG_SEED = 0


def rng() -> np.random.Generator:
    return np.random.default_rng(RNG_SEED)


def unnormalised(x: torch.Tensor, name: str) -> np.ndarray:
    """Return the original bytes of a normalised tensor."""
    spec = _images.SPECS[name]
    mean, std = (torch.tensor(v).view(1, -1, 1, 1) for v in (spec.mean, spec.std))
    exact = (x * std + mean) * 255
    assert (exact - exact.round()).abs().max() < 1e-3
    return exact.round().numpy().astype(np.uint8)


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every download by torchvision fail immediately."""

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
    ("which", "classes", "folder"),
    [("balanced", 47, "EMNIST/raw"), ("byclass", 62, "gzip"), ("digits", 10, "emnist-digits")],
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


def test_emnist_letters_are_numbered_from_0(tmp_path: Path) -> None:
    arrays = write_idx_set(tmp_path, "emnist-letters-train", "emnist-letters-test", 26, True)
    for part in ("train", "test"):
        labels = arrays[f"emnist-letters-{part}-labels-idx1-ubyte"]
        write_idx(tmp_path / f"emnist-letters-{part}-labels-idx1-ubyte", labels + 1, True)
    bundle = load("emnist-letters", data_dir=str(tmp_path))
    assert np.array_equal(bundle.train.y, arrays["emnist-letters-train-labels-idx1-ubyte"])
    assert bundle.num_classes == 26
    chosen = load("emnist-letters", data_dir=str(tmp_path), selection=Selection(classes="10-19"))
    assert sorted(set(chosen.train.y.tolist())) == list(range(10))
    assert chosen.num_classes == 10


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
def test_damaged_idx_files_are_named(tmp_path: Path, spoil: Callable[[bytes], bytes], message: str) -> None:
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


def test_labels_out_of_range_and_different_lengths_are_refused(tmp_path: Path) -> None:
    write_idx_set(tmp_path, "train", "t10k", 12, False)
    with pytest.raises(
        DataError, match=r"train-labels-idx1-ubyte: labels must be from 0 to 9, .* sample 10 is 10"
    ):
        load("mnist", data_dir=str(tmp_path))
    write_idx(tmp_path / "train-labels-idx1-ubyte", np.zeros(39), False)
    with pytest.raises(
        DataError, match=r"labels-idx1-ubyte has 39 labels, but .*images-idx3-ubyte has 40 images"
    ):
        load("mnist", data_dir=str(tmp_path))
    write_idx_set(tmp_path, "train", "t10k", 10, False)
    write_idx(tmp_path / "t10k-images-idx3-ubyte", np.zeros((0, 28, 28)), False)
    with pytest.raises(DataError, match=r"t10k-images-idx3-ubyte has no images"):
        load("mnist", data_dir=str(tmp_path))


def test_labels_are_named_as_the_file_numbers_them(tmp_path: Path) -> None:
    """Those of EMNIST's letters count from 1."""
    write_idx_set(tmp_path, "emnist-letters-train", "emnist-letters-test", 10, False)
    with pytest.raises(DataError, match=r"labels must be from 1 to 26, but that of sample 0 is 0"):
        load("emnist-letters", data_dir=str(tmp_path))


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("name", ["mnist", "emnist-byclass", "cifar10", "cifar100", "svhn"])
def test_missing_files_without_a_network(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError, match=r"download failed: .*(no network|Error downloading)") as caught:
        load(name, data_dir=str(tmp_path))
    assert repr(name) in str(caught.value)
    assert str(tmp_path) in str(caught.value)


# CIFAR: pickled batches. torchvision checks the real files' checksums, so that the small ones need their own.


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
def test_a_cifar_file_with_a_wrong_checksum_is_refused(tmp_path: Path) -> None:
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
    assert bundle.class_names == tuple(sorted(CINIC))
    assert len(load("cinic10", data_dir=str(tmp_path), limit=10).train) == 10


def test_missing_or_incomplete_cinic10(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"train/CLASS/\*.png"):
        load("cinic10", data_dir=str(tmp_path))
    with pytest.raises(DataError, match=r'in a folder that data_dir="FOLDER" names'):
        load("cinic10")
    write_cinic(tmp_path)
    (tmp_path / "test" / "truck").rename(tmp_path / "test" / "lorry")
    with pytest.raises(DataError, match=r"lorry"):
        load("cinic10", data_dir=str(tmp_path))
