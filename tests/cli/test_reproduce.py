"""``flwr-kd reproduce``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from flwr_kd.experiments.papers import estimate, library, report
from flwr_kd.plotting import beside_printed
from flwr_kd.results import files
from tests.cli.commands import Command, is_a_picture, scalars

TABLE = """
id = "figure-1"
kind = "picture"
title = "A map"
claim = "Features are apart."
source = "section 2"
unit = "none"
metric = "t-SNE"
methods = ["fedavg", "fedhkd"]

[measures]
map = "tsne"

[settings]
dataset = "digits"
clients = 2
rounds = 1
limit = 150

[hyperparameters]
fedhkd = { noise = "none" }

[[run]]
id = "iid"
settings = { partition = "iid" }
[[run]]
id = "skewed"
settings = { partition = "dirichlet:0.1" }

[[expect]]
claim = "the map has islands"
kind = "text"
source = "stated"
"""

COMPARED = """
id = "table-2"
kind = "accuracy"
title = "A table"
claim = "Knowledge helps."
source = "section 3"
unit = "percent"
metric = "accuracy"
methods = ["fedavg", "fedhkd"]
controls = ["uniform", "alone"]

[measures]
local = "local_accuracy"

[settings]
dataset = "mnist"
clients = 3
rounds = 1

[hyperparameters]
fedhkd = { noise = "none", threshold = 0.0 }

[[run]]
id = "skewed"
settings = { partition = "dirichlet:0.1" }
printed.local = { fedavg = 50.5, fedhkd = 60.5 }

[[expect]]
claim = "FedHKD is the best"
kind = "best"
source = "stated"
methods = ["fedhkd"]

[small]
note = "digits."
settings = { dataset = "digits", limit = 150 }
"""
CURVES = """
id = "table-3"
kind = "curve"
title = "Curves"
claim = "They rise."
source = "section 3"
unit = "percent"
metric = "accuracy of a client"
runs-of = "table-2"
clients = [1, 3]

[measures]
local = "local_accuracy"
"""
CONTROLS = """
[controls.uniform]
method = "fedhkd"
set = { client-knowledge = "uniform" }
of = ["fedhkd"]
note = "Uniform predictions"

[controls.alone]
method = "fedproto"
set = { proto-weight = 0.0 }
note = "Each client alone"
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    folder = tmp_path / "experiments"
    folder.mkdir()
    (folder / "paper.toml").write_text(f'id = "mine"\ntitle = "A Paper"\nauthors = "Somebody"\n{CONTROLS}')
    (folder / "table-2.toml").write_text(COMPARED)
    (folder / "table-3.toml").write_text(CURVES)
    (folder / "figure-1.toml").write_text(TABLE)
    monkeypatch.setattr(library, "folders", lambda: [folder])
    library.papers.cache_clear()
    yield
    library.papers.cache_clear()


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimate, "seconds_per_sample", lambda *args: 0.001)


def test_the_list_names_each_experiment_with_its_claim_data_and_cost(command: Command, timed: None) -> None:
    code, out, err = command("reproduce")
    assert (code, err) == (0, "")
    for paper, experiment in library.every():
        assert f"  {paper.id}/{experiment.id} " in out
        assert experiment.claim.split()[0] in out
    (line,) = (each for each in out.splitlines() if each.startswith("  fedhkd/table-2 "))
    assert "accuracy" in line
    assert "–cifar10" in line
    # 9 methods and 2 controls, 3 seeds, 10 clients, 50 rounds, 5 epochs, in two cells each: of 375 samples 6
    # batches, of 549 9.
    assert f"{11 * 3 * 10 * 50 * 5 * (6 + 9) * 2 / 1e6:.2g} M steps" in line


def test_a_few_steps_of_a_model_are_timed() -> None:
    size = estimate.SIZES["digits"]
    seconds = estimate.seconds_per_sample("mlp", size)
    assert seconds is not None
    assert seconds > 0
    # The second call does not measure again.
    assert estimate.seconds_per_sample("mlp", size) == seconds
    assert estimate.seconds_per_sample("bilstm", size) is None
    assert estimate.seconds_per_sample("mlp", None) is None


@pytest.mark.long
def test_an_experiment_is_run_and_drawn(command: Command, tmp_path: Path, mine: None) -> None:
    options = ("--only", "iid", "--seeds", "1", "--backend", "inline", "--device", "cpu", "--out", "o")
    code, out, err = command("reproduce", "mine/figure-1", *options, "--dry-run")
    assert (code, err) == (0, "")
    assert "iid: " in out
    assert "fedhkd: noise=none" in out
    assert "skewed" not in out
    assert not (tmp_path / "o").exists()
    code, out, err = command("reproduce", "mine/figure-1", *options)
    assert (code, err) == (0, "")
    assert "to be judged by reading: the map has islands" in out
    assert f"page: {tmp_path / 'o' / 'figure-1.md'}" in out
    assert "flwr-kd reproduce mine/figure-1 --only iid" in (tmp_path / "o" / "figure-1.md").read_text()
    assert is_a_picture(tmp_path / "o" / "iid" / "tsne.png")
    # It goes on: what is finished is not run again.
    code, out, err = command("reproduce", "mine/figure-1", *options)
    assert (code, err) == (0, "")


