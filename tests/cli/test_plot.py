"""``flwr-kd plot``: pictures of the runs that were measured."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord

from flwr_kd import Experiment, registry
from flwr_kd.experiments import data, saved_arrays
from flwr_kd.plotting import classes, coefficients, landscape
from flwr_kd.results import files, schema
from flwr_kd.server.checkpoint import Checkpoint
from tests.cli.commands import TINY, Command, is_a_picture, kept_files

pytestmark = pytest.mark.long


def add_images(folder: Path, method: str, images: np.ndarray[Any, Any]) -> None:
    """Add images to the saved state of a run's server."""
    place = saved_arrays.folder_of(folder, method, 0)
    checkpoint = Checkpoint.load(place, registry.get(method).strategy.__name__)
    assert checkpoint is not None
    replace(checkpoint, state={**checkpoint.state, "synthetic": images}).save(place)


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


def test_a_map_shows_all_classes_of_a_set_that_has_few(command: Command, tmp_path: Path) -> None:
    rows = "".join(f"{i % 3 + i * 7 % 10 / 10:.1f},{i * 3 % 5},{i % 3}\n" for i in range(90))
    (tmp_path / "table.csv").write_text("f,g,label\n" + rows)
    args = ["--dataset", "csv:table.csv", "--partition", "iid", "--limit", "40"]
    assert command("simulate", "fedavg", *TINY, *args, "--out", "o").code == 0
    assert command("plot", "tsne", "o").code == 0
    assert is_a_picture(tmp_path / "o" / "tsne.png")
    code, _, err = command("plot", "tsne", "o", "--classes", "4")
    assert (code, err) == (2, "flwr-kd: classes must be at most the number that occurs, 3, not 4\n")


def test_the_plots_are_of_the_models_that_were_measured(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The experiment and model that are rebuilt from a result have the run's accuracy and training samples."""
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
    """Write a result without running anything: each method's state after the last round, by seed."""
    rounds = (schema.RoundResult(1, 0.5, None, None, 1, 1, 1.0, 2, 0),)
    runs = []
    for name, by_seed in states.items():
        method = registry.get(name)
        config = method.config().to_wire()
        for seed, state in enumerate(by_seed):
            runs.append(schema.RunResult(name, seed, rounds, hyperparameters=config))
            if state is not None:
                checkpoint = Checkpoint(method.strategy.__name__, 1, config, seed, ArrayRecord(), state)
                checkpoint.save(saved_arrays.folder_of(folder, name, seed))
    files.save(schema.Comparison({"dataset": "digits", "clients": 2}, {}, "", tuple(runs)), folder)


def test_curves_are_drawn(command: Command, tmp_path: Path) -> None:
    a_result(tmp_path / "o", {"fedproto": [None]})
    code, out, err = command("plot", "curves", "o", "--accuracies", "local-accuracy", "--out", "c.png")
    assert (code, err, out) == (0, "", f"curves: {tmp_path / 'c.png'}\n")
    assert is_a_picture(tmp_path / "c.png")
    code, _, err = command("plot", "curves", "o", "--accuracies", "common-accuracy")
    assert code == 2
    assert "common-accuracy was not measured" in err


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


def test_who_has_what_is_drawn_with_and_without_a_run(command: Command, tmp_path: Path) -> None:
    for name, form in (("a", "iid"), ("b", "dirichlet:0.5")):
        code = command(
            "simulate", "fedavg", *TINY, "--no-arrays", "--partition", form, "--out", f"runs/{name}"
        ).code
        assert code == 0
    # A folder of results is all of them.
    code, out, err = command("plot", "classes", "runs")
    assert (code, err, out) == (0, "", f"classes: {tmp_path / 'runs' / 'classes.png'}\n")
    assert is_a_picture(tmp_path / "runs" / "classes.png")
    code, out, err = command("plot", "sweep", "runs/a", "runs/b", "--out", "s.png")
    assert (code, err, out) == (0, "", f"sweep: {tmp_path / 's.png'}\n")
    assert is_a_picture(tmp_path / "s.png")
    for picture in ("clients", "communication"):
        code, out, err = command("plot", picture, "runs")
        assert (code, err, out) == (0, "", f"{picture}: {tmp_path / 'runs' / f'{picture}.png'}\n")
        assert is_a_picture(tmp_path / "runs" / f"{picture}.png")
    code, _, err = command("plot", "optimum", "runs/a")
    assert (code, err.split(":")[1]) == (
        2,
        " no run has the distances of its models to the last one in two rounds",
    )
    assert command("plot", "optimum", "runs").err == "flwr-kd: name one result, got 2 in 'runs'\n"
    divided = ("--partition", "iid", "--partition", "ktpfl-2:max", "--clients", "4", "--classes", "0,3,5")
    code, out, err = command("plot", "partition", *divided, "--limit", "150", "--dots", "--out", "p.png")
    assert (code, err, out) == (0, "", f"partition: {tmp_path / 'p.png'}\n")
    assert is_a_picture(tmp_path / "p.png")


def test_a_panel_of_one_run_has_no_seeds_of_others(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, form, seeds in (("a", "iid", "0,1"), ("b", "dirichlet:0.5", "0")):
        args = (*TINY, "--no-arrays", "--partition", form, "--seeds", seeds, "--out", name)
        assert command("compare", "fedavg", *args).code == 0
    drawn: list[tuple[str, ...]] = []
    plain = classes.figure
    monkeypatch.setattr(
        classes,
        "figure",
        lambda panels, title, **more: drawn.append((*panels, *title)) or plain(panels, **more),
    )
    assert command("plot", "classes", "a", "b").code == 0
    (words,) = drawn
    assert words[:2] == ("iid", "dirichlet:0.5")
    assert words[-1] == "seed 0"


def test_distances_are_drawn(command: Command, tmp_path: Path) -> None:
    args = (*TINY, "--rounds", "3", "--distances", "--no-arrays", "--seeds", "0,1", "--out", "o")
    assert command("compare", "fedavg", "fedproto", *args).code == 0
    code, out, err = command("plot", "optimum", "o")
    assert (code, err, out) == (0, "", f"optimum: {tmp_path / 'o' / 'optimum.png'}\n")
    assert is_a_picture(tmp_path / "o" / "optimum.png")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("classes", "none"), "no folder 'none': name that of a result"),
        (("sweep", "empty"), "no result in 'empty': there is no result.json, nor in its folders"),
        (("partition", "--partition", "idd"), "unknown partition 'idd' (did you mean 'iid'?)"),
        (("partition", "--seed", "-1"), "seed must be a whole number from 0, got -1"),
        (("partition", "--out", "empty"), "out must be a file, got the folder 'empty'"),
    ],
)
def test_what_cannot_be_drawn_is_one_line(
    command: Command, tmp_path: Path, args: tuple[str, ...], message: str
) -> None:
    (tmp_path / "empty" / ".unfinished").mkdir(parents=True)
    code, out, err = command("plot", *args)
    assert (code, out) == (2, "")
    assert message in err
    assert len(err.splitlines()) == 1


def test_the_plots_are_listed(command: Command) -> None:
    for args in (("plot",), ("plot", "--help")):
        code, out, err = command(*args)
        assert (code, err) == (0, "")
        names = (
            *("tsne", "landscape", "samples", "coefficients", "classes", "partition", "sweep"),
            *("clients", "communication", "optimum"),
        )
        assert all(name in out for name in names)
