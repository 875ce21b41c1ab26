"""``--log`` of ``simulate`` and ``compare``, and the key ``log`` of apps."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Context, RecordDict

from flwr_kd import ConfigError
from flwr_kd.experiments.run_config import strategy_options
from flwr_kd.results import files
from tests.cli.commands import TINY, Command, scalars

pytestmark = pytest.mark.long


def test_compare_has_a_run_per_method_and_seed(command: Command, tmp_path: Path) -> None:
    code, out, err = command(
        "compare", "fedavg", "fedproto", *TINY, "--rounds", "2", "--seeds", "0,1", "--out", "here",
        "--log", "tensorboard",
    )  # fmt: skip
    assert (code, err) == (0, "")
    folder = tmp_path / "here" / "tensorboard"
    assert f"log: tensorboard --logdir {folder}" in out
    runs = files.load(tmp_path / "here").runs
    assert sorted(path.name for path in folder.iterdir()) == sorted(f"{r.name}-seed{r.seed}" for r in runs)
    for run in runs:
        mine = scalars(folder / f"{run.name}-seed{run.seed}", "local_accuracy")
        assert mine == [(r.round, pytest.approx(r.local_accuracy)) for r in run.rounds]


def test_a_missing_package_is_a_line_before_anything_is_run(
    command: Command, no_run: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "wandb" else real(name, *a)
    )
    code, _, err = command("simulate", "fedavg", *TINY, "--log", "wandb:mine")
    assert code == 2
    assert err == (
        'flwr-kd: --log wandb needs the package wandb, which is not installed: pip install "flwr-kd[wandb]"\n'
    )
    assert not (tmp_path / "runs").exists()


def test_a_database_that_cannot_be_opened_leaves_nothing(
    command: Command, no_run: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    code, _, err = command("simulate", "fedavg", *TINY, "--log", "mlflow:nonsense://x")
    assert (code, len(err.splitlines())) == (2, 1)
    assert err.startswith("flwr-kd: --log mlflow:nonsense://x cannot be used: ")
    assert not (tmp_path / "runs" / "fedavg").exists()


def context_of(app_settings: dict[str, Any], **settings: Any) -> Context:
    return Context(7, 0, {}, RecordDict(), {**app_settings, **settings})


@pytest.fixture
def app_settings() -> dict[str, Any]:
    import tomllib

    file = Path(__file__).resolve().parents[2] / "apps" / "fedhkd" / "pyproject.toml"
    settings: dict[str, Any] = tomllib.loads(file.read_text("utf-8"))["tool"]["flwr"]["app"]["config"]
    return settings


def test_an_app_has_its_logs_beside_the_result(
    app_settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert len(strategy_options(context_of(app_settings))["callbacks"]) == 1  # a line per round
    (_, log) = strategy_options(context_of(app_settings, log="tensorboard", out="/data/x"))["callbacks"]
    assert log.folder == Path("/data/x/tensorboard")
    (_, log) = strategy_options(context_of(app_settings, log="tensorboard"))["callbacks"]
    assert log.folder == tmp_path / "flwr-kd" / "runs" / "7" / "tensorboard"
    with pytest.raises(
        ConfigError, match=r"log: the folder of tensorboard must be an absolute path, got 'x'"
    ):
        strategy_options(context_of(app_settings, log="tensorboard:x"))
    with pytest.raises(ConfigError, match=r"unknown log 'tensorbord' \(did you mean 'tensorboard'\?\)"):
        strategy_options(context_of(app_settings, log="tensorbord"))
