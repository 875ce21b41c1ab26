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
IN_ALL_TIERS = ("method-is-described", "two-rounds-reach-everyone", "bytes-are-those-of-the-formula")
"""What every method passes in the quick tier."""
FOR_ALL_VARIANTS = (
    *IN_ALL_TIERS,
    "learning-goes-on",
    "same-seed-same-numbers",
    "state-survives-save-and-resume",
    "a-resumed-run-equals-an-uninterrupted-one",
)
"""What the further variants of a method pass before the slow tier: it does not follow from the first one."""


def marks(check: str, name: str) -> list[pytest.MarkDecorator]:
    """Return a check's markers; one worker runs all checks of a method, which share runs."""
    found = [pytest.mark.xdist_group(f"runs of {name}")]
    if check.startswith("processes"):
        found = [pytest.mark.program]
    if check in IN_ALL_TIERS:
        found.append(pytest.mark.every_method)
    if check not in FOR_ALL_VARIANTS:
        found.append(pytest.mark.first_variant)
    return found


RUNS = [
    pytest.param(name, check.name, id=f"{check.name}-{name}", marks=marks(check.name, name))
    for check in CHECKS.values()
    for name in registry.methods()
    if not check.recorded and check.cases(name)
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
