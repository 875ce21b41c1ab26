"""Files of methods and settings for ``compare``."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import typer

from flwr_kd import ConfigError, ExperimentOptions, ResultError, registry
from flwr_kd.cli.app import app
from flwr_kd.experiments import comparison
from flwr_kd.experiments.papers import library, rules
from flwr_kd.experiments.run_form import RunForm, option_values, planned, read_run_form

TEXT = """
methods = ["fedavg", "fedhkd", "strong"]
seeds = [3]

[settings]
dataset = "digits"
clients = 2
fraction-train = 1

[hyperparameters]
all = { local-epochs = 2, temperature = 0.25 }
fedhkd = { gamma = 0.1 }

[named.strong]
method = "fedhkd"
set = { gamma = 0.5 }
model = "lenet"
"""


def form(folder: Path, text: str = TEXT) -> RunForm:
    file = folder / "runs.toml"
    file.write_text(text)
    return read_run_form(file)


def one(*args: Any, **kwargs: Any) -> Any:
    (found,) = planned(*args, **kwargs)
    return found


def test_rows_have_their_settings(tmp_path: Path) -> None:
    plan = one(form(tmp_path))
    assert plan.id == ""
    assert plan.settings == {"dataset": "digits", "clients": 2, "fraction_train": 1.0}
    avg, hkd, strong = plan.entries
    assert [(row.name, row.method.name, row.model) for row in plan.entries] == [
        ("fedavg", "fedavg", None), ("fedhkd", "fedhkd", None), ("strong", "fedhkd", "lenet")
    ]  # fmt: skip
    assert [row.config.local_epochs for row in plan.entries] == [2, 2, 2]
    assert avg.config == registry.get("fedavg").config(["local-epochs=2"])
    # A named row has its method's settings, and its own on top.
    assert (hkd.config.to_wire()["gamma"], strong.config.to_wire()["gamma"]) == (0.1, 0.5)
    assert strong.config.to_wire()["temperature"] == 0.25


def test_the_callers_values_win(tmp_path: Path) -> None:
    plan = one(
        form(tmp_path), settings={"clients": 5}, assignments=["gamma=0.7"], methods=["strong", "fedproto"]
    )
    assert plan.settings["clients"] == 5
    strong, proto = plan.entries
    assert (strong.name, strong.config.to_wire()["gamma"]) == ("strong", 0.7)
    assert (proto.name, proto.config.local_epochs) == ("fedproto", 2)


def test_a_grid_of_hyperparameters_labels_rows(tmp_path: Path) -> None:
    text = TEXT + "[grid]\ngamma = [0.0, 0.2]\n[grid.fedavg]\nbatch-size = [8, 16]\n"
    rows = one(form(tmp_path, text)).entries
    # `strong` is named for its gamma, and keeps it.
    assert [row.name for row in rows] == [
        "fedavg, batch-size=8", "fedavg, batch-size=16", "fedhkd, gamma=0.0", "fedhkd, gamma=0.2", "strong"
    ]  # fmt: skip
    assert [row.config.batch_size for row in rows[:2]] == [8, 16]
    assert [row.config.to_wire()["gamma"] for row in rows[2:]] == [0.0, 0.2, 0.5]


def test_what_the_caller_gives_replaces_the_grids_values(tmp_path: Path) -> None:
    """A label or a folder with another value than the one that was used would be a lie."""
    text = TEXT + "[grid]\ngamma = [0.0, 0.2]\nbatch-size = [8, 16]\npartition = ['iid', 'dirichlet:1']\n"
    own = text.replace("[grid]", "[grid.fedhkd]\ntemperature = [1.0, 2.0]\n[grid]")
    plan = one(
        form(tmp_path, own),
        settings={"partition": "iid"},
        assignments=["gamma=0.3", "batch_size=4", "temperature=3"],
        methods=["fedavg", "fedhkd"],
    )
    assert (plan.id, plan.settings["partition"]) == ("", "iid")
    assert [row.name for row in plan.entries] == ["fedavg", "fedhkd"]
    assert [row.config.batch_size for row in plan.entries] == [4, 4]
    assert plan.entries[1].config.to_wire()["temperature"] == 3


def test_rows_that_the_callers_values_make_equal_are_refused(tmp_path: Path) -> None:
    """The names of a result's rows say in what they differ."""
    text = TEXT.replace('model = "lenet"', "")
    with pytest.raises(ConfigError, match="the rows 'fedhkd' and 'strong' are the same"):
        planned(form(tmp_path, text), assignments=["gamma=0.3"])
    assert len(planned(form(tmp_path, TEXT), assignments=["gamma=0.3"])) == 1
    as_in_a_result = text.replace("strong", '"fedhkd, gamma=0.5"').replace('""', '"')
    with pytest.raises(ConfigError, match=r"the rows 'fedhkd' and 'fedhkd, gamma=0.5' are the same"):
        planned(form(tmp_path, as_in_a_result), assignments=["gamma=0.3"])
    with pytest.raises(ConfigError, match="the rows 'fedhkd' and 'strong' are the same"):
        planned(form(tmp_path, TEXT), assignments=["gamma=0.3"], settings={"model": "mlp"})
    cells = "[[run]]\nid = 'a'\nsettings = { clients = 3 }\n[[run]]\nid = 'b'\n"
    assert one(form(tmp_path, TEXT + cells), settings={"clients": 4}).id == ""
    third = "[[run]]\nid = 'c'\nsettings = { rounds = 3 }\n"
    with pytest.raises(ConfigError, match="the comparisons 'a' and 'b' are the same"):
        planned(form(tmp_path, TEXT + cells + third), settings={"clients": 4})


