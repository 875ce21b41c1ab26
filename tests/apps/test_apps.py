"""What holds for every app, and that ``flwr run`` gives the numbers of ``flwr-kd simulate``."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from flwr.app import Context, RecordDict
from flwr.common.config import parse_config_args

from flwr_kd import registry, results
from flwr_kd.config import ConfigError
from flwr_kd.inline import InlineGrid
from flwr_kd.simulation import Experiment, run

APPS = Path(__file__).resolve().parents[2] / "apps"
CLIENTS, ROUNDS, SEED = 3, 2, 5
Module = Callable[[str, str], ModuleType]


@dataclass(frozen=True)
class App:
    """An app, what is set in its run on a SuperLink, and settings that it must refuse."""

    name: str
    method: str
    listed: frozenset[str]
    """Hyper-parameters that its ``pyproject.toml`` must have."""
    set: dict[str, Any]
    wrong: tuple[tuple[dict[str, Any], str], ...]

    @property
    def folder(self) -> Path:
        return APPS / self.name

    @property
    def settings(self) -> dict[str, Any]:
        project = tomllib.loads((self.folder / "pyproject.toml").read_text("utf-8"))
        return dict(project["tool"]["flwr"]["app"]["config"])

    @property
    def page(self) -> str:
        return (self.folder / "README.md").read_text("utf-8")

    @property
    def defaults(self) -> dict[str, Any]:
        """The method's own hyper-parameters."""
        return registry.get(self.method).config_class().to_wire()

    def context(self, **settings: Any) -> Context:
        changed = {name.replace("_", "-"): value for name, value in settings.items()}
        config = {**self.settings, **changed}
        return Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config=config)


FEDHKD = App(
    name="fedhkd",
    method="fedhkd",
    listed=frozenset({"gamma", "classifier-weight", "noise", "sigma", "clip", "local-epochs"}),
    set={"local-epochs": 2, "gamma": 0.2, "sigma": 0.5, "reproducible-noise": True},
    wrong=(({"gamma": -1.0}, r"gamma must be >= 0, got -1"),),
)
FEDDKC = App(
    name="feddkc",
    method="feddkc-skr",
    listed=frozenset({"refinement", "target-peak", "target-entropy", "beta", "send-test-features"}),
    set={"batch-size": 32, "refinement": "skr", "target-entropy": 1.2, "send-test-features": True},
    wrong=(
        ({"beta": -1.0}, r"beta must be >= 0, got -1"),
        ({"refinement": "krr"}, r"refinement must be one of kkr, skr, got 'krr'"),
        ({"target_peak": 0.05}, r"target-peak .*0\.05"),
        ({"refinement": "skr", "target_entropy": 9.0}, r"target-entropy .*9"),
        ({"model": "resnet2,resnt4"}, r"resnt4.*resnet4"),
    ),
)
every = pytest.mark.parametrize("app", [FEDHKD, FEDDKC], ids=lambda app: app.name)


def test_every_app_is_tested() -> None:
    assert {FEDHKD.name, FEDDKC.name} == {path.parent.name for path in APPS.glob("*/pyproject.toml")}


@every
@pytest.mark.flwr_run
@pytest.mark.timeout(420)
def test_flwr_run_gives_the_numbers_of_the_simulation(app: App, superlink: Any, tmp_path: Path) -> None:
    shared = {"num-server-rounds": ROUNDS, "min-nodes": CLIENTS, "seed": SEED, "out": str(tmp_path)}
    values = " ".join(f"{name}={json.dumps(value)}" for name, value in {**shared, **app.set}.items())
    superlink.run(app.folder, CLIENTS, values)

    method = registry.get(app.method)
    expected = run(
        method,
        Experiment(clients=CLIENTS, rounds=ROUNDS, seed=SEED, backend="inline", device="cpu"),
        method.config(
            f"{name}={value}"
            for name, value in app.set.items()
            if name in app.defaults and name not in method.fixed
        ),
    )
    comparison = results.load(tmp_path)
    (found,) = comparison.runs
    assert (found.method, found.seed) == (app.method, SEED)
    assert found.hyperparameters == expected.hyperparameters
    assert comparison.config["clients"] == CLIENTS
    assert f"seed={SEED}" in comparison.command
    assert len(found.rounds) == ROUNDS
    for ours, theirs in zip(found.rounds, expected.rounds, strict=True):
        assert (ours.participants, ours.failures) == (CLIENTS, 0)
        assert (ours.bytes_up, ours.bytes_down) == (theirs.bytes_up, theirs.bytes_down)
        for name in ("local_accuracy", "local_top5", "global_accuracy", "server_accuracy", "train_loss"):
            assert getattr(ours, name) == pytest.approx(getattr(theirs, name), abs=1e-6), name
        assert ours.clients == theirs.clients


