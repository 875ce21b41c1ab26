"""Claims of the pages stand beside controls that differ from the method in nothing but knowledge."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

from flwr_kd.config import KNOWLEDGE
from flwr_kd.experiments.comparison import Entry

ROOT = Path(__file__).resolve().parents[2]


def program(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module(name)


def changed(one: Entry, other: Entry) -> set[str]:
    mine, theirs = one.config.to_wire(), other.config.to_wire()
    return {name for name in mine if mine[name] != theirs.get(name)}


def test_each_control_is_its_method_without_knowledge(monkeypatch: pytest.MonkeyPatch) -> None:
    for part in program("controls", monkeypatch).PARTS.values():
        entries = {entry.name: entry for entry in part.entries()}
        assert len(entries) == len(part.rows)
        control = entries[part.control]
        (option,) = {
            name for name, value in control.config.to_wire().items() if value in KNOWLEDGE and value != "own"
        }
        whole = [
            entry
            for entry in entries.values()
            if entry is not control and changed(control, entry) == {option}
        ]
        assert whole, part.control


def test_fedhkds_search_shows_all_its_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    grids, report = program("grids", monkeypatch), program("report", monkeypatch)
    grid = grids.fedhkd()
    assert len(grid.cells) == 1 + len({*grids.fedhkd_settings()})
    shown: list[str] = []
    cells = {
        name: {"seeds": {seed: {"global_accuracy": 0.5} for seed in ("10", "11")}} for name in grid.cells
    }

    class Noting(dict):  # type: ignore[type-arg]
        def get(self, name: str, default: object = None) -> object:
            shown.append(name)
            return super().get(name, default)

    monkeypatch.setattr(report, "document", lambda name: {"cells": Noting(cells)})
    monkeypatch.setattr(report, "made_with", lambda name: "made")
    table = report.fedhkd_search()
    assert {*shown} >= {*grid.cells} - {"fedavg"}
    assert "| 0.2 | +0.0 / +0.0 | " in table
