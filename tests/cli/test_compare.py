"""``flwr-kd simulate`` and ``flwr-kd compare``: what they print and write."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from flwr.common.logger import FLOWER_LOGGER

from flwr_kd import registry
from flwr_kd.experiments import resumption, runner
from flwr_kd.experiments.experiment import Experiment, attacker_ids
from flwr_kd.results import files
from tests.cli.commands import SMALL, TINY, Command, kept_files, numbers

pytestmark = pytest.mark.long


def test_simulate_writes_a_result_and_curves(command: Command, tmp_path: Path) -> None:
    code, out, err = command(
        "simulate", "fedhkd", *SMALL, "--seed", "4", "--set", "gamma=0.5", "--out", "here"
    )
    assert (code, err) == (0, "")
    document = json.loads((tmp_path / "here" / "result.json").read_text())
    assert set(document) == {"schema_version", "command", "config", "versions", "summary", "runs"}
    assert document["command"].startswith("flwr-kd simulate fedhkd --backend inline")
    config = document["config"]
    assert config["seeds"] == [4]
    assert (config["dataset"], config["partition"], config["clients"], config["rounds"]) == (
        "digits", "inner-dirichlet:0.1", 3, 2
    )  # fmt: skip
    assert {"flwr-kd", "flwr", "torch", "numpy", "python", "machine"} <= set(document["versions"])
    (one,) = document["runs"]
    assert (one["method"], one["seed"], one["hyperparameters"]["gamma"]) == ("fedhkd", 4, 0.5)
    assert [each["round"] for each in one["rounds"]] == [1, 2]
    assert set(one["rounds"][0]) == {
        "round", "local_accuracy", "global_accuracy", "train_loss", "bytes_up", "bytes_down", "seconds",
        "participants", "failures", "local_top5", "server_accuracy", "clients", "available",
        "global_top5", "round_trips", "bytes_knowledge",
    }  # fmt: skip
    assert (tmp_path / "here" / "curves.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert f"result: {tmp_path / 'here' / 'result.json'}" in out
    assert f"curves: {tmp_path / 'here' / 'curves.png'}" in out
    local = one["rounds"][-1]["local_accuracy"]
    assert f"{100 * local:.2f}" in out
    assert "±" not in out
    # The result is read as it was written.
    read = files.load(tmp_path / "here")
    assert read.runs[0].rounds[-1].local_accuracy == local


@pytest.mark.parametrize("columns", [80, 120])
def test_the_bar_has_accuracy_and_time_left(
    columns: int, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As on a terminal, where each state of the bar is written.
    for name, value in {"FORCE_COLOR": "1", "TERM": "xterm", "COLUMNS": str(columns)}.items():
        monkeypatch.setenv(name, value)
    code, out, _ = command("simulate", "fedavg", *SMALL, "--out", "here")
    assert code == 0
    bar = next(
        line
        for line in re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", out).splitlines()
        if line.startswith("fedavg, seed 0") and "2/2" in line
    )
    rounds = files.load(Path("here")).runs[0].rounds
    assert rounds[-1].local_accuracy is not None
    assert f"local {100 * rounds[-1].local_accuracy:.1f} %" in bar
    # Nothing is cut; the bar itself is there where it has room.
    assert re.search(r" % \d:\d\d:\d\d left 0:00:00 *$", bar)
    assert ("━" in bar) == ("rounds" in bar) == (columns > 100)


def test_a_warning_is_written_once_in_the_words_of_the_command(
    command: Command, flower_log: list[str]
) -> None:
    assert command("simulate", "fedhkd", *SMALL, "--seeds", "0,1").code == 0
    (warning,) = flower_log
    assert "few samples per class" in warning
    assert "--set noise=none disables" in warning
    assert not FLOWER_LOGGER.handlers[0].colored  # type: ignore[attr-defined]


def test_the_result_is_under_runs_if_no_folder_is_named(command: Command, tmp_path: Path) -> None:
    assert command("simulate", "fedavg", *SMALL).code == 0
    assert (tmp_path / "runs" / "fedavg" / "result.json").exists()


def test_a_result_that_is_there_is_not_overwritten(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = tmp_path / "there" / "result.json"
    there.parent.mkdir()
    there.write_text("precious")
    with monkeypatch.context() as patch:
        patch.setattr(runner, "run", lambda *args, **kwargs: pytest.fail("something was run"))
        code, _, err = command("simulate", "fedavg", *SMALL, "--out", "there")
    assert code == 2
    assert len(err.splitlines()) == 1
    assert "exists" in err
    assert "--force" in err
    assert "--resume" in err
    assert there.read_text() == "precious"
    assert command("simulate", "fedavg", *SMALL, "--out", "there", "--force").code == 0
    assert json.loads(there.read_text())["runs"][0]["method"] == "fedavg"


def test_a_folder_that_cannot_be_written_is_a_line(command: Command, no_run: None) -> None:
    code, _, err = command("simulate", "fedavg", *SMALL, "--out", "/proc/nowhere")
    assert code == 2
    assert err.startswith("flwr-kd: out: cannot write to '/proc/nowhere'")
    assert len(err.splitlines()) == 1


def test_a_setting_that_all_methods_fix_is_refused(command: Command, no_run: None) -> None:
    code, _, err = command("compare", "fedhyb-1", "fedhyb-2", *SMALL, "--set", "dynamic-weighting=false")
    assert code == 2
    assert err == (
        "flwr-kd: dynamic-weighting is fixed by fedhyb-1, fedhyb-2, got 'dynamic-weighting=false'\n"
    )


def test_a_merged_test_set_is_said(command: Command, tmp_path: Path) -> None:
    code, out, _ = command("compare", "fedavg", *SMALL, "--seeds", "0", "--merge-test", "--out", "merged")
    assert code == 0
    assert "the common test set is divided among the clients (--merge-test)" in out
    assert "global accuracy: none, the common test set is divided among the clients" in " ".join(out.split())
    assert files.load(tmp_path / "merged").config["merge_test"] is True


def test_several_seeds_give_mean_and_spread(command: Command, tmp_path: Path) -> None:
    code, out, _ = command("simulate", "fedavg", *SMALL, "--seeds", "0,1,0", "--out", "o")
    assert code == 0
    document = json.loads((tmp_path / "o" / "result.json").read_text())
    assert [run["seed"] for run in document["runs"]] == [0, 1]
    finals = [100 * run["rounds"][-1]["local_accuracy"] for run in document["runs"]]
    mean, std = sum(finals) / 2, abs(finals[0] - finals[1]) / 2**0.5
    assert f"{mean:.2f} ± {std:.2f}" in out
    assert std > 0


def test_compare_gives_all_methods_the_same_partitions(command: Command, tmp_path: Path) -> None:
    code, out, err = command(
        "compare", "fedavg", "fedhkd-star", "fedproto", "fedavg", *SMALL, "--seeds", "0,1", "--set",
        "local-epochs=1", "--set", "threshold=0.1", "--out", "o",
    )  # fmt: skip
    assert (code, err) == (0, "")
    runs = json.loads((tmp_path / "o" / "result.json").read_text())["runs"]
    assert sorted((run["method"], run["seed"]) for run in runs) == [
        (name, seed) for name in ("fedavg", "fedhkd-star", "fedproto") for seed in (0, 1)
    ]
    histograms = {seed: [r["histogram"] for r in runs if r["seed"] == seed] for seed in (0, 1)}
    for seed in (0, 1):
        assert all(each == histograms[seed][0] for each in histograms[seed])
    assert histograms[0][0] != histograms[1][0]
    # A setting goes to the methods that have it.
    assert all(run["hyperparameters"]["local-epochs"] == 1 for run in runs)
    assert {r["method"] for r in runs if r["hyperparameters"].get("threshold") == 0.1} == {"fedhkd-star"}
    row = [line for line in out.splitlines() if line.strip().startswith("fedproto")][-1]
    assert "–" in row  # no global model, so no global accuracy, and not 0


def test_methods_with_models_of_their_own_can_be_compared(command: Command, tmp_path: Path) -> None:
    code, out, _ = command("compare", "fedproto", "fedgkt", *SMALL, "--seeds", "0", "--out", "o")
    assert code == 0
    document = json.loads((tmp_path / "o" / "result.json").read_text())
    assert document["config"]["model"] == {
        "fedproto": "mlp", "fedgkt": "resnet2,resnet4,resnet6,resnet10,resnet12"
    }  # fmt: skip
    measured = {run["method"]: run["rounds"][-1]["server_accuracy"] for run in document["runs"]}
    assert measured["fedproto"] is None
    assert f"{100 * measured['fedgkt']:.2f}" in out
    assert "server" in out


def test_the_same_command_gives_the_same_numbers(command: Command, tmp_path: Path) -> None:
    def numbers(folder: str, *more: str) -> list[Any]:
        assert command("simulate", "fedhkd", *SMALL, "--out", folder, *more).code == 0
        runs = json.loads((tmp_path / folder / "result.json").read_text())["runs"]
        for each in runs[0]["rounds"]:
            del each["seconds"]
        return list(runs)

    assert numbers("a") == numbers("b", "--workers", "1")


def test_arrays_can_be_left_out(command: Command, tmp_path: Path) -> None:
    assert command("simulate", "fedavg", *TINY, "--no-arrays", "--out", "o").code == 0
    assert not (tmp_path / "o" / "arrays").exists()
    for plot in ("tsne", "landscape", "samples", "coefficients"):
        code, out, err = command("plot", plot, "o")
        assert (code, out) == (2, "")
        assert err.startswith("flwr-kd: 'o' has no arrays of fedavg with seed 0")
        assert err.endswith("run it again, without --no-arrays\n")
        assert len(err.splitlines()) == 1


def test_no_arrays_of_an_earlier_result_stay(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "o"
    assert command("compare", "fedavg", "fedprox", *TINY, "--seeds", "0,1", "--out", "o").code == 0
    (folder / "arrays" / "mine.txt").write_text("x")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with monkeypatch.context() as patch:
        patch.setattr(registry.get("fedhkd").strategy, "aggregate_phase", lambda *a: 1 / 0)
        assert command("compare", "fedavg", "fedhkd", *TINY, "--force", "--out", "o").code == 1
    # A run that fails leaves the earlier result whole.
    after = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert {path: data for path, data in after.items() if ".unfinished" not in path.parts} == before
    assert command("simulate", "fedavg", *TINY, "--seed", "1", "--out", "o", "--force").code == 0
    assert kept_files(folder) == ["fedavg-seed1"]
    assert sorted(path.name for path in (folder / "arrays").iterdir()) == ["fedavg-seed1", "mine.txt"]
    assert command("simulate", "fedavg", *TINY, "--out", "o", "--force", "--no-arrays").code == 0
    assert [path.name for path in (folder / "arrays").iterdir()] == ["mine.txt"]


def test_a_comparison_with_malicious_clients(command: Command, tmp_path: Path) -> None:
    attack = ["--attack", "nan", "--attackers", "1"]
    code, out, err = command("compare", "fedavg", "fedproto", *SMALL, "--seeds", "0", *attack, "--out", "o")
    # The attacker's reply is dropped in both rounds of fedavg.
    assert (code, err) == (0, "note: 1 more warning of the kinds above; --verbose shows all\n")
    document = json.loads((tmp_path / "o" / "result.json").read_text())
    assert (document["config"]["attack"], document["config"]["attackers"]) == ("nan", 1)
    failures = {run["method"]: [each["failures"] for each in run["rounds"]] for run in document["runs"]}
    assert failures == {"fedavg": [1, 1], "fedproto": [0, 0]}
    assert "note: nan changes nothing of what fedproto send" in out
    experiment = Experiment(clients=3, attack="nan", attackers=1)
    assert document["config"]["attacker_ids"] == {"0": sorted(attacker_ids(experiment))}


CONFIG = """
methods = ["fedavg", "strong"]
seeds = [2]