@every
def test_the_result_is_what_was_run(app: App, module: Module, tmp_path: Path) -> None:
    context = app.context(num_server_rounds=1, model="mlp", seed=SEED, out=str(tmp_path))
    grid = InlineGrid(module(app.name, "client_app").app, 2, run_config=context.run_config)
    module(app.name, "server_app").main(grid, context)
    comparison = results.load(tmp_path)
    (found,) = comparison.runs
    assert registry.get(found.method).name.startswith(app.name)
    assert found.hyperparameters.get("refinement", "") in found.method
    (stats,) = found.rounds
    assert set(stats.clients) == {"0", "1"}
    assert stats.local_top5 is not None
    assert (comparison.config["backend"], comparison.config["seeds"]) == ("flwr", [SEED])
    *words, values = shlex.split(comparison.command)
    assert words == ["flwr", "run", f"apps/{app.name}", "--run-config"]
    assert {**parse_config_args([values]), "out": str(tmp_path)} == context.run_config


@every
def test_nothing_is_written_without_out(app: App, module: Module, monkeypatch: pytest.MonkeyPatch) -> None:
    context = app.context(num_server_rounds=1, model="mlp")
    grid = InlineGrid(module(app.name, "client_app").app, 2, run_config=context.run_config)
    server = module(app.name, "server_app")
    monkeypatch.setattr(server, "save", None)
    server.main(grid, context)


@every
def test_the_apps_defaults_are_the_methods(app: App) -> None:
    listed = {name: value for name, value in app.settings.items() if name in app.defaults}
    assert listed == {name: app.defaults[name] for name in listed}
    assert app.listed <= set(listed)
    assert app.settings["model"] == registry.get(app.method).model


@every
def test_the_readme_explains_every_setting(app: App) -> None:
    pages = [
        app.page,
        *(other.page for other in (FEDHKD,) if f"../{other.name}/README.md#settings" in app.page),
    ]
    rows = re.findall(r"^\| (`.*?) \|", "\n".join(pages), flags=re.MULTILINE)
    explained = set(re.findall(r"`([^`]+)`", " ".join(rows)))
    assert {name for name in app.settings if name not in app.defaults} <= explained


@every
def test_a_relative_out_is_refused_before_the_work(app: App, module: Module) -> None:
    with pytest.raises(ConfigError, match=r"out must be an absolute path, got 'runs/here'"):
        module(app.name, "server_app").main(None, app.context(out="runs/here"))


@every
def test_a_result_is_not_overwritten(app: App, module: Module, tmp_path: Path) -> None:
    (tmp_path / results.FILE_NAME).write_text("{}")
    with pytest.raises(results.ResultExistsError, match=re.escape(str(tmp_path))):
        module(app.name, "server_app").main(None, app.context(out=str(tmp_path)))


@every
def test_settings_are_checked_before_the_work(app: App, module: Module) -> None:
    server = module(app.name, "server_app")
    everywhere: tuple[tuple[dict[str, Any], str], ...] = (
        ({"model": "mlpp"}, r"mlpp.*mlp"),
        ({"min_nodes": 0}, r"clients must be a whole number from 1, got 0"),
        ({"partition": "diriclet:0.1"}, r"diriclet"),
    )
    for settings, message in (*everywhere, *app.wrong):
        with pytest.raises(ValueError, match=message):
            server.main(None, app.context(**settings))
