"""Image sets that are distributed as folders of image files: CINIC-10, Tiny ImageNet, CheXpert.

A part's inputs are the files' paths, which are decoded when they are encoded, after a limit has been applied.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from flwr_kd.checks import DataError
from flwr_kd.data._base import AnyArray, require
from flwr_kd.data._files import check_regular
from flwr_kd.data._source import Part, Source
from flwr_kd.wording import option

__all__ = ["CHEXPERT_FINDINGS", "chexpert", "chexpert_multilabel", "cinic10", "tiny_imagenet"]

CHEXPERT_FINDINGS = (
    "No Finding",
    "Enlarged Cardiomediastinum",
    "Cardiomegaly",
    "Lung Opacity",
    "Lung Lesion",
    "Edema",
    "Consolidation",
    "Pneumonia",
    "Atelectasis",
    "Pneumothorax",
    "Pleural Effusion",
    "Pleural Other",
    "Fracture",
    "Support Devices",
)
"""The columns of CheXpert's labels, whose order numbers the classes."""

_PATIENT = re.compile(r"(?:^|/)((?:train|valid)/patient(\d+)/.+)$")
_TEST_EVERY = 5
_LABELS = {"1.0": True, "1": True, "0.0": False, "0": False, "-1.0": False, "-1": False, "": False}


def cinic10(data_dir: Path | None) -> Source:
    """Return CINIC-10's training and test part from a tree of images; its "valid" part is not used."""
    torchvision = require("torchvision.datasets")
    root = _root("cinic10", data_dir, ("", "CINIC-10", "cinic10"), ("train/CLASS/*.png", "test/CLASS/*.png"))
    try:
        train, test = (torchvision.ImageFolder(str(root / part)) for part in ("train", "test"))
    except FileNotFoundError as error:
        raise DataError(f"data set 'cinic10' in {root}: {error}") from error
    if train.classes != test.classes:
        raise DataError(
            f"data set 'cinic10' in {root}: train has the classes {train.classes}, test has {test.classes}"
        )
    parts = [_part(*zip(*folder.samples, strict=True)) for folder in (train, test)]
    return Source(parts[0], parts[1], 10, tuple(train.classes))


def tiny_imagenet(data_dir: Path | None) -> Source:
    """Return Tiny ImageNet from the folder as it is distributed; its "val" part is the test set.

    The labels of its "test" part are not public. Classes are numbered in the order of their WordNet ids.
    """
    needed = ("train/WNID/images/*.JPEG", "val/images/*.JPEG", "val/val_annotations.txt", "wnids.txt")
    root = _root("tiny-imagenet", data_dir, ("", "tiny-imagenet-200", "tiny-imagenet"), needed)
    classes = sorted(line.strip() for line in _lines(root / "wnids.txt") if line.strip())
    paths, labels = [], []
    for label, wnid in enumerate(classes):
        files = sorted((root / "train" / wnid / "images").glob("*.JPEG"))
        if not files:
            raise DataError(f"data set 'tiny-imagenet': {root}/train/{wnid}/images has no *.JPEG")
        paths += files
        labels += [label] * len(files)
    test_paths, test_labels = [], []
    for number, line in enumerate(_lines(root / "val" / "val_annotations.txt"), start=1):
        cells = line.rstrip("\n").split("\t")
        if len(cells) < 2 or cells[1] not in classes:
            raise DataError(
                f"{root}/val/val_annotations.txt, row {number} must be a file, a tab and a class of wnids.txt, got "
                f"{line.strip()[:80]!r}"
            )
        test_paths.append(root / "val" / "images" / cells[0])
        test_labels.append(classes.index(cells[1]))
    return Source(_part(paths, labels), _part(test_paths, test_labels), len(classes), tuple(classes))


def chexpert(data_dir: Path | None) -> Source:
    """Return CheXpert's radiographs with exactly one finding, which is their class.

    A cell of the 14 findings is 1 (positive), 0 (negative), -1 (uncertain) or empty (not mentioned). Uncertain ones
    count as negative ("U-Zeros" of Irvin et al., AAAI 2019). Radiographs with several positive findings, or with
    none, are left out: a class is one of several that exclude each other. All views are used. The test set has the
    patients of ``train.csv`` whose number is divisible by five, so that no patient is in both parts; the part
    "valid" (234 images, few with one finding) is not used.
    """
    return _radiographs(data_dir, single=True)


