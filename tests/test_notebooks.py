"""The notebooks run from top to bottom, and their committed outputs are those of such a run."""

from __future__ import annotations

import functools
import importlib.util
import platform
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import nbformat
import pytest

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted(ROOT.glob("notebooks/*.ipynb"))
LARGEST = 300_000
MOST_PICTURES = 4
# Numbers with a decimal point are measured: other processors and versions of PyTorch sum in another order.
DECIMAL = re.compile(r"(-?\d[\d,]*\.\d+(?:e[+-]?\d+)?)")
RELATIVE = 0.05
LAST_DIGITS = 2
ABSOLUTE_PATH = re.compile(r"(?<![\w.)}/:])/[\w.-]+/[\w.-]+|\b[A-Z]:\\\w")
ADDRESS = re.compile(r"\bat 0x[0-9a-f]+")

each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)


@functools.cache
def runner() -> ModuleType:
    """Import ``notebooks/run.py``, which is a script and not a module of a package."""
    spec = importlib.util.spec_from_file_location("notebooks_run", ROOT / "notebooks" / "run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def code(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def text(cell: Any) -> str:
    """Return what a cell prints, and the text form of what it displays."""
    return "\n".join(
        output.text if output.output_type == "stream" else output.data.get("text/plain", "")
        for output in cell.outputs
        if output.output_type != "error"
    )


def pictures(cell: Any) -> int:
    return sum("image/png" in output.get("data", {}) for output in cell.outputs)


def complaints(notebook: Any) -> list[str]:
    """Return the output to stderr, and the errors."""
    return [
        output.get("text") or f"{output.ename}: {output.evalue}"
        for cell in code(notebook)
        for output in cell.outputs
        if output.output_type == "error" or output.get("name") == "stderr"
    ]


def places(number: str) -> int:
    """Return the decimal place of a number's last digit: 2 for 0.25, 4 for 1.5e-3."""
    mantissa, _, exponent = number.partition("e")
    return len(mantissa.partition(".")[2]) - int(exponent or 0)


def difference(committed: str, fresh: str) -> str | None:
    """Return where two texts differ, or None.

    Words and whole numbers (counts, bytes, settings) must be equal. Numbers with a decimal point may differ by 5 %,
    or by two units of the last digit shown. White space is ignored, since columns move with widths.
    """
    was, now = DECIMAL.split(committed), DECIMAL.split(fresh)
    for index, (before, after) in enumerate(zip(was, now, strict=False)):
        if index % 2 == 0:
            same = before.split() == after.split()
        else:
            a, b = (float(number.replace(",", "")) for number in (before, after))
            shown = LAST_DIGITS * 10.0 ** -min(places(before), places(after))
            same = abs(a - b) <= max(RELATIVE * max(abs(a), abs(b)), shown * 1.001)
        if not same:
            return f"{''.join(was[max(0, index - 2) : index])!r}: {before!r} was committed, now {after!r}"
    return (
        None
        if len(was) == len(now)
        else f"{''.join(was)[-200:]!r} was committed, now {''.join(now)[-200:]!r}"
    )


def tells(shown: str) -> list[str]:
    """Return the parts of a text that reveal the machine: absolute paths, its name, addresses of objects."""
    names = [re.escape(name) for name in (str(ROOT), str(Path.home()), platform.node()) if name]
    own = re.compile(rf"(?<!\w)(?:{'|'.join(names)})(?!\w)")
    return [match.group() for pattern in (own, ABSOLUTE_PATH, ADDRESS) for match in pattern.finditer(shown)]


def test_there_is_a_notebook() -> None:
    assert NOTEBOOKS


@each_notebook
@pytest.mark.program
@pytest.mark.slow
def test_notebooks_run_from_top_to_bottom(path: Path) -> None:
    notebook = runner().execute(path)
    assert not complaints(notebook)
    assert sum(pictures(cell) for cell in code(notebook)) >= 1
    committed = nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]
    for before, after in zip(code(committed), code(notebook), strict=True):
        where = f"{path.name}, cell {before.id}"
        assert difference(text(before), text(after)) is None, (
            f"{where}; if it should: python notebooks/run.py"
        )
        assert pictures(before) == pictures(after), where


