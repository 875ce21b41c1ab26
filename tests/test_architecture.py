"""The layers of the package: which folder may import which, read off the imports themselves."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SMALL = {
    "by_name",
    "catalogue",
    "checks",
    "config",
    "files",
    "formulas",
    "inputs",
    "lazy",
    "measured_rounds",
    "privacy",
    "secret_noise",
    "seeding",
    "text",
    "update_privacy",
    "wording",
}
"""Modules at the root that all others may import."""
MAY_IMPORT: dict[str, set[str]] = {
    **dict.fromkeys(SMALL, SMALL),
    "models": SMALL,
    "data": SMALL,
    "learning": SMALL | {"models"},
    "transport": SMALL,
    "testing": SMALL
    | {"transport", "registry", "rules", "learning", "client", "server", "data", "models", "experiments"},
    "server": SMALL | {"transport", "learning", "models"},
    "client": SMALL | {"transport", "learning", "models"},
    "distillation": SMALL | {"transport", "learning", "models", "server", "client"},
    "public_data": SMALL | {"transport", "rules", "learning", "models", "server", "client", "distillation"},
    "rules": SMALL | {"transport", "server"},
    "registry": SMALL | {"rules", "server", "client"},
    "results": SMALL,
    "plotting": SMALL | {"results", "models", "data"},
    "report": SMALL | {"results", "plotting"},
    "tracking": SMALL | {"server"},
}
"""By folder or module of ``flwr_kd``: what else of it may be imported. Who is not here may import all."""
ABOVE = {"app_files", "cli", "experiments", "plotting", "report", "results", "testing", "tracking"}
"""What no method may import."""


def module_of(path: Path) -> str:
    parts = [*path.relative_to(ROOT).with_suffix("").parts]
    if parts[0] == "strategies":
        parts.insert(0, "flwr_kd")
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {
    module_of(path): path
    for folder in ("flwr_kd", "strategies")
    for path in sorted((ROOT / folder).rglob("*.py"))
}


def imports(module: str) -> Iterator[str]:
    """Yield the modules of this package that a module imports, wherever in it."""
    path = MODULES[module]
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "flwr_kd")
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join([*package[: len(package) - node.level + 1], *([base] if base else [])])
            if base.split(".")[0] == "flwr_kd":
                names = (f"{base}.{alias.name}" for alias in node.names)
                yield from (name if name in MODULES else base for name in names)


def place(module: str) -> str:
    """Return the folder or module of ``flwr_kd`` that a module is, or is in."""
    return [*module.split("."), ""][1]


@pytest.mark.parametrize("module", MODULES)
def test_imports_follow_the_layers(module: str) -> None:
    mine = place(module)
    if mine == "strategies":
        forbidden = {imported for imported in imports(module) if place(imported) in ABOVE}
    elif mine in MAY_IMPORT:
        # The package itself is its version and its name.
        allowed = MAY_IMPORT[mine] | {mine, ""}
        forbidden = {imported for imported in imports(module) if place(imported) not in allowed}
    else:
        forbidden = set()
    assert not forbidden


@pytest.mark.parametrize("module", [name for name in MODULES if name.endswith(".client")])
def test_a_client_half_does_not_import_a_server_half(module: str) -> None:
    halves = {imported for imported in imports(module) if imported.split(".")[-1] in ("strategy", "server")}
    assert not {
        imported for imported in halves if MODULES[imported].is_file() and imported != "flwr_kd.server"
    }
    assert not {imported for imported in imports(module) if place(imported) == "server"}


@pytest.mark.parametrize(
    "module", [name for name in MODULES if name.split(".")[-1] in ("strategy", "server") and "." in name]
)
def test_a_server_half_does_not_import_a_client_half(module: str) -> None:
    assert not {imported for imported in imports(module) if imported.split(".")[-1] == "client"}
    assert not {imported for imported in imports(module) if place(imported) == "client"}


def test_the_layers_name_what_there_is() -> None:
    assert set(MAY_IMPORT) <= {place(module) for module in MODULES}


def test_there_is_no_cycle_between_folders() -> None:
    edges = {
        (place(m), place(imported))
        for m in MODULES
        for imported in imports(m)
        if place(m) and place(imported)
    }
    below: dict[str, set[str]] = {}
    for source, target in edges:
        if source != target and "strategies" not in (source, target):
            below.setdefault(source, set()).add(target)
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join([*path, name])
        if name not in done:
            for imported in sorted(below.get(name, ())):
                visit(imported, (*path, name))
            done.add(name)

    for name in sorted(below):
        visit(name, ())