[settings]
clients = 2
rounds = 1
limit = 150
backend = "inline"
device = "cpu"

[named.strong]
method = "fedhkd"
set = { gamma = 0.5, noise = "none" }
"""


def test_a_file_says_what_is_compared_and_the_command_line_wins(command: Command, tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(CONFIG)
    code, out, err = command(
        "compare", "--config", "c.toml", "--rounds", "2", "--set", "local-epochs=1", "--out", "o"
    )
    assert (code, err) == (0, "")
    result = files.load(tmp_path / "o")
    assert [(run.name, run.method, run.seed, len(run.rounds)) for run in result.runs] == [
        ("fedavg", "fedavg", 2, 2), ("strong", "fedhkd", 2, 2)
    ]  # fmt: skip
    assert [run.hyperparameters["local-epochs"] for run in result.runs] == [1, 1]
    assert result.runs[1].hyperparameters["gamma"] == 0.5
    assert "strong" in out
    # The result is such a file as well.
    assert command("compare", "--config", "o/result.json", "--out", "again").code == 0
    assert numbers(tmp_path / "again") == numbers(tmp_path / "o")
    assert command("compare", "--config", "c.toml", "--seeds", "5", "fedproto", "--out", "p").code == 0
    assert [(run.name, run.seed) for run in files.load(tmp_path / "p").runs] == [("fedproto", 5)]


def test_a_grid_of_options_is_a_folder_for_each_value(command: Command, tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(
        CONFIG.replace('"strong"]', '"fedproto"]') + '[grid]\npartition = ["iid", "pathological:2"]\n'
    )
    code, out, _ = command("compare", "--config", "c.toml")
    assert code == 0
    folders = [tmp_path / "runs" / "c" / f"partition={name}" for name in ("iid", "pathological-2")]
    assert [files.load(each).config["partition"] for each in folders] == ["iid", "pathological:2"]
    code, out, _ = command("compare", "--config", "c.toml", "--resume")
    assert (code, out.count("not run again: fedavg (seed 2), fedproto (seed 2)")) == (0, 2)


def test_a_mistake_in_a_later_comparison_is_found_before_the_first_runs(
    command: Command, tmp_path: Path, no_run: None
) -> None:
    """Also one that the data set, the partition or the folder refuses."""
    grid = CONFIG + '[grid]\npartition = ["iid", "pathological:11"]\n'
    runs = CONFIG.replace('backend = "inline"\n', "") + (
        '[[run]]\nid = "first"\n[[run]]\nid = "second"\nsettings = { model = "foo" }\n'
    )
    cases = {
        grid: "partition=pathological-11: K in partition 'pathological:11' must be at most",
        runs: "second: unknown model 'foo'",
    }
    for text, message in cases.items():
        (tmp_path / "c.toml").write_text(text)
        code, out, err = command("compare", "--config", "c.toml", "--out", "o")
        assert (code, out) == (2, "")
        assert message in err
        assert not (tmp_path / "o").exists()
    (tmp_path / "c.toml").write_text(CONFIG + '[grid]\npartition = ["iid", "dirichlet:1"]\n')
    interrupted = tmp_path / "o" / "partition=dirichlet-1"
    (interrupted / resumption.FOLDER).mkdir(parents=True)
    code, out, err = command("compare", "--config", "c.toml", "--out", "o")
    assert (code, out) == (2, "")
    assert "partition=dirichlet-1' has an unfinished comparison" in err


@pytest.mark.parametrize(
    ("name", "message"), [("seeds", "seeds must be whole numbers from 0"), ("columns", "unknown column ''")]
)
def test_an_empty_text_is_no_list(
    command: Command, tmp_path: Path, no_run: None, name: str, message: str
) -> None:
    (tmp_path / "c.toml").write_text(CONFIG)
    for words in (("fedavg",), ("--config", "c.toml")):
        code, out, err = command("compare", *words, f"--{name}", "")
        assert (code, out) == (2, "")
        assert message in err


def test_methods_of_the_command_line_leave_out_rows_of_the_grid(command: Command, tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(CONFIG + "[grid.fedavg]\nlearning-rate = [0.01, 0.02]\n")
    assert command("compare", "fedproto", "--config", "c.toml", "--out", "o").code == 0
    assert [run.name for run in files.load(tmp_path / "o").runs] == ["fedproto"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (CONFIG + "[grids]\n", "c.toml: unknown key 'grids' (did you mean 'grid'?)"),
        (CONFIG.replace("clients = 2", "clients = 0"), "clients must be a whole number from 1, got 0"),
        (CONFIG.replace("clients = 2", "client = 2"), "unknown option 'client' (did you mean 'clients'?)"),
    ],
)
def test_a_wrong_file_is_a_line(
    command: Command, tmp_path: Path, no_run: None, text: str, message: str
) -> None:
    (tmp_path / "c.toml").write_text(text)
    code, _, err = command("compare", "--config", "c.toml")
    assert code == 2
    assert len(err.splitlines()) == 1
    assert message in err


def test_methods_or_a_file_are_needed(command: Command, no_run: None) -> None:
    code, _, err = command("compare")
    assert (code, err) == (
        2, "flwr-kd: name at least one method of `flwr-kd methods`, or a file with --config\n"
    )  # fmt: skip
