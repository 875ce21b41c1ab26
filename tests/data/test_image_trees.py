"""Loaders of image sets that are folders of files, on small folders in the form of the real ones."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from flwr_kd.data import DataError, _images, load, load_public
from flwr_kd.data._image_trees import CHEXPERT_FINDINGS

WNIDS = ["n02124075", "n01443537", "n04067472"]
"""In the order of wnids.txt, which is not sorted."""


def save(path: Path, value: int, mode: str = "RGB", size: tuple[int, int] = (64, 64)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, value if mode == "L" else (value, value, value)).save(path, quality=95)


def values(x: torch.Tensor, name: str) -> np.ndarray:
    """Return each image's mean in 0 .. 255, before its normalisation."""
    spec = _images.SPECS[name]
    mean, std = (torch.tensor(v).view(1, -1, 1, 1) for v in (spec.mean, spec.std))
    return ((x * std + mean) * 255).mean(dim=(1, 2, 3)).numpy()


def write_tiny_imagenet(root: Path) -> None:
    for k, wnid in enumerate(WNIDS):
        for i in range(4):
            # Some of the real files are grey.
            save(root / "train" / wnid / "images" / f"{wnid}_{i}.JPEG", 40 * k + i, "L" if i == 3 else "RGB")
        (root / "train" / wnid / f"{wnid}_boxes.txt").write_text(f"{wnid}_0.JPEG\t0\t0\t63\t63\n")
    rows = []
    for i in range(6):
        save(root / "val" / "images" / f"val_{i}.JPEG", 200 + i)
        rows.append(f"val_{i}.JPEG\t{WNIDS[i % 3]}\t0\t32\t44\t62\n")
    (root / "val" / "val_annotations.txt").write_text("".join(rows))
    save(root / "test" / "images" / "test_0.JPEG", 0)
    (root / "wnids.txt").write_text("\n".join(WNIDS) + "\n")
    (root / "words.txt").write_text("n01443537\tgoldfish, Carassius auratus\n")


@pytest.mark.parametrize("folder", ["", "tiny-imagenet-200"])
def test_tiny_imagenet(tmp_path: Path, folder: str) -> None:
    write_tiny_imagenet(tmp_path / folder)
    bundle = load("tiny-imagenet", data_dir=str(tmp_path))
    assert bundle.input_shape == (3, 64, 64)
    assert bundle.num_classes == 3
    # Classes are sorted: n01443537, n02124075, n04067472.
    assert bundle.train.y.tolist() == np.repeat([0, 1, 2], 4).tolist()
    expected = [40 * k + i for k in (1, 0, 2) for i in range(4)]
    assert np.abs(values(bundle.train.x, "tiny-imagenet") - expected).max() < 1
    assert bundle.test.y.tolist() == [1, 0, 2, 1, 0, 2]
    assert np.abs(values(bundle.test.x, "tiny-imagenet") - np.arange(200, 206)).max() < 1


def test_tiny_imagenet_as_public_data_takes_the_form_of_the_clients_images(tmp_path: Path) -> None:
    write_tiny_imagenet(tmp_path)
    public = load_public("tiny-imagenet", dataset="cifar100", data_dir=str(tmp_path), limit=6)
    assert public.x.shape == (6, 3, 32, 32)
    # Even areas stay even, in the normalisation of the clients' set.
    assert np.abs(values(public.x, "cifar100") % 40).max() < 4
    assert torch.bincount(public.y).tolist() == [2, 2, 2]


def test_missing_or_damaged_tiny_imagenet_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"needs train/WNID/images/\*.JPEG, .* and wnids.txt in .*tiny-imagenet-200"
    ):
        load("tiny-imagenet", data_dir=str(tmp_path))
    write_tiny_imagenet(tmp_path)
    annotations = tmp_path / "val" / "val_annotations.txt"
    rows = annotations.read_text()
    annotations.write_text(rows.replace("val_2.JPEG\tn04067472", "val_2.JPEG\tn99999999"))
    with pytest.raises(DataError, match=r"val_annotations.txt, row 3 must be a file, a tab and a class"):
        load("tiny-imagenet", data_dir=str(tmp_path))
    annotations.write_text(rows.replace("val_2.JPEG", "val_9.JPEG"))
    with pytest.raises(DataError, match=r"val_9.JPEG' cannot be read: .*No such file"):
        load("tiny-imagenet", data_dir=str(tmp_path))
    (tmp_path / "wnids.txt").write_text("n00000001\n")
    with pytest.raises(DataError, match=r"n00000001/images has no \*.JPEG"):
        load("tiny-imagenet", data_dir=str(tmp_path))


# CheXpert