def test_controls_stand_beside_the_claims_and_costs_below_them(
    command: Command, tmp_path: Path, mine: None
) -> None:
    options = ("--scale", "small", "--seeds", "0,1", "--backend", "inline", "--device", "cpu", "--out", "o")
    code, out, err = command("reproduce", "mine/table-2", *options, "--target", "20")
    assert (code, err) == (0, "")
    assert "stand-in: digits for mnist" in out
    document = json.loads((tmp_path / "o" / "table-2.json").read_text())
    assert document["stand-ins"] == ["digits for mnist"]
    result = files.load(tmp_path / "o" / "skewed").by_method()
    assert list(result) == ["fedavg", "fedhkd", "uniform", "alone"]
    last = {name: {run.seed: run.last["local_accuracy"] for run in runs} for name, runs in result.items()}
    # A control is no method that a claim can be about: FedHKD is compared with FedAvg alone.
    (claim,) = document["claims"]
    expected = [100 * ((last["fedhkd"][seed] or 0) - (last["fedavg"][seed] or 0)) for seed in (0, 1)]
    assert claim["mean-margin"]["mean"] == pytest.approx(sum(expected) / 2)
    text = (tmp_path / "o" / "table-2.md").read_text()
    _, _, of_controls = text.partition("## Controls")
    of_uniform, _, of_alone = of_controls.partition("### Above `alone`")
    assert "| `fedavg` |" not in of_uniform
    assert "| `fedavg` |" in of_alone
    gain = sum((last["fedavg"][seed] or 0) - (last["alone"][seed] or 0) for seed in (0, 1)) / 2
    assert f"| skewed | `fedavg` | {round(100 * gain, 2) + 0.0:+.2f} [" in of_alone
    # Who is better off, counted by hand.
    costs = {each["row"]: each for each in document["costs"]}
    for name in ("fedavg", "fedhkd"):
        shares = []
        for run, other in zip(result[name], result["alone"], strict=True):
            pairs = [
                (values["local_accuracy"] or 0, other.rounds[-1].clients[client]["local_accuracy"] or 0)
                for client, values in run.rounds[-1].clients.items()
            ]
            shares.append(sum(mine > theirs for mine, theirs in pairs) / len(pairs))
        assert costs[name]["better-off"]["mean"] == pytest.approx(sum(shares) / 2)
    assert "better-off" not in costs["alone"]
    assert costs["fedavg"]["target"] == "local accuracy 20 %"
    assert is_a_picture(tmp_path / "o" / "table-2.png")
    # Curves of single clients have the table's runs, which are not run again.
    code, out, err = command("reproduce", "mine/table-3", *options)
    assert (code, err) == (0, "")
    assert is_a_picture(tmp_path / "o" / "skewed" / "client-curves.png")
    of_clients = json.loads((tmp_path / "o" / "table-3.json").read_text())["cells"]
    assert {each["cell"] for each in of_clients} == {"skewed client 1", "skewed client 3"}
    for each in of_clients:
        client = str(int(each["cell"][-1]) - 1)
        for run in result[each["row"]]:
            share = run.rounds[-1].clients[client]["local_accuracy"]
            assert each["ours"][str(run.seed)] == pytest.approx(100 * (share or 0))


@pytest.mark.long
def test_each_cell_is_written_to_a_tracker(command: Command, tmp_path: Path, mine: None) -> None:
    options = ("--seeds", "1", "--backend", "inline", "--device", "cpu", "--out", "o")
    code, out, _ = command("reproduce", "mine/figure-1", *options, "--log", "tensorboard")
    assert code == 0
    folders = [tmp_path / "o" / cell / "tensorboard" for cell in ("iid", "skewed")]
    places = [line for line in out.splitlines() if line.startswith("log: ")]
    assert places == [f"log: tensorboard --logdir {folder}" for folder in folders]
    for folder in folders:
        runs = files.load(folder.parent).runs
        assert sorted(path.name for path in folder.iterdir()) == ["fedavg-seed1", "fedhkd-seed1"]
        for run in runs:
            logged = scalars(folder / f"{run.name}-seed1", "local_accuracy")
            assert logged == [(r.round, pytest.approx(r.local_accuracy)) for r in run.rounds]


