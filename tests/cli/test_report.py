"""``flwr-kd report``."""

from __future__ import annotations

from pathlib import Path

import pytest

from flwr_kd.cli.report import short_names
from flwr_kd.plotting import remove_pictures
from flwr_kd.results import files
from tests.cli.commands import Command
from tests.report.examples import a_result


def test_a_report_of_one_and_of_several_results(command: Command, tmp_path: Path) -> None:
    for name in ("a", "b"):
        files.save(a_result(f"dirichlet:{name == 'b'}"), tmp_path / "runs" / name)
    code, out, err = command("report", "runs/a")
    assert (code, out, err) == (0, f"report: {tmp_path / 'runs' / 'a' / 'report.html'}\n", "")
    assert "<h1>Report: a</h1>" in (tmp_path / "runs" / "a" / "report.html").read_text(encoding="utf-8")
    code, out, err = command("report", "runs", "--out", "pages/both.html")
    assert (code, out, err) == (0, f"report: {tmp_path / 'pages' / 'both.html'}\n", "")
    assert "<h1>Report: 2 results</h1>" in (tmp_path / "pages" / "both.html").read_text(encoding="utf-8")


def test_mistakes_are_one_line(command: Command, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert command("report", "nowhere") == (2, "", "flwr-kd: no folder 'nowhere': name that of a result\n")
    assert command("report", "empty").err.startswith("flwr-kd: no result in 'empty'")
    files.save(a_result(), tmp_path / "a")
    assert (
        command("report", "a", "--out", "empty").err
        == "flwr-kd: out must be a file, got the folder 'empty'\n"
    )
    assert not (tmp_path / "a" / "report.html").exists()


@pytest.mark.parametrize(
    ("folders", "names"),
    [(["r/a", "r/b"], ["a", "b"]), (["r/x/o", "r/y/o"], ["x/o", "y/o"]), (["r/o", "r/o/o"], ["r/o", "o/o"])],
)
def test_names_are_short_and_differ(folders: list[str], names: list[str]) -> None:
    assert short_names(folders) == names


def test_an_overwritten_result_loses_its_report(tmp_path: Path) -> None:
    (tmp_path / "report.html").write_text("of an earlier result")
    remove_pictures(tmp_path)
    assert not list(tmp_path.iterdir())
