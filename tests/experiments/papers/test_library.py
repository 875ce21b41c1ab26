"""The papers' experiments as files: each is valid, and the papers' own numbers say what is noted of them."""

from __future__ import annotations

import sys
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import pytest

from flwr_kd import ConfigError, registry
from flwr_kd.experiments.papers import library, printed, rules
from flwr_kd.experiments.papers.paper import Paper
from flwr_kd.experiments.papers.schema import PaperExperiment

EVERY = [pytest.param(paper, each, id=f"{paper.id}/{each.id}") for paper, each in library.every()]
ROOT = Path(__file__).parents[3]


def others(paper: Paper) -> dict[str, PaperExperiment]:
    return {each.id: each for each in library.papers()[paper.id][1]}


def test_each_of_the_five_papers_has_its_tables_and_figures() -> None:
    found = {paper.id: [each.id for each in experiments] for paper, experiments in library.papers().values()}
    assert {paper: len(each) for paper, each in found.items()} == {
        "feddkc": 10, "fedhead": 7, "fedhkd": 6, "fedhyb": 12, "ktpfl": 14
    }  # fmt: skip
    # Each file that is there is found.
    files = {(file.parts[-3], file.stem) for file in ROOT.glob("strategies/*/experiments/*.toml")}
    assert files == {(paper, each) for paper, ids in found.items() for each in (*ids, "paper")}
    assert library.find("fedhkd/table-1")[1].title.startswith("Local and global accuracy")
    with pytest.raises(
        ConfigError, match=r"unknown experiment 'fedhkd/tabel-1' \(did you mean 'fedhkd/table-1'"
    ):
        library.find("fedhkd/tabel-1")


@pytest.mark.parametrize(("paper", "experiment"), EVERY)
def test_what_the_papers_own_numbers_say_is_what_is_noted(paper: Paper, experiment: PaperExperiment) -> None:
    """The same code that decides whether a claim holds here counts how the paper's own numbers keep it."""
    grid = printed.paper_grid(experiment, others(paper))
    for claim in experiment.expect:
        agrees, count, against = printed.paper_agrees(experiment, claim, grid)
        if claim.paper.agrees:
            assert (f"{agrees} of {count}", claim.claim) == (claim.paper.agrees, claim.claim)
        if claim.paper.not_in:
            assert set(against) == set(claim.paper.not_in)
        if claim.paper.mean_gain is not None:
            measure = printed.measure_of(experiment, claim)
            found = [
                cell.of(measure, left)[0] - cell.of(measure, right)[0]
                for cell in grid
                for left in claim.left
                for right in claim.right
            ]
            unit = Decimal(100) if experiment.unit == "fraction" else Decimal(1)
            assert sum(found) / len(found) == pytest.approx(float(claim.paper.mean_gain * unit), abs=0.0051)
        if claim.paper.clients:
            each = printed.paper_grid(replace(experiment, clients=(1, 2, 3, 4, 5)))
            agrees, count, _ = printed.paper_agrees(experiment, claim, each)
            assert f"{agrees} of {count}" == claim.paper.clients


def test_printed_numbers_keep_their_digits() -> None:
    (cell,) = (each for each in library.find("fedhkd/table-1")[1].run if each.id == "cifar10-10")
    assert str(cell.printed["local"]["fedavg"]) == "0.5950"
    (cell,) = (
        each for each in library.find("fedhead/table-3")[1].run if each.id == "sst2-tokens_dirichlet-1"
    )
    assert str(cell.printed["global"]["fedhead"]) == "89.60 ± 0.05"


def test_figures_of_a_tables_runs_have_these_runs() -> None:
    figure, table = library.find("ktpfl/figure-10")[1], library.find("ktpfl/table-3")[1]
    assert figure.run == tuple(cell for cell in table.run if "distill-epochs" in cell.set)
    assert len(figure.run) == 12
    assert figure.settings == table.settings


