"""A comparison from Python: prepared, run, written."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from flwr_kd import ConfigError, ExperimentOptions, ResultError, ResultExistsError, registry
from flwr_kd.experiments import comparison, run_form, runner, saved_arrays
from flwr_kd.experiments.comparison import Entry
from flwr_kd.plotting import curves
from flwr_kd.results import files
from flwr_kd.results.schema import Comparison, RunResult
from flwr_kd.results.table import table

OPTIONS = ExperimentOptions(clients=2, rounds=1, limit=150, backend="inline", device="cpu")


def test_a_comparison_is_written_and_can_be_extended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = comparison.compare(["fedavg"], OPTIONS, seeds=[1], folder=tmp_path, settings=["local-epochs=1"])
    assert files.load(tmp_path) == first
    assert first.config["seeds"] == [1]
    assert first.runs[0].hyperparameters["local-epochs"] == 1
    with pytest.raises(ResultExistsError):
        comparison.compare(["fedavg"], OPTIONS, seeds=[1], folder=tmp_path)
    (tmp_path / "tsne.png").touch()

    started: list[tuple[str, int]] = []
    real = runner.run

    def noting(method: registry.Method, experiment: Any, *args: Any, **kwargs: Any) -> Any:
        started.append((method.name, experiment.seed))
        return real(method, experiment, *args, **kwargs)

    monkeypatch.setattr(runner, "run", noting)
    names = ["fedavg", "fedproto", "fedavg"]
    whole = comparison.compare(
        names, OPTIONS, seeds=[0], folder=tmp_path, settings=["local-epochs=1"], resume=True
    )
    assert started == [("fedavg", 0), ("fedproto", 0)]
    assert [(run.method, run.seed) for run in whole.runs] == [("fedavg", 0), ("fedproto", 0), ("fedavg", 1)]
    assert whole.runs[-1] == first.runs[0]
    # The picture showed the earlier result.
    assert not (tmp_path / "tsne.png").exists()


def test_a_plan_says_what_runs(tmp_path: Path) -> None:
    options = ExperimentOptions(
        clients=2, rounds=3, limit=150, backend="inline", device="cpu", attack="nan", attackers=1
    )
    plan = comparison.prepare(
        ["fedproto", "fedavg"], options, seeds=[0, 2], folder=tmp_path / "o", command="c"
    )
    assert plan.rounds == 12
    assert [(method.name, experiment.seed) for method, experiment in plan.runs()] == [
        ("fedproto", 0), ("fedavg", 0), ("fedproto", 2), ("fedavg", 2)
    ]  # fmt: skip
    assert plan.models == {"fedproto": "mlp", "fedavg": "mlp"}
    assert plan.unharmed() == ["fedproto"]
    assert (plan.command, plan.config["attack"]) == ("c", "nan")


def test_callbacks_see_each_run_and_round(tmp_path: Path) -> None:
    plan = comparison.prepare(["fedavg"], OPTIONS, seeds=[0, 1], folder=tmp_path)
    runs: list[tuple[int, bool]] = []
    rounds: list[int] = []

    def run() -> None:
        comparison.run(
            plan,
            keep_arrays=False,
            on_run=lambda method, experiment, finished: runs.append((experiment.seed, finished)),
            on_round=lambda stats: rounds.append(stats.server_round),
        )

    run()
    assert (runs, rounds) == ([(0, False), (1, False)], [1, 1])
    run()
    assert (runs[2:], rounds[2:]) == ([(0, True), (1, True)], [])
    assert not list(tmp_path.rglob("*.safetensors"))


def test_a_setting_goes_to_the_methods_that_have_it() -> None:
    star, avg, hkd = (registry.get(name) for name in ("fedhkd-star", "fedavg", "fedhkd"))
    configs = comparison.configs_of([star, avg, hkd], ["gamma=0.5", "batch-size=8"])
    assert {name: config.batch_size for name, config in configs.items()} == dict.fromkeys(configs, 8)
    assert (configs["fedhkd"].to_wire()["gamma"], configs["fedhkd-star"].to_wire()["gamma"]) == (0.5, 0.0)
    for methods, text, message in (
        ([star], "gamma=1", "gamma is fixed at 0.0 by this method, got 1"),
        ([star, avg], "gamma=1", "gamma is fixed by fedhkd-star, got 'gamma=1'"),
        ([avg, hkd], "gama=1", r"unknown hyper-parameter 'gama' \(did you mean 'gamma'\?\)"),
        ([avg, hkd], "gamma", "'gamma' is not of the form name=value"),
    ):
        with pytest.raises(ConfigError, match=message):
            comparison.configs_of(methods, [text])


def labelled(*gammas: float) -> list[Entry]:
    method = registry.get("fedhkd")
    return [
        Entry(method, method.config([f"gamma={g}", "noise=none"]), f"gamma={g}", model="lenet")
        for g in gammas
    ]


def test_one_method_with_several_settings_is_kept_apart_by_its_labels(tmp_path: Path) -> None:
    entries = [*labelled(0.1, 5.0), Entry(registry.get("fedavg"), registry.get("fedavg").config())]
    whole = comparison.compare(entries, OPTIONS, seeds=[0], folder=tmp_path)
    assert files.load(tmp_path) == whole
    assert [(run.name, run.label, run.method) for run in whole.runs] == [
        ("gamma=0.1", "gamma=0.1", "fedhkd"), ("gamma=5.0", "gamma=5.0", "fedhkd"), ("fedavg", "", "fedavg")
    ]  # fmt: skip
    assert [run.hyperparameters["gamma"] for run in whole.runs[:2]] == [0.1, 5.0]
    assert whole.config["model"] == {"gamma=0.1": "lenet", "gamma=5.0": "lenet", "fedavg": "mlp"}
    assert [row["method"] for row in whole.summary()] == list(whole.by_method()) == [e.name for e in entries]
    # Each run has kept its own arrays, which are those of its own model.
    for run in whole.runs:
        experiment = saved_arrays.experiment_of(whole.config, run)
        assert saved_arrays.global_model(experiment, saved_arrays.read(tmp_path, run)) is not None
    console = Console(width=100)
    with console.capture() as capture:
        console.print(table(whole))
    assert "gamma=5.0" in capture.get()
    legend = curves.figure(whole).legends[0]
    assert [text.get_text() for text in legend.get_texts()] == ["gamma=0.1", "gamma=5.0", "fedavg"]


def test_labelled_runs_go_on_where_they_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    comparison.compare(labelled(0.1), OPTIONS, seeds=[0], folder=tmp_path)
    first = files.load(tmp_path).runs[0]
    whole = comparison.compare(labelled(0.1, 5.0), OPTIONS, seeds=[0], folder=tmp_path, resume=True)
    assert [run.name for run in whole.runs] == ["gamma=0.1", "gamma=5.0"]
    assert whole.runs[0] == first
    other = [replace(entry, label="gamma=0.1") for entry in labelled(0.2)]
    with pytest.raises(ResultError, match=r"another gamma \(gamma=0.1\): 0.1 there, 0.2 here"):
        comparison.compare(other, OPTIONS, seeds=[0], folder=tmp_path, resume=True)
    avg = registry.get("fedavg")
    with pytest.raises(
        ResultError, match=r"another method \(gamma=0.1\): 'fedhkd' there, 'fedavg' here|gamma"
    ):
        comparison.compare(
            [Entry(avg, avg.config(), "gamma=0.1")], OPTIONS, seeds=[0], folder=tmp_path, resume=True
        )


def test_clients_that_train_alone_are_a_row_by_name(tmp_path: Path) -> None:
    settings = ["local-epochs=2", "proto-weight=3", "gamma=0.1"]
    names = ["fedhkd", "alone", "fedproto", "alone"]
    plan = comparison.prepare(names, OPTIONS, seeds=[0], folder=tmp_path / "plan", settings=settings)
    rows = {entry.name: (entry.method.name, entry.config.to_wire()) for entry in plan.entries}
    assert list(rows) == ["fedhkd", "alone", "fedproto"]
    assert rows["alone"] == ("fedproto", {**rows["fedproto"][1], "proto-weight": 0.0})
    assert rows["fedproto"][1]["proto-weight"] == 3.0
    assert rows["alone"][1]["local-epochs"] == 2
    result = comparison.compare(["fedavg", "alone"], OPTIONS, seeds=[0], folder=tmp_path / "run")
    by_name = {row["method"]: row for row in result.summary()}
    assert by_name["fedavg"]["better_off"]["n"] == 1
    assert by_name["alone"]["better_off"]["n"] == 0
    # What carries their runs is no part of training alone.
    for key in ("bytes_up", "bytes_down", "bytes_knowledge", "round_trips"):
        assert by_name["alone"][key]["mean"] == 0
    assert by_name["fedavg"]["bytes_up"]["mean"] > 0
    form = run_form.read_run_form(tmp_path / "run" / "result.json")
    again = run_form.entries_of(form, ["fedavg", "alone"])
    assert [entry.name for entry in again] == ["fedavg", "alone"]
    assert again[1].config == plan.entries[1].config.__class__(proto_weight=0.0)
    (file := tmp_path / "own.toml").write_text('methods = ["alone"]\n')
    (own,) = run_form.entries_of(run_form.read_run_form(file), ["alone"])
    assert (own.name, own.method.name, own.config.to_wire()["proto-weight"]) == ("alone", "fedproto", 0.0)


def test_two_rows_need_two_names(tmp_path: Path) -> None:
    same = [replace(entry, label="one") for entry in labelled(0.1, 0.2)]
    with pytest.raises(ConfigError, match="two rows of a comparison have the name 'one'"):
        comparison.prepare(same, OPTIONS, seeds=[0], folder=tmp_path)
    with pytest.raises(ConfigError, match="a run's name must be of at most 100 letters"):
        replace(same[0], label="../outside")


def test_a_warm_up_on_labels_that_the_model_has_not_is_refused_before_the_run() -> None:
    options = replace(OPTIONS, classes="5", public="mnist-5k")
    with pytest.raises(
        ConfigError, match=r"of 5 classes on public data, whose labels go up to 9: set warmup_head"
    ):
        comparison.prepare(["fedmd"], options, seeds=[0], settings=["warmup-epochs=1"])
    plan = comparison.prepare(["fedmd"], options, seeds=[0], settings=["warmup-epochs=1", "warmup-head=own"])
    plan.unfinished.remove()


def test_the_result_of_clients_own_data_cannot_be_run_again(tmp_path: Path) -> None:
    files.save(
        Comparison({"dataset": "own", "classes": ["a", "b"]}, {}, "", (RunResult("fedavg", 0, ()),)), tmp_path
    )
    with pytest.raises(ConfigError, match="the result is of clients' own data, which it does not have"):
        run_form.read_run_form(tmp_path)


def test_a_command_gives_the_result_again(tmp_path: Path) -> None:
    """Also of a comparison that was extended, or went on."""

    def made(names: list[str], seeds: list[int], command: str) -> str:
        resume = "--resume" in command
        plan = comparison.prepare(
            names, OPTIONS, seeds=seeds, folder=tmp_path / "run", command=command, resume=resume
        )
        comparison.run(plan)
        return comparison.write(plan)[0].command

    assert made(["fedavg"], [0], "first") == "first"
    assert made(["fedavg"], [0], "first --resume --log csv") == "first --log csv"
    assert made(["fedavg", "fedprox"], [1], "second --resume") == "first --log csv && second --resume"
    assert made(["fedavg", "fedprox"], [1], "second --resume") == "first --log csv && second --resume"
