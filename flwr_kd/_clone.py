"""Where the strategies lie: an installation has them inside the package, a clone beside it.

Whoever installs, and then works in the clone, gets the clone's package, since Python and Ray's workers look into
the working directory first. An editable installation would find them by itself.
"""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

__all__ = ["find_strategies"]


def find_strategies(package: ModuleType) -> None:
    """Make the ``strategies`` beside a package its subpackage, unless it has them inside."""
    folder = Path(package.__path__[0])
    beside = folder.parent / "strategies"
    name = f"{package.__name__}.strategies"
    if (folder / "strategies").is_dir() or not (beside / "fedavg").is_dir() or name in sys.modules:
        return
    spec = spec_from_file_location(name, beside / "__init__.py", submodule_search_locations=[str(beside)])
    if spec is not None and spec.loader is not None:
        module = sys.modules[name] = module_from_spec(spec)
        spec.loader.exec_module(module)
        package.strategies = module  # type: ignore[attr-defined]
