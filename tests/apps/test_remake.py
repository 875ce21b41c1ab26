"""The apps of this repository are what the template of ``flwr-kd app`` makes of their methods."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest
from flwr.cli.build import build

from tests.apps.applications import APPLICATIONS, APPS, App
from tests.processes import ROOT


@pytest.fixture
def remake() -> ModuleType:
    spec = importlib.util.spec_from_file_location("remake_apps", APPS / "remake.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_files_are_up_to_date(remake: ModuleType) -> None:
    """`make pages` writes them."""
    assert remake.update(write=False) == []
    assert {project.name for project in remake.PROJECTS} == {app.name for app in APPLICATIONS}


def test_stale_files_are_found_and_written_again(
    remake: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(APPS, tmp_path / "apps")
    monkeypatch.setattr(remake, "APPS", tmp_path / "apps")
    (tmp_path / "apps" / "fedhkd" / "LICENSE").unlink()
    (tmp_path / "apps" / "ktpfl" / "pyproject.toml").write_text("")
    (tmp_path / "apps" / "ktpfl" / "README.md").write_text("by hand")
    stale = ["apps/fedhkd/LICENSE", "apps/ktpfl/pyproject.toml"]
    assert remake.update(write=False) == stale
    assert remake.update(write=True) == stale
    assert remake.update(write=False) == []
    for name in stale:
        assert (tmp_path / name).read_text("utf-8") == (ROOT / name).read_text("utf-8")
    assert (tmp_path / "apps" / "ktpfl" / "README.md").read_text("utf-8") == "by hand"


@pytest.mark.parametrize("app", APPLICATIONS, ids=lambda app: app.name)
def test_flower_builds_it(app: App, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    build(app=app.folder)
    # It has imported the app's package.
    sys.modules.pop(f"{app.name}_app", None)
    assert [path.name.split(".")[:2] for path in tmp_path.glob("*.fab")] == [["flwr-kd", app.name]]
