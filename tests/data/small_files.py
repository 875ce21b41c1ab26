"""Small files in the formats of the data sets that the papers' experiments name."""

from __future__ import annotations

import csv
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from flwr_kd.data._image_trees import CHEXPERT_FINDINGS
from tests.data.test_flow_tables import FILES as FLOWS
from tests.data.test_flow_tables import TEXTS
from tests.data.test_image_files import CINIC, md5, write_idx

WORDS = ("orbit rocket", "goalie puck", "engine wheel", "stock bank")


def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def labels(classes: int, each: int) -> np.ndarray:
    return np.tile(np.arange(classes), each)


def pixels(count: int, *shape: int) -> np.ndarray:
    return rng().integers(0, 256, (count, *shape), dtype=np.uint8)


def idx(train: str, test: str, classes: int, first: int = 0) -> Callable[..., None]:
    def write(folder: Path, each: int, patch: pytest.MonkeyPatch) -> None:
        for stem, count in ((train, each), (test, 3)):
            y = labels(classes, count) + first
            write_idx(folder / f"{stem}-images-idx3-ubyte", pixels(len(y), 28, 28), False)
            write_idx(folder / f"{stem}-labels-idx1-ubyte", y, False)

    return write


def cifar(folder: Path, each: int, patch: pytest.MonkeyPatch, *, hundred: bool) -> None:
    from torchvision import datasets

    kind = datasets.CIFAR100 if hundred else datasets.CIFAR10
    names = ["train"] if hundred else [f"data_batch_{i}" for i in range(1, 6)]
    test, key, meta = (
        ("test", "fine_labels", ("meta", "fine_label_names"))
        if hundred
        else ("test_batch", "labels", ("batches.meta", "label_names"))
    )
    root = folder / kind.base_folder
    root.mkdir(parents=True)
    classes = 100 if hundred else 10
    y = labels(classes, each)
    for part, name in zip(np.array_split(np.arange(len(y)), len(names)), names, strict=True):
        batch = {"data": pixels(len(part), 3072), key: y[part].tolist()}
        (root / name).write_bytes(pickle.dumps(batch))
    (root / test).write_bytes(
        pickle.dumps({"data": pixels(2 * classes, 3072), key: labels(classes, 2).tolist()})
    )
    (root / meta[0]).write_bytes(pickle.dumps({meta[1]: [str(k) for k in range(classes)]}))
    # torchvision checks the real files' sums.
    patch.setattr(kind, "train_list", [[name, md5(root / name)] for name in names])
    patch.setattr(kind, "test_list", [[test, md5(root / test)]])
    patch.setattr(kind, "meta", {**kind.meta, "md5": md5(root / meta[0])})


def svhn(folder: Path, each: int, patch: pytest.MonkeyPatch) -> None:
    import scipy.io
    from torchvision.datasets import SVHN

    sums = {"extra": ["", "", ""]}
    for split, count in (("train", each), ("test", 3)):
        y = labels(10, count) + 1
        path = folder / f"{split}_32x32.mat"
        images = pixels(len(y), 32, 32, 3).transpose(1, 2, 3, 0)
        scipy.io.savemat(path, {"X": images, "y": y.astype(np.uint8)[:, None]})
        sums[split] = ["", path.name, md5(path)]
    patch.setattr(SVHN, "split_list", sums)


