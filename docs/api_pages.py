"""Writes the pages of the API reference: one for each folder of the package, with every public name.

A name is public if the `__all__` of its module has it, or, in a module without one, if it is a class or function
without an underscore in front. A name that other modules export again stands on the page of the module that defines
it.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from sphinx.pycode import ModuleAnalyzer

import flwr_kd
import flwr_kd.strategies

__all__ = ["home_of", "modules", "pages", "public_names", "write"]

_ROOT = "flwr_kd"


def write(folder: Path) -> None:
    """Write all pages into a folder, and remove those of modules that are gone."""
    wanted = pages()
    folder.mkdir(parents=True, exist_ok=True)
    for file in folder.glob("*.rst"):
        if file.stem not in wanted:
            file.unlink()
    for name, text in wanted.items():
        file = folder / f"{name}.rst"
        # A file that is as it was keeps its time, so that Sphinx does not read it again.
        if not file.exists() or file.read_text(encoding="utf-8") != text:
            file.write_text(text, encoding="utf-8")


def pages() -> dict[str, str]:
    """Return the pages as reStructuredText, by their names: ``flwr_kd``, ``flwr_kd.client`` and so on."""
    groups: dict[str, list[ModuleType]] = {}
    for module in modules():
        groups.setdefault(_page_of(module), []).append(module)
    return {page: "\n".join(_page(page, group)) for page, group in groups.items()}


def modules() -> Iterator[ModuleType]:
    """Yield all modules of the package whose names have no underscore in front."""
    yield flwr_kd
    for package in (flwr_kd, flwr_kd.strategies):
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            parts = found.name.split(".")
            if not any(part.startswith("_") for part in parts):
                yield importlib.import_module(found.name)


def public_names(module: ModuleType) -> list[str]:
    """Return the names of a module's ``__all__`` that it defines itself, without type variables."""
    names = []
    assigned = _assigned(module)
    listed = getattr(module, "__all__", vars(module))
    for name in listed:
        if name.startswith("_"):
            continue
        value = getattr(module, name)
        if type(value).__name__ == "TypeVar":
            continue
        if not _is_described_by_itself(value):
            if name in assigned and hasattr(module, "__all__"):
                names.append(name)
            continue
        home = str(value.__module__)
        # What a module with an underscore in front defines is public where its folder exports it.
        if home.partition("._")[0] == module.__name__:
            names.append(name)
    return names


def _assigned(module: ModuleType) -> set[str]:
    """Return the names of constants and type aliases that a module's source defines."""
    names: set[str] = set()
    for node in ast.parse(inspect.getsource(module)).body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {
                part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)
            }
    return names


def _page_of(module: ModuleType) -> str:
    """Return the page on which a module stands: that of its folder, or of the package for modules at its root."""
    parts = module.__name__.split(".")
    depth = 3 if parts[1:2] == ["strategies"] else 2
    is_folder = hasattr(module, "__path__")
    return ".".join(parts[:depth] if len(parts) > depth or is_folder else parts[: depth - 1])


def _page(page: str, group: list[ModuleType]) -> Iterator[str]:
    title = page if page == _ROOT else page.removeprefix(f"{_ROOT}.")
    yield from (title, "=" * len(title), "")
    if page == _ROOT:
        yield from _exports()
    for module in sorted(group, key=lambda module: (module.__name__ != page, module.__name__)):
        name = module.__name__
        if name != page:
            yield from (name, "-" * len(name), "")
        yield f".. automodule:: {name}"
        members = public_names(module) if module is not flwr_kd else []
        described = [member for member in members if _is_described_by_itself(getattr(module, member))]
        if described:
            yield f"   :members: {', '.join(described)}"
        yield ""
        yield from _data(module, [member for member in members if member not in described])


def _is_described_by_itself(value: object) -> bool:
    return inspect.isclass(value) or inspect.isroutine(value)


def _data(module: ModuleType, names: list[str]) -> Iterator[str]:
    """Yield the descriptions of constants and type aliases, which stand behind them in the source."""
    if not names:
        return
    texts = ModuleAnalyzer.for_module(module.__name__).find_attr_docs()
    for name in names:
        yield from (f".. py:data:: {name}", f"   :module: {module.__name__}", "")
        yield from (f"   {line}" for line in texts.get(("", name), []))
        yield ""


def home_of(target: str) -> str:
    """Return the full name by which a name of the package stands in the reference; the same if there is none.

    ``flwr_kd.KDStrategy.start`` stands there as ``flwr_kd.server.strategy.KDStrategy.start``.
    """
    value: Any = flwr_kd
    known = target
    parts = target.split(".")[1:]
    for place, part in enumerate(parts):
        if not hasattr(value, part):
            return target
        value = getattr(value, part)
        if id(value) in _homes():
            known = ".".join([_homes()[id(value)], *parts[place + 1 :]])
    return known


@functools.cache
def _homes() -> dict[int, str]:
    found: dict[int, str] = {}
    for module in modules():
        for name in public_names(module) if module is not flwr_kd else ():
            value = getattr(module, name)
            # Equal texts and numbers may be one object in several places.
            if not isinstance(value, str | int | float | bool | None):
                found.setdefault(id(value), f"{module.__name__}.{name}")
    return found


def _exports() -> Iterator[str]:
    """Yield the list of names that users import from the package itself, with links to their homes."""
    yield from ("``from flwr_kd import ...`` has these names:", "")
    for name in sorted(flwr_kd.__all__, key=str.lower):
        value = getattr(flwr_kd, name)
        home = getattr(value, "__module__", None)
        if home:
            yield f"- :py:obj:`{name} <{home}.{name}>`"
    yield ""