def test_what_is_equal_in_the_file_may_stay_so(tmp_path: Path) -> None:
    """As cells of a paper's table that differ in how their numbers are read only."""
    text = TEXT.replace(", temperature = 0.25", "") + "[named.again]\nmethod = 'fedavg'\n"
    cells = (
        "".join(f"[[run]]\nid = '{name}'\n" for name in "ab")
        + "[[run]]\nid = 'c'\nset = { weight-decay = 0.9 }\n"
    )
    for given in ({}, {"clients": 4}):
        plans = planned(
            form(tmp_path, text + cells),
            settings=given,
            assignments=["batch-size=4"],
            methods=["fedavg", "again"],
        )
        assert [plan.id for plan in plans] == ["a", "b", "c"]
        assert [row.name for row in plans[0].entries] == ["fedavg", "again"]
    # A value of the grid may be that of a row.
    gridded = TEXT.replace('model = "lenet"', "") + "[grid.fedhkd]\ngamma = [0.2, 0.5]\n"
    for given in ({}, {"clients": 4}):
        assert len(one(form(tmp_path, gridded), settings=given, assignments=["batch-size=4"]).entries) == 4


def test_the_callers_model_is_that_of_all_rows(tmp_path: Path) -> None:
    plan = one(form(tmp_path), settings={"model": "mlp"})
    assert [row.model for row in plan.entries] == [None, None, None]
    assert plan.settings["model"] == "mlp"


@pytest.mark.long
def test_each_table_that_trains_is_such_a_file() -> None:
    for folder in library.folders():
        _, experiments = library.read_folder(folder)
        for each in experiments:
            if each.trained:
                plans = planned(read_run_form(folder / f"{each.id}.toml"))
                assert [row.name for row in plans[0].entries] == list(rules.taken(each).methods)
                assert len(plans) == max(1, len(each.run))
                # An option that none of them has changes none of their differences.
                elsewhere = planned(
                    read_run_form(folder / f"{each.id}.toml"),
                    settings={"device": "cpu"},
                    assignments=["batch-size=8"],
                )
                assert [plan.id for plan in elsewhere] == [plan.id for plan in plans]


def test_what_trains_nothing_is_refused() -> None:
    file = Path(__file__).resolve().parents[2] / "strategies" / "fedhkd" / "experiments" / "section-4.3.toml"
    with pytest.raises(ConfigError, match="trains nothing: `flwr-kd reproduce` computes"):
        read_run_form(file)


def test_a_grid_of_options_makes_comparisons(tmp_path: Path) -> None:
    text = TEXT + '[grid]\npartition = ["iid", "dirichlet:0.1"]\nrounds = [1, 2]\n'
    plans = planned(form(tmp_path, text))
    assert [plan.id for plan in plans] == [
        "partition=iid rounds=1", "partition=iid rounds=2",
        "partition=dirichlet-0.1 rounds=1", "partition=dirichlet-0.1 rounds=2",
    ]  # fmt: skip
    assert [plan.settings["rounds"] for plan in plans] == [1, 2, 1, 2]


