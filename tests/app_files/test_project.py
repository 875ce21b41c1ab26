"""Every method as a Flower App: it has all settings, Flower builds it and would publish it, and it runs."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from flwr.app import Context, RecordDict
from flwr.cli.build import build
from packaging.requirements import Requirement

from flwr_kd import registry
from flwr_kd.app_files import AppProject
from flwr_kd.app_files.settings import FLOWER, FLOWER_TARGET
from flwr_kd.checks import ConfigError
from flwr_kd.results import files
from flwr_kd.results.schema import RunResult
from flwr_kd.transport.inline_grid import InlineGrid
from tests.processes import PATIENCE, ROOT

# Not the command of the same name, which its package exports.
publish = importlib.import_module("flwr.cli.app_cmd.publish")
CLIENTS = 2
SMALL = {"num-server-rounds": 1, "limit": 60, "test-limit": 20, "public-limit": 20, "model": "mlp"}


def written(folder: Path, *names: str, app: str = "made") -> Path:
    """Write an app of the methods into a folder of its own, and return that."""
    AppProject(name=app, methods=tuple(map(registry.get, names))).write(folder / app)
    return folder / app


def settings_of(app: Path) -> dict[str, Any]:
    project = tomllib.loads((app / "pyproject.toml").read_text("utf-8"))
    return dict(project["tool"]["flwr"]["app"]["config"])


@pytest.fixture(autouse=True)
def forget_apps() -> Iterator[None]:
    """Forget the apps' modules: apps of several tests have one name, and `flwr build` imports their package."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    for name in [name for name in sys.modules if name.partition(".")[0].endswith("_app")]:
        del sys.modules[name]


