"""Finds the strategies, which are inside the package in an installation, and beside it in a clone.

A user who installs the package and then works in the clone imports the clone's package, because Python and Ray's
workers search the working directory first. An editable installation needs no help.
"""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

__all__ = ["find_strategies"]


def find_strategies(package: ModuleType) -> None:
    """Make the folder ``strategies`` beside a package its subpackage, unless the package has one inside."""
    package_folder = Path(package.__path__[0])
    strategies = package_folder.parent / "strategies"
    name = f"{package.__name__}.strategies"
    if (
        (package_folder / "strategies").is_dir()
        or not (strategies / "fedavg").is_dir()
        or name in sys.modules
    ):
        return
    spec = spec_from_file_location(
        name, strategies / "__init__.py", submodule_search_locations=[str(strategies)]
    )
    if spec is not None and spec.loader is not None:
        module = sys.modules[name] = module_from_spec(spec)
        spec.loader.exec_module(module)
        package.strategies = module  # type: ignore[attr-defined]
