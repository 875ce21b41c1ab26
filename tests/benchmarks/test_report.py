"""`make results`: pages show what was measured, and every result has a command that makes it."""

from __future__ import annotations

import dataclasses
import importlib
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest
from matplotlib.figure import Figure

from flwr_kd import registry
from flwr_kd.results import files
from flwr_kd.results.schema import RoundResult, RunResult

pytestmark = pytest.mark.long

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
    (first,) = re.findall(r"^flwr-kd compare .*$", (ROOT / "README.md").read_text("utf-8"), flags=re.M)
    result = files.load(ROOT / "benchmarks" / "results" / "readme-first.json")
    assert f"{first} --out runs/readme/first" == result.command
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
    text = "# A\n\n<!-- results: side-by-side digits-inner-dirichlet -->\n\n| old |\n\n<!-- end -->\n\nmore\n"
    filled = report.filled(text)
    assert "| old |" not in filled
    assert filled.endswith("\n\n<!-- end -->\n\nmore\n")
    assert report.filled(filled) == filled
    assert all(f"`{method}`" in filled for method in ("fedavg", "fedhkd", "ktpfl", "feddkc-skr"))


def test_a_picture_that_is_old_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    report = program("report", monkeypatch)
    shown = [{"cell": "a", "row": "fedavg", "ours": {"0": 50.0}}]
    picture = report.Picture(tmp_path / "a.png", lambda: shown, lambda: Figure(figsize=(1, 1)))
    assert picture.carried() is None
    picture.write()
    assert picture.carried() == picture.digest()
    shown[0]["ours"] = {"0": 51.0}
    assert picture.carried() != picture.digest()