@pytest.fixture
def imported(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import a module of an app as Flower does."""

    def load(app: Path, name: str) -> ModuleType:
        project = tomllib.loads((app / "pyproject.toml").read_text("utf-8"))
        module, _, _ = project["tool"]["flwr"]["app"]["components"][name].partition(":")
        monkeypatch.syspath_prepend(str(app))
        return importlib.import_module(module)

    return load


def run_here(app: Path, imported: Any, out: Path, **settings: Any) -> RunResult:
    """Run an app in this process, with the settings that it has, and return its result."""
    config = settings_of(app)
    given = {**SMALL, "out": str(out), **settings}
    config |= {name: value for name, value in given.items() if name in config}
    grid = InlineGrid(imported(app, "clientapp").app, CLIENTS, run_config=config)
    context = Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config=config)
    imported(app, "serverapp").main(grid, context)
    (result,) = files.load(out).runs
    return result


@pytest.mark.parametrize("name", registry.methods())
def test_flower_builds_and_would_publish_every_methods_app(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    app = written(tmp_path, name)
    monkeypatch.chdir(tmp_path)
    build(app=app)
    (bundle,) = tmp_path.glob("*.fab")
    # What Flower recommends and does not find is said before that.
    assert "missing" not in capsys.readouterr().out
    with zipfile.ZipFile(bundle) as archive:
        names = set(archive.namelist())
        config = tomllib.loads(archive.read("pyproject.toml").decode())
    assert names == {
        "pyproject.toml",
        "LICENSE",
        "README.md",
        *(f"made_app/{module}.py" for module in ("__init__", "server_app", "client_app")),
        ".info/CONTENT",
    }
    assert config["tool"]["flwr"]["app"]["fab-format-version"] == 1
    # The checks of `flwr app publish` before it uploads: nothing of the app is left out.
    paths = publish._collect_file_paths(app)
    publish._validate_files(paths)
    publish._validate_description(config["project"]["description"])
    assert {path.relative_to(app).as_posix() for path in paths} == names - {".info/CONTENT"} | {".gitignore"}
    # `build` has imported the package, and Python may keep what it compiled.
    left_out = [line for line in capsys.readouterr().out.splitlines() if "Skip" in line]
    assert [line for line in left_out if "__pycache__" not in line] == []


@pytest.mark.parametrize("name", registry.methods())
def test_every_methods_app_has_all_of_its_hyper_parameters(name: str, tmp_path: Path) -> None:
    method, settings = registry.get(name), settings_of(written(tmp_path, name))
    expected = {
        key: value
        for key, value in method.config_class().to_wire().items()
        if key.replace("-", "_") not in method.fixed
    }
    assert {key: settings[key] for key in expected} == expected
    assert all(type(settings[key]) is type(value) for key, value in expected.items())
    assert not {key.replace("_", "-") for key in method.fixed} & settings.keys()
    strategy = method.strategy
    assert ("aggregation" in settings) == (strategy.averages_models or strategy.bounds_updates)
    assert ("knowledge-aggregation" in settings) == strategy.averages_knowledge
    assert ("public" in settings) == (method.public_at in ("server", "clients"))


@pytest.mark.parametrize("name", registry.methods())
def test_every_methods_app_runs(name: str, tmp_path: Path, imported: Any) -> None:
    method = registry.get(name)
    config = method.config_class.from_texts(["local-epochs=1", *method.quick], **method.fixed)
    result = run_here(written(tmp_path, name), imported, tmp_path / "out", **config.to_wire())
    assert (result.method, result.hyperparameters) == (name, config.to_wire())
    (stats,) = result.rounds
    assert (stats.participants, stats.failures) == (CLIENTS, 0)
    assert stats.local_accuracy is not None
    assert (stats.global_accuracy is not None) == method.global_model


# What is particular


def test_an_app_of_several_methods_chooses_by_a_setting(tmp_path: Path, imported: Any) -> None:
    app = written(tmp_path, "fedavg", "fedproto")
    settings, text = settings_of(app), (app / "pyproject.toml").read_text("utf-8")
    assert settings["method"] == "fedavg"
    assert re.search(r"^# .*\[fedproto\]\n(# .*\n)*global-model = ", text, flags=re.MULTILINE)
    for name in ("fedavg", "fedproto"):
        given = {"method": name, "local-epochs": 1}
        result = run_here(app, imported, tmp_path / name, **given)
        (stats,) = result.rounds
        assert (result.method, stats.participants, stats.failures) == (name, CLIENTS, 0)
        assert (stats.global_accuracy is not None) == (name == "fedavg")
    with pytest.raises(ConfigError, match=r"method must be one of fedavg, fedproto, got 'fedprox'"):
        run_here(app, imported, tmp_path / "other", method="fedprox")


@pytest.mark.parametrize("name", ["fedproto", "fedmd"])
def test_a_mean_of_the_models_is_measured_in_a_simulation(name: str, tmp_path: Path, imported: Any) -> None:
    given = {"global-model": "average", "local-epochs": 1}
    (stats,) = run_here(written(tmp_path, name), imported, tmp_path / "out", **given).rounds
    assert stats.global_accuracy is not None
    assert stats.failures == 0


def test_methods_with_other_defaults_have_apps_of_their_own() -> None:
    for names, message in (
        (
            ("fedavg", "ktpfl"),
            r"fedavg and ktpfl have different defaults of [a-z-]+, \S+ and \S+: write an app for",
        ),
        (
            ("fedproto", "fedgkt"),
            r"fedproto and fedgkt have different defaults of model, 'mlp' and 'resnet2,",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            AppProject(name="both", methods=tuple(map(registry.get, names)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "my_app"}, r"name must be a letter, .* 32 at most, got 'my_app'"),
        ({"name": "3d"}, r"name must be a letter"),
        ({"name": ""}, r"name must be a letter"),
        ({"name": "a" * 33}, r"name must be a letter, .* 32 at most"),
        ({"name": 'x"\nversion = "9'}, r"name must be a letter"),
        ({"publisher": 'x"'}, r"publisher must be an account's name"),
        ({"publisher": ""}, r"publisher must be an account's name"),
        ({"description": "x" * 201}, r"description must be one line of at most 200 characters, got 201"),
        ({"description": "two\nlines"}, r"description must be one line"),
        ({"methods": ()}, r"methods must be at least one method, got none"),
    ],
)
def test_what_flower_would_refuse_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        AppProject(**{"name": "made", "methods": (registry.get("fedavg"),), **options})


@pytest.mark.parametrize("name", ["made", "a" * 32, "my-app", "build", "Test-1"])
def test_flower_takes_every_name_that_is_allowed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    app = written(tmp_path, "fedavg", app=name)
    build(app=app)
    (bundle,) = tmp_path.glob("*.fab")
    with zipfile.ZipFile(bundle) as archive:
        assert sum(path.endswith(".py") for path in archive.namelist()) == 3
    # The package's name must not be that of another package.
    assert AppProject(name=name, methods=(registry.get("fedavg"),)).package.endswith("_app")


def test_a_description_may_have_quotes(tmp_path: Path) -> None:
    text = 'a "mean" of \\ and é'
    project = AppProject(name="made", methods=(registry.get("fedavg"),), description=text)
    assert tomllib.loads(project.files()["pyproject.toml"])["project"]["description"] == text


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    project = AppProject(name="made", methods=(registry.get("fedavg"),))
    (tmp_path / "file").write_text("mine")
    for folder in (tmp_path, tmp_path / "file"):
        with pytest.raises(ConfigError, match=r"exists already: name a folder that is new or empty"):
            project.write(folder)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    (tmp_path / "empty").mkdir()
    project.write(tmp_path / "empty")
    assert (tmp_path / "empty" / "LICENSE").read_text("utf-8") == (ROOT / "LICENSE").read_text("utf-8")


@pytest.mark.parametrize("name", ["fedavg", "fedhead", "fedhyb-star", "feddkc-kkr", "ktpfl", "fedgen"])
def test_the_files_are_formatted_and_clean(name: str, tmp_path: Path) -> None:
    app = written(tmp_path, name)
    ruff = [sys.executable, "-m", "ruff"]
    config = ["--config", str(ROOT / "pyproject.toml"), "--ignore", "D10", str(app)]
    done = subprocess.run(
        [*ruff, "check", *config], capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert done.returncode == 0, done.stdout
    form = [*ruff, "format", "--check", "--config", str(ROOT / "pyproject.toml"), str(app)]
    done = subprocess.run(form, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr


def test_flowers_versions_are_those_of_this_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert FLOWER in project["dependencies"]
    assert FLOWER_TARGET in Requirement(FLOWER).specifier


def test_a_plugins_app_names_its_distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    method = replace(registry.get("fedavg"), name="made-up", paper="Nobody, Nothing, 1999")
    monkeypatch.setitem(registry._METHODS, "made-up", method)
    monkeypatch.setitem(registry._SOURCES, "made-up", "their-package 3.1")
    app = written(tmp_path, "made-up", "fedavg")
    assert "`flwr-kd[simulation]` and `their-package 3.1` must be" in (app / "README.md").read_text("utf-8")
    assert "need flwr-kd and their-package 3.1: see" in (app / "pyproject.toml").read_text("utf-8")