def test_trackers_are_checked_before_anything_is_run(
    command: Command, mine: None, no_run: None, tmp_path: Path
) -> None:
    code, _, err = command("reproduce", "mine/figure-1", "--out", "o", "--log", "tensorbord")
    assert (code, err) == (
        2,
        "flwr-kd: unknown log 'tensorbord' (did you mean 'tensorboard'?); valid: tensorboard, mlflow, wandb\n",
    )
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("mine/figure-2",), "unknown experiment 'mine/figure-2' (did you mean 'mine/figure-1'?)"),
        (("mine/figure-1", "--scale", "tiny"), "scale must be one of paper, small, got 'tiny'"),
        (("mine/figure-1", "--scale", "small"), "figure-1 has no small version"),
        (("mine/figure-1", "--only", "mnist"), "only: no cell has mnist; there are iid, skewed"),
        (("mine/figure-1", "--seeds", "a"), "seeds must be whole numbers from 0"),
        (("mine/figure-1", "--seeds", ""), "seeds must be whole numbers from 0, separated by commas, got ''"),
    ],
)
def test_a_mistake_is_one_line(command: Command, mine: None, words: tuple[str, ...], message: str) -> None:
    code, _, err = command("reproduce", *words)
    assert code == 2
    assert len(err.splitlines()) == 1
    assert message in err


def test_an_experiments_file_is_a_file_of_settings(command: Command, tmp_path: Path, mine: None) -> None:
    file = str(tmp_path / "experiments" / "figure-1.toml")
    options = ("--seeds", "1", "--backend", "inline", "--device", "cpu", "--no-arrays", "--out", "o")
    assert command("compare", "--config", file, *options).code == 0
    assert sorted(path.name for path in (tmp_path / "o").iterdir()) == ["iid", "skewed"]


SMALL = ("--scale", "small", "--backend", "inline", "--device", "cpu", "--out", "o")


def test_numbers_are_of_the_seeds_that_are_asked_for(command: Command, tmp_path: Path, mine: None) -> None:
    """A folder may have runs of others."""
    whole = command("reproduce", "mine/table-2", *SMALL, "--seeds", "0,1")
    assert (whole[0], whole[2]) == (0, "")
    code, _, err = command("reproduce", "mine/table-2", *SMALL, "--seeds", "1")
    assert (code, err) == (0, "")
    document = json.loads((tmp_path / "o" / "table-2.json").read_text())
    assert document["seeds"] == [1]
    assert {seed for cell in document["cells"] for seed in cell["ours"]} == {"1"}
    assert {cost["seconds"]["n"] for cost in document["costs"]} == {1}
    text = (tmp_path / "o" / "table-2.md").read_text()
    assert "Seeds 1." in text
    assert "±" not in text.partition("## Ours")[2].partition("| 60.5 |")[0].partition("| method |")[2]
    again = (*SMALL, "--seeds", "1", "--dry-run")
    assert "\nskewed: finished\n" in command("reproduce", "mine/table-2", *again).out
    more = (*SMALL, "--seeds", "1,2", "--dry-run")
    assert "\nskewed: finished\n" not in command("reproduce", "mine/table-2", *more).out
    # The runs of the other seed are still there.
    assert {run.seed for run in files.load(tmp_path / "o" / "skewed").runs} == {0, 1}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--target", "850"), "target (in percent) must be in [1, 100], got '850'"),
        (("--target", ":5"), "target: there is no accuracy before the colon, got ':5'"),
        (("--target", "foo:5"), "target: unknown accuracy 'foo'"),
        (("--target", "common:20"), "target 'common:20' needs the common accuracy of each round"),
        (("--target", "global-on-clients:20"), "set --measure every:1"),
        (("--workers", "0"), "workers must be a whole number from 1, got 0"),
        (("--backend", "foo"), "unknown backend 'foo'"),
        (("--device", "gpu"), "device"),
        (("--data-dir", "nowhere"), "data-dir 'nowhere' does not exist"),
        (("--measure", "always"), "measure must be never, last or every:N, got 'always'"),
        (("--only", ","), "--only must be words and NAME=VALUE separated by commas, got ','"),
        (("--only", ""), "--only must be words and NAME=VALUE separated by commas, got ''"),
        (("--only", " clients = 7"), "only: clients must be 3, got '7'"),
        (("--out", "afile"), "'afile' is not a directory"),
        (("--out", "afile/b"), "'afile' is not a directory"),
    ],
)
@pytest.mark.parametrize("dry", [True, False])
def test_a_mistake_is_refused_before_any_work(
    command: Command, tmp_path: Path, mine: None, words: tuple[str, ...], message: str, dry: bool
) -> None:
    (tmp_path / "afile").touch()
    code, out, err = command("reproduce", "mine/table-2", "--scale", "small", *words, *(["--dry-run"] * dry))
    assert (code, out) == (2, "")
    assert message in err