def test_cells_are_comparisons_with_their_settings(tmp_path: Path) -> None:
    text = TEXT + (
        '[[run]]\nid = "a"\nsettings = { clients = 3 }\nset = { gamma = 0.9 }\n[[run]]\nid = "b"\n'
    )
    first, second = planned(form(tmp_path, text))
    assert (first.id, first.settings["clients"]) == ("a", 3)
    assert [row.config.to_wire().get("gamma") for row in first.entries] == [None, 0.9, 0.5]
    assert (second.id, second.settings["clients"]) == ("b", 2)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"fedavg", ', '"fedagv", ', r"unknown method 'fedagv' \(did you mean 'fedavg'\?\)"),
        ("clients = 2", "cleints = 2", r"unknown option 'cleints' \(did you mean 'clients'\?\)"),
        ("clients = 2", 'clients = "2"', r"clients must be of type int, got '2'"),
        ("clients = 2", "clients = 2.5", r"clients must be of type int, got 2.5"),
        ("clients = 2", "data-dir = 2", r"data-dir must be of type str, got 2"),
        ("gamma = 0.1", "gama = 0.1", r"fedhkd: unknown hyper-parameter 'gama' \(did you mean 'gamma'\?\)"),
        ("gamma = 0.1", "gamma = -0.1", r"fedhkd: gamma must be >= 0, got -0.1"),
        (
            "local-epochs = 2",
            "epochs = 2",
            r"hyperparameters.all: unknown hyper-parameter 'epochs' \(did you mean 'local-epochs'\?\)",
        ),
        ("fedhkd = {", "fedhdk = {", r"unknown method 'fedhdk'"),
        (
            'method = "fedhkd"',
            'method = "fedhkd-star"',
            r"strong: gamma is fixed at 0.0 by fedhkd-star, got 0.5",
        ),
        ("[named.strong]", "[grid.strng]\ngamma = [1]\n[named.strong]", r"grid.strng: unknown row 'strng'"),
        (
            "[named.strong]",
            "[grid]\ngamma = 1\n[named.strong]",
            r"grid.gamma must be a list of values, got 1",
        ),
        (
            "[named.strong]",
            "[grid]\ngama = [1]\n[named.strong]",
            r"grid: unknown option or hyper-parameter 'gama'",
        ),
        (
            "[named.strong]",
            "[grid]\npartition = ['iid', 'iid']\n[named.strong]",
            r"grid.partition has the value 'iid' twice: leave one of them out",
        ),
        (
            "[named.strong]",
            "[grid.fedhkd]\ngamma = [0.1, 0.1]\n[named.strong]",
            r"grid.fedhkd.gamma has the value 0.1 twice",
        ),
        ("[named.strong]", '[named.""]\nmethod = "fedavg"\n[named.strong]', r"named: a row must have a name"),
        (
            "[named.strong]",
            '[named.alone]\nmethod = "fedprox"\n[named.strong]',
            r"named.alone: alone is the row of clients that train by themselves.*this row is fedprox",
        ),
        (
            "[named.strong]",
            "[grid]\npartion = ['iid']\n[named.strong]",
            r"unknown option or hyper-parameter 'partion' \(did you mean 'partition'\?\)",
        ),
        (
            "[named.strong]",
            "[grid]\npartition = []\n[named.strong]",
            r"grid.partition must have at least one value, got an empty list",
        ),
        (
            "[named.strong]",
            "[grid.fedhkd]\ngama = [1]\n[named.strong]",
            r"grid.fedhkd: unknown hyper-parameter 'gama' \(did you mean 'gamma'\?\)",
        ),
        (
            '"fedhkd", "strong"]',
            '"fedhkd-star", "strong"]\ngrid.fedhkd-star = { gamma = [1] }',
            r"grid.fedhkd-star: gamma is fixed at 0.0 by fedhkd-star",
        ),
        ("[named.strong]", "[named.x]\nmethod = 'fedhdk'\n[named.strong]", r"named.x.method: unknown method"),
        (
            "[named.strong]",
            "[named.fedavg]\nmethod = 'fedhkd'\n[named.strong]",
            r"named.fedavg: fedavg is a method, and this row is fedhkd: .* or a note",
        ),
        ("[named.strong]", "[[run]]\nid = 'a'\n[[run]]\nid = 'a'\n[named.strong]", r"two .* the id 'a'"),
        (
            "[named.strong]",
            "[[run]]\nid = 'a'\nsettings = { cleints = 2 }\n[named.strong]",
            r"runs.toml: run 'a': settings: unknown option 'cleints'",
        ),
        ("clients = 2", "seeds = [1]", r"settings: seeds is no option .* at the top of the file"),
        (
            "clients = 2",
            "clients = [2, 3]",
            r"settings: clients must have one value, got a list: .* \[grid\]",
        ),
        ("clients = 2", "grid = 1", r"settings: grid is no option .* in a table of its own"),
        ("clients = 2", "gamma = 1", r"settings: gamma is a hyper-parameter: .* under \[hyperparameters\]"),
        ("clients = 2", "set = 1", r"settings: hyper-parameters are written under \[hyperparameters\]"),
        ("clients = 2", "out = 'a'", r"settings: out is an option of the command line only: .* give --out"),
        (
            "seeds = [3]",
            "dataset = 'digits'",
            r"runs.toml: dataset is an option of a run: .* under \[settings\]",
        ),
        ("seeds = [3]", "gamma = 1", r"runs.toml: gamma is a hyper-parameter: .* under \[hyperparameters\]"),
        ("seeds = [3]", "out = 'a'", r"runs.toml: out is an option of the command line only: .* give --out"),
        ("seeds = [3]", "seed = 1", r"runs.toml: unknown key 'seed' \(did you mean 'seeds'\?\)"),
        (
            "{ gamma = 0.1 }",
            "{ clients = 2 }",
            r"hyperparameters.fedhkd: clients is an option of a run: write",
        ),
        ("{ gamma = 0.5 }", "{ clients = 2 }", r"named.strong: set: clients is an option of a run: write it"),
        ('model = "lenet"', "gamma = 2", r"named.strong: gamma is a hyper-parameter: .* a \[named\] row"),
        (
            "[named.strong]",
            "[grid.fedhkd]\nrounds = [1]\n[named.strong]",
            r"grid.fedhkd: rounds is an option of",
        ),
        (
            "[named.strong]",
            "[[run]]\nid = 'a'\nrounds = 2\n[named.strong]",
            r"runs.toml: run 'a': rounds is an option of a run: .* `settings` of a \[\[run\]\]",
        ),
        ("seeds = [3]", "seeds = []", r"runs.toml: seeds must have at least one number"),
        ('methods = ["fedavg", "fedhkd", "strong"]', "", r"there is no method to run"),
    ],
)
def test_what_is_not_allowed_is_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in TEXT
    with pytest.raises(ConfigError, match=message):
        planned(form(tmp_path, TEXT.replace(old, new)))


