"""Grids of settings: what is run, what an interrupted one keeps, and the oracle of who knows the groups."""

from __future__ import annotations

import importlib
import itertools
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from flwr_kd import registry

ROOT = Path(__file__).resolve().parents[2]
TINY: dict[str, Any] = {"dataset": "digits", "model": "mlp", "clients": 2, "rounds": 1, "limit": 120}


@pytest.fixture
def grids(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("grids")


def run(
    grids: ModuleType, monkeypatch: pytest.MonkeyPatch, out: Path, grid: Any, *words: str
) -> dict[str, Any]:
    monkeypatch.setitem(grids.GRIDS, "tiny", lambda: grid)
    monkeypatch.setattr("sys.argv", ["grids.py", "tiny", "--out", str(out), *words])
    grids.main()
    return dict(json.loads(out.read_text(encoding="utf-8")))


def test_what_was_run_is_not_run_again(
    grids: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cells = {"short": grids.Cell("fedavg"), "long": grids.Cell("fedavg", ("local-epochs=2",))}
    grid = grids.Grid("short", cells, (0, 1), TINY, ("local-epochs=1", "sectors=2"))
    out = tmp_path / "grid.json"
    made = run(grids, monkeypatch, out, grid, "--cells", "short")
    assert [sorted(cell["seeds"]) for cell in made["cells"].values()] == [["0", "1"], []]
    # FedAvg has no sectors, and a cell's own setting wins.
    assert [cell["settings"] for cell in made["cells"].values()] == [["local-epochs=1"], ["local-epochs=2"]]
    capsys.readouterr()
    whole = run(grids, monkeypatch, out, grid)
    assert capsys.readouterr().err.split("\n")[:-1] == ["tiny: long, seed 0", "tiny: long, seed 1"]
    assert whole["cells"]["short"] == made["cells"]["short"]
    assert 0 <= whole["cells"]["long"]["seeds"]["1"]["global_accuracy"] <= 1
    changed = grids.Grid("short", cells, (0, 1), {**TINY, "limit": 140}, grid.settings)
    assert grids.begun(out, "tiny", changed)["cells"]["short"]["seeds"] == {}


def test_models_that_were_chosen_on_validation_data_are_measured_on_the_whole_test_set(
    grids: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The same model: without validation data in the training, it would have another accuracy."""
    sizes = []
    plain = grids.evaluator
    monkeypatch.setattr(
        grids, "evaluator", lambda build, bundle: sizes.append(len(bundle.test)) or plain(build, bundle)
    )
    cells = {"fedavg": grids.Cell("fedavg")}
    grid = grids.Grid("fedavg", cells, (0,), {**TINY, "validation": True}, ("local-epochs=1",), tested=True)
    (values,) = run(grids, monkeypatch, tmp_path / "grid.json", grid)["cells"]["fedavg"]["seeds"].values()
    assert sizes == [359]
    assert values["rounds"] == [values["global_accuracy"]]
    assert round(values["test_accuracy"] * 359, 6).is_integer()
    assert not round(values["global_accuracy"] * 359, 6).is_integer()


def test_the_lowest_client_of_the_later_rounds_is_kept(
    grids: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid = grids.Grid("fedavg", {}, (0,), {**TINY, "rounds": 2}, ("local-epochs=1",))
    cell = grids.Cell("fedavg")
    assert "lowest_accuracy" not in grids.measured(grid, cell, 0)
    results = []
    monkeypatch.setattr(grids, "UNSETTLED", 1)
    plain = grids.run
    monkeypatch.setattr(grids, "run", lambda *a, **k: results.append(plain(*a, **k)) or results[-1])
    values = grids.measured(grid, cell, 0)
    accuracies = [client["local_accuracy"] for client in results[0].rounds[1].clients.values()]
    assert values["lowest_accuracy"] == min(accuracies) < max(accuracies)


def test_the_oracle_knows_the_halves(grids: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.Tensor] = []
    plain = grids.personal_targets
    monkeypatch.setattr(grids, "personal_targets", lambda c, s: seen.append(c) or plain(c, s))
    before = grids.KTpFL.targets
    part = {**TINY, "clients": 5, "limit": None, "partition": "ktpfl-1:6"}
    grid = grids.Grid("oracle", {}, (0,), part, ("local-epochs=1", "public-samples=20"))
    grids.measured(grid, grids.Cell("ktpfl", oracle=True), 0)
    assert grids.KTpFL.targets is before
    (weights,) = seen
    expected = torch.zeros(5, 5, dtype=torch.float64)
    expected[:3, :3], expected[3:, 3:] = 1 / 3, 1 / 2
    torch.testing.assert_close(weights, expected)


def test_settings_are_those_of_the_methods(grids: ModuleType) -> None:
    for grid in (make() for make in grids.GRIDS.values()):
        assert grid.control in grid.cells
        for cell in grid.cells.values():
            registry.get(cell.method).config([*grids.own_settings(grid, cell)])


def test_fedhybs_defaults_are_the_best_of_its_search() -> None:
    """One epoch is the least there is; the rate lies between others."""
    path = ROOT / "benchmarks" / "results" / "grid-fedhyb-server.json"
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    assert all(cell["experiment"]["validation"] for cell in cells.values())
    cells.pop("fedavg")
    seeds = set.intersection(*(set(cell["seeds"]) for cell in cells.values()))
    assert len(seeds) > 1
    best = max(cells.values(), key=lambda cell: sum(cell["seeds"][k]["global_accuracy"] for k in seeds))
    config = registry.get("fedhyb").config()
    chosen = {"server-epochs": config.server_epochs, "server-learning-rate": config.server_learning_rate}
    assert {
        name: float(value) for name, _, value in (text.partition("=") for text in best["settings"][-2:])
    } == chosen
    rates = sorted(float(cell["settings"][-1].partition("=")[2]) for cell in cells.values())
    assert rates[0] < config.server_learning_rate < rates[-1]


def test_a_control_is_its_cell_without_knowledge(grids: ModuleType) -> None:
    for alpha in grids.ALPHAS:
        grid = grids.GRIDS[f"fedhkd-controls-{alpha}"]()
        sent = {
            name: registry.get(cell.method).config([*grids.own_settings(grid, cell)]).to_wire()
            for name, cell in grid.cells.items()
        }
        assert len(sent) == 2 + 3 * len(grids.FOUND)
        for name, control in itertools.product(grids.FOUND, ("uniform", "permuted")):
            assert sent[name] != sent["fedhkd"]
            assert sent[f"{name}-{control}"] == {**sent[name], "client-knowledge": control}


def test_fedhkds_search_shows_all_its_cells(grids: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    report = importlib.import_module("report")
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
