"""Every method in the shared matrix of :mod:`flwr_kd.testing`; a new one joins by being registered."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from flwr_kd import registry
from flwr_kd.testing import CHECKS
from flwr_kd.testing.recording import Case

ROOT = Path(__file__).resolve().parents[1]
RUNS = [
    pytest.param(
        name,
        check.name,
        id=f"{check.name}-{name}",
        marks=[pytest.mark.program] if check.name.startswith("processes") else [],
    )
    for check in CHECKS.values()
    for name in registry.methods()
    if check.run.__module__.endswith(("run_checks", "byte_checks", "device_checks")) and check.cases(name)
]


@pytest.mark.program
def test_strategies_are_found_in_a_clone_that_is_not_installed() -> None:
    """As the workers of a simulation find it, which look into the working directory first."""
    code = (
        "import sys; sys.meta_path[:] = [f for f in sys.meta_path if 'editable' not in repr(f).lower()]; "
        f"sys.path.insert(0, {str(ROOT)!r}); import flwr_kd.strategies.fedhkd as m; print(m.__file__)"
    )
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == str(ROOT / "strategies" / "fedhkd" / "__init__.py"), done.stderr


def test_the_registry_holds_every_folder_of_this_library() -> None:
    folders = {path.parent.name for path in (ROOT / "strategies").glob("*/__init__.py")}
    registered = {method.strategy_path.split(".")[2] for method in registry.methods().values()}
    assert folders == registered
    assert len(folders) > 10


@pytest.mark.parametrize(("name", "check"), RUNS)
def test_the_method_passes(name: str, check: str) -> None:
    CHECKS[check](Case(name))
