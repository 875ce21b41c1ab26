"""The apps as modules, and a SuperLink on which they run."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from flwr_kd.results.schema import Comparison
from tests.processes import ROOT
from tests.superlink import SuperLink

# So that pytest explains failed assertions in it.
pytest.register_assert_rewrite("tests.apps.applications")


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Keep results for which a run names no folder out of the user's home."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "home"


class Simulation(SuperLink):
    """A SuperLink with Flower's simulation runtime."""

    def __init__(self, folder: Path) -> None:
        # The apps themselves set the number of threads.
        super().__init__(folder, "--simulation", environment={"OMP_NUM_THREADS": None})

    def run(self, app: Path, settings: Mapping[str, Any], clients: int) -> Comparison:
        """Run an app to its end, one CPU per client, and return its result."""
        federation = f"num-supernodes={clients} client-resources-num-cpus=1 init-args-num-cpus=2"
        return self.submit(app, settings, "--federation-config", federation).result()


@pytest.fixture(scope="session")
def superlink(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Simulation]:
    pytest.importorskip("ray", reason="a local simulation needs Ray")
    with Simulation(tmp_path_factory.mktemp("superlink")) as link:
        yield link


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], ModuleType]]:
    """Import an app's module as Flower does, from the app's own folder."""
    packages, threads = set(), torch.get_num_threads()

    def load(app: str, name: str) -> ModuleType:
        package = f"{app}_app"
        packages.add(package)
        monkeypatch.syspath_prepend(str(ROOT / "apps" / app))
        return importlib.import_module(f"{package}.{name}")

    yield load
    torch.set_num_threads(threads)
    for name in [name for name in sys.modules if name.partition(".")[0] in packages]:
        del sys.modules[name]
