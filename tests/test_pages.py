"""The pages are true: examples run, links lead somewhere, tables match the code."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from flwr_kd import registry

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted(
    p for p in [*ROOT.glob("*.md"), *ROOT.glob("strategies/*/README.md"), *ROOT.glob("apps/*/README.md")]
)
SECTIONS = (
    "What is sent",
    "Equations",
    "Hyper-parameters",
    "Deviations",
    "Results",
    "Use in your own Flower project",
)
NOTEBOOKS = sorted(ROOT.glob("notebooks/*.ipynb"))
EXAMPLES = [
    (page.relative_to(ROOT).as_posix(), code)
    for page in PAGES
    for code in re.findall(r"<!-- run -->\n```python\n(.*?)```", page.read_text(), flags=re.S)
]


def folder(name: str) -> Path:
    return ROOT / "strategies" / registry.get(name).strategy.__module__.split(".")[-2]


@pytest.mark.parametrize(("page", "code"), EXAMPLES, ids=[page for page, _ in EXAMPLES])
def test_examples_run(page: str, code: str) -> None:
    exec(compile(code, page, "exec"), {"__name__": page})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("name", list(registry.methods()))
def test_every_method_has_its_page(name: str) -> None:
    text = (folder(name) / "README.md").read_text()
    assert f"`{name}`" in text
    assert [line[3:] for line in text.splitlines() if line.startswith("## ")] == list(SECTIONS)
    table = dict(
        re.findall(
            r"^\| `([a-z-]+)` \| ([^|]+) \| .+ \|$", text.partition("## Hyper-parameters")[2], flags=re.M
        )
    )
    for parameter, _, default, _ in registry.get(name).config_class.help():
        assert table[parameter] == str(default)


def test_the_examples_are_many() -> None:
    assert len(EXAMPLES) >= 1 + len({folder(name) for name in registry.methods()})


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_notebooks_run_from_top_to_bottom(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "commit notebooks without outputs"
    resources = {"metadata": {"path": str(path.parent)}}
    NotebookClient(notebook, timeout=240, kernel_name="python3", resources=resources).execute()
    assert any(cell.get("outputs") for cell in notebook.cells)


def test_there_is_a_notebook() -> None:
    assert NOTEBOOKS
