"""The command: what it prints, what it writes, and how it fails."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from flwr.app import ArrayRecord
from matplotlib.image import imread

from flwr_kd import Experiment, __version__, privacy, registry
from flwr_kd.cli import app
from flwr_kd.experiments import data, runner, saved_arrays
from flwr_kd.plotting import coefficients, landscape
from flwr_kd.results import files, provenance, schema
from flwr_kd.server.checkpoint import Checkpoint

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
            app.main()
        except SystemExit as error:
            code = int(error.code or 0)
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return call


@pytest.fixture
def no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "run", lambda *args, **kwargs: pytest.fail("something was run"))


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
        "name", "paper", "exchanged", "public_at", "different_models", "global_model"
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
    read = files.load(tmp_path / "here")
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
        patch.setattr(runner, "run", lambda *args, **kwargs: pytest.fail("something was run"))
        code, _, err = command("simulate", "fedavg", *SMALL, "--out", "there")
    assert code == 2
    assert len(err.splitlines()) == 1
    assert "exists" in err
    assert "force" in err
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


# ---------------------------------------------------------------------- arrays and plots


TINY = ["--backend", "inline", "--clients", "2", "--rounds", "1", "--limit", "150", "--device", "cpu"]


def kept_files(folder: Path) -> list[str]:
    return sorted(path.parent.name for path in folder.glob("arrays/*/checkpoint.safetensors"))


def is_a_picture(path: Path) -> bool:
    return bool(imread(path)[..., :3].std() > 0.01)


def add_images(folder: Path, method: str, images: np.ndarray[Any, Any]) -> None:
    """Let a run have made images at its server, as a strategy's state keeps them."""
    place = saved_arrays.folder_of(folder, method, 0)
    found = Checkpoint.load(place, registry.get(method).strategy.__name__)
    assert found is not None
    replace(found, state={**found.state, "synthetic": images}).save(place)


def test_the_last_models_are_kept_and_drawn(command: Command, tmp_path: Path) -> None:
    folder = tmp_path / "o"
    assert command("compare", "fedavg", "fedproto", "feddf", *TINY, "--seeds", "0,1", "--out", "o").code == 0
    assert kept_files(folder) == [
        "fedavg-seed0", "fedavg-seed1", "feddf-seed0", "feddf-seed1", "fedproto-seed0", "fedproto-seed1"
    ]  # fmt: skip
    assert list(tmp_path.iterdir()) == [folder]

    code, out, err = command("plot", "tsne", "o", "--samples", "20", "--classes", "3")
    assert (code, err) == (0, "")
    assert out == f"left out: fedproto (no global model)\nt-SNE: {folder / 'tsne.png'}\n"
    assert is_a_picture(folder / "tsne.png")
    code, out, err = command(
        "plot", "landscape", "o", "--directions", "2", "--points", "3", "--samples", "30", "--seed", "1",
        "--out", "pictures/l.png", "--reach", "0.5",
    )  # fmt: skip
    assert (code, err) == (0, "")
    assert out == f"left out: fedproto (no global model)\nlandscape: {tmp_path / 'pictures' / 'l.png'}\n"
    assert is_a_picture(tmp_path / "pictures" / "l.png")

    code, out, err = command("plot", "samples", "o")
    assert (code, err) == (2, "flwr-kd: no method of 'o' makes images at the server\n")
    add_images(folder, "feddf", np.random.default_rng(0).random((20, 1, 8, 8), dtype=np.float32))
    code, out, err = command("plot", "samples", "o")
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        "left out: fedavg (it makes no images)",
        "left out: fedproto (it makes no images)",
        f"samples: {folder / 'samples.png'}",
    ]
    assert is_a_picture(folder / "samples.png")
    add_images(folder, "feddf", np.zeros((21, 1, 8, 8), dtype=np.float32))
    assert "[C * n, K, H, W] with C = 10 classes, got [21, 1, 8, 8]" in command("plot", "samples", "o").err


