"""An experiment of a paper, run: results, resumption, page, verdicts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flwr_kd import ConfigError
from flwr_kd.experiments import comparison
from flwr_kd.experiments.papers import library, report, reproduction
from flwr_kd.results import files
from tests.cli.commands import is_a_picture

PAPER = """
id = "mine"
title = "A Paper"
authors = "Somebody"
[[findings]]
about = "table 1"
text = "a finding"
"""
TABLE = """
id = "table-1"
kind = "accuracy"
title = "Accuracy"
claim = "FedHKD is better."
source = "section 2"
unit = "fraction"
metric = "accuracy"
methods = ["fedavg", "strong"]
seeds = [0, 1]
open = [{ question = "the seeds", taken = "0 and 1" }]
doubts = ["a doubt"]

[measures]
local = "local_accuracy"
global = "global_accuracy"

[settings]
dataset = "digits"
clients = 2
rounds = 1
limit = 150
backend = "inline"
device = "cpu"

[named.strong]
method = "fedhkd"
set = { noise = "none" }

[[run]]
id = "iid"
settings = { partition = "iid" }
printed.local = { fedavg = 0.5950, strong = 0.60 }
printed.global = { fedavg = 0.5, strong = [0.6, 0.01] }

[[run]]
id = "skewed"
settings = { partition = "dirichlet:0.1" }
printed.global = { fedavg = 0.6, strong = 0.5 }

[[run]]
id = "iid-again"
settings = { partition = "iid" }

[[expect]]
claim = "strong is above FedAvg"
kind = "above"
source = "stated"
measure = "global"
left = ["strong"]
right = ["fedavg"]

[small]
note = "one client."
settings = { clients = 1 }
run = [{ id = "tiny", stands-for = "iid", settings = { partition = "iid" } }]
"""
MISSING = """
id = "table-2"
kind = "accuracy"
title = "Accuracy"
claim = "c"
source = "section 2"
unit = "percent"
metric = "accuracy"
methods = ["fedavg"]
[measures]
global = "global_accuracy"
[settings]
clients = 2
rounds = 1
backend = "inline"
device = "cpu"
[[run]]
id = "there"
settings = { dataset = "digits", limit = 100 }
[[run]]
id = "not-there"
settings = { dataset = "cinic10" }
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "experiments"
    folder.mkdir()
    for name, text in (("paper", PAPER), ("table-1", TABLE), ("table-2", MISSING)):
        (folder / f"{name}.toml").write_text(text)
    monkeypatch.setattr(library, "folders", lambda: [folder])
    monkeypatch.chdir(tmp_path)
    library.papers.cache_clear()
    yield tmp_path
    library.papers.cache_clear()


def test_cells_are_comparisons_and_cells_with_the_same_settings_share_them(
    mine: Path, ran: list[tuple[str, int]]
) -> None:
    chosen = reproduction.prepare("mine/table-1")
    assert chosen.folder == Path("runs/reproduce/mine/table-1-paper")
    assert [[cell.id for cell in job.cells] for job in chosen.jobs] == [["iid", "iid-again"], ["skewed"]]
    assert reproduction.run(chosen) == {}
    assert len(ran) == 2 * 2 * 2
    results = reproduction.results_of(chosen)
    assert set(results) == {"iid", "skewed", "iid-again"}
    assert results["skewed"].config["partition"] == "dirichlet:0.1"
    assert is_a_picture(chosen.folder / "iid" / "curves.png")
    # Nothing is run again, and a further seed alone is added.
    reproduction.run(chosen)
    assert len(ran) == 8
    more = reproduction.prepare("mine/table-1", only=["skewed"], seeds=[0, 1, 2])
    reproduction.run(more)
    assert ran[8:] == [("fedavg", 2), ("fedhkd", 2)]


def test_a_run_that_is_interrupted_goes_on(mine: Path, ran: list[tuple[str, int]]) -> None:
    chosen = reproduction.prepare("mine/table-1", only=["skewed"])

    def stop(plan: comparison.Plan) -> None:
        def begin(*_: Any) -> None:
            if len(ran) == 3:
                raise KeyboardInterrupt

        comparison.run(plan, on_run=begin)

    with pytest.raises(KeyboardInterrupt):
        reproduction.run(chosen, runner=stop)
    assert not (chosen.folder / "skewed" / files.FILE_NAME).exists()
    reproduction.run(chosen)
    assert ran == [("fedavg", 0), ("fedhkd", 0), ("fedavg", 1), ("fedhkd", 1)]


