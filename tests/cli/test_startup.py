"""What the command imports before it computes anything: help does not wait for PyTorch."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.processes import PATIENCE

HEAVY = ("torch", "flwr", "ray", "matplotlib", "numpy")
PROGRAM = f"""
import contextlib, io, sys
from flwr_kd.cli import main

for line in sys.argv[1:]:
    sys.argv = ["flwr-kd", *line.split()]
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
        main()
    assert out.getvalue(), line
    loaded = [name for name in {HEAVY!r} if name in sys.modules]
    assert not loaded, f"{{line}} imports {{loaded}}"
"""


def python(*arguments: str) -> None:
    subprocess.run([sys.executable, "-c", *arguments], check=True, timeout=PATIENCE)


def test_help_version_and_methods_import_nothing_heavy() -> None:
    commands = (
        "--help",
        "--version",
        "methods",
        "methods --json",
        "methods fedhkd",
        "methods fedhkd --json",
        "methods --help",
        "datasets",
        "models",
        "partitions",
        "simulate --help",
        "compare --help",
        "privacy --help",
        "plot --help",
        "plot landscape --help",
        "plot classes --help",
        "report --help",
        "table --help",
        "completion bash",
    )
    python(PROGRAM, *commands)


@pytest.mark.parametrize(
    "module",
    ["flwr_kd", "flwr_kd.catalogue", "flwr_kd.config", "flwr_kd.checks", "flwr_kd.text", "flwr_kd.plotting"],
)
def test_light_modules_import_nothing_heavy(module: str) -> None:
    python(f"import sys, {module}\nassert not {{*{HEAVY!r}}} & {{*sys.modules}}")
