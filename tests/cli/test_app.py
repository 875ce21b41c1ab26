"""The command itself: help, version, exit codes, and mistakes reported in one line."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flwr_kd import __version__, registry
from flwr_kd.experiments import runner
from flwr_kd.results import files
from tests.cli.commands import SMALL, Command


def test_version_and_help(command: Command) -> None:
    assert command("--version") == (0, f"flwr-kd {__version__}\n", "")
    for args in ((), ("--help",), ("-h",)):
        code, out, err = command(*args)
        assert (code, err) == (0, "")
        assert all(name in out for name in ("methods", "simulate", "compare", "privacy"))
        assert len(out.splitlines()) > 5


@pytest.mark.parametrize("words", ["methods ktpfl", "datasets", "models"])
def test_a_code_page_without_a_letter_is_no_error(
    command: Command, monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    assert command(*words.split()).code == 0
    sys.stdout.flush()
    assert b"?" in written.getvalue()


@pytest.mark.parametrize(
    "words", ["", "simulate", "compare", "methods fedhyb-star", "partitions", "privacy", "plot"]
)
def test_help_and_lists_fit_into_60_columns(
    command: Command, monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    code, out, err = command(*words.split(), *([] if " " in words or words == "partitions" else ["-h"]))
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 60


@pytest.mark.program
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


MISTAKES = [
    (["simulate", "fedhdk"], ["unknown method 'fedhdk'", "did you mean 'fedhkd'", "feddf, feddkc-kkr"]),
    (["compare", "fedavg", "fedprx"], ["unknown method 'fedprx'", "fedprox"]),
    (["methods", "nope"], ["unknown method 'nope'", "fedavg"]),
    (["methods", "FedHKD*"], ["did you mean 'fedhkd-star'"]),
    (["compare", "KT-pFL"], ["did you mean 'ktpfl'"]),
    (["simulate", "fedavg", "--dataset", "cifar-10"], ["did you mean 'cifar10'"]),
    (["simulate", "fedavg", "--partition", "Dirichlet:0.5"], ["did you mean 'dirichlet:ALPHA'"]),
    (["simulate", "fedavg", "--model", "ResNet-8"], ["did you mean 'resnet8'"]),
    (["simulate", "fedavg", "--set", "Learning_Rate=1"], ["did you mean 'learning-rate'"]),
    (["simulate", "fedavg", "--data_dir", "x"], ["did you mean '--data-dir'", "see `flwr-kd simulate --help`"]),
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
    (["simulate", "fedavg", "--round", "2"], ["'--round' (did you mean '--rounds'?)"]),
    (["simulate", "fedavg", "--fraction-train", "1.5"], ["fraction-train", "(0, 1]", "1.5"]),
    (["simulate", "fedavg", "--backend", "dask"], ["unknown backend 'dask'", "auto, processes, inline, ray"]),
    (["simulate", "fedavg", "--device", "tpu"], ["device", "'tpu'", "cpu"]),
    (["simulate", "fedavg", "--seeds", "1,x"], ["seeds", "1,x"]),
    (["simulate", "fedavg", "--seed", "-1"], ["seed must be a whole number from 0, got -1"]),
    (["simulate", "fedavg", "--seed", "1", "--seeds", "0,2"], ["either --seed or --seeds", "1", "0,2"]),
    (["simulate", "fedavg", "--limit", "0"], ["limit must be a whole number from 1, got 0"]),
    (["simulate", "fedavg", "--test-limit", "0"], ["test-limit must be a whole number from 1, got 0"]),
    (["simulate", "fedavg", "--data-dir", "nowhere"], ["data-dir", "nowhere", "files of 'digits'"]),
    (["simulate", "fedavg", "--data-dir", "/dev/null"], ["data-dir '/dev/null' is no folder"]),
    (["simulate", "fedavg", "--aggregation", "krum"], ["aggregation must be one of mean, median"]),
    (["simulate", "fedavg", "--aggregation", "krum:4"], ["--aggregation krum:4 needs at least 11", "got 10"]),
    (["compare", "fedproto", "--aggregation", "median"], ["--aggregation mean expected: FedProto averages"]),
    (["simulate", "fedproto", "--knowledge-aggregation", "krum:1"], ["knowledge_aggregation must be one of mean"]),
    (["simulate", "fedavg", "--knowledge-aggregation", "median"], ["--knowledge-aggregation mean expected"]),
    (["simulate", "fedavg", "--attack", "nan"], ["attack 'nan' needs attackers from 1, got 0"]),
    (["compare", "fedavg", "--attackers", "2"], ["attackers=2 needs an attack, one of label-flip[:TARGET]"]),
    (["simulate", "fedavg", "--attack", "nan", "--attackers", "11"], ["attackers must be at most clients=10"]),
    (["simulate", "fedavg", "--attack", "gaussian", "--attackers", "1"], ["SIGMA must be a finite number above 0"]),
    (["simulate", "fedavg", "--attack", "label-flip:10", "--attackers", "1"], ["TARGET must be in 0..9"]),
    (["simulate", "fedavg", "--imbalance", "0.5"], ["imbalance must be a finite number from 1, got 0.5"]),
    (["simulate", "fedavg", "--imbalance", "500"], ["imbalance factor 500 needs at least 500 samples of class 0"]),
    (["simulate", "fedavg", "--target", "common:5"], ["needs the common accuracy of each", "--measure every:1"]),
    (["simulate", "fedavg", "--target", "50", "--test-fraction", "0"], ["own test splits", "test-fraction of 0"]),
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
    (["simulate", "fedavg", "--learning-rate", "1"], ["a hyper-parameter, given as --set learning-rate=VALUE"]),
    (["simulate", "fedavg", "fedprox"], ["extra argument (fedprox)", "`flwr-kd compare` takes several"]),
    (["compare", "fedavg,fedprox"], ["methods are separated by spaces, got 'fedavg,fedprox'"]),
    (["simulat", "fedavg"], ["unknown command 'simulat' (did you mean 'simulate'?)", "see `flwr-kd --help`"]),
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
def test_a_mistake_is_reported_in_one_line(
    command: Command, args: list[str], parts: list[str], tmp_path: Path
) -> None:
    code, out, err = command(*args)
    assert code == 2, err
    assert out == ""
    assert err.startswith("flwr-kd: ")
    assert len(err.splitlines()) == 1
    assert err.lower().count("did you mean") <= 1
    for part in parts:
        assert part in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("no_run")
def test_a_folder_that_is_a_file_is_a_mistake(command: Command, tmp_path: Path) -> None:
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


def test_a_run_whose_rounds_are_all_void_exits_with_1_and_writes_nothing(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> None:
        raise ArithmeticError("no")

    monkeypatch.setattr(registry.get("fedavg").client, "fit", fail)
    code, _, err = command("simulate", "fedavg", *SMALL, "--out", "o")
    assert code == 1
    assert "fedavg: the server failed: every round was void (2 of 2)" in err.splitlines()[-1]
    assert not (tmp_path / "o").exists()


def test_without_ray_the_command_says_what_to_install(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    code, _, err = command(
        "simulate", "fedavg", "--clients", "3", "--rounds", "1", "--limit", "150", "--backend", "ray"
    )
    assert code == 2
    assert "pip install 'flwr-kd[simulation]', or --backend processes" in err
    assert len(err.splitlines()) == 1


@pytest.mark.program
@pytest.mark.parametrize(("workers", "backend"), [("1", "inline"), ("2", "processes")])
def test_without_ray_a_comparison_runs(
    workers: str, backend: str, command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The result names the backend that was used."""
    monkeypatch.setitem(sys.modules, "ray", None)
    small = ["--clients", "3", "--rounds", "1", "--limit", "150", "--device", "cpu", "--workers", workers]
    assert command("compare", "fedavg", *small, "--seeds", "0", "--out", "o").code == 0
    result = files.load(tmp_path / "o")
    assert result.config["backend"] == backend
    assert [row.participants for row in result.runs[0].rounds] == [3]


def test_an_interrupt_exits_with_130(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "run", interrupt)
    code, _, err = command("simulate", "fedavg", *SMALL)
    assert code == 130
    assert err.splitlines()[-1].startswith("flwr-kd: interrupted")


@pytest.mark.parametrize(
    "words",
    [
        "simulate",
        "compare",
        "methods",
        "datasets",
        "models",
        "partitions",
        "privacy",
        "reproduce",
        "plot curves",
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
    # The line of a parameter has its name and its help.
    for line in out.splitlines():
        if line.startswith("  --") or line.strip().isupper():
            assert len(line.split("  ")) > 2, line
    if words == "simulate":
        assert "flwr-kd methods`  [required]" in out
    if words == "compare":
        assert "names from `flwr-kd methods`, and alone" in out