def test_each_option_of_the_command_line_has_its_place_in_a_file_or_a_reason() -> None:
    """Whatever `compare` takes and a file's settings do not, the error says where it belongs."""
    command = typer.main.get_command(app).commands["compare"]  # type: ignore[attr-defined]
    flags = {flag[2:] for option in command.params for flag in option.opts if flag.startswith("--")}
    elsewhere = flags - {each.name.replace("_", "-") for each in fields(ExperimentOptions)}
    assert len(elsewhere) > 8
    for flag in elsewhere:
        with pytest.raises(ConfigError, match=r"no option of a run|hyper-parameters are|command line only"):
            option_values({flag: 1})


def test_a_result_is_run_again_as_it_was(tmp_path: Path) -> None:
    """Labels, variants, models, backend and seeds are the result's; so are the numbers."""
    options = ExperimentOptions(clients=2, rounds=2, limit=150, backend="inline", device="cpu")
    named = "[named.fedavg]\nmethod = 'fedprox'\nnote = 'a paper calls it so'\n"
    text = TEXT.replace('"fedavg", "fedhkd", "strong"]', '"strong", "fedhkd-star", "fedavg"]')
    file = form(tmp_path, text + named)
    rows = one(file, assignments=["noise=none"]).entries
    first = comparison.compare(rows, options, seeds=[4], folder=tmp_path / "first")
    again = read_run_form(tmp_path / "first" / "result.json")
    assert again == read_run_form(tmp_path / "first")
    plan = one(again)
    second = comparison.compare(
        plan.entries, ExperimentOptions(**plan.settings), seeds=again.seeds, folder=tmp_path / "second"
    )
    assert second.config == first.config
    assert [(run.name, run.method, run.seed, run.hyperparameters) for run in second.runs] == [
        (run.name, run.method, run.seed, run.hyperparameters) for run in first.runs
    ]
    for before, after in zip(first.runs, second.runs, strict=True):
        assert [replace(each, seconds=0.0) for each in after.rounds] == [
            replace(each, seconds=0.0) for each in before.rounds
        ]


