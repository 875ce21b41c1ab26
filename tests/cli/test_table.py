"""``flwr-kd table`` and ``--format``: the table alone goes to standard output."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest

from flwr_kd.results import files
from flwr_kd.results.formats import latex_text, markdown_text
from tests.cli.commands import TINY, Command

pytestmark = pytest.mark.long


def test_compare_prints_csv_alone_and_table_prints_it_again(command: Command, tmp_path: Path) -> None:
    code, out, err = command(
        "compare", "fedavg", "fedproto", *TINY, "--seeds", "0,1", "--out", "here", "--format", "csv"
    )
    assert code == 0
    result = files.load(tmp_path / "here")
    rows = list(csv.DictReader(io.StringIO(out)))
    assert [row["method"] for row in rows] == ["fedavg", "fedproto"]
    for row, summary in zip(rows, result.summary(), strict=True):
        assert float(row["local_accuracy_mean"]) == summary["local_accuracy"]["mean"]
    assert f"result: {tmp_path / 'here' / 'result.json'}" in err
    assert command("table", "here", "--format", "csv").out == out
    assert command("table", "here", "--format", "markdown").out == markdown_text(result)
    chosen = ["common_accuracy", "seconds"]
    assert command(
        "table", "here", "--format", "latex", "--columns", "common-accuracy,seconds"
    ).out == latex_text(result, chosen)
    text = command("table", "here").out
    assert "difference to fedavg in points" in text
    assert "last round, mean ± std over 2 seeds" in text


def test_an_unknown_format_is_a_line_before_anything_is_run(command: Command, no_run: None) -> None:
    expected = "flwr-kd: unknown format 'cvs' (did you mean 'csv'?); valid: text, csv, markdown, latex\n"
    for words in (("simulate", "fedavg", *TINY), ("table", ".")):
        code, _, err = command(*words, "--format", "cvs")
        assert (code, err) == (2, expected)