def test_a_tables_picture_has_its_numbers_in_percent(monkeypatch: pytest.MonkeyPatch) -> None:
    """FedHKD's table prints shares of 1: ours are in percent, and so are the printed ones beside them."""
    tables = program("paper_tables", monkeypatch)
    panels: dict[str, list[Any]] = {}
    monkeypatch.setattr(tables.beside_printed, "figure", lambda found, title: panels.update(found))
    document = json.loads((RESULTS / "papers" / "fedhkd-table-1.json").read_text("utf-8"))
    tables.figure(document)
    assert list(panels) == ["local %", "global %"]
    groups = {(name, group.name): group for name, each in panels.items() for group in each}
    for cell in document["cells"]:
        group = groups[f"{cell['measure']} %", cell["cell"]]
        assert group.ours[cell["row"]] == list(cell["ours"].values())
        if cell["printed"] is not None:
            assert group.printed[cell["row"]] == pytest.approx(100 * float(cell["printed"]))


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
    for name in remake.PROGRAMS:
        (tmp_path / "results" / name).write_text("{}")
    (tmp_path / "results" / "slim.json").unlink()
    called = []

    def call(words: list[str]) -> None:
        called.append(words[1:])
        if words[0] == "bash":
            (Path(words[2]) / "first").mkdir(parents=True)
            (Path(words[2]) / "first" / "result.json").write_text(json.dumps("first"))

    monkeypatch.setattr(remake, "ROOT", tmp_path)
    monkeypatch.setattr(remake, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(remake, "call", call)
    monkeypatch.setattr("sys.argv", ["remake.py"])
    remake.main()
    assert called == [
        ["slim.py", "--out", str(tmp_path / "results" / "slim.json")],
        ["readme.sh", str(tmp_path / "runs" / "readme")],
        # The papers' tables without a result, one by one.
        *([["reproduce.py"]] if remake.reproduce.missing() else []),
    ]
    assert (tmp_path / "results" / "readme-first.json").read_text() == '"first"'


def test_the_rows_are_the_methods_of_the_papers(monkeypatch: pytest.MonkeyPatch) -> None:
    accuracy = program("accuracy", monkeypatch)
    rows = {row for _, group in accuracy.GROUPS.values() for row in group}
    assert rows == set(accuracy.METHODS) | set(accuracy.VARIANTS)
    assert set(accuracy.EVERYTHING["digits-inner-dirichlet"]) == {*registry.methods(), accuracy.ALONE}
    assert set(accuracy.METHODS) <= set(registry.methods())
    # The rest are ablations and variants, on their methods' pages; each folder has one method that is compared.
    folders = {method.strategy_path.split(".")[2] for method in registry.methods().values()}
    assert folders == {registry.get(name).strategy_path.split(".")[2] for name in accuracy.METHODS}
    left_out = set(registry.methods()) - rows
    assert {"fedhkd-star", "fedhyb-1", "sim-pfl", "ktpfl-weights", "heur-fedamp"} <= left_out


def test_a_rows_settings_are_those_of_all_then_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    accuracy = program("accuracy", monkeypatch)
    moon = accuracy.entry("moon", "0.125", ("contrastive-mu=5",))
    assert (moon.name, moon.config.batch_size, moon.config.contrastive_mu) == ("moon", 32, 5)
    assert moon.config.learning_rate == 0.125
    assert accuracy.entry("fedmd", "0.125", ()).config.distill_learning_rate == 0.125
    # Per-FedAvg fixes SGD, and has no Adam to set.
    per_fedavg = accuracy.entry("per-fedavg", "0.125", ("learning-rate=0.25",)).config
    assert (per_fedavg.local_epochs, per_fedavg.optimizer, per_fedavg.learning_rate) == (5, "sgd", 0.25)
    variant = accuracy.entry("fedamp-distance", "0.125", ())
    assert (variant.name, variant.method.name, variant.config.attention) == (
        "fedamp-distance",
        "fedamp",
        "distance",
    )


def test_differences_are_to_fedavg_and_to_it_with_fine_tuning(monkeypatch: pytest.MonkeyPatch) -> None:
    report = program("report", monkeypatch)

    def runs(method: str, *values: tuple[float, float | None, float | None]) -> list[RunResult]:
        return [
            RunResult(
                method,
                seed,
                (
                    RoundResult(
                        1,
                        local,
                        whole,
                        None,
                        1,
                        1,
                        1.0,
                        1,
                        0,
                        accuracy_before=before,
                        clients={"0": {"local_accuracy": local}},
                    ),
                ),
            )
            for seed, (local, whole, before) in enumerate(values)
        ]

    groups = {
        "fedavg": runs("fedavg", (0.5, 0.25, None), (0.75, 0.5, None)),
        "fedavg-ft": runs("fedavg-ft", (0.625, 0.25, 0.375), (0.75, 0.5, 0.5)),
        "moon": runs("moon", (0.875, 0.5, None), (1.0, 0.75, None)),
        "fedamp": runs("fedamp", (0.875, None, None), (0.875, None, None)),
    }
    # Both differences are 25 points on the common test set, and on the clients those to 37.5 % and 50 %.
    assert report.against_fedavg(groups, "moon") == [
        "93.8 ± 8.8",
        "**+50.0 [+50.0, +50.0]**",
        "**+25.0 [+25.0, +25.0]**",
        "62.5 ± 17.7",
        "**+25.0 [+25.0, +25.0]**",
    ]
    fedamp = report.against_fedavg(groups, "fedamp")
    assert fedamp[1] == "+43.8 [−35.7, +123.2]"
    assert fedamp[3:] == ["–", "–"]
    assert [report.against_fedavg(groups, name)[4] for name in ("fedavg", "fedavg-ft")] == ["–", "–"]


def test_a_search_looks_at_no_test_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    search = program("search", monkeypatch)
    part = search.BASELINES_PARTS["digits-pathological"]
    experiment = search.Experiment.from_options(search.options_of(part), search.SEED)
    labels = search.bundle_of(experiment).train.y
    for (fit, held), (train, test) in zip(
        search.held_out(experiment), search.client_splits(experiment), strict=True
    ):
        assert {*fit.tolist(), *held.tolist()} == {*train.tolist()}
        assert not {*held.tolist()} & {*fit.tolist(), *test.tolist()}
        assert 0.2 < len(held) / len(train) < 0.3
        assert set(labels[held].tolist()) == set(labels[test].tolist())


def test_a_search_measures_on_what_it_holds_out(monkeypatch: pytest.MonkeyPatch) -> None:
    search = program("search", monkeypatch)
    seen = []

    class Result:
        last: ClassVar = {"local_accuracy": 0.5}

    def run(method: object, experiment: object, config: object) -> type[Result]:
        seen.append((search.runner.client_splits(experiment), config))
        return Result

    monkeypatch.setattr(search.runner, "run", run)
    settings = ["local-epochs=1", "learning-rate=0.0625"]
    assert search.validated("digits-pathological", "pfedme", settings) == 0.5
    ((splits, config),) = seen
    part = search.BASELINES_PARTS["digits-pathological"]
    experiment = search.Experiment.from_options(search.options_of(part), search.SEED)
    assert splits is search.held_out(dataclasses.replace(experiment, model="mlp"))
    assert (config.local_epochs, config.learning_rate) == (1, 0.0625)
    # The runner's own are back.
    assert search.runner.client_splits is search.client_splits


def test_the_best_cell_of_a_search_and_whether_it_is_at_an_edge(monkeypatch: pytest.MonkeyPatch) -> None:
    search = program("search", monkeypatch)
    monkeypatch.setattr(search, "GRIDS", {"per-fedavg": (("1", "2", "3"),), "pfedme": (("1", "2"), ("3",))})
    (_, first), *_ = search.cells("pfedme")
    assert first == [
        "local-epochs=1",
        "proximal-lambda=1",
        "learning-rate=0.9",
        "personal-learning-rate=3",
    ]
    pairs = {
        "per-fedavg": ((0.25, 0.5), (0.75, 0.5), (1.0, None)),
        "pfedme": ((0.25, 0.5), (0.5, 0.5)),
    }
    found = [
        {"row": row, "settings": settings, "part": part, "validation_accuracy": value}
        for row, means in pairs.items()
        for (_, settings), pair in zip(search.cells(row), means, strict=True)
        for part, value in zip(search.PARTS, pair, strict=True)
        if value is not None
    ]
    best = search.best(found)
    # The third cell is not measured on both data sets yet.
    assert best["per-fedavg"] == {
        "settings": ["learning-rate=2", "alpha=2"],
        "mean": 0.625,
        "at_an_edge": False,
    }
    assert (best["pfedme"]["mean"], best["pfedme"]["at_an_edge"]) == (0.5, True)
    assert "proximal-lambda=2" in best["pfedme"]["settings"]


def test_the_settings_are_those_that_the_search_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    accuracy, search = program("accuracy", monkeypatch), program("search", monkeypatch)
    document = json.loads((RESULTS / "search-baselines.json").read_text("utf-8"))
    chosen = search.best(document["cells"])
    assert chosen == document["best"]
    assert set(chosen) == set(search.GRIDS)
    for row, found in chosen.items():
        assert list(accuracy.SETTINGS_OF[row]) == found["settings"]
        assert not found["at_an_edge"]


def test_what_a_model_per_client_takes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The cells are the numbers of the program's own measurement, of a small case."""
    report, store = program("report", monkeypatch), program("model_store", monkeypatch)
    case = store.measured(3, 1, 1, tmp_path)
    assert set(case["seconds"]) == set(store.STEPS)
    case |= {"clients": 1000, "peak_mb": 1234, "seconds": {**case["seconds"], "mix": 12.34}}
    (row,) = store.rows_for_page([case])
    assert row[:4] == ["1,000", "1", "1,000", "1,234"]
    assert dict(zip(store.HEADER, row, strict=True))["mix, s"] == "12.3"
    made = {"versions": {"python": "3"}, "memory_mb": 7, "cases": [case]}
    (tmp_path / "model-store.json").write_text(json.dumps(made))
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    lines = report.model_store().split("\n")
    assert lines[2] == "| " + " | ".join(row) + " |"
    assert lines[4].startswith(
        "7 MB of models are in memory. Measured by `python benchmarks/model_store.py` with "
    )


def test_a_grid_is_compared_with_its_control_seed_by_seed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    report = program("report", monkeypatch)
    cell = {"method": "fedavg", "settings": [], "experiment": {"validation": True}}

    def seeds(*values: float) -> dict[str, dict[str, float]]:
        return {str(seed): {"global_accuracy": value} for seed, value in enumerate(values)}

    cells = {
        "control": {**cell, "seeds": seeds(0.5, 0.6)},
        "better": {**cell, "seeds": seeds(0.6, 0.7, 0.9)},
        "not-run": {**cell, "seeds": {}},
    }
    made = {"versions": {"python": "3"}, "control": "control", "cells": cells}
    (tmp_path / "grid-fedhyb-server.json").write_text(json.dumps(made))
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    lines = report.grid("fedhyb-server", "global_accuracy").split("\n")
    assert lines[0] == "| setting | seeds | global, validation data % | over `control` |"
    assert lines[2:4] == [
        "| `control` | 2 | 55.0 ± 7.1 | – |",
        # The third seed has no counterpart.
        "| `better` | 3 | 73.3 ± 15.3 | **+10.0 [+10.0, +10.0]** |",
    ]
    assert lines[4] == ""
    assert lines[5].startswith("Measured by `python benchmarks/grids.py fedhyb-server` with ")


def test_rows_of_earlier_defaults_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    report = program("report", monkeypatch)

    def run(method: str, **changed: object) -> list[RunResult]:
        values = {**registry.get(method).config().to_wire(), **changed}
        return [RunResult(method, 0, (), hyperparameters=values)]

    now = {"fedavg": run("fedavg", **{"learning-rate": 7.0, "batch-size": 3}), "fedhyb": run("fedhyb")}
    assert report.earlier_defaults(now) == ""
    then = {**now, "fedhyb": run("fedhyb", **{"server-epochs": 20, "gone": 1})}
    assert report.earlier_defaults(then) == " Measured with earlier defaults: `fedhyb`: `server-epochs=20`."
