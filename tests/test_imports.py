"""What importing the package leaves unimported, in one fresh process for all of its parts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("flwr_kd.data", "flwr_kd.models", "flwr_kd.plotting")
OPTIONAL = (
    *("sklearn", "torchvision", "datasets", "flwr_datasets", "mlxtend", "pandas", "scipy", "pyarrow"),
    *("matplotlib", "ray", "dp_accounting"),
)
"""Packages that are imported when they are first used."""


@pytest.mark.program
def test_importing_parts_of_the_package_imports_no_optional_package() -> None:
    code = (
        "import importlib, json, sys\n"
        f"for part in {PARTS}:\n"
        "    importlib.import_module(part)\n"
        f"    print(json.dumps([part, [name for name in {OPTIONAL} if name in sys.modules]]))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert [json.loads(line) for line in done.stdout.splitlines()] == [[part, []] for part in PARTS]