def test_cells_are_chosen_by_values_settings_and_words() -> None:
    table = library.find("fedhkd/table-1")[1]

    def ids(*terms: str) -> list[str]:
        return [cell.id for cell in library.chosen(table.run, terms, table.settings)]

    assert ids("cifar10", "clients=10") == ["cifar10-10"]
    assert ids("dataset=svhn") == ["svhn-10", "svhn-20", "svhn-50"]
    assert ids("svhn-50") == ["svhn-50"]
    assert len(ids("rounds=50")) == 9
    assert ids("mnist") == []


def test_inferred_values_are_taken_where_the_paper_prints_none() -> None:
    table = rules.taken(library.find("feddkc/table-5")[1])
    assert table.settings["rounds"] == 300
    assert table.hyperparameters["feddkc-kkr"]["target-peak"] == 0.12
    # What is only noted changes nothing: FedHKD's threshold is the printed one.
    printed_one = rules.taken(library.find("fedhkd/table-1")[1])
    assert printed_one.hyperparameters["fedhkd"]["threshold"] == 0.25


SMALLEST = """
id = "table-9"
kind = "accuracy"
title = "t"
claim = "c"
source = "Table 9"
unit = "percent"
metric = "m"
methods = ["fedavg", "fedhkd"]

[measures]
global = "global_accuracy"

[settings]
dataset = "digits"

[hyperparameters]
fedhkd = { gamma = 0.1 }

[[run]]
id = "a"
settings = { clients = 3 }
printed.global = { fedavg = 50.10, fedhkd = [51.0, 0.5] }

[[expect]]
claim = "FedHKD is above FedAvg"
kind = "above"
source = "stated"
left = ["fedhkd"]
right = ["fedavg"]
where = { clients = 3 }

[small]
note = "n"
[[small.run]]
id = "b"
stands-for = "a"
"""
PAPER = 'id = "mine"\ntitle = "t"\nauthors = "a"\n'


def folder_of(path: Path, text: str = SMALLEST) -> Path:
    (path / library.PAPER).write_text(PAPER)
    (path / "table-9.toml").write_text(text)
    return path


