"""The registry, and what a package exports: both without importing what is not used."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import json
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from flwr_kd import registry
from flwr_kd.checks import ConfigError
from flwr_kd.lazy import exports, load

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = sorted(path.parent.name for path in (ROOT / "strategies").glob("*/__init__.py"))
PACKAGES = ["flwr_kd", *(f"flwr_kd.strategies.{name}" for name in FOLDERS)]
METHODS = list(registry.methods())
HEAVY = ("torch", "flwr", "numpy")


@pytest.mark.program
def test_methods_and_their_hyper_parameters_import_nothing_heavy() -> None:
    code = (
        "import json, sys; from flwr_kd import registry\n"
        "found = {name: method.config().to_wire() for name, method in registry.methods().items()}\n"
        f"print(json.dumps([list(found), [name for name in {HEAVY} if name in sys.modules]]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [list(registry.methods()), []]


@pytest.mark.parametrize("name", METHODS)
def test_paths_lead_to_classes_that_agree(name: str) -> None:
    method = registry.get(name)
    assert method.config_class is method.strategy.config_class is method.client.config_class
    assert method.strategy.__module__ == method.strategy_path.partition(":")[0]
    assert method.client.__module__ == method.client_path.partition(":")[0]


def test_a_name_that_is_taken_is_an_error_that_names_both() -> None:
    method = registry.get("fedavg")
    assert registry.register(method) is method
    with pytest.raises(
        ConfigError, match=r"'fedavg' is registered twice: .*fedavg.strategy:FedAvg .*, mine:Mine"
    ):
        registry.register(dataclasses.replace(method, strategy_path="mine:Mine"))
    assert registry.get("fedavg") == method


def typed_imports(package: str) -> set[tuple[str, str]]:
    """Return module and name of what a package imports for the type checker alone."""
    source = Path(importlib.import_module(package).__file__ or "").read_text(encoding="utf-8")
    blocks = [
        node.body
        for node in ast.parse(source).body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    imports = [node for block in blocks for node in block if isinstance(node, ast.ImportFrom)]
    return {
        (f"{package}.{node.module}" if node.level else str(node.module), alias.name)
        for node in imports
        for alias in node.names
    }


@pytest.mark.parametrize("package", PACKAGES)
def test_exported_names_are_those_of_the_type_checker(package: str) -> None:
    module = importlib.import_module(package)
    expected = typed_imports(package)
    assert {name for _, name in expected} <= set(module.__all__)
    for home, name in expected:
        assert getattr(module, name) is getattr(importlib.import_module(home), name)
    for name in module.__all__:
        assert getattr(module, name) is not None
        assert name in dir(module)
    with pytest.raises(AttributeError, match=rf"module '{package}' has no attribute 'nothing'"):
        _ = module.nothing


def test_a_missing_name_is_an_attribute_error() -> None:
    find, names = exports("flwr_kd", {"checks": ["ConfigError"]})
    assert find("ConfigError") is ConfigError
    assert "ConfigError" in names()
    with pytest.raises(AttributeError, match=r"module 'flwr_kd' has no attribute 'DataError'"):
        find("DataError")


@pytest.mark.parametrize("path", ["", "flwr_kd", ":ConfigError", "flwr_kd.checks:"])
def test_a_path_without_both_parts_is_refused(path: str) -> None:
    with pytest.raises(ValueError, match=r"must be written as module:name, got"):
        load(path)


@pytest.fixture
def entry_point(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[str, str], None]]:
    """Give this process one entry point, and a registry that has not looked for any yet."""
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("_METHODS", "_SOURCES"):
        monkeypatch.setattr(registry, name, dict(getattr(registry, name)))
    monkeypatch.setattr(registry, "_loaded", False)
    given = []

    def give(code: str, value: str) -> None:
        given.append(value.partition(":")[0])
        (tmp_path / f"{given[-1]}.py").write_text(textwrap.dedent(code))
        point = EntryPoint("mine", value, registry.GROUP)
        monkeypatch.setattr(registry, "entry_points", lambda group: [point])

    yield give
    for name in given:
        sys.modules.pop(name, None)


COPY = """
    from dataclasses import replace
    from flwr_kd.registry import register
    from flwr_kd.strategies.fedgkt import METHOD
"""


def test_an_entry_point_names_a_method_or_a_module_that_registers(
    entry_point: Callable[[str, str], None],
) -> None:
    entry_point(COPY + "    method = replace(METHOD, name='named')", "one_that_names:method")
    assert registry.get("named").strategy is registry.get("fedgkt").strategy


def test_a_broken_entry_point_costs_no_other_method(entry_point: Callable[[str, str], None]) -> None:
    before = set(METHODS)
    entry_point(COPY + "    register(replace(METHOD, name='half'))\n    1 / 0", "one_that_raises")
    with pytest.warns(RuntimeWarning, match=r"one_that_raises are left out: .* raised ZeroDivisionError"):
        names = set(registry.methods())
    assert names == before


def test_an_entry_point_cannot_take_a_name(entry_point: Callable[[str, str], None]) -> None:
    code = COPY + "    register(replace(METHOD, name='fedavg', strategy_path='taken:Mine'))"
    entry_point(code, "one_that_takes")
    with pytest.raises(registry.NameTakenError, match=r"'fedavg' is registered twice: .*of one_that_takes"):
        registry.methods()