def test_the_plots_are_of_the_models_that_were_measured(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is rebuilt from the result is what ran: the same accuracy, and the same training samples."""
    args = ["--model", "lenet", "--partition", "pathological:2", "--seed", "3", "--image-size", "12"]
    assert command("simulate", "fedavg", *TINY, *args, "--out", "o").code == 0
    result = files.load(tmp_path / "o")
    (run,) = result.runs
    experiment = saved_arrays.experiment_of(result.config, run)
    model = saved_arrays.global_model(experiment, saved_arrays.read(tmp_path / "o", run))
    test = data.bundle_of(experiment).test
    assert not model.training
    right = float((model(test.x).argmax(dim=1) == test.y).float().mean())
    assert right == pytest.approx(run.rounds[-1].global_accuracy)
    rows = saved_arrays.training_rows(experiment, 10**6, np.random.default_rng(0))
    labels = data.bundle_of(experiment).train.y.numpy()[rows]
    assert np.bincount(labels, minlength=10).tolist() == np.sum(run.histogram, axis=0).tolist()
    assert len(saved_arrays.training_rows(experiment, 5, np.random.default_rng(0))) == 5
    original = Experiment(
        clients=2, limit=150, partition="pathological:2", seed=3, image_size=12, model="lenet"
    )
    for ours, theirs in zip(data.client_splits(experiment), data.client_splits(original), strict=True):
        assert all((a == b).all() for a, b in zip(ours, theirs, strict=True))

    seen: list[Any] = []
    monkeypatch.setattr(landscape, "plot", lambda *a, **k: seen.append(a) or tmp_path / "x.png")
    for _ in range(2):
        assert command("plot", "landscape", "o", "--directions", "2", "--samples", "40").code == 0
    (_, magnitudes, losses, _), (_, _, again, _) = seen
    assert magnitudes.tolist() == pytest.approx(np.linspace(-1, 1, 21).tolist())
    assert magnitudes[10] == 0
    assert losses["fedavg"].shape == (2, 21)
    np.testing.assert_array_equal(losses["fedavg"], again["fedavg"])


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


def test_no_picture_of_an_earlier_result_stays(command: Command, tmp_path: Path) -> None:
    assert command("simulate", "fedavg", *TINY, "--out", "o").code == 0
    assert command("plot", "tsne", "o", "--samples", "20").code == 0
    for name in ("mine.png", "coefficients.png"):
        (tmp_path / "o" / name).write_text("x")
    assert command("simulate", "fedprox", *TINY, "--out", "o", "--force").code == 0
    assert sorted(path.name for path in (tmp_path / "o").glob("*.png")) == ["curves.png", "mine.png"]


def test_samples_that_are_missing_are_not_said_never_to_have_been(command: Command, tmp_path: Path) -> None:
    assert command("compare", "fedavg", "fedhyb-star", *TINY, "--seeds", "0", "--out", "o").code == 0
    assert "left out: fedavg (it makes no images)" in command("plot", "samples", "o").out
    (tmp_path / "o" / "arrays" / "fedhyb-star-seed0" / "checkpoint.safetensors").unlink()
    (tmp_path / "o" / "arrays" / "fedhyb-star-seed0").rmdir()
    code, _, err = command("plot", "samples", "o")
    assert (code, "has no arrays of fedhyb-star with seed 0" in err) == (2, True)


def a_result(folder: Path, states: dict[str, list[dict[str, np.ndarray[Any, Any]] | None]]) -> None:
    """Write a result of runs that nobody made: each method's state after the last round, by seed."""
    rounds = (schema.RoundResult(1, 0.5, None, None, 1, 1, 1.0, 2, 0),)
    runs = []
    for name, by_seed in states.items():
        method = registry.get(name)
        config = method.config().to_wire()
        for seed, state in enumerate(by_seed):
            runs.append(schema.RunResult(name, seed, rounds, hyperparameters=config))
            if state is not None:
                found = Checkpoint(method.strategy.__name__, 1, config, seed, ArrayRecord(), state)
                found.save(saved_arrays.folder_of(folder, name, seed))
    files.save(schema.Comparison({"dataset": "digits", "clients": 2}, {}, "", tuple(runs)), folder)


def test_coefficients_are_drawn(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = np.full((2, 2), 0.5), np.array([[0.8, 0.2], [0.3, 0.7]])
    clients = np.array([1, 4])
    a_result(
        tmp_path / "o",
        {
            "fedproto": [{"prototypes": np.ones(3)}] * 2,
            "fedhkd": [{"coefficients": each, "clients": clients} for each in (first, second)],
            "fedavg": [None, None],
        },
    )
    left_out = ["left out: fedproto (it kept no coefficients)", "left out: fedavg (it kept no coefficients)"]
    code, out, err = command("plot", "coefficients", "o")
    assert (code, err) == (0, "")
    assert out.splitlines() == [*left_out, f"coefficients: {tmp_path / 'o' / 'coefficients.png'}"]
    assert is_a_picture(tmp_path / "o" / "coefficients.png")
    code, out, err = command("plot", "coefficients", "o", "--seed", "1", "--out", "pictures/c.png")
    assert (code, err) == (0, "")
    assert out.splitlines() == [*left_out, f"coefficients: {tmp_path / 'pictures' / 'c.png'}"]
    assert is_a_picture(tmp_path / "pictures" / "c.png")

    seen: list[Any] = []
    monkeypatch.setattr(coefficients, "plot", lambda *a, **k: seen.append((a[1], k)) or tmp_path / "x.png")
    for args, expected in (((), first), (("--seed", "1"), second)):
        assert command("plot", "coefficients", "o", *args).code == 0
        drawn, named = seen.pop()
        assert list(drawn) == ["fedhkd"]
        np.testing.assert_array_equal(drawn["fedhkd"][0], expected)
        assert drawn["fedhkd"][1].tolist() == [1, 4]
        assert named == {"seed": int(args[1]) if args else None}


def test_a_result_without_coefficients_has_none_to_draw(command: Command, tmp_path: Path) -> None:
    a_result(tmp_path / "o", {"fedproto": [{"prototypes": np.ones(3)}], "fedavg": [None]})
    code, _, err = command("plot", "coefficients", "o")
    assert (code, err) == (2, "flwr-kd: no method of 'o' kept coefficients of its clients\n")
    assert not (tmp_path / "o" / "coefficients.png").exists()
    a_result(tmp_path / "p", {"fedhkd": [{"coefficients": np.ones((2, 3)), "clients": np.arange(2)}]})
    code, out, err = command("plot", "coefficients", "p")
    assert (code, out) == (2, "")
    assert "coefficients of fedhkd must be floats of the shape [N, N]" in err
    assert len(err.splitlines()) == 1


def test_arrays_of_another_run_are_refused(command: Command, tmp_path: Path) -> None:
    for name, value in (("a", "0.1"), ("b", "0.2")):
        assert (
            command("simulate", "fedavg", *TINY, "--set", f"learning-rate={value}", "--out", name).code == 0
        )
    file = Path("arrays", "fedavg-seed0", "checkpoint.safetensors")
    before = (tmp_path / "a" / file).read_bytes()
    (tmp_path / "a" / file).write_bytes((tmp_path / "b" / file).read_bytes())
    assert "are of another run than the result: run it again" in command("plot", "tsne", "a").err
    (tmp_path / "a" / file).write_bytes(before[:100])
    code, _, err = command("plot", "tsne", "a")
    assert code == 2
    assert "cannot read the arrays" in err
    (tmp_path / "a" / file).write_bytes(before)
    document = json.loads((tmp_path / "a" / "result.json").read_text())
    document["config"]["model"] = "lenet"
    (tmp_path / "a" / "result.json").write_text(json.dumps(document))
    code, _, err = command("plot", "tsne", "a")
    assert code == 2
    assert "the arrays kept are not of the model lenet" in err
    assert len(err.splitlines()) == 1


def test_a_result_without_a_global_model_has_nothing_to_draw(command: Command) -> None:
    assert command("simulate", "fedproto", *TINY, "--out", "o").code == 0
    code, out, err = command("plot", "tsne", "o")
    assert (code, out, err) == (2, "", "flwr-kd: no method of 'o' has a global model: fedproto\n")


def test_the_plots_are_listed(command: Command) -> None:
    for args in (("plot",), ("plot", "--help")):
        code, out, err = command(*args)
        assert (code, err) == (0, "")
        assert all(name in out for name in ("tsne", "landscape", "samples", "coefficients"))


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
    (["simulate", "fedavg", "--attack", "nan"], ["attack 'nan' needs attackers from 1, got 0"]),
    (["compare", "fedavg", "--attackers", "2"], ["attackers=2 needs an attack, one of label-flip[:TARGET]"]),
    (["simulate", "fedavg", "--attack", "nan", "--attackers", "11"], ["attackers must be at most clients=10"]),
    (["simulate", "fedavg", "--attack", "gaussian", "--attackers", "1"], ["SIGMA must be a finite number above 0"]),
    (["simulate", "fedavg", "--attack", "label-flip:10", "--attackers", "1"], ["TARGET must be in 0..9"]),
    (["simulate", "fedavg", "--imbalance", "0.5"], ["imbalance must be a finite number from 1, got 0.5"]),
    (["simulate", "fedavg", "--imbalance", "500"], ["imbalance factor 500 needs at least 500 samples of class 0"]),
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
    (["privacy", "--sigma", "-1"], ["sigma", "above 0", "-1"]),
    (["privacy", "--delta", "2"], ["delta", "(0, 1)", "2"]),
    (["plot", "tnse", "."], ["tnse"]),
    (["plot", "tsne"], ["RESULT_DIR"]),
    (["plot", "tsne", "nowhere"], ["no folder 'nowhere'"]),
    (["plot", "tsne", "."], ["no result in '.'", "result.json"]),
    (["plot", "tsne", ".", "--out", "."], ["out must be a file, got the folder '.'"]),
    (["plot", "landscape", ".", "--points", "4"], ["points must be an odd number from 3, got 4"]),
    (["plot", "landscape", ".", "--reach", "0"], ["reach must be a finite number above 0, got 0"]),
    (["plot", "landscape", ".", "--directions", "0"], ["directions must be a whole number from 1, got 0"]),
    (["plot", "landscape", ".", "--samples", "0"], ["samples must be a whole number from 1, got 0"]),
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

    monkeypatch.setattr(runner, "run", interrupt)
    code, _, err = command("simulate", "fedavg", *SMALL)
    assert code == 130
    assert err.splitlines()[-1] == "flwr-kd: interrupted"


@pytest.mark.parametrize(
    "words",
    [
        "simulate",
        "compare",
        "methods",
        "privacy",
        "plot tsne",
        "plot landscape",
        "plot samples",
        "plot coefficients",
    ],
)
def test_help_tells_what_everything_is(command: Command, words: str) -> None:
    code, out, _ = command(*words.split(), "--help")
    assert code == 0
    assert "\\" not in out
    # A line of a parameter is its name and its text.
    for line in out.splitlines():
        if line.startswith("  --") or line.strip().isupper():
            assert len(line.split("  ")) > 2, line
    if words in ("simulate", "compare"):
        assert "flwr-kd methods`  [required]" in out


# ---------------------------------------------------------------------- comparisons that were interrupted


PAIR = ("compare", "fedavg", "fedhkd", *TINY, "--seeds", "0,1")


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Return a list in which each run is noted."""
    seen: list[tuple[str, int]] = []
    real = runner.run

    def noting(method: Any, experiment: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append((method.name, experiment.seed))
        return real(method, experiment, *args, **kwargs)

    monkeypatch.setattr(runner, "run", noting)
    return seen


def interrupted(
    command: Command, monkeypatch: pytest.MonkeyPatch, before: tuple[str, int], *args: str
) -> Outcome:
    """Run a command whose user interrupts it when one of its runs begins."""
    real = runner.run

    def stopping(method: Any, experiment: Any, *rest: Any, **kwargs: Any) -> Any:
        if (method.name, experiment.seed) == before:
            raise KeyboardInterrupt
        return real(method, experiment, *rest, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(runner, "run", stopping)
        return command(*args)


def numbers(folder: Path) -> dict[tuple[str, int], Any]:
    runs = files.load(folder).runs
    return {(run.method, run.seed): [replace(each, seconds=0.0) for each in run.rounds] for run in runs}


def test_finished_runs_are_not_run_again(
    command: Command, monkeypatch: pytest.MonkeyPatch, ran: list[tuple[str, int]], tmp_path: Path
) -> None:
    assert command(*PAIR, "--out", "whole").code == 0
    code, out, err = interrupted(command, monkeypatch, ("fedavg", 1), *PAIR, "--out", "o")
    assert (code, err.splitlines()[-1]) == (130, "flwr-kd: interrupted")
    assert "2 finished runs kept in 'o': the same command with --resume goes on" in out
    assert not (tmp_path / "o" / "result.json").exists()
    ran.clear()
    code, out, _ = command(*PAIR, "--out", "o", "--resume")
    assert code == 0
    assert ran == [("fedavg", 1), ("fedhkd", 1)]
    assert "not run again: fedavg (seed 0), fedhkd (seed 0)" in out
    found = numbers(tmp_path / "o")
    assert list(found) == list(numbers(tmp_path / "whole"))
    assert found == numbers(tmp_path / "whole")
    assert kept_files(tmp_path / "o") == kept_files(tmp_path / "whole")
    assert sorted(path.name for path in (tmp_path / "o").iterdir()) == ["arrays", "curves.png", "result.json"]
    assert saved_arrays.read(tmp_path / "o", files.load(tmp_path / "o").runs[0]).server_round == 1


def test_a_comparison_that_is_killed_goes_on(command: Command, tmp_path: Path) -> None:
    """No handler runs on SIGKILL: what is finished is on the disk before the next run begins."""
    args = ["compare", "fedavg", "fedhkd", *TINY[:-4], "--limit", "1000", "--seeds", "0", "--out", "o"]
    program = "import sys; from flwr_kd import cli; sys.argv = ['flwr-kd', *sys.argv[1:]]; cli.main()"
    with subprocess.Popen([sys.executable, "-c", program, *args, "--rounds", "60"], cwd=tmp_path) as process:
        done = tmp_path / "o" / ".unfinished" / "result.json"
        while process.poll() is None and not done.exists():
            pass
        process.kill()
    assert not (tmp_path / "o" / "result.json").exists()
    code, out, _ = command(*args, "--rounds", "60", "--resume")
    assert code == 0
    assert "not run again: fedavg (seed 0)" in out


def test_a_whole_result_takes_more_methods_and_seeds(
    command: Command, ran: list[tuple[str, int]], tmp_path: Path
) -> None:
    assert command("compare", "fedavg", *TINY, "--seeds", "1", "--out", "o").code == 0
    first = numbers(tmp_path / "o")
    ran.clear()
    assert command(*PAIR, "--out", "o", "--resume").code == 0
    assert ran == [("fedavg", 0), ("fedhkd", 0), ("fedhkd", 1)]
    found = numbers(tmp_path / "o")
    assert list(found) == [("fedavg", 0), ("fedhkd", 0), ("fedavg", 1), ("fedhkd", 1)]
    assert found["fedavg", 1] == first["fedavg", 1]
    assert files.load(tmp_path / "o").config["seeds"] == [0, 1]
    assert len(kept_files(tmp_path / "o")) == 4
    ran.clear()
    assert command(*PAIR, "--out", "o", "--resume").code == 0
    assert ran == []
    assert numbers(tmp_path / "o") == found


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        (["--partition", "iid"], "another partition (config): 'inner-dirichlet:0.1' there, 'iid' here"),
        (["--set", "local-epochs=2"], "another local-epochs (fedavg): 5 there, 2 here"),
        (["--model", "lenet"], "another model (fedavg): 'mlp' there, 'lenet' here"),
    ],
)
def test_other_settings_are_not_mixed_in(
    command: Command,
    ran: list[tuple[str, int]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    changed: list[str],
    named: str,
) -> None:
    assert interrupted(command, monkeypatch, ("fedhkd", 0), *PAIR, "--out", "o").code == 130
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    ran.clear()
    code, _, err = command(*PAIR, *changed, "--out", "o", "--resume")
    assert code == 2
    assert named in err
    assert len(err.splitlines()) == 1
    assert ran == []
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_other_versions_are_not_mixed_in(
    command: Command, monkeypatch: pytest.MonkeyPatch, ran: list[tuple[str, int]]
) -> None:
    assert interrupted(command, monkeypatch, ("fedhkd", 0), *PAIR, "--out", "o").code == 130
    real = provenance.versions()
    monkeypatch.setattr(provenance, "versions", lambda: {**real, "torch": "1.0"})
    ran.clear()
    code, _, err = command(*PAIR, "--out", "o", "--resume")
    assert (code, ran) == (2, [])
    assert f"another torch (versions): {real['torch']!r} there, '1.0' here" in err


def test_an_unfinished_comparison_is_not_lost_by_mistake(
    command: Command, monkeypatch: pytest.MonkeyPatch, ran: list[tuple[str, int]], tmp_path: Path
) -> None:
    assert interrupted(command, monkeypatch, ("fedhkd", 0), *PAIR, "--out", "o").code == 130
    code, _, err = command(*PAIR, "--out", "o")
    assert code == 2
    assert "'o' has an unfinished comparison; go on with --resume, begin anew with --force" in err
    code, _, err = command(*PAIR, "--out", "o", "--resume", "--force")
    assert (code, "give one of them" in err) == (2, True)
    code, _, err = command("compare", "fedhkd", *TINY, "--out", "o", "--resume")
    assert (code, "has runs of fedavg, which would be lost" in err) == (2, True)
    ran.clear()
    assert command(*PAIR, "--out", "o", "--force").code == 0
    assert len(ran) == 4


def test_nothing_is_left_where_no_run_was_finished(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    code, out, _ = interrupted(command, monkeypatch, ("fedavg", 0), *PAIR, "--out", "o")
    assert (code, "kept" in out) == (130, False)
    assert not (tmp_path / "o").exists()