def test_a_file_is_read(tmp_path: Path) -> None:
    paper, (experiment,) = library.read_folder(folder_of(tmp_path))
    assert (paper.id, experiment.id, experiment.trained) == ("mine", "table-9", True)
    assert str(experiment.run[0].printed["global"]["fedhkd"]) == "51.0 ± 0.5"
    assert rules.small_form(experiment).run[0].stands_for == "a"
    assert rules.small_form(experiment).settings == {"dataset": "digits"}


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('id = "table-9"', 'id = "table-8"', r"id must be 'table-9', the file's name, got 'table-8'"),
        ('kind = "accuracy"', 'kind = "table"', r"kind must be one of accuracy, .* got 'table'"),
        ('unit = "percent"', 'unit = "%"', r"unit must be one of .* got '%'"),
        ('title = "t"', "", r"title is missing"),
        ('title = "t"', 'title = "t"\nmissing = []', r"unknown key 'missing'"),
        ('"fedavg", "fedhkd"]', '"fedavg", "fedhdk"]', r"a: unknown method 'fedhdk'"),
        ('global = "global_accuracy"', 'global = "accuracy"', r"measures: unknown measure 'accuracy'"),
        ('dataset = "digits"', 'dataset = "digit"', r"a: unknown data set 'digit'"),
        ('dataset = "digits"', 'data = "digits"', r"a: unknown option 'data'"),
        (
            'dataset = "digits"',
            'set = "digits"',
            r"a: hyper-parameters are written under \[hyperparameters\]",
        ),
        ("gamma = 0.1", "gamma = -1", r"a: fedhkd: gamma must be >= 0, got -1"),
        ("gamma = 0.1", "gam = 0.1", r"a: fedhkd: unknown hyper-parameter 'gam'"),
        ("clients = 3 }\nprinted", 'clients = "3" }\nprinted', r"a: clients must be of type int, got '3'"),
        (
            "fedavg = 50.10",
            'fedavg = "50.10"',
            r"run\[a\]: printed.global.fedavg must be a number, or a number and its",
        ),
        ("fedavg = 50.10", "fedprox = 50.10", r"run.a.printed.global: unknown row 'fedprox'"),
        ("printed.global", "printed.local", r"run.a.printed.local: unknown measure 'local'"),
        ('kind = "above"', 'kind = "over"', r"expect\[1\]: kind must be one of"),
        ('left = ["fedhkd"]\n', "", r"expect\[1\]: kind above needs left"),
        ('left = ["fedhkd"]', 'left = ["fedprox"]', r"expect\[1\]: unknown row 'fedprox'"),
        ("where = { clients", "where = { beta", r"expect\[1\]: unknown setting of a cell 'beta'"),
        ('source = "stated"', 'source = "guessed"', r"source must be stated or read-off, got 'guessed'"),
        ('stands-for = "a"', 'stands-for = "z"', r"small.run.b: no cell 'z' to stand for"),
        ('[[run]]\nid = "a"', '[[run]]\nid = "a"\n[[run]]\nid = "a"', r"two cells have the id 'a'"),
        ('metric = "m"', 'metric = "m"\ncontrols = ["alone"]', r"controls: unknown control 'alone'"),
        (
            'metric = "m"',
            'metric = "m"\nnamed = { fedavg = { method = "fedavg" } }\ncontrols = ["fedavg"]',
            r"controls: 'fedavg' is a row of methods already",
        ),
        ('metric = "m"', 'metric = "m"\nruns-of = "table-7"', r"unknown experiment 'table-7'"),
        ('claim = "c"', 'claim = " "', r"claim must not be empty"),
        ('source = "Table 9"', 'source = ""', r"source must not be empty"),
        ('claim = "FedHKD is above FedAvg"', 'claim = ""', r"expect\[1\]: claim must not be empty"),
        (
            "clients = 3 }\nprinted",
            "clients = -3 }\nprinted",
            r"a: clients must be a whole number from 1, got -3",
        ),
        (
            'dataset = "digits"',
            'dataset = "digits"\nrounds = -50',
            r"a: rounds must be a whole number from 1, got -50",
        ),
        (
            'dataset = "digits"',
            'dataset = "digits"\nfraction-train = 2.0',
            r"a: fraction-train must be in \(0, 1\]",
        ),
        (
            'dataset = "digits"',
            'dataset = "digits"\nmodel = "mpl"',
            r"a: unknown model 'mpl' \(did you mean 'mlp'",
        ),
        ('note = "n"', 'note = "n"\nsettings = { model = "mpl" }', r"small: b: unknown model 'mpl'"),
        (
            'unit = "percent"',
            'unit = "fraction"',
            r"printed.global.fedavg must be from 0 to 1, since unit is 'fraction'",
        ),
        (
            "fedavg = 50.10",
            "fedavg = 501.0",
            r"printed.global.fedavg must be from 0 to 100, since unit is 'percent'",
        ),
        (
            "right = [",
            'paper = { agrees = "yes" }\nright = [',
            r"expect\[1\]: paper.agrees must be like '8 of 9', got 'yes'",
        ),
    ],
)
def test_what_is_not_allowed_is_refused_with_file_and_experiment(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    assert old in SMALLEST
    with pytest.raises(ConfigError, match=message) as caught:
        library.read_folder(folder_of(tmp_path, SMALLEST.replace(old, new)))
    assert "table-9.toml: experiment mine/table-9" in str(caught.value)


def test_a_method_of_another_package_can_have_experiments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "their_package"
    (package / library.FOLDER).mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "strategy.py").touch()
    folder_of(package / library.FOLDER)
    monkeypatch.syspath_prepend(tmp_path)
    known = registry.methods()
    theirs = replace(known["fedavg"], name="theirs", strategy_path="their_package.strategy:Theirs")
    monkeypatch.setattr(registry, "methods", lambda: {**known, "theirs": theirs})
    library.papers.cache_clear()
    try:
        assert library.find("mine/table-9")[0].title == "t"
    finally:
        library.papers.cache_clear()
        sys.modules.pop("their_package", None)