def test_an_accuracy_that_is_measured_in_each_round_has_a_target(
    command: Command, tmp_path: Path, mine: None
) -> None:
    words = ("--seeds", "1", "--target", "common:2", "--measure", "every:1")
    code, _, err = command("reproduce", "mine/table-2", *SMALL, *words)
    assert (code, err) == (0, "")
    document = json.loads((tmp_path / "o" / "table-2.json").read_text())
    assert {cost["target"] for cost in document["costs"]} == {"common accuracy 2 %"}
    assert {cost["rounds-to-target"]["mean"] for cost in document["costs"]} == {1}
    # One that no row reaches is said as well.
    words = ("--seeds", "1", "--target", "common:100", "--measure", "every:1", "--out", "p")
    assert command("reproduce", "mine/table-2", *SMALL[:-2], *words).code == 0
    _, _, costs = (tmp_path / "p" / "table-2.md").read_text().partition("## Cost")
    header, _, *rows = (line for line in costs.splitlines() if line.startswith("|"))
    column = next(place for place, text in enumerate(header.split("|")) if "rounds to" in text)
    assert {row.split("|")[column].strip() for row in rows[:4]} == {"–"}


@pytest.mark.parametrize(
    "words", [("--only", "a"), ("--dry-run",), ("--seeds", "1"), ("--out", "o"), ("--force",)]
)
def test_what_is_for_one_experiment_needs_one(command: Command, words: tuple[str, ...]) -> None:
    code, out, err = command("reproduce", *words)
    assert (code, out) == (2, "")
    assert f"{words[0]} is for one experiment: name it" in err


@pytest.mark.parametrize("name", ["fedhkd/figure-1", "fedhkd/table-1"])
def test_without_data_nothing_is_written(command: Command, tmp_path: Path, name: str) -> None:
    """One line for each data set, with what to do, whatever the number of cells."""
    code, out, err = command("reproduce", name, "--data-dir", ".", "--out", "o")
    assert code == 2
    assert err.splitlines()[-1].startswith(f"flwr-kd: no cell of {name} could be run, for what is said above")
    lines = [line for line in out.splitlines() if line.startswith("not run: ")]
    assert len(lines) == len({line.partition("data set ")[2].split()[0] for line in lines})
    assert all(line.endswith("name their folder with --data-dir FOLDER") for line in lines)
    assert not list(tmp_path.glob("o/*.md"))


def test_a_table_at_chance_level_says_so(
    command: Command, tmp_path: Path, mine: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("reproduce", "mine/table-2", *SMALL, "--seeds", "1")
    assert "little was learnt" not in command(*words).out
    document = json.loads((tmp_path / "o" / "table-2.json").read_text())
    assert document["at-chance"] == []
    best = max(cell["ours"]["1"] for cell in document["cells"])
    # Ten classes: guessing gives ten percent.
    for factor, found in ((best / 10 - 0.01, []), (best / 10 + 0.01, ["skewed"])):
        monkeypatch.setattr(report, "CHANCE", factor)
        out = command(*words).out
        assert ("note: little was learnt in skewed: no row is above" in out) == bool(found)
        assert json.loads((tmp_path / "o" / "table-2.json").read_text())["at-chance"] == found
        assert ("**Little was learnt in" in (tmp_path / "o" / "table-2.md").read_text()) == bool(found)


def test_a_picture_says_what_it_is_of(
    command: Command, tmp_path: Path, mine: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    titles = []
    plain = beside_printed.figure
    monkeypatch.setattr(
        beside_printed, "figure", lambda p, title: titles.append((*title, *p)) or plain(p, title)
    )
    assert command("reproduce", "mine/table-2", *SMALL, "--seeds", "1")[0] == 0
    assert titles == [("mine/table-2: A table", "small version", "digits for mnist", "local (%)")]


def test_a_dry_run_lists_what_is_computed(command: Command) -> None:
    code, out, err = command("reproduce", "fedhkd/section-4.3", "--dry-run")
    assert (code, err) == (0, "")
    assert "\nsigma-7: computed; sigma=7, delta=0.01," in out


def test_computed_bytes_have_their_unit_and_no_spread(command: Command, tmp_path: Path) -> None:
    code, _, err = command("reproduce", "ktpfl/figure-5", "--out", "o")
    assert (code, err) == (0, "")
    text = (tmp_path / "o" / "figure-5.md").read_text()
    assert "| method | bytes (MB), ours |" in text
    assert "10^6 bytes of all rounds" in text
    assert "±" not in text.partition("## Ours")[2].partition("## ")[0].replace("mean ± standard", "")
    assert "by the formula" in text