@each_notebook
def test_committed_outputs_are_those_of_a_whole_run(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]
    nbformat.validate(notebook)
    cells = code(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert not complaints(notebook)
    assert 1 <= sum(pictures(cell) for cell in cells) <= MOST_PICTURES


@each_notebook
def test_notebooks_are_small_and_say_nothing_of_the_machine(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]
    assert path.stat().st_size < LARGEST
    assert notebook.metadata == runner().METADATA
    assert not [cell.id for cell in notebook.cells if cell.metadata]
    for cell in notebook.cells:
        assert not tells(cell.source), cell.id
        for output in cell.get("outputs", []):
            for kind, shown in output.get("data", {"text/plain": output.get("text", "")}).items():
                assert not kind.startswith("text/") or not tells(shown), cell.id


@each_notebook
def test_links_lead_somewhere(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]
    prose = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    targets = [target for target in re.findall(r"\]\(([^)#\s]+)", prose) if not target.startswith("http")]
    assert targets, "the notebook links to further pages"
    assert not [target for target in targets if not (path.parent / target).exists()]


@pytest.mark.parametrize(
    "line",
    [
        "/home/me/run.json",
        "saved to '/tmp/x/y'",
        r"C:\Users\me",
        "<Axes at 0x7f12ab>",
        str(ROOT),
        f"on {platform.node()}.",
    ],
)
def test_what_tells_of_the_machine_is_found(line: str) -> None:
    assert tells(line)


@pytest.mark.parametrize("line", ["[page](../strategies/fedhkd/README.md)", "https://a.org/b/c", "1/2/3"])
def test_links_tell_nothing_of_the_machine(line: str) -> None:
    assert not tells(line)


@pytest.mark.parametrize(
    ("committed", "fresh"),
    [
        ("local 82.4 %\nglobal 70.1 %", "local 82.4 %\nglobal 70.1 %"),
        ("local 82.4 %", "local  79.1 %"),
        ("loss 0.012", "loss 0.014"),
        ("off by -0.01", "off by 0.01"),
        ("1,024.5 kB", "1,024.9 kB"),
        ("1.25e-03", "1.27e-03"),
    ],
)
def test_measured_numbers_may_differ_a_little(committed: str, fresh: str) -> None:
    assert difference(committed, fresh) is None


@pytest.mark.parametrize(
    ("committed", "fresh"),
    [
        ("local 82.4 %", "global 82.4 %"),
        ("local 82.4 %", "local 77.9 %"),
        ("loss 0.012", "loss 0.015"),
        ("37 samples", "38 samples"),
        ("82.4 % of 37", "82.4 % of 38"),
        ("local 82.4 %", "local – %"),
        ("local 82.4 %", "local nan %"),
        ("local 82.4 %", "local 82 %"),
        ("82.4", "82.4 79.9"),
        ("82.4", ""),
        ("1.25e-03", "1.25e-02"),
    ],
)
def test_other_differences_are_found(committed: str, fresh: str) -> None:
    assert difference(committed, fresh) is not None


@pytest.mark.program
def test_a_failing_or_noisy_notebook_is_found(tmp_path: Path) -> None:
    noisy, failing = tmp_path / "noisy.ipynb", tmp_path / "failing.ipynb"
    for path, source in ((noisy, "import warnings; warnings.warn('look')"), (failing, "1 / 0")):
        cell = nbformat.v4.new_code_cell(source)  # type: ignore[no-untyped-call]
        nbformat.write(nbformat.v4.new_notebook(cells=[cell]), path)  # type: ignore[no-untyped-call]
    assert "look" in complaints(runner().execute(noisy))[0]
    with pytest.raises(Exception, match=r"ZeroDivisionError"):
        runner().execute(failing)
