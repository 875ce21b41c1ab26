"""The report as text: what it shows, that nothing in it is loaded, and that no text of a result is markup."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from flwr_kd.report.charts import style_class
from flwr_kd.report.page import page, write
from flwr_kd.results.errors import ResultError
from flwr_kd.results.schema import Comparison, RunResult
from tests.report.examples import HOSTILE, a_hostile_result, a_result
from tests.report.test_html import read


def plain_text(text: str) -> str:
    body = re.sub(r"<(style|script)>.*?</\1>", "", text, flags=re.DOTALL)
    return " ".join(" ".join(read(body).texts).split())


def test_it_shows_everything_that_a_result_has() -> None:
    text = page({"run": a_result()})
    seen = plain_text(text)
    for heading in (
        "Table",
        "Curves",
        "Clients",
        "Who has which classes",
        "Bytes and seconds",
        "Configuration",
    ):
        assert f">{heading}</h2>" in text
    # Two seeds, 0.6 and 0.6; 0.7 and 0.72: mean and standard deviation by hand.
    assert "60.00 ± 0.00" in seen
    assert "71.00 ± 1.41" in seen
    # The difference is 0.10 and 0.12: mean 0.11, t(1) = 12.706 times 0.01.
    assert "+11.00 [−1.71, +23.71]" in seen
    # The clients are 0.05 below and above.
    assert "fedproto 65.00" in seen
    assert "4 of 4" in seen
    assert "per client 10 to 12 samples of 2 of 3 classes" in seen
    assert "client class 0 class 1 class 2 all 0 5 0 7 12 1 0 9 1 10" in seen
    # 4 MB in each of three rounds.
    assert "1.00 3.00" in seen
    assert "lr=0.05" in seen
    assert "flwr-kd compare fedavg fedproto" in seen
    assert "torch 2.4" in seen
    assert "training loss" in seen


def test_classes_have_the_names_that_the_data_gives_them() -> None:
    result = a_result()
    names = ["apple", "a name that is longer than there is room", "<b>"]
    runs = tuple(replace(run, class_names=names) for run in result.runs)
    text = page({"run": replace(result, runs=runs)})
    seen = plain_text(text)
    assert f"client {' '.join(names)} all 0 5 0 7 12" in seen
    assert "a name that is longer t…" in seen
    assert "<b>" not in text


def test_without_a_script_each_chart_has_its_values_in_a_table() -> None:
    text = page({"run": a_result()})
    figures = re.findall(r"<figure.*?</figure>", text, re.DOTALL)
    assert len(figures) == 7  # local and global accuracy, loss, clients, classes, bytes, seconds
    for figure in figures:
        assert 'role="img"' in figure
        assert re.search(r'aria-label="[^"]{20,}"', figure)
        assert figure.count('class="values"') == 1


def test_nothing_is_loaded() -> None:
    text = page({"run": a_result()})
    assert re.findall(r'(?:src|href)="([^"#][^"]*)"', text) == ["data:,"]
    assert "@import" not in text
    assert "url(" not in text
    assert "default-src 'none'" in text.replace("&#x27;", "'")


def test_texts_of_a_result_stay_texts() -> None:
    reader = read(page({HOSTILE: a_hostile_result()}))
    assert reader.tags.count("script") == 1
    assert "img" not in reader.tags
    names = {name for name, _ in reader.attributes}
    assert not {name for name in names if name.startswith("on")}
    seen = " ".join(reader.texts)
    assert seen.count("<script>alert(1)</script>") > 10
    assert "\u202e" not in seen
    assert "\\u202e" in seen


def test_several_results_stand_side_by_side() -> None:
    text = page({"a": a_result("iid"), "b": a_result("dirichlet:0.1", gain=0.2)})
    seen = plain_text(text)
    assert "local accuracy (%), last round method a b fedavg 60.00 ± 0.00 60.00 ± 0.00" in seen
    assert "71.00 ± 1.41 +11.00 [−1.71, +23.71] 81.00 ± 1.41 +21.00 [+8.29, +33.71]" in seen
    assert "partition differs iid dirichlet:0.1" in seen
    assert "dataset digits digits" in seen
    assert "local accuracy – a" in seen
    assert "local accuracy – b" in seen
    # A decided difference is bold, the other is not.
    assert "<strong>+21.00 [+8.29, +33.71]</strong>" in text
    assert "<strong>+11.00" not in text
    # Charts of one quantity have one scale.
    first, second = (
        re.findall(r'text-anchor="end">([\d.]+)<', figure)
        for figure in re.findall(r"<figure.*?</figure>", text, re.DOTALL)[:2]
    )
    assert first == second
    assert len(first) > 2


def test_methods_that_only_one_result_has_keep_their_colour() -> None:
    one = a_result()
    other = replace(one, runs=tuple(run for run in one.runs if run.method == "fedproto"))
    text = page({"one": one, "other": other})
    assert 'class="line c1 d0" data-name="fedproto"' in text
    assert 'class="line c0 d0" data-name="fedproto"' not in text


def test_what_was_not_measured_is_said() -> None:
    one = a_result()
    runs = tuple(replace(run, histogram=[]) for run in one.runs[:1])
    seen = plain_text(page({"run": replace(one, runs=runs, command="")}))
    assert "No numbers of samples per class" in seen
    assert "does not say by which command" in seen
    assert "difference to" not in seen


@pytest.mark.parametrize(
    ("results", "message"),
    [
        ({}, "no result"),
        ({"a": Comparison({}, {}, "", ())}, "a: runs is empty"),
        ({"a": Comparison({}, {}, "", (RunResult("fedavg", 3, ()),))}, r"a: fedavg \(seed 3\) has no round"),
    ],
)
def test_what_cannot_be_reported_is_an_error(results: dict[str, Comparison], message: str) -> None:
    with pytest.raises(ResultError, match=message):
        page(results)


def test_numbers_that_are_too_large_are_an_error() -> None:
    one = a_result()
    (first, *_) = one.runs
    rounds = tuple(replace(stats, bytes_up=10**400) for stats in first.rounds)
    with pytest.raises(ResultError, match="too large"):
        page({"a": replace(one, runs=(replace(first, rounds=rounds),))})


def test_a_report_is_written_and_overwritten(tmp_path: Path) -> None:
    file = write({"run": a_result()}, tmp_path / "new" / "report.html")
    first = file.read_text(encoding="utf-8")
    assert first.startswith("<!doctype html>")
    write({"run": a_result("dirichlet:1")}, file)
    assert "dirichlet:1" in file.read_text(encoding="utf-8")


def test_rounds_are_whole_numbers_and_one_is_no_plural() -> None:
    result = a_result(clients=1, rounds=1)
    text = page({"run": result})
    assert "iid · 1 client · 1 round" in text
    curves = [
        chart for chart in re.findall(r"<figure.*?</figure>", text, re.DOTALL) if ">round</text>" in chart
    ]
    assert len(curves) == 3  # local and global accuracy, loss
    for chart in curves:
        # The ticks of the axis of rounds stand in the middle.
        places = re.findall(r'text-anchor="middle">([^<]*)</text>', chart)
        assert [place for place in places if place.replace(".", "").isdigit()] == ["1", "2", "3"]


def test_all_methods_have_dashes_in_the_style_sheet() -> None:
    """42 names have a line of their own."""
    text = page({"run": a_result()})
    assert len({style_class(number) for number in range(42)}) == 42
    for number in range(42):
        colour, dashes = style_class(number).split()
        assert f".{colour} {{" in text
        assert dashes == "d0" or f".{dashes} polyline" in text