def test_a_file_that_is_no_result_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("{}")
    with pytest.raises(ResultError, match=r"a.json: schema_version"):
        read_run_form(tmp_path / "a.json")
    with pytest.raises(ConfigError, match="there is no such file"):
        read_run_form(tmp_path / "b.json")


def test_no_setting_makes_the_row_alone_another(tmp_path: Path) -> None:
    """Its clients train alone whatever the command line, a file or a result says."""
    text = "methods = ['alone', 'fedproto', 'fedavg']\n[hyperparameters]\nalone = { local-epochs = 3 }\n"
    alone, proto, _ = one(form(tmp_path, text), assignments=["proto-weight=2"]).entries
    assert [row.config.to_wire()["proto-weight"] for row in (alone, proto)] == [0, 2]
    assert [row.config.local_epochs for row in (alone, proto)] == [3, 5]
    with pytest.raises(
        ConfigError, match="proto-weight is fixed at 0 in the row alone, got 'proto-weight=2'"
    ):
        one(form(tmp_path, text), assignments=["proto-weight=2"], methods=["alone", "fedavg"])
    spread = one(form(tmp_path, text + "[grid]\nbatch-size = [8, 16]\n"), methods=["alone"]).entries
    assert [row.config.to_wire()["proto-weight"] for row in spread] == [0, 0]


def test_a_row_runs_with_its_own_seeds(tmp_path: Path) -> None:
    """As in a result that was extended by a method with fewer seeds."""
    options = ExperimentOptions(clients=2, rounds=1, limit=150, backend="inline", device="cpu")
    folder = tmp_path / "extended"
    comparison.compare(["fedavg"], options, seeds=[0, 1, 0], folder=folder)
    plan = comparison.prepare(
        ["fedavg", "fedprox"], options, seeds=[1], folder=folder, command="second --resume", resume=True
    )
    comparison.run(plan)
    made, _ = comparison.write(plan)
    pairs = [(run.name, run.seed) for run in made.runs]
    assert sorted(pairs) == [("fedavg", 0), ("fedavg", 1), ("fedprox", 1)]
    again = read_run_form(folder)
    assert again.seeds == (0, 1)
    plan = comparison.prepare(one(again).entries, options, seeds=again.seeds, folder=tmp_path / "again")
    assert sorted((row.name, each.seed) for row, each in plan.runs()) == sorted(pairs)
    assert plan.rounds == 3


def test_what_a_result_derived_is_free_again(tmp_path: Path) -> None:
    """The limit of client-samples, and the public data that a data set has by default."""
    options = ExperimentOptions(
        clients=2, rounds=1, dataset="digits", client_samples=60, backend="inline", device="cpu"
    )
    comparison.compare(["fedavg"], options, seeds=[0], folder=tmp_path / "run")
    again = read_run_form(tmp_path / "run")
    for given in ({"clients": 3}, {"dataset": "letters"}):
        settings = one(again, settings=given).settings
        assert "limit" not in settings
        assert "public" not in settings
        comparison.prepare(["fedavg"], ExperimentOptions(**settings), seeds=[0], folder=tmp_path / "next")
        (tmp_path / "next" / ".unfinished" / "result.json").unlink()
        (tmp_path / "next" / ".unfinished").rmdir()


def test_folders_of_comparisons_differ(tmp_path: Path) -> None:
    cells = "[[run]]\nid = 'lr<1'\n[[run]]\nid = 'lr>1'\nsettings = { rounds = 2 }\n"
    with pytest.raises(ConfigError, match="two comparisons have the folder 'lr-1'"):
        planned(form(tmp_path, TEXT + cells))


def test_numbers_of_texts_and_a_byte_order_mark_are_read(tmp_path: Path) -> None:
    file = tmp_path / "runs.toml"
    file.write_text("\ufeffmethods = ['fedavg']\n[settings]\ntarget = 85\nclasses = 5\n", encoding="utf-8")
    assert one(read_run_form(file)).settings == {"target": "85", "classes": "5"}
