"""Names of a package that are imported when they are first used."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

__all__ = ["exports", "load"]


def exports(
    package: str, modules: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return a package's ``__getattr__`` and ``__dir__``, which import its names on first use.

    Parameters
    ----------
    package : str
        The package's ``__name__``.
    modules : mapping of str to sequence of str
        Names by the module that defines them, relative to the package. For a type checker the package imports the
        same names under ``TYPE_CHECKING``; a test holds both lists together.

    Examples
    --------
    >>> find, names = exports("flwr_kd", {"checks": ["ConfigError"]})
    >>> find("ConfigError").__name__
    'ConfigError'
    """
    homes = {name: f"{package}.{module}" for module, names in modules.items() for name in names}

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(homes[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *homes})

    return find, names


def load(path: str) -> Any:
    """Import what a path ``module:name`` names.

    >>> load("flwr_kd.checks:ConfigError").__name__
    'ConfigError'

    Raises
    ------
    ValueError
        If the path is not written like that.
    ImportError
        If the module cannot be imported.
    AttributeError
        If the module has no such name.
    """
    module, separator, name = path.partition(":")
    if not (module and separator and name):
        raise ValueError(f"an import path must be written as module:name, got {path!r}")
    return getattr(importlib.import_module(module), name)
