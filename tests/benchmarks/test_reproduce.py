"""The benchmark that runs the papers' tables: its pieces, what it keeps, and the page that follows."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from flwr_kd.experiments.papers import estimate, library

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.setattr(estimate, "seconds_per_sample", lambda *args: 0.0001)
    return importlib.import_module("reproduce")


@pytest.fixture
def tables(program: Any) -> Any:
    return importlib.import_module("paper_tables")


def test_each_experiment_is_a_piece_and_comes_after_those_whose_runs_it_shows(program: Any) -> None:
    found = program.pieces()
    assert {piece.name for piece in found} == {f"{paper.id}/{each.id}" for paper, each in library.every()}
    assert len({piece.file_name for piece in found}) == len(found)
    order = [piece.name for piece, _ in program.ordered(found)]
    for paper, experiment in library.every():
        place = order.index(f"{paper.id}/{experiment.id}")
        for other in (*([experiment.runs_of] if experiment.runs_of else []), *experiment.tables):
            assert order.index(f"{paper.id}/{other}") < place
    # What needs a download at the paper's size runs on a stand-in.
    for _, experiment in library.every():
        assert experiment.small is not None or not estimate.data_of(experiment) or experiment.kind == "cost"


def test_what_has_a_result_is_not_run_again(
    program: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = []
    monkeypatch.setattr(program, "run", lambda piece, seeds, *others: ran.append((piece.name, seeds)))
    (tmp_path / "fedhkd-table-1.json").write_text("{}")
    names = "fedhkd/table-1,fedhkd/table-2,fedhkd/section-4.3"
    monkeypatch.setattr("sys.argv", ["reproduce.py", "--only", names, "--out", str(tmp_path), "--seeds", "1"])
    program.main()
    assert ran == [("fedhkd/section-4.3", "1"), ("fedhkd/table-2", "1")]
    assert "fedhkd/table-1" not in {piece.name for piece in program.missing(tmp_path)}
    monkeypatch.setattr("sys.argv", ["reproduce.py", "--only", "fedhkd/table-9"])
    with pytest.raises(SystemExit):
        program.main()


def test_a_published_command_does_not_say_where_the_data_lay(program: Any, tmp_path: Path) -> None:
    page, out = tmp_path / "page.json", tmp_path / "out"
    by_name = {piece.name: piece for piece in program.pieces()}
    piece = by_name["fedhead/table-3"]
    words = "cli.py reproduce fedhead/table-3 --scale small"
    for given, published in (("", ""), (" --data-dir '/a folder/x' --force", " --data-dir FOLDER --force")):
        page.write_text(json.dumps({"command": words + given}), encoding="utf-8")
        program.collect(piece, page, out)
        made = json.loads((out / piece.file_name).read_text(encoding="utf-8"))
        assert made["command"] == f"flwr-kd reproduce fedhead/table-3 --scale small{published}"


def document(**changes: Any) -> dict[str, Any]:
    def cell(name: str, row: str, ours: list[float], printed: str | None) -> dict[str, Any]:
        by_seed = {str(seed): value for seed, value in enumerate(ours)}
        return {"cell": name, "measure": "local", "row": row, "ours": by_seed, "printed": printed}

    def cost(name: str, row: str, better: float | None, rounds: float | None) -> dict[str, Any]:
        values: dict[str, Any] = {"bytes-up": {"mean": 1e6}, "bytes-down": {"mean": 2e6}}
        values["seconds"] = {"mean": 0.5}
        if better is not None:
            values["better-off"] = {"mean": better}
        if rounds is not None:
            values |= {f"{what}-to-target": {"mean": rounds} for what in ("rounds", "seconds")}
            values["bytes-to-target"] = {"mean": 3e6 * rounds}
        return {"cell": name, "row": row, "target": "local accuracy 50 %", **values}

    return {
        "experiment": "fedhkd/table-2",
        "scale": "small",
        "note": "letters.",
        "stand-ins": ["letters for cifar10"],
        "seeds": [0, 1],
        "command": "flwr-kd reproduce fedhkd/table-2 --scale small",
        "versions": {"commit": "abc"},
        "claims": [
            {
                "claim": "FedHKD is above FedAvg",
                "verdict": "holds",
                "in-order": 2,
                "comparisons": 2,
                "mean-margin": {"mean": 1.5, "interval": [1.0, 2.0]},
                "paper-agrees": [4, 4],
                "checks": [],
            }
        ],
        "cells": [
            cell("a", "fedavg", [50.0, 51.0], "0.5"),
            cell("a", "fedhkd", [54.0, 55.0], "0.6789 ± 0.1"),
            cell("a", "alone", [40.0, 43.0], None),
            cell("b", "fedhkd", [60.0, 62.0], None),
            cell("b", "alone", [50.0, 50.0], None),
        ],
        "controls": ["alone"],
        "costs": [
            cost("a", "fedavg", 0.25, 2),
            cost("b", "fedavg", 0.75, None),
            cost("a", "fedhkd", 1.0, 4),
            cost("b", "fedhkd", 1.0, 6),
            cost("a", "alone", None, None),
        ],
        "computed": [],
        "class-counts": {"a": [[3, 0, 1], [0, 2, 0]]},
        "not-run": {"c": "no data"},
        **changes,
    }


def test_the_page_has_verdicts_numbers_controls_and_costs(tables: Any, tmp_path: Path) -> None:
    (tmp_path / "fedhkd-table-2.json").write_text(json.dumps(document()))
    lines = tables.of_paper(tmp_path, "fedhkd").splitlines()
    assert "| FedHKD is above FedAvg | **holds** | 2 of 2 | +1.50 [+1.00, +2.00] | 4 of 4 |" in lines
    assert "| local %, ours / printed | `fedavg` | `fedhkd` | `alone` |" in lines
    assert "| a | 50.5 / 50.0 | 54.5 / 67.9 | 41.5 |" in lines
    assert "| b | – | 61.0 | 50.0 |" in lines
    assert any(
        "Stand-in: letters for cifar10." in line and "Small version: letters." in line for line in lines
    )
    # By seed the mean over both cells: (14 + 10) / 2 and (12 + 12) / 2, which are the same.
    assert "| `fedhkd` | +12.00 [+12.00, +12.00] | 100 | 3 | 0.5 | 5 | 15 | 5 |" in lines, "\n".join(lines)
    (of_fedavg,) = (line for line in lines if line.startswith("| `fedavg` | +"))
    assert "| 50 | 3 | 0.5 | 2 (1 of 2 cells) | 6 (1 of 2 cells) | 2 (1 of 2 cells) |" in of_fedavg
    assert "Not run: c: no data." in lines
    assert "| a | 2 | 1.5 | 88 |" in lines
    assert any(line.startswith("No result yet: `fedhkd/table-1`, ") for line in lines)


def test_the_summary_counts_claims(tables: Any, tmp_path: Path) -> None:
    claims = [{"verdict": verdict} for verdict in ("holds", "holds", "undecided", "not run", "does not hold")]
    (tmp_path / "fedhkd-table-2.json").write_text(json.dumps(document(claims=claims)))
    header, rows = tables.summary(tmp_path)
    assert header[2:] == ("claims: holds", "claims: does not hold", "claims: undecided")
    assert ["[fedhkd](#fedhkd)", "1 of 6", "2", "1", "1"] in rows
    assert ["[ktpfl](#ktpfl)", "0 of 14", "0", "0", "0"] in rows
