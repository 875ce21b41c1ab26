"""A client's own data: folders of images by class, and csv files."""

from __future__ import annotations

import os
import re
import unicodedata
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from flwr_kd.data import DataError, DataSpec, load, load_own, load_public, load_samples, load_test

GREY = DataSpec(("cat", "dog", "owl"), (1, 4, 4))
COLOUR = DataSpec(("cat", "dog", "owl"), (3, 4, 4))
TABLE = DataSpec(("cat", "dog", "owl"), (2,))


def paint(path: Path, value: int = 0, side: int = 4) -> Path:
    """Write a grey image of one value."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L", (side, side), value).save(path)
    return path


def animals(root: Path, **counts: int) -> Path:
    """Write a folder with a number of images per class; values differ, and increase in the order of the names."""
    value = 0
    for name, count in sorted(counts.items()):
        (root / name).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            paint(root / name / f"{number:03}.png", value)
            value += 1
    return root


def values(x: torch.Tensor) -> list[int]:
    """Return the original grey values of images with one value each."""
    levels = (x * 0.5 + 0.5) * 255
    assert torch.allclose(levels, levels.flatten(1)[:, :1, None, None].expand_as(levels), atol=1e-3)
    return [round(float(level)) for level in levels[:, 0, 0, 0]]


# the form that clients agree on


@pytest.mark.parametrize(
    ("classes", "shape", "expected"),
    [
        ("cat,dog", "1x28x28", DataSpec(("cat", "dog"), (1, 28, 28))),
        (" no , yes ", "16", DataSpec(("no", "yes"), (16,))),
        ("1,0", "3 X 8 x 9", DataSpec(("1", "0"), (3, 8, 9))),
        (unicodedata.normalize("NFD", "Bär,Löwe"), "2", DataSpec(("Bär", "Löwe"), (2,))),
    ],
)
def test_specs_are_read_from_texts(classes: str, shape: str, expected: DataSpec) -> None:
    assert DataSpec.parse(classes, shape) == expected


@pytest.mark.parametrize(
    ("classes", "shape", "message"),
    [
        ("cat", "4", r"classes must be at least 2 different names, got 'cat'"),
        ("cat,cat", "4", r"classes must be at least 2 different names, got 'cat', 'cat'"),
        ("cat,,dog", "4", r"classes must be .*, got 'cat', '', 'dog'"),
        *(
            ("cat,dog", shape, rf"input-shape must be CHANNELSxHEIGHTxWIDTH .* got '{shape}'")
            for shape in (
                "",
                "0",
                "28x28",
                "2x28x28",
                "1x0x28",
                "1x28x28x1",
                "-4",
                "1x28x",
                "four",
                "1.5",
                "²",
            )
        ),
    ],
)
def test_bad_specs_are_refused(classes: str, shape: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        DataSpec.parse(classes, shape)
    with pytest.raises(DataError, match=r"input-shape must be .* got \[True\]"):
        DataSpec(("a", "b"), (True,))


def test_a_label_has_the_number_of_its_name() -> None:
    spec = DataSpec(("3", "1", "nan", "inf", "01"), (2,))
    indices = {
        name: spec.index(name)
        for name in ("3", "1", " 1 ", "3.0", "1e0", "nan", "inf", "01", "-inf", "2", "1.5")
    }
    assert indices == {
        **{"3": 0, "1": 1, " 1 ": 1, "3.0": 0, "1e0": 1, "nan": 2, "inf": 3, "01": 4},
        **{"-inf": None, "2": None, "1.5": None},
    }


def test_a_spec_without_data_builds_a_model() -> None:
    bundle = GREY.bundle()
    assert (bundle.num_classes, bundle.input_shape, len(bundle.train), len(bundle.test)) == (
        3,
        (1, 4, 4),
        0,
        0,
    )
    assert bundle.train.x.shape == (0, 1, 4, 4)


# folders of images


def test_images_come_by_class_in_the_order_of_their_names(tmp_path: Path) -> None:
    root = animals(tmp_path / "train", owl=2, cat=3)
    paint(root / "cat" / "more" / "a.PNG", 90)
    paint(root / "cat" / "more" / ".hidden" / "a.png", 91)
    paint(root / "cat" / ".a.png", 92)
    paint(root / ".trash" / "a.png", 93)
    (root / "cat" / ".DS_Store").write_text("")
    (root / "dog").mkdir()
    (root / "README.txt").write_text("not an image, and in no class folder")
    paint(tmp_path / "test" / "owl" / "a.png", 77)
    train, test = load_own(tmp_path, GREY)
    assert values(train.x) == [0, 1, 2, 90, 3, 4]
    assert train.y.tolist() == [0, 0, 0, 0, 2, 2]
    assert (values(test.x), test.y.tolist()) == ([77], [2])
    assert train.x.dtype == torch.float32
    again, _ = load_own(tmp_path, GREY, seed=5)
    assert torch.equal(again.x, train.x)


def test_folder_names_are_compared_in_a_normal_form(tmp_path: Path) -> None:
    paint(tmp_path / "train" / unicodedata.normalize("NFD", "Bär") / "a.png")
    paint(tmp_path / "train" / "Löwe" / "a.png")
    train, test = load_own(tmp_path, DataSpec.parse("Löwe,Bär", "1x4x4"))
    assert sorted(train.y.tolist() + test.y.tolist()) == [0, 1]


def test_a_fifth_is_held_out_without_a_test_part(tmp_path: Path) -> None:
    animals(tmp_path, cat=20, dog=10)
    train, test = load_own(tmp_path, GREY, seed=3)
    assert sorted(values(train.x) + values(test.x)) == list(range(30))
    assert values(train.x) == sorted(values(train.x))
    assert torch.bincount(test.y).tolist() == [4, 2]
    assert values(load_own(tmp_path, GREY, seed=3)[1].x) == values(test.x)
    assert values(load_own(tmp_path, GREY, seed=4)[1].x) != values(test.x)


def test_one_image_alone_is_for_training(tmp_path: Path) -> None:
    paint(tmp_path / "owl" / "a.png")
    train, test = load_own(tmp_path, GREY)
    assert (len(train), len(test)) == (1, 0)


def test_train_and_test_may_be_classes(tmp_path: Path) -> None:
    paint(tmp_path / "train" / "a.png", 1)
    paint(tmp_path / "bus" / "a.png", 2)
    train, test = load_own(tmp_path, DataSpec.parse("train,bus", "1x4x4"))
    assert sorted(values(train.x) + values(test.x)) == [1, 2]


def deep(path: Path) -> None:
    Image.fromarray(np.full((4, 4), 256 * 200, dtype=np.uint16)).save(path.with_suffix(".png"))


def pnm(path: Path) -> None:
    path.with_suffix(".pgm").write_bytes(b"P5 4 4 65535\n" + (256 * 200).to_bytes(2, "big") * 16)


def palette(path: Path) -> None:
    Image.new("RGB", (4, 4), (200, 200, 200)).quantize(4).save(path.with_suffix(".png"))


def camera(path: Path) -> None:
    images = [Image.new("L", (4, 4), 200) for _ in range(2)]
    images[0].save(path.with_suffix(".jpg"), format="MPO", save_all=True, append_images=images[1:])


def of_mode(mode: str, value: object, ending: str) -> Callable[[Path], None]:
    return lambda path: Image.new(mode, (4, 4), value).save(path.with_suffix(ending))  # type: ignore[arg-type]


@pytest.mark.parametrize("spec", [GREY, COLOUR], ids=["grey", "colour"])
@pytest.mark.parametrize(
    ("write", "level"),
    [
        (of_mode("L", 200, ".png"), 200 / 255),
        (of_mode("L", 200, ".webp"), 200 / 255),
        (of_mode("1", 1, ".tif"), 1.0),
        (of_mode("LA", (200, 9), ".png"), 200 / 255),
        (of_mode("RGB", (200, 200, 200), ".bmp"), 200 / 255),
        (of_mode("RGBA", (200, 200, 200, 0), ".png"), 200 / 255),
        (palette, 200 / 255),
        (camera, 200 / 255),
        (deep, 256 * 200 / 65535),
        (pnm, 256 * 200 / 65535),
    ],
)
def test_images_are_scaled_by_the_largest_value_of_their_format(
    write: Callable[[Path], None], level: float, spec: DataSpec, tmp_path: Path
) -> None:
    (tmp_path / "cat").mkdir()
    write(tmp_path / "cat" / "a")
    train, _ = load_own(tmp_path, spec)
    assert train.x.shape == (1, *spec.input_shape)
    # JPEG and WebP are not exact.
    assert torch.allclose(train.x, torch.tensor(2 * level - 1), atol=0.02)


def test_colours_stay_or_become_their_luminance(tmp_path: Path) -> None:
    (tmp_path / "cat").mkdir()
    Image.new("RGB", (4, 4), (255, 0, 51)).save(tmp_path / "cat" / "a.png")
    (coloured, _), (grey, _) = load_own(tmp_path, COLOUR), load_own(tmp_path, GREY)
    assert coloured.x[0, :, 0, 0].tolist() == pytest.approx([1.0, -1.0, -0.6], abs=1e-6)
    assert float(grey.x[0, 0, 2, 2]) == pytest.approx(2 * (0.299 + 0.114 * 0.2) - 1, abs=1e-6)


@pytest.mark.parametrize("side", [1, 3, 4, 7, 40])
def test_images_of_any_size_fill_the_shape(side: int, tmp_path: Path) -> None:
    """Slightly smaller images are also resized: padding would give each size another margin."""
    paint(tmp_path / "cat" / "a.png", 255, side)
    Image.new("L", (side, 2 * side), 255).save(tmp_path / "cat" / "b.png")
    train, test = load_own(tmp_path, GREY)
    both = torch.cat([train.x, test.x])
    assert torch.allclose(both, torch.ones(2, 1, 4, 4))


# tables


def test_tables_are_not_scaled(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_text("age;LABEL;weight\n" + "30.25;dog;-0.5\n" * 4 + "1e3;cat;7\n")
    train, test = load_own(file, TABLE)
    assert train.x.tolist() == [[30.25, -0.5]] * 3 + [[1000.0, 7.0]]
    assert train.y.tolist() == [1, 1, 1, 0]
    assert (test.x.tolist(), test.y.tolist()) == ([[30.25, -0.5]], [1])


def test_tables_may_come_in_two_parts(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("".join(f"{i},0,owl\n" for i in range(20)))
    train, test = load_own(tmp_path, TABLE)
    assert (len(train), len(test)) == (16, 4)
    (tmp_path / "test.csv").write_text("5,6,cat\n")
    train, test = load_own(tmp_path, TABLE)
    assert train.x[:, 0].tolist() == list(range(20))
    assert (test.x.tolist(), test.y.tolist()) == ([[5.0, 6.0]], [0])


def test_labels_may_be_numbers(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("0.5,1.0\n0.5,7\n0.5,1\n")
    (tmp_path / "test.csv").write_text("0.5,7\n")
    train, test = load_own(tmp_path, DataSpec.parse("7,1", "1"))
    assert (train.y.tolist(), test.y.tolist()) == ([1, 0, 1], [0])


def test_a_class_may_be_named_like_a_missing_value(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("age,code\n0.5,NA\n0.7,NB\n")
    assert load_test(tmp_path / "a.csv", DataSpec(("NA", "NB"), (1,))).y.tolist() == [0, 1]
    with pytest.raises(DataError, match=r"row 2, column 'code': a row has no label"):
        load_test(tmp_path / "a.csv", DataSpec(("A", "NB"), (1,)))


def test_labels_of_other_digits_are_no_classes() -> None:
    spec = DataSpec.parse("10,1", "1")
    assert [spec.index(label) for label in ("10.0", "1_0", "١٠", "inf")] == [0, None, None, None]


# data that is refused


def nothing(root: Path) -> Path:
    return root / "scns"


def long_name(root: Path) -> Path:
    return root / ("a" * 300)


def empty(root: Path) -> Path:
    return root


def no_images(root: Path) -> Path:
    (root / "cat").mkdir()
    return root


def unknown(root: Path) -> Path:
    return animals(root, cat=2, dgo=1)


def loose(root: Path) -> Path:
    paint(animals(root, cat=2) / "b.png")
    paint(root / "a.JPG")
    return root


def scan(root: Path) -> Path:
    (animals(root, cat=2) / "cat" / "0.dcm").write_bytes(b"DICM")
    return root


def broken(root: Path) -> Path:
    file = paint(root / "cat" / "a.png", side=64)
    file.write_bytes(file.read_bytes()[:40])
    return root


def not_an_image(root: Path) -> Path:
    (animals(root, cat=2) / "cat" / "b.png").write_text("text")
    return root


def dangling(root: Path) -> Path:
    os.symlink(root / "gone.png", animals(root, cat=2) / "cat" / "b.png")
    return root


def pipe(root: Path) -> Path:
    os.mkfifo(animals(root, cat=2) / "cat" / "b.png")
    return root


def huge(root: Path) -> Path:
    Image.new("1", (10_000, 5_001)).save(animals(root, cat=2) / "cat" / "b.png")
    return root


def link_to_itself(root: Path) -> Path:
    os.symlink(root, animals(root, cat=2) / "cat" / "again")
    return root


def link_out(root: Path) -> Path:
    outside = paint(root / "outside" / "a.png")
    os.symlink(outside, animals(root / "data", cat=2) / "cat" / "b.png")
    return root / "data"


def linked_class(root: Path) -> Path:
    os.symlink("cat", animals(root, cat=2) / "dog")
    return root


def postscript(root: Path) -> Path:
    Image.new("L", (4, 4)).save(animals(root, cat=2) / "cat" / "b.png", format="EPS")
    return root


def volume(root: Path) -> Path:
    (root / "cat").mkdir()
    pages = [Image.new("L", (4, 4)) for _ in range(3)]
    pages[0].save(root / "cat" / "a.tif", save_all=True, append_images=pages[1:])
    return root


def floats(root: Path) -> Path:
    (root / "cat").mkdir()
    Image.new("F", (4, 4), 0.5).save(root / "cat" / "a.tiff")
    return root


def only_test(root: Path) -> Path:
    animals(root / "test", cat=2)
    return root


def empty_test(root: Path) -> Path:
    animals(root / "train", cat=2)
    (root / "test" / "cat").mkdir(parents=True)
    return root


def third_part(root: Path) -> Path:
    animals(root / "train", cat=2)
    animals(root / "val", cat=2)
    return root


def two_trains(root: Path) -> Path:
    animals(root / "train", cat=2)
    (root / "train.csv").write_text("1,2,cat\n")
    return root


def file(root: Path) -> Path:
    (root / "a.csv").write_text("1,2,cat\n")
    return root / "a.csv"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            nothing,
            r"'.*scns' does not exist; expected a folder with one sub-folder .*, or a csv file",
        ),
        (long_name, r"'.*aaa' cannot be read: File name too long"),
        (empty, r"has no sub-folders; expected one per class: cat, dog, owl"),
        (no_images, r"has no images in its class folders"),
        (unknown, r"folder '.*/dgo': unknown class 'dgo' \(did you mean 'dog'\?\); valid: cat, dog, owl"),
        (loose, r"the image '.*/a\.JPG' is in no class folder"),
        (scan, r"the file '.*/cat/0\.dcm' is not an image; names of images end in \.bmp, .*\.png"),
        (broken, r"the image '.*/cat/a\.png' cannot be read: "),
        (not_an_image, r"the image '.*/cat/b\.png' cannot be read: cannot identify image file"),
        (dangling, r"the image '.*/cat/b\.png' cannot be read: .*No such file"),
        (pipe, r"'.*/cat/b\.png' cannot be read: it is a named pipe"),
        (huge, r"b\.png' has 10,000 x 5,001 pixels, at most 50,000,000 are read"),
        (link_to_itself, r"'.*/cat/again' is a symbolic link to '.*'; .* \(cp -rl\)"),
        (link_out, r"'.*/cat/b\.png' is a symbolic link to '.*/outside/a\.png'"),
        (linked_class, r"'.*/dog' is a symbolic link to 'cat'"),
        (postscript, r"the image '.*/cat/b\.png' cannot be read: cannot identify image file"),
        (volume, r"the image '.*/cat/a\.tif' has 3 pages or frames, expected one"),
        (floats, r"the image '.*/cat/a\.tiff' has values of 32 bits, .* save it with 8 or 16"),
        (only_test, r"has a test part, but neither train/ nor train\.csv"),
        (empty_test, r"'.*/test' has no images"),
        (third_part, r"has train, and may have no other folders, got 'val'"),
        (two_trains, r"has both train/ and train\.csv; one is expected"),
        (
            file,
            r"a\.csv' is a table, for which input-shape must be the number of columns .* '1x4x4'",
        ),
    ],
)
def test_folders_that_cannot_be_used(make: Callable[[Path], Path], message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message) as caught:
        load_own(make(tmp_path), GREY)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"is empty"),
        ("1,2,3,cat\n", r"has 3 columns beside the label, input-shape is 2"),
        ("1,cat\n", r"has 1 columns beside the label, input-shape is 2"),
        ("a,b,label\n1,x,cat\n", r"row 2, column 'b': 'x' is not a finite number"),
        ("1,2,cat\n1,,dog\n", r"row 2, column 1: '' is not a finite number"),
        ("1,2,cat\n1,inf,dog\n", r"row 2, column 1: 'inf' is not a finite number"),
        ("1,2,cat\n1,1e39,dog\n", r"has numbers beyond the range of float32"),
        ("1,2,cat\n1,2,\n", r"column 2: a row has no label"),
        ("1,2,cat\n1,2\n", r"row 2 has 2 cells, but the first row has 3"),
        (
            "a,b,label\n1,2,cta\n",
            r"row 2, column 'label': unknown class 'cta' \(did you mean 'cat'\?\); valid: cat, dog, owl",
        ),
        ("a,b,label\n", r"at least one feature, one label column and one row"),
        (",a,b,label\n0,1,2,cat\n", r"first column has no name.*index=False"),
        ('a,b,label\n"' + "1" * 200_000 + '",1,cat\n', r"row 2: field larger than field limit"),
    ],
)
def test_tables_that_cannot_be_used(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(text)
    with pytest.raises(DataError, match=message) as caught:
        load_own(path, TABLE)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("load", [load_own, load_test, load_samples])
def test_a_device_or_a_pipe_is_no_table(load: Callable[..., object], tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.csv")
    for path, kind in ((tmp_path / "a.csv", "named pipe"), (Path("/dev/zero"), "device")):
        with pytest.raises(DataError, match=rf"'{path}' cannot be read: it is a {kind}"):
            load(path, TABLE)


def test_a_folder_may_be_reached_by_a_link(tmp_path: Path) -> None:
    os.symlink(animals(tmp_path / "data", cat=2, dog=2), tmp_path / "link")
    assert load_test(tmp_path / "link", GREY).y.tolist() == [0, 0, 1, 1]


def test_a_folder_is_no_table_and_bytes_are_no_text(tmp_path: Path) -> None:
    animals(tmp_path, cat=2)
    with pytest.raises(DataError, match=r"is a folder of images, .* input-shape must be CHANNELSx.* got '2'"):
        load_own(tmp_path, TABLE)
    with pytest.raises(DataError, match=r"000\.png' cannot be read"):
        load_own(tmp_path / "cat" / "000.png", TABLE)


# test data and public data


def test_test_data_is_the_test_part_or_all_samples(tmp_path: Path) -> None:
    whole = animals(tmp_path / "whole", cat=3, owl=2)
    assert load_test(whole, GREY).y.tolist() == [0, 0, 0, 2, 2]
    animals(tmp_path / "parts" / "test", dog=2)
    assert load_test(tmp_path / "parts", GREY).y.tolist() == [1, 1]
    animals(tmp_path / "parts" / "train", cat=2)
    assert load_test(tmp_path / "parts", GREY).y.tolist() == [1, 1]
    (tmp_path / "a.csv").write_text("1,2,owl\n")
    assert load_test(tmp_path / "a.csv", TABLE).y.tolist() == [2]
    animals(tmp_path / "half" / "train", cat=2)
    with pytest.raises(DataError, match=r"half' has a training part, but neither test/ nor test\.csv"):
        load_test(tmp_path / "half", GREY)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1,2\n3,4\n", [[1, 2], [3, 4]]),
        ("a,b\n1,2\n", [[1, 2]]),
        ("1,2,bird\n3,4,\n", None),
        ("1,2,bird\n3,4,cow\n", [[1, 2], [3, 4]]),
        ("label,a,b\nx,1,2\n", [[1, 2]]),
    ],
)
def test_samples_need_no_labels(text: str, expected: list[list[int]] | None, tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(text)
    if expected is None:
        with pytest.raises(DataError, match=r"a row has no label"):
            load_samples(path, TABLE)
        return
    samples = load_samples(path, TABLE)
    assert (samples.x.tolist(), set(samples.y.tolist())) == (expected, {-1})


def test_samples_that_do_not_fit(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("a,label\n1,2\n")
    with pytest.raises(DataError, match=r"has 1 columns beside the label, input-shape is 2"):
        load_samples(path, TABLE)
    path.write_text("a,b\n")
    with pytest.raises(DataError, match=r"must have at least one feature, one row of data"):
        load_samples(path, TABLE)
    (tmp_path / "folder").mkdir()
    with pytest.raises(DataError, match=r"folder' has no images"):
        load_samples(tmp_path / "folder", GREY)
    with pytest.raises(DataError, match=r"is a folder of images"):
        load_samples(tmp_path / "folder", TABLE)
    with pytest.raises(DataError, match=r"does not exist; expected"):
        load_samples(tmp_path / "flder", GREY)


def test_a_limit_keeps_some_of_the_samples_in_their_order(tmp_path: Path) -> None:
    animals(tmp_path, any=12, thing=8)
    every = load_public(str(tmp_path), dataset=GREY)
    assert values(every.x) == list(range(20))
    some = load_public(str(tmp_path), dataset=GREY, seed=1, limit=7)
    assert len(some) == 7
    assert values(some.x) == sorted(values(some.x))
    assert values(load_public(str(tmp_path), dataset=GREY, seed=1, limit=7).x) == values(some.x)
    assert values(load_public(str(tmp_path), dataset=GREY, seed=2, limit=7).x) != values(some.x)
    (tmp_path / "a.csv").write_text("".join(f"{i},0\n" for i in range(20)))
    rows = load_public(f"csv:{tmp_path / 'a.csv'}", dataset=TABLE, seed=1, limit=7).x[:, 0].tolist()
    assert rows == values(some.x)


def test_an_image_set_takes_the_form_of_own_images() -> None:
    digits = load("digits").train.x
    spec = DataSpec.parse("a,b,c", "3x8x8")
    public = load_public("digits", dataset=spec, limit=50)
    assert public.x.shape == (50, 3, 8, 8)
    assert set(public.y.tolist()) == {-1}
    assert (float(public.x.min()), float(public.x.max())) == (-1.0, 1.0)
    every = load_public("digits", dataset=DataSpec.parse("a,b,c", "1x8x8"))
    assert len(every) == 1797
    mine = (every.x * 0.5 + 0.5).flatten(1)
    assert torch.cdist(digits[:20].flatten(1), mine).min(dim=1).values.max() < 1e-6


@pytest.mark.parametrize(
    ("name", "spec", "message"),
    [
        (
            None,
            GREY,
            r"public must be the absolute path .*, or an image set: there is no default .* '1x4x4', got ''",
        ),
        ("", TABLE, r"public must be the absolute path of a folder or of a csv file: there is no default"),
        (
            "digits",
            TABLE,
            r"public must be the absolute path .* for data of input-shape '2', got 'digits' \(images\)",
        ),
        ("sst2", GREY, r"public must be .* got 'sst2' \(texts\)"),
        ("csv:here.csv", TABLE, r"public must be the absolute path .* got 'csv:here.csv' \(tables\)"),
        ("mnst", GREY, r"unknown data set 'mnst'"),
        ("/no/such/place", GREY, r"public: '/no/such/place' does not exist"),
    ],
)
def test_public_data_that_cannot_be_used(name: str | None, spec: DataSpec, message: str) -> None:
    with pytest.raises(DataError, match=message):
        load_public(name, dataset=spec)


def test_without_the_library_the_error_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "PIL.Image", None)
    with pytest.raises(DataError, match=re.escape("needs the package 'PIL'")):
        load_own(animals_without_library(tmp_path), GREY)


def animals_without_library(root: Path) -> Path:
    (root / "cat").mkdir()
    (root / "cat" / "a.png").write_bytes(b"")
    return root
