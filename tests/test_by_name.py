"""Functions of a user's own, imported by name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from flwr.app import Context, RecordDict

from flwr_kd.by_name import call_with, import_function, names_function, refuse_in_messages
from flwr_kd.checks import ConfigError
from flwr_kd.experiments.run_settings import experiment


@pytest.mark.parametrize("name", ["a:b", "a.b.c:d_1", "_a:b"])
def test_names(name: str) -> None:
    assert names_function(name)
    with pytest.raises(ConfigError, match="must not name a function to import"):
        refuse_in_messages(name, "model")


@pytest.mark.parametrize(
    "name",
    ["", "a", "a:", ":b", "a:b:c", "a/b:c", "a b:c", "1a:b", "csv:x.csv", "a..b:c", "a:b\n", None],
)
def test_no_names(name: object) -> None:
    assert not names_function(name)
    refuse_in_messages(str(name), "model")


class TestImport:
    def test_a_module_that_is_missing(self) -> None:
        with pytest.raises(ConfigError, match=r"model 'no_such_module:f': .*ModuleNotFoundError"):
            import_function("no_such_module:f", "model")

    def test_a_function_that_is_missing(self) -> None:
        with pytest.raises(ConfigError, match="the module math has no function pi"):
            import_function("math:pi", "model")

    def test_an_error_in_the_module(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "broken_by_name.py").write_text("1 / 0\n", encoding="utf-8")
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "path", [*sys.path])
        with pytest.raises(ConfigError, match="ZeroDivisionError: division by zero"):
            import_function("broken_by_name:f", "dataset")

    def test_the_working_directory_comes_last(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "own_by_name.py").write_text("def two():\n    return 2\n", encoding="utf-8")
        (tmp_path / "colorsys.py").write_text("def two():\n    return 3\n", encoding="utf-8")
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "path", [*sys.path])
        assert import_function("own_by_name:two", "model")() == 2
        with pytest.raises(ConfigError, match="colorsys has no function two"):
            import_function("colorsys:two", "model")


def test_a_function_gets_what_it_names() -> None:
    values = {"num_classes": 3, "seed": 1}
    assert call_with(lambda: "none", values) == "none"
    assert call_with(lambda seed, other=5: (seed, other), values) == (1, 5)
    assert call_with(lambda **options: options, values) == values


@pytest.mark.program
def test_nothing_is_imported_before_it_is_asked_for() -> None:
    code = "import sys, flwr_kd.by_name; raise SystemExit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("key", ["model", "dataset"])
def test_a_run_config_cannot_name_code(key: str) -> None:
    """A SuperNode gets it in a message: nothing may be imported for it."""
    settings = {"dataset": "digits", "model": "mlp", "data-dir": "", "partition": "iid", "classes": ""}
    settings[key] = {"model": "mlp, never_by_name:two", "dataset": "never_by_name:two"}[key]
    context = Context(1, 2, {}, RecordDict(), settings)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=f"{key} in a run config must not name a function"):
        experiment(context)
    assert "never_by_name" not in sys.modules
