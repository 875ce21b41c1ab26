"""The command: what it prints, what it writes, and how it fails."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from flwr_kd import __version__, cli, privacy, registry, results, simulation

SMALL = ["--backend", "inline", "--clients", "3", "--rounds", "2", "--limit", "150", "--device", "cpu"]


class Outcome(NamedTuple):
    code: int
    out: str
    err: str


Command = Callable[..., Outcome]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Command:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def call(*args: str) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["flwr-kd", *args])
        capsys.readouterr()
        code = 0
        try:
            cli.main()
        except SystemExit as error:
            code = int(error.code or 0)
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return call


@pytest.fixture
def no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulation, "run", lambda *args, **kwargs: pytest.fail("something was run"))


# ---------------------------------------------------------------------- methods, version, privacy


def test_methods_are_listed(command: Command) -> None:
    code, out, err = command("methods")
    assert (code, err) == (0, "")
    for name, method in registry.methods().items():
        assert name in out
        assert method.exchanged in out


def test_methods_as_json(command: Command) -> None:
    code, out, _ = command("methods", "--json")
    rows = {row["name"]: row for row in json.loads(out)}
    assert code == 0
    assert list(rows) == list(registry.methods())
    assert set(rows["fedhkd"]) == {
        "name", "paper", "exchanged", "public_data", "different_models", "global_model"
    }  # fmt: skip
    assert rows["fedhkd"]["global_model"] is True
    assert rows["fedproto"]["different_models"] is True
    assert "FedHKD" in rows["fedhkd"]["paper"]


def test_the_hyper_parameters_of_a_method(command: Command) -> None:
    _, out, _ = command("methods", "fedhkd")
    assert "classifier-weight" in out
    assert "0.25" in out
    rows = {row["name"]: row for row in json.loads(command("methods", "fedhkd", "--json").out)}
    assert rows["gamma"] == {"name": "gamma", "type": "float", "default": 0.05, "help": rows["gamma"]["help"]}
    assert "eq. 11" in rows["gamma"]["help"]
    star = {row["name"] for row in json.loads(command("methods", "fedhkd-star", "--json").out)}
    assert star == set(rows) - {"gamma"}
    transfer = {row["name"]: row["default"] for row in json.loads(command("methods", "fedgkt", "--json").out)}
    assert transfer["send-test-features"] is True  # as a simulation has it


def test_version_and_help(command: Command) -> None:
    assert command("--version") == (0, f"flwr-kd {__version__}\n", "")
    for args in ((), ("--help",)):
        code, out, err = command(*args)
        assert (code, err) == (0, "")
        assert all(name in out for name in ("methods", "simulate", "compare", "privacy"))
        assert len(out.splitlines()) > 5


def test_privacy_prints_the_budget(command: Command) -> None:
    code, out, err = command("privacy", "--sigma", "7", "--rounds", "50", "--delta", "0.01", "--count", "256")
    assert (code, err) == (0, "")
    for label, value in privacy.budget(sigma=7, rounds=50, delta=0.01, dimensions=64, count=256).rows():
        (line,) = [line for line in out.splitlines() if f" {label} " in line]
        assert f" {value} " in line
    assert "It holds if" in out
    assert "Not covered" in out
    assert "model weights" in out
    twice = command("privacy", "--sigma", "14", "--rounds", "50").out
    assert twice != command("privacy", "--sigma", "7", "--rounds", "50").out


def test_as_a_command_of_its_own() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "flwr_kd.cli", "simulate", "fedhdk"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("flwr-kd: unknown method 'fedhdk' (did you mean 'fedhkd'?); valid: ")
    assert len(done.stderr.splitlines()) == 1


# ---------------------------------------------------------------------- simulate and compare


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
        "participants", "failures", "local_top5", "server_accuracy", "clients",
    }  # fmt: skip
    assert (tmp_path / "here" / "curves.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert f"result: {tmp_path / 'here' / 'result.json'}" in out
    assert f"curves: {tmp_path / 'here' / 'curves.png'}" in out
    local = one["rounds"][-1]["local_accuracy"]
    assert f"{100 * local:.2f}" in out
    assert "±" not in out
    # What was written reads back, and a second look at the numbers gives the same ones.
    read = results.load(tmp_path / "here")
    assert read.runs[0].rounds[-1].local_accuracy == local


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
        patch.setattr(simulation, "run", lambda *args, **kwargs: pytest.fail("something was run"))
        code, _, err = command("simulate", "fedavg", *SMALL, "--out", "there")
    assert code == 2
    assert len(err.splitlines()) == 1
    assert "exists" in err
    assert "force" in err
    assert there.read_text() == "precious"
    assert command("simulate", "fedavg", *SMALL, "--out", "there", "--force").code == 0
    assert json.loads(there.read_text())["runs"][0]["method"] == "fedavg"


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


# ---------------------------------------------------------------------- mistakes


MISTAKES = [
    (["simulate", "fedhdk"], ["unknown method 'fedhdk'", "did you mean 'fedhkd'", "fedavg, feddf, feddkc-kkr"]),
    (["compare", "fedavg", "fedprx"], ["unknown method 'fedprx'", "fedprox"]),
    (["methods", "nope"], ["unknown method 'nope'", "fedavg"]),
    (["simulate", "fedavg", "--dataset", "digit"], ["'digit'", "digits", "fashion-mnist"]),
    (["simulate", "fedavg", "--dataset", "csv:/no/such.csv"], ["/no/such.csv"]),
    (["simulate", "fedavg", "--model", "lenett"], ["unknown model 'lenett'", "lenet", "resnet8"]),
    (["simulate", "fedavg", "--model", "mlp,lenet"], ["fedavg needs one model", "--model mlp,lenet"]),
    (["simulate", "fedavg", "--feature-dim", "-1"], ["feature-dim", "-1"]),
    (["simulate", "fedavg", "--partition", "dirichlett:1"], ["dirichlett", "inner-dirichlet"]),
    (["simulate", "fedavg", "--partition", "dirichlet:0"], ["dirichlet", "0"]),
    (["simulate", "fedavg", "--partition", "pathological:77"], ["77", "10"]),
    (["simulate", "fedavg", "--clients", "99999"], ["99999"]),
    (["simulate", "fedavg", "--rounds", "0"], ["rounds", "from 1", "0"]),
    (["simulate", "fedavg", "--rounds", "two"], ["rounds", "two"]),
    (["simulate", "fedavg", "--round", "2"], ["--round", "--rounds"]),
    (["simulate", "fedavg", "--fraction-train", "1.5"], ["fraction-train", "(0, 1]", "1.5"]),
    (["simulate", "fedavg", "--backend", "dask"], ["unknown backend 'dask'", "ray, inline"]),
    (["simulate", "fedavg", "--device", "tpu"], ["device", "'tpu'", "cpu"]),
    (["simulate", "fedavg", "--seeds", "1,x"], ["seeds", "1,x"]),
    (["simulate", "fedavg", "--seed", "-1"], ["seeds", "-1"]),
    (["simulate", "fedavg", "--limit", "0"], ["limit", "0"]),
    (["simulate", "fedavg", "--image-size", "4"], ["cannot be padded to images of 4"]),
    (["simulate", "fedavg", "--augment", "mixup"], ["augment must be one of none, crop", "'mixup'"]),
    (["simulate", "feddkc-kkr", "--set", "target-peak=0.05"], ["target-peak must be in", "(0.1, 1)", "0.05"]),
    (["simulate", "feddkc-skr", "--set", "target-entropy=4"], ["target-entropy must be in", "(0, 3.32"]),
    (["simulate", "feddkc-skr", "--set", "refinement=kkr"], ["refinement is fixed at skr"]),
    (["simulate", "fedgkt", "--feature-dim", "8"], ["resnet2", "feature_dim must be None, got 8"]),
    (["simulate", "fedhkd", "--set", "gama=1"], ["unknown hyper-parameter 'gama'", "gamma", "threshold"]),
    (["simulate", "fedhkd", "--set", "gamma=-1"], ["gamma must be >= 0", "-1"]),
    (["simulate", "fedhkd", "--set", "gamma=nan"], ["gamma must be finite"]),
    (["simulate", "fedhkd", "--set", "gamma=big"], ["gamma must be of type float", "'big'"]),
    (["simulate", "fedhkd", "--set", "gamma"], ["'gamma' is not of the form name=value"]),
    (["simulate", "fedhkd", "--set", "noise=loud"], ["noise must be one of representations, all, none"]),
    (["simulate", "fedhkd-star", "--set", "gamma=1"], ["gamma is fixed at 0.0"]),
    (["compare", "fedavg", "fedhkd", "--set", "gama=1"], ["unknown hyper-parameter 'gama'", "gamma"]),
    (["compare", "fedavg", "fedhkd", "--set", "gamma=-1"], ["gamma must be >= 0"]),
    (["simulate"], ["METHOD"]),
    (["simulat", "fedavg"], ["simulat"]),
    (["privacy", "--sigma", "-1"], ["sigma", "> 0", "-1"]),
    (["privacy", "--delta", "2"], ["delta", "< 1", "2"]),
]  # fmt: skip


@pytest.mark.usefixtures("no_run")
@pytest.mark.parametrize(
    ("args", "parts"), MISTAKES, ids=lambda v: " ".join(v) if isinstance(v, list) else None
)
def test_a_mistake_is_told_in_one_line(
    command: Command, args: list[str], parts: list[str], tmp_path: Path
) -> None:
    code, out, err = command(*args)
    assert code == 2, err
    assert out == ""
    assert err.startswith("flwr-kd: ")
    assert len(err.splitlines()) == 1
    for part in parts:
        assert part in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("no_run")
def test_a_folder_that_is_a_file_is_a_mistake_too(command: Command, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    code, _, err = command("simulate", "fedavg", *SMALL, "--out", "file")
    assert code == 2
    assert "is not a directory" in err
    assert len(err.splitlines()) == 1


def test_a_failing_server_exits_with_1_and_writes_nothing(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> None:
        raise ArithmeticError("the matrix\nis singular")

    monkeypatch.setattr(registry.get("fedavg").strategy, "aggregate_phase", fail)
    code, _, err = command("simulate", "fedavg", *SMALL, "--out", "o")
    assert code == 1
    assert err == "flwr-kd: fedavg: the server failed: the matrix is singular\n"
    assert not (tmp_path / "o").exists()


def test_without_ray_the_command_says_what_to_install(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    code, _, err = command("simulate", "fedavg", "--clients", "3", "--rounds", "1", "--limit", "150")
    assert code == 2
    assert "pip install 'flwr-kd[simulation]', or --backend inline" in err
    assert len(err.splitlines()) == 1


def test_an_interrupt_exits_with_130(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(simulation, "run", interrupt)
    code, _, err = command("simulate", "fedavg", *SMALL)
    assert code == 130
    assert err.splitlines()[-1] == "flwr-kd: interrupted"