def image(path: Path, value: int, mode: str, side: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels(1, side, side, 3)[0] // 2 + value % 100).convert(mode).save(path)


def cinic10(folder: Path, each: int, patch: pytest.MonkeyPatch) -> None:
    for part, count in (("train", each), ("test", 2)):
        for k, name in enumerate(CINIC):
            for i in range(count):
                image(folder / "CINIC-10" / part / name / f"{i}.png", 10 * k + i, "RGB", 32)


def tiny_imagenet(folder: Path, each: int, patch: pytest.MonkeyPatch) -> None:
    root, wnids = folder / "tiny-imagenet-200", ["n01", "n02", "n03"]
    for wnid in wnids:
        for i in range(each):
            image(root / "train" / wnid / "images" / f"{wnid}_{i}.JPEG", i, "RGB", 64)
    for i in range(3):
        image(root / "val" / "images" / f"val_{i}.JPEG", i, "RGB", 64)
    rows = "".join(f"val_{i}.JPEG\t{wnid}\t0\t0\t63\t63\n" for i, wnid in enumerate(wnids))
    (root / "val" / "val_annotations.txt").write_text(rows)
    (root / "wnids.txt").write_text("\n".join(wnids))


def chexpert(folder: Path, each: int, patch: pytest.MonkeyPatch) -> None:
    root = folder / "CheXpert-v1.0-small"
    root.mkdir()
    with (root / "train.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["Path", "Sex", *CHEXPERT_FINDINGS])
        # Patients whose number is divisible by five are the test set.
        for patient in range(1, 5 * each * len(CHEXPERT_FINDINGS) // 4):
            finding = patient * 3 % len(CHEXPERT_FINDINGS)
            path = f"train/patient{patient:05d}/study1/view1_frontal.jpg"
            image(root / path, patient, "L", 64)
            cells = ["1.0" if k == finding else "" for k in range(len(CHEXPERT_FINDINGS))]
            table.writerow([f"CheXpert-v1.0-small/{path}", "Male", *cells])


def flows(name: str) -> Callable[..., None]:
    def write(folder: Path, each: int, patch: pytest.MonkeyPatch) -> None:
        file, columns, label, names = FLOWS[name]
        generator = rng()
        with (folder / file).open("w", newline="") as out:
            table = csv.writer(out)
            table.writerow(columns)
            for i in range(8 * each):
                numbers = generator.normal(size=len(columns))
                row = [
                    TEXTS.get(column, f"{number:.4f}")
                    for column, number in zip(columns, numbers, strict=True)
                ]
                row[columns.index(label)] = names[i % len(names)]
                table.writerow(row)

    return write


def ag_news(folder: Path, each: int, patch: pytest.MonkeyPatch) -> None:
    # A folder of its own: in the one that all share, train.csv could be any set's.
    (folder / "ag-news").mkdir()
    for split, count in (("train", each), ("test", 3)):
        with (folder / "ag-news" / f"{split}.csv").open("w", newline="") as file:
            table = csv.writer(file, quoting=csv.QUOTE_ALL)
            for i in range(count):
                for k, words in enumerate(WORDS):
                    table.writerow([k + 1, words, f"text {i}"])


def sst2(folder: Path, each: int, patch: pytest.MonkeyPatch) -> None:
    (folder / "SST-2").mkdir()
    for split, count in (("train", 2 * each), ("dev", 3)):
        rows = [f"{words} text {i}\t{k}" for i in range(count) for k, words in enumerate(WORDS[:2])]
        (folder / "SST-2" / f"{split}.tsv").write_text("\n".join(["sentence\tlabel", *rows]))


def newsgroups(folder: Path, each: int, patch: pytest.MonkeyPatch) -> None:
    for split, count in (("train", each), ("test", 3)):
        rows = [f"topic.{k}\t{words} text {i}" for i in range(count) for k, words in enumerate(WORDS)]
        text = "\n".join(["Category\tText", "d\tstring", "class\t", *rows]) + "\n"
        (folder / f"20newsgroups-{split}.tab").write_text(text)


WRITERS: dict[str, Callable[..., None]] = {
    "mnist": idx("mnist/train", "mnist/t10k", 10),
    "fashion-mnist": idx("fashion-mnist/train", "fashion-mnist/t10k", 10),
    "emnist-balanced": idx("emnist-balanced-train", "emnist-balanced-test", 47),
    # The letters' classes count from 1.
    "emnist-letters": idx("emnist-letters-train", "emnist-letters-test", 26, first=1),
    "cifar10": lambda *args: cifar(*args, hundred=False),
    "cifar100": lambda *args: cifar(*args, hundred=True),
    "svhn": svhn,
    "cinic10": cinic10,
    "tiny-imagenet": tiny_imagenet,
    "chexpert": chexpert,
    "unicauca75": flows("unicauca75"),
    "unicauca141": flows("unicauca141"),
    "ag-news-tokens": ag_news,
    "sst2-tokens": sst2,
    "20newsgroups-tokens": newsgroups,
}
"""By data set, what writes its files: folder, training samples of each class, and what patches checksums."""
