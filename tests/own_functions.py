"""A module of a user's own, whose functions are named as ``module:function``."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from flwr_kd.data._function import samples


def make_importable(name: str, source: str, folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Write the module into a folder, which becomes the working directory of the test."""
    (folder / f"{name}.py").write_text(source, encoding="utf-8")
    patch.chdir(folder)
    patch.setattr(sys, "path", [*sys.path])
    patch.delitem(sys.modules, name, raising=False)
    samples.cache_clear()