def write_chexpert(root: Path, cells: list[dict[str, str]], base: str = "CheXpert-v1.0-small") -> None:
    """Write a radiograph per row; patients are numbered from 1, and their images' values are ten times that."""
    columns = ["Path", "Sex", "Age", "Frontal/Lateral", "AP/PA", *CHEXPERT_FINDINGS]
    root.mkdir(parents=True, exist_ok=True)
    with open(root / "train.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, columns, restval="")
        writer.writeheader()
        for number, row in enumerate(cells, start=1):
            path = f"train/patient{number:05d}/study1/view1_frontal.jpg"
            # Real ones have different sizes, and are grey.
            save(root / path, 10 * number, "L", (390 + number, 320))
            writer.writerow(
                {"Path": f"{base}/{path}", "Sex": "Female", "Age": "68", "Frontal/Lateral": "Frontal", **row}
            )


ROWS = [
    {"No Finding": "1.0"},
    {"Edema": "1.0", "Pneumonia": "-1.0", "Fracture": "0.0"},
    {"Edema": "1.0", "Fracture": "1.0"},  # Several findings.
    {"Pneumonia": "-1.0"},  # An uncertain one only.
    {"Fracture": "1.0"},  # The fifth patient.
    {},
    {"Support Devices": "1.0", "Lung Opacity": ""},
    {"Edema": "1.0"},
    {"Cardiomegaly": "1.0"},
    {"Edema": "1.0"},  # The tenth patient.
    {"No Finding": "1.0"},
    {"No Finding": "1.0"},
    {"Edema": "1.0"},
]


@pytest.mark.parametrize("folder", ["", "CheXpert-v1.0-small", "CheXpert-v1.0"])
def test_chexpert_has_the_radiographs_with_one_finding(tmp_path: Path, folder: str) -> None:
    write_chexpert(tmp_path / folder, ROWS, base=folder or "anything")
    bundle = load("chexpert", data_dir=str(tmp_path), hold_back=True)
    public = load_public(None, dataset="chexpert", data_dir=str(tmp_path))
    assert bundle.input_shape == (1, 64, 64)
    assert bundle.num_classes == 14
    # One of the eight samples for training is held back; only classes with more than one can give it.
    assert (len(bundle.train), len(public)) == (7, 1)
    found = {}
    for part in (bundle.train, public):
        found |= dict(
            zip(values(part.x, "chexpert").round().astype(int).tolist(), part.y.tolist(), strict=True)
        )
    names = {value: CHEXPERT_FINDINGS[label] for value, label in found.items()}
    assert names == {
        10: "No Finding", 20: "Edema", 70: "Support Devices", 80: "Edema", 90: "Cardiomegaly", 110: "No Finding",
        120: "No Finding", 130: "Edema",
    }  # fmt: skip
    assert [CHEXPERT_FINDINGS[label] for label in bundle.test.y] == ["Fracture", "Edema"]
    assert np.abs(values(bundle.test.x, "chexpert") - [50, 100]).max() < 1


def test_chexpert_with_all_findings(tmp_path: Path) -> None:
    write_chexpert(tmp_path, ROWS)
    bundle = load("chexpert-multilabel", data_dir=str(tmp_path), hold_back=True)
    public = load_public(None, dataset="chexpert-multilabel", data_dir=str(tmp_path))
    assert (bundle.multi_label, bundle.num_classes, bundle.class_names) == (True, 14, CHEXPERT_FINDINGS)
    assert (len(bundle.train), len(public), len(bundle.test)) == (9, 2, 2)
    findings = {}
    for part in (bundle.train, public, bundle.test):
        for image, labels in zip(*part.tensors, strict=True):
            patient = round(float(values(image[None], "chexpert")[0]) / 10)
            findings[patient] = [name for name, label in zip(CHEXPERT_FINDINGS, labels, strict=True) if label]
    expected = {
        patient: [name for name in CHEXPERT_FINDINGS if row.get(name) == "1.0"]
        for patient, row in enumerate(ROWS, start=1)
    }
    assert findings == expected
    assert [] in expected.values()
    assert ["Edema", "Fracture"] in expected.values()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "No Finding",
            "Nothing",
            r"must have the columns Path and the 14 findings; 'No Finding' is not there",
        ),
        ("-1.0", "u", r"row 3, column 'Pneumonia' must be 1.0, 0.0, -1.0 or empty, got 'u'"),
        ("train/patient00002", "p2", r"row 3, column 'Path' must end in train/patientN/studyN/FILE"),
        ("patient000", "patient100", r"1000./study1/view1_frontal.jpg' cannot be read"),
    ],
)
def test_damaged_chexpert_is_named(tmp_path: Path, old: str, new: str, message: str) -> None:
    write_chexpert(tmp_path, ROWS)
    table = tmp_path / "train.csv"
    table.write_text(table.read_text().replace(old, new))
    with pytest.raises(DataError, match=message):
        load("chexpert", data_dir=str(tmp_path))


def test_chexpert_needs_patients_for_both_parts(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"needs train/patient\*/study\*/\*.jpg and train.csv in "):
        load("chexpert", data_dir=str(tmp_path))
    write_chexpert(tmp_path, ROWS[:4])
    with pytest.raises(DataError, match=r"no radiograph with exactly one finding of patients whose number"):
        load("chexpert", data_dir=str(tmp_path))


def test_a_quotation_mark_too_many_is_named_with_its_row(tmp_path: Path) -> None:
    write_chexpert(tmp_path, ROWS)
    table = next(tmp_path.rglob("train.csv"))
    lines = table.read_text().splitlines()
    lines[2] = '"x"y' + lines[2]
    table.write_text("\n".join(lines))
    with pytest.raises(DataError, match=r"train.csv, row 3 is no row of a table: "):
        load("chexpert", data_dir=str(tmp_path))