def chexpert_multilabel(data_dir: Path | None) -> Source:
    """Return CheXpert's radiographs with all 14 findings of each, 0 or 1.

    As :func:`chexpert`, but none is left out. One without a positive finding is divided as "No Finding".
    """
    return _radiographs(data_dir, single=False)


def _rows(reader: csv.DictReader[str], table: Path) -> Iterator[dict[str, str]]:
    try:
        yield from reader
    except csv.Error as error:
        raise DataError(f"{table}, row {reader.reader.line_num} is no row of a table: {error}") from None


def _radiographs(data_dir: Path | None, *, single: bool) -> Source:
    folders = ("", "CheXpert-v1.0-small", "CheXpert-v1.0", "chexpert")
    root = _root("chexpert", data_dir, folders, ("train/patient*/study*/*.jpg", "train.csv"))
    table = root / "train.csv"
    parts: tuple[list[tuple[Path, list[bool]]], list[tuple[Path, list[bool]]]] = ([], [])
    reader = csv.DictReader(_lines(table), strict=True)
    if missing := [name for name in ("Path", *CHEXPERT_FINDINGS) if name not in (reader.fieldnames or ())]:
        raise DataError(
            f"{table} must have the columns Path and the 14 findings; {missing[0]!r} is not there"
        )
    for row in _rows(reader, table):
        match = _PATIENT.search(row["Path"] or "")
        if match is None:
            raise DataError(
                f"{table}, row {reader.line_num}, column 'Path' must end in train/patientN/studyN/FILE, got "
                f"{row['Path']!r}"
            )
        where = f"{table}, row {reader.line_num}"
        findings = [_positive(row[name], name, where) for name in CHEXPERT_FINDINGS]
        if not single or sum(findings) == 1:
            parts[int(match[2]) % _TEST_EVERY == 0].append((root / match[1], findings))
    if not all(parts):
        kind = "radiograph with exactly one finding" if single else "radiograph"
        raise DataError(
            f"{table} has no {kind} of patients whose number is divisible by {_TEST_EVERY}, or none of the others"
        )
    train, test = (
        Part.of_several(
            _paths(path for path, _ in part), np.array([findings for _, findings in part], np.float32)
        )
        for part in parts
    )
    if single:
        train, test = (replace(part, all_labels=None) for part in (train, test))
    return Source(train, test, len(CHEXPERT_FINDINGS), tuple(CHEXPERT_FINDINGS))


def _positive(cell: str | None, name: str, where: str) -> bool:
    if cell is None or cell.strip() not in _LABELS:
        raise DataError(f"{where}, column {name!r} must be 1.0, 0.0, -1.0 or empty, got {cell!r}")
    return _LABELS[cell.strip()]


def _root(name: str, data_dir: Path | None, folders: Sequence[str], needed: Sequence[str]) -> Path:
    """Return the first folder that has the beginnings of all paths that are needed."""
    roots = [data_dir / folder for folder in folders] if data_dir else []
    beginnings = [path.partition("/")[0] for path in needed]
    for root in roots:
        if all((root / beginning).exists() for beginning in beginnings):
            return root
    where = ", ".join(map(str, roots)) or f"a folder that {option('data_dir', 'FOLDER')} names"
    raise DataError(f"data set {name!r} needs {', '.join(needed[:-1])} and {needed[-1]} in {where}")


def _lines(path: Path) -> Iterable[str]:
    try:
        check_regular(path)
        return path.read_text(encoding="utf-8-sig").splitlines(keepends=True)
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error


def _part(paths: Iterable[str | Path], labels: Iterable[int]) -> Part:
    return Part(_paths(paths), np.asarray(list(labels), dtype=np.int64))


def _paths(paths: Iterable[str | Path]) -> AnyArray:
    return np.array([str(path) for path in paths], dtype=object)
