"""Tables from csv files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from flwr_kd.data import DataError, load, load_public


def write_csv(path: Path, lines: list[str]) -> str:
    path.write_text("\n".join(lines) + "\n")
    return f"csv:{path}"


def letter_rows(number: int = 100) -> list[str]:
    values = np.random.default_rng(0).normal(5, 3, (number, 3)).round(3)
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
    plural = load(write_csv(tmp_path / "plural.csv", ["Labels,a,b,c", *moved]))
    for bundle in (named, numbers, first, semicolons, plural):
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
    # The second table is on the scale of the first, so that equal steps of raw values stay equal.
    steps = public.x.diff(dim=0)
    assert torch.allclose(steps, steps[:1].expand_as(steps), atol=1e-5)
    assert 0.2 < steps[0, 0] < 0.5
    narrow = write_csv(tmp_path / "z.csv", ["1,0", "2,1", "3,0"])
    with pytest.raises(DataError, match=r"a table with 1 features cannot replace one with 3"):
        load_public(narrow, dataset=name)
    assert bundle.input_shape == (3,)


def test_csv_path_relative_to_data_dir(tmp_path: Path) -> None:
    write_csv(tmp_path / "x.csv", letter_rows())
    bundle = load("csv:x.csv", data_dir=str(tmp_path))
    assert bundle.name == "csv:x.csv"
    assert len(bundle.train) == 60


BODY = [f"{i * 0.37:.2f},{i % 5},{'abc'[i % 3]}" for i in range(30)]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        # What pandas and R write with their defaults.
        (
            [",f,g,label", *(f"{i},{row}" for i, row in enumerate(BODY))],
            r"first column has no name.*index=False",
        ),
        (['"","f","label"', '"1",2,"a"', '"2",3,"b"'], r"first column has no name.*row\.names=FALSE"),
        ([",0,1", "0,0.5,1", "1,0.7,2"], r"first column has no name"),
        (
            ["Unnamed: 0,f,g,label", *(f"{i},{row}" for i, row in enumerate(BODY))],
            r"first column has no name",
        ),
        (["index,f,label", "0,2,a", "1,3,b"], r"column 'index' numbers the rows.*index=False"),
        (
            ["Id,f,g,label", *(f"{i * 7 % 30},{row}" for i, row in enumerate(BODY))],
            r"column 'Id' numbers the rows",
        ),
        (["0,1,2", *BODY], r"row 1: 0, 1, 2 may be a header of column numbers"),
        (["0,1,kind", *BODY], r"row 1: 0, 1, kind may be a header of column numbers"),
        (["1,2,3", *BODY], r"row 1: 1, 2, 3 may be a header of column numbers"),
        (["2019.0,2020.0,2021.0", *BODY], r"may be a header of column numbers"),
        (["f,g,label", *(f"{i},{row}" for i, row in enumerate(BODY))], r"row 2 has 4 .*row\.names=FALSE"),
        (["sep=;", "f;g;label", "1;2;a"], r"row 1: 'sep=;?,?' is a note for Excel"),
        (["# mine", "f,g,label", *BODY], r"first row has 1: it must be a header or a sample"),
        # Columns whose meaning is not certain.
        (["y,f,g", *BODY], r"'y' may have the labels, or the last column, 'g'"),
        (["class_id,f,g", *BODY], r"'class_id' may have the labels, or the last column"),
        (["f,label_0,label_1", *BODY], r"'label_0' and 'label_1' may have the labels"),
        (["f,class,Label", *BODY], r"columns 'class' and 'Label', which all name labels"),
        (["f,f,label", *BODY], r"has the name 'f' twice"),
        (["f,g,label,", *(f"{row}," for row in BODY)], r"column 3 of the header has no name"),
        # Numbers that Python or another program reads.
        (["1_0,2,a", *BODY], r"row 1, column 0: '1_0' is not a finite number"),
        ([*BODY, "١٠,2,a"], r"row 31, column 0: '١٠' is not a finite number"),
        ([*BODY, "0x1F,2,a"], r"'0x1F' is not a finite number"),
        ([*BODY, "1e999,2,a"], r"'1e999' is not a finite number"),
        (
            ["f;g;label", "1,5;2;a", "2,5;3;b"],
            r"row 2, column 'f': '1,5' .*decimals must be written with a point",
        ),
        (["f;g;label", "1,500;2;a", "2,500;3;b"], r"'1,500' is not .*(point|thousands)"),
        (["f,g,label", "true,2,a"], r"'true' is not .*write 1 and 0"),
        (["1,5;2,5;a", "2,5;3,5;b"], r"may be separated by ',' or ';'"),
        ([*BODY, "NA,2,a"], r"row 31, column 0: 'NA' is not a finite number \(a missing value: fill it in"),
        (["1,1", "2,0", "3,1_0"], r"row 3, column 1: the label '1_0' is not a plain number"),
        (["1,1", "2,0", "3,inf"], r"the label 'inf' is not a plain number"),
        (["1,9007199254740993", "2,9007199254740995"], r"row 2, .*label 9007199254740995 is beyond"),
        # Files that are broken, or something else.
        (["f,g,label", '1,"2,a', *BODY], r"row 32: unexpected end of data; is a quotation mark missing"),
        (["f,g,label", '1,"2', '3",a', *BODY], r"row 3: a cell goes over several lines"),
        (["f,g,label", '"' + "1" * 200_000 + '",1,a'], r"field larger than field limit"),
        (["f,g,label", "1,\0,a"], r"row 2 has a NUL byte"),
        (["1 2 a", "2 3 b"], r"must be separated by commas, semicolons or tabs"),
        (["f,label", *["1e300,a", "-1e300,b"] * 9], r"too large to be standardised"),
    ],
)
def test_csv_files_with_more_than_one_meaning_are_refused(
    tmp_path: Path, lines: list[str], message: str
) -> None:
    with pytest.raises(DataError, match=message) as caught:
        load(write_csv(tmp_path / "x.csv", lines))
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("cell", ["NA", "", "?", ".", "NaN", "null", "None", "n/a", "#N/A", "<NA>", '" "'])
def test_a_missing_label_is_no_class(tmp_path: Path, cell: str) -> None:
    with pytest.raises(DataError, match=r"row 32, column 'label': a row has no label"):
        load(write_csv(tmp_path / "x.csv", ["f,g,label", *BODY, f"1,2,{cell}"]))
    assert load(write_csv(tmp_path / "y.csv", [*BODY, "1,2,none", "2,3,none"])).num_classes == 4


@pytest.mark.parametrize(
    ("text", "newline"),
    [
        ("\ufeff" + "\n".join(['"f","g","label"', *BODY]), "\n"),
        ("\n".join(["f,g,kind", *BODY]), "\r\n"),
        ("\n".join(["f,g,label", "", *BODY, "  "]), "\r"),
        ("\n".join(["f\tg\tlabel", *BODY]).replace(",", "\t"), "\n"),
        ("\n".join(BODY).replace(",", ";"), "\n"),
        ("\n".join('"' + row.replace(",", '", "') + '"' for row in BODY), "\n"),
    ],
)
def test_usual_ways_to_write_csv_are_read_alike(tmp_path: Path, text: str, newline: str) -> None:
    plain = load(write_csv(tmp_path / "plain.csv", BODY))
    (tmp_path / "x.csv").write_text(text, newline=newline, encoding="utf-8")
    bundle = load(f"csv:{tmp_path / 'x.csv'}")
    assert torch.equal(bundle.train.x, plain.train.x)
    assert torch.equal(bundle.train.y, plain.train.y)


def test_columns_that_may_give_the_labels_away_are_named(tmp_path: Path, flower_log: list[str]) -> None:
    lines = [f"{i},{i * 37 % 30}.5,{i % 3},{'abc'[i % 3]}" for i in range(30)]
    for seed in (0, 1):
        load(write_csv(tmp_path / "x.csv", lines), seed=seed)
    first, second = flower_log
    assert "x.csv, column 0 numbers the rows from 0 to 29, and may give their labels away" in first
    assert "x.csv, column 2 has one value for each of 3 classes" in second
    # An index after the rows were shuffled, one of a selection of rows, and one label of a one-hot code.
    lines = [f"{i * 7 % 30},{i * i},{i % 2},{'abc'[i % 3]}" for i in range(30)]
    load(write_csv(tmp_path / "y.csv", ["sample,nr,label_0,label", *lines]))
    assert "y.csv: 'label_0' is used as a feature beside the labels" in flower_log[2]
    assert "column 'sample' numbers the rows from 0 to 29" in flower_log[3]
    assert "column 'nr' numbers the rows from 0 to 841" in flower_log[4]


def test_quotation_marks_protect_a_separator(tmp_path: Path) -> None:
    lines = [f'{i}.5,"{"a;b" if i % 2 else "a,b"}"' for i in range(20)]
    assert load(write_csv(tmp_path / "x.csv", lines)).num_classes == 2


def test_whole_numbers_are_one_class_however_they_are_written(tmp_path: Path) -> None:
    lines = [f"{i}.5,{['1', '1.0', 'x'][i % 3]}" for i in range(30)]
    assert load(write_csv(tmp_path / "x.csv", lines)).num_classes == 2


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([""], "is empty"),
        (["1", "2"], "at least one feature"),
        (["a,label"], "one row of data"),
        (["a,b,label", "1,2,x", "1,red,y"], "row 3, column 'b': 'red' is not a finite number"),
        (["1,2,x", "1,nan,y"], "row 2, column 1: 'nan' is not a finite"),
        (["1,,x", "1,3,y"], "row 1, column 1: '' is not a finite"),
        (["1,2,x", "1,y"], "row 2 has 2 cells, but the first row has 3"),
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