def test_the_page_has_ours_beside_the_printed_numbers_and_a_verdict(mine: Path) -> None:
    chosen = reproduction.prepare("mine/table-1", only=["partition=iid"])
    reproduction.run(chosen)
    made = report.report(chosen, command="flwr-kd reproduce mine/table-1")
    text = report.write(made).read_text()
    first = reproduction.results_of(chosen)["iid"]
    values = [100 * run.last["local_accuracy"] for run in first.by_method()["fedavg"]]  # type: ignore[operator]
    assert f"{sum(values) / 2:.2f} ± " in text
    (row,) = (line for line in text.splitlines() if line.startswith("| `fedavg` |") and "59.50" in line)
    assert row.endswith("| 50 |")
    assert "| 60 ± 1 |" in text
    (claim,) = (line for line in text.splitlines() if line.startswith("| strong is above FedAvg"))
    assert claim.endswith("| 1 of 2; not skewed |")
    # Two cells here, of which one repeats the other's settings.
    assert " of 2 |" in claim
    for expected in (
        "a finding",
        "a doubt",
        "The seeds. Taken: 0 and 1.",
        "`flwr-kd reproduce mine/table-1`",
    ):
        assert expected in text
    assert '"strong is above FedAvg" is true of 1 of 2: not of skewed' in text
    picture = report.draw(made)
    assert picture is not None
    assert is_a_picture(picture)
    document = json.loads(report.page_file(chosen).with_suffix(".json").read_text())
    (entry,) = document["claims"]
    assert entry["paper-agrees"] == [1, 2]
    assert entry["comparisons"] == len(entry["checks"]) == 2
    ours = {(c["cell"], c["measure"], c["row"]): c for c in document["cells"]}
    assert ours["iid", "local", "fedavg"]["printed"] == "0.5950"
    assert list(ours["iid", "local", "fedavg"]["ours"].values()) == values


@pytest.mark.parametrize(("kind", "setting"), [("sweep", ""), ("picture", "distances = true")])
def test_sweeps_and_distances_have_pictures_of_their_own(mine: Path, kind: str, setting: str) -> None:
    text = MISSING.replace('"accuracy"', f'"{kind}"', 1).replace(
        "clients = 2\nrounds = 1", f"clients = 2\nrounds = 3\n{setting}"
    )
    runs = "".join(
        f'[[run]]\nid = "{name}"\nsettings = {{ dataset = "digits", limit = 100, partition = "{form}" }}\n'
        for name, form in (("one", "iid"), ("other", "dirichlet:1"))[: 2 if kind == "sweep" else 1]
    )
    (mine / "experiments" / "table-2.toml").write_text(text[: text.index("[[run]]")] + runs)
    library.papers.cache_clear()
    chosen = reproduction.prepare("mine/table-2", seeds=[0])
    reproduction.run(chosen)
    picture = report.draw(report.report(chosen))
    assert picture is not None
    assert is_a_picture(picture)


def test_the_small_version_stands_for_cells_of_the_paper(mine: Path) -> None:
    chosen = reproduction.prepare("mine/table-1", scale="small", seeds=[5])
    assert [(job.folder.name, job.options.clients) for job in chosen.jobs] == [("tiny", 1)]
    reproduction.run(chosen)
    made = report.report(chosen)
    text = report.write(made).read_text()
    assert "small version" in text
    assert "In place of the paper's iid." in text
    assert "59.50" in text
    # One seed has no interval.
    (ruled,) = made.ruled
    assert ruled.found.verdict.value == "undecided"


def test_a_cell_without_data_is_named_and_the_others_run(mine: Path, tmp_path: Path) -> None:
    chosen = reproduction.prepare("mine/table-2", seeds=[0], settings={"data_dir": str(tmp_path)})
    failed = reproduction.run(chosen)
    assert list(failed) == ["not-there"]
    assert "data set 'cinic10' needs" in failed["not-there"]
    text = report.write(report.report(chosen, failed=failed)).read_text()
    assert "- not-there: data set 'cinic10' needs" in text
    assert "| there |" in text


def test_what_is_not_there_is_refused(mine: Path) -> None:
    with pytest.raises(ConfigError, match=r"scale must be one of paper, small, got 'tiny'"):
        reproduction.prepare("mine/table-1", scale="tiny")
    for only, message in (
        (["mnist"], r"only: no cell has mnist; there are iid, skewed"),
        (["iid", "skewed"], r"only: no cell has all of iid, skewed; there are iid, skewed"),
        (["partion=iid"], r"only: unknown setting of a cell 'partion' \(did you mean 'partition'\?\)"),
        (["partition=idd"], r"only: partition must be iid or .*, got 'idd'"),
    ):
        with pytest.raises(ConfigError, match=message):
            reproduction.prepare("mine/table-1", only=only)
    with pytest.raises(ConfigError, match=r"table-2 has no small version"):
        reproduction.prepare("mine/table-2", scale="small")
