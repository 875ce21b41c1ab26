"""`make results`: pages show what was measured, and every result has a command that makes it."""

from __future__ import annotations

import importlib
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from flwr_kd import registry
from flwr_kd.results import files
from flwr_kd.results.schema import RoundResult, RunResult

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"


def program(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Import a benchmark as it is when it is run: with its own folder on the path."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module(name)


def test_pages_and_picture_show_what_was_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report = program("report", monkeypatch)
    monkeypatch.setattr("sys.argv", ["report.py", "--check"])
    with pytest.raises(SystemExit) as ended:
        report.main()
    assert ended.value.code == 0, capsys.readouterr().out
    names = {
        name
        for page in report.pages()
        for name in re.findall(r"<!-- results: (\S+)", page.read_text("utf-8"))
    }
    assert names == set(report.TABLES)


def test_the_readmes_first_table_is_that_of_its_first_command() -> None:
    (block, *_) = re.findall(r"```sh\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), flags=re.S)
    result = files.load(ROOT / "benchmarks" / "results" / "readme-first.json")
    assert f"{block.splitlines()[-1]} --out runs/readme/first" == result.command
    down_and_up = [sum(row[f"bytes_{way}"]["mean"] for way in ("up", "down")) for row in result.summary()]
    assert down_and_up[0] > 40 * down_and_up[1]


@pytest.mark.slow
def test_the_readmes_first_command_gives_the_numbers_shown(tmp_path: Path) -> None:
    """To two points: other versions and machines differ in the last digits, which training multiplies."""
    shown = files.load(ROOT / "benchmarks" / "results" / "readme-first.json")
    options = ["--backend", "inline", "--workers", "1", "--no-arrays", "--out", str(tmp_path)]
    words = [*shlex.split(shown.command)[1:-2], *options]
    done = subprocess.run(
        [sys.executable, "-m", "flwr_kd.cli", *words], capture_output=True, text=True, timeout=900
    )
    assert (done.returncode, done.stderr) == (0, "")  # no warning
    for row, now in zip(shown.summary(), files.load(tmp_path).summary(), strict=True):
        for kind in ("local_accuracy", "global_accuracy"):
            assert now[kind]["mean"] == (row[kind]["mean"] and pytest.approx(row[kind]["mean"], abs=0.02))


def test_a_page_that_is_old_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    report = program("report", monkeypatch)
    text = "# A\n\n<!-- results: side-by-side -->\n\n| old |\n\n<!-- end -->\n\nmore\n"
    filled = report.filled(text)
    assert "| old |" not in filled
    assert filled.endswith("\n\n<!-- end -->\n\nmore\n")
    assert report.filled(filled) == filled
    assert all(f"`{method}`" in filled for method in ("fedavg", "fedhkd", "ktpfl", "feddkc-skr"))


def test_what_it_takes_to_reach_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    report = program("report", monkeypatch)

    def run(seed: int, *accuracies: float) -> RunResult:
        rounds = (
            RoundResult(i, a, None, None, 10**6, 3 * 10**6, 2.0, 5, 0)
            for i, a in enumerate(accuracies, start=1)
        )
        return RunResult("fedavg", seed, tuple(rounds))

    assert report.to_target([run(0, 0.5, 0.9, 0.8), run(1, 0.85, 0.9, 0.9)]) == ("1.5", "6", "3")
    assert report.to_target([run(0, 0.5, 0.9, 0.8), run(1, 0.1, 0.2, 0.3)]) == (
        "2.0 (1 of 2)",
        "8 (1 of 2)",
        "4",
    )
    assert report.to_target([run(0, 0.5)]) == ("–", "–", "–")


def test_a_short_long_run_is_compared_with_its_own_last_round(monkeypatch: pytest.MonkeyPatch) -> None:
    scale = program("scale", monkeypatch)

    def run(rounds: int) -> dict[str, object]:
        grown = [number * 10**6 for number in range(1, rounds + 1)]
        return {
            "method": "fedavg",
            "rounds": rounds,
            "server_resident": grown,
            "worker_resident": grown[::-1],
        }

    runs = [run(12), run(scale.LONG)]
    assert scale.growth(runs)[1:] == [["fedavg", "25", "50", "26", "1"]]
    assert scale.growth(runs, 12) == [
        ["method", "server, round 12, MB", "round 12, MB", "worker, round 12, MB", "round 12, MB"],
        ["fedavg", "12", "12", "1", "1"],
    ]


def test_every_result_has_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    remake = program("remake", monkeypatch)
    assert remake.missing() == []
    assert [path.name for path in RESULTS.iterdir() if remake.family(path.name) is None] == []
    assert remake.family("nobody.json") is None
    for script in remake.SCRIPTS.values():
        assert (ROOT / "benchmarks" / f"{script}.sh").exists()
    for words in remake.PROGRAMS.values():
        text = (ROOT / "benchmarks" / words[0]).read_text(encoding="utf-8")
        assert all(f'"{word}"' in text for word in words[1:] if word.startswith("--"))


def test_what_is_missing_is_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Results of a script's folders are put in their place, by the name of each."""
    remake = program("remake", monkeypatch)
    (tmp_path / "results").mkdir()
    for name in (
        *remake.PROGRAMS,
        remake.SEARCH,
        "feddkc-a.json",
        "fedhead-a.json",
        "fedhkd-digits-a.json",
        "ktpfl-a.json",
        "readme-first.json",
    ):
        (tmp_path / "results" / name).write_text("{}")
    (tmp_path / "results" / "slim.json").unlink()
    called = []

    def call(words: list[str]) -> None:
        called.append(words[1:])
        if words[0] == "bash":
            for name in ("tail-10", "tail-100"):
                (Path(words[2]) / name).mkdir(parents=True)
                (Path(words[2]) / name / "result.json").write_text(json.dumps(name))

    monkeypatch.setattr(remake, "ROOT", tmp_path)
    monkeypatch.setattr(remake, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(remake, "call", call)
    monkeypatch.setattr("sys.argv", ["remake.py"])
    remake.main()
    assert called == [
        ["slim.py", "--out", str(tmp_path / "results" / "slim.json")],
        ["fedhyb.sh", str(tmp_path / "runs" / "fedhyb")],
    ]
    made = {path.name: path.read_text() for path in (tmp_path / "results").glob("fedhyb-*.json")}
    assert made == {"fedhyb-tail-10.json": '"tail-10"', "fedhyb-tail-100.json": '"tail-100"'}


NOT_COMPARED = {"pfedhn"}
"""Folders of methods that the comparison does not have yet."""


def test_the_side_by_side_methods_are_those_of_the_papers(monkeypatch: pytest.MonkeyPatch) -> None:
    accuracy = program("accuracy", monkeypatch)
    assert set(accuracy.METHODS) <= set(registry.methods())
    # The rest are ablations and variants, on their methods' pages; each folder has one method that is compared.
    folders = {method.strategy_path.split(".")[2] for method in registry.methods().values()}
    compared = {registry.get(name).strategy_path.split(".")[2] for name in accuracy.METHODS}
    assert folders == compared | NOT_COMPARED
    assert not compared & NOT_COMPARED
    left_out = set(registry.methods()) - set(accuracy.METHODS)
    assert {"fedhkd-star", "fedhyb-1", "sim-pfl", "ktpfl-weights"} <= left_out
