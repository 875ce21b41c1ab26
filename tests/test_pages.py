"""The pages are true: examples run, links lead somewhere, tables agree with the code and with the results."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import typer

from flwr_kd import privacy, registry
from flwr_kd.cli import app, methods
from flwr_kd.experiments.comparison import method_of_row

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted(
    page
    for pattern in ("*.md", "docs/*.md", "strategies/*/README.md", "apps/*/README.md")
    for page in ROOT.glob(pattern)
)
SECTIONS = (
    "What is sent",
    "Equations",
    "Hyper-parameters",
    "Deviations",
    "Results",
    "Use in your own Flower project",
)
RUN = re.compile(r"<!-- run(?:: (\S+))? -->\n+```python\n(.*?)```", flags=re.S)


def examples() -> Iterator[tuple[str, str]]:
    """Yield each page's examples; those that have a name are parts of one, in the order of the page."""
    for page in PAGES:
        parts: dict[str, list[str]] = {}
        for name, code in RUN.findall(page.read_text(encoding="utf-8")):
            parts.setdefault(name or f"{len(parts)}", []).append(code)
        for found in parts.values():
            yield page.relative_to(ROOT).as_posix(), "\n\n".join(found)


EXAMPLES = list(examples())
MOVING = "docs/moving.md"


def label(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def folder(name: str) -> Path:
    return ROOT / "strategies" / registry.get(name).strategy.__module__.split(".")[-2]


def section(page: Path, title: str) -> str:
    return page.read_text(encoding="utf-8").partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def rows(text: str) -> list[list[str]]:
    """Return the cells of all tables' rows, headers and rules left out."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    rules = [i for i, line in enumerate(lines) if set(line) <= set("|-: ")]
    kept = [line for i, line in enumerate(lines) if i not in rules and i + 1 not in rules]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in kept]


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def commands() -> Iterator[tuple[str, str]]:
    """Yield each flwr-kd command that a page shows, in a block or in the text."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        blocks = "\n".join(re.findall(r"```(?:sh|bash)\n(.*?)```", text, flags=re.S)).replace("\\\n", " ")
        prose = re.sub(r"```.*?```", "", text, flags=re.S)
        inline = [found.replace("\n", " ") for found in re.findall(r"`(flwr-kd [^`]+)`", prose)]
        for line in [*re.findall(r"^flwr-kd .+$", blocks, flags=re.M), *inline]:
            yield label(page), line


# The page on moving has a test of its own.
@pytest.mark.parametrize(
    ("page", "code"), [pytest.param(*example, id=example[0]) for example in EXAMPLES if example[0] != MOVING]
)
def test_examples_run(page: str, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # Some write a result.
    exec(compile(code, page, "exec"), {"__name__": page})


def test_every_page_of_a_method_has_an_example() -> None:
    pages = {MOVING, *(label(folder(name) / "README.md") for name in registry.methods())}
    assert pages <= {page for page, _ in EXAMPLES}


@pytest.mark.long
def test_the_projects_of_the_moving_page_learn_before_and_after(capsys: pytest.CaptureFixture[str]) -> None:
    """Two examples in Flower's own styles, and four of this package, each with what it printed."""
    (code,) = (code for page, code in EXAMPLES if page == MOVING)
    for server in ("server_fn=server_fn", "@client_app.train()", "FedProtoClient", "FedHKDClient"):
        assert server in code
    exec(compile(code, MOVING, "exec"), {"__name__": MOVING})
    printed = re.findall(r"[01]\.\d+", capsys.readouterr().out)
    assert len(printed) == 2 + 2 * 3
    assert min(map(float, printed)) > 0.6  # with three or four classes per client


def test_the_readme_is_one_screen_and_begins_with_its_two_commands() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 60
    assert [line.partition("#")[0].strip() for line in lines[2:6]] == [
        "```sh",
        "make demo",
        "make test",
        "```",
    ]


@pytest.mark.parametrize("page", PAGES, ids=label)
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", page.read_text(encoding="utf-8")):
        if target.startswith("http"):
            continue
        linked = page.parent / target if target else page
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked), f"{target}#{anchor}"


@pytest.mark.parametrize("name", list(registry.methods()))
def test_every_method_has_its_page(name: str) -> None:
    page = folder(name) / "README.md"
    text = page.read_text(encoding="utf-8")
    assert f"`{name}`" in text
    assert tuple(re.findall(r"^## (.+)$", text, flags=re.M)) == SECTIONS
    expected = [
        [f"`{parameter}`", str(default), meaning]
        for parameter, _, default, meaning in registry.get(name).config_class.help()
    ]
    # A page with methods of several configs has a heading for each but the first table.
    first, *others = re.split(r"^### ", section(page, "Hyper-parameters"), flags=re.M)
    own = [part for part in others if f"`{name}`" in part.partition("\n")[0]]
    assert rows(own[0] if own else first) == expected


def test_the_page_of_methods_lists_them_as_registered() -> None:
    listed = {}
    for names, _, different, public, has_global, page in rows(
        (ROOT / "docs" / "methods.md").read_text("utf-8")
    ):
        for name in re.findall(r"`([^`]+)`", names):
            listed[name] = (different, public, has_global, label(folder(name) / "README.md") in page)
    yes = {True: "yes", False: "no"}
    assert listed == {
        name: (
            yes[method.heterogeneous],
            methods.PUBLIC_DATA[method.public_at],
            yes[method.global_model],
            True,
        )
        for name, method in registry.methods().items()
    }


def pages_program() -> ModuleType:
    spec = importlib.util.spec_from_file_location("pages_of_methods", ROOT / "docs" / "pages.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_parts_are_up_to_date() -> None:
    """`make pages` writes them."""
    program = pages_program()
    assert program.update(write=False) == []
    used = {
        name
        for page in PAGES
        for name in re.findall(r"^<!-- methods: (\S+)", page.read_text(encoding="utf-8"), flags=re.M)
    }
    assert used == set(program.PARTS)


def test_a_stale_part_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = pages_program()
    page = tmp_path / "README.md"
    page.write_text("# A\n\n<!-- methods: hyper-parameters fedprox -->\n\n| old |\n\n<!-- end -->\n\nmore\n")
    monkeypatch.setattr(program, "ROOT", tmp_path)
    assert program.update(write=False) == ["README.md"]
    assert "| old |" in page.read_text()
    assert program.update(write=True) == ["README.md"]
    text = page.read_text()
    assert "| old |" not in text
    assert "| `proximal-mu` | 0.5 |" in text
    assert text.endswith("\n\n<!-- end -->\n\nmore\n")
    assert program.update(write=True) == []


def test_the_usage_page_lists_the_apps() -> None:
    text = (ROOT / "docs" / "usage.md").read_text(encoding="utf-8")
    apps = [path.parent.name for path in ROOT.glob("apps/*/pyproject.toml")]
    assert apps
    for name in apps:
        assert f"(../apps/{name}/README.md)" in text
        assert f"`flwr run apps/{name} " in text


@pytest.mark.program
@pytest.mark.slow
def test_the_usage_pages_commands_run(tmp_path: Path) -> None:
    """As they stand there, in turn; the picture of the last one is there.

    The README's first command is among them; tests/benchmarks/test_report.py runs it, and compares its numbers.
    """
    (first,) = (
        line for page, line in commands() if page == "README.md" and line.startswith("flwr-kd compare ")
    )
    block = section(ROOT / "docs" / "usage.md", "Command line").partition("```sh\n")[2].partition("```")[0]
    lines = [line for line in block.splitlines() if line]
    assert first in lines
    lines.remove(first)
    assert len(lines) > 4
    program = "import sys; from flwr_kd import cli; sys.argv = ['flwr-kd', *sys.argv[1:]]; cli.main()"
    for line in lines:
        name, *words = shlex.split(line, comments=True)
        assert name == "flwr-kd"
        done = subprocess.run(
            [sys.executable, "-c", program, *words], cwd=tmp_path, capture_output=True, text=True, timeout=900
        )
        assert done.returncode == 0, f"{line}: {done.stderr}"
    assert (tmp_path / "runs" / "hostile" / "landscape.png").stat().st_size > 10_000


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.M))
    named = {
        target
        for page in PAGES
        for target in re.findall(
            r"(?:^|`)make ([a-z-]+)(?=`| +#|$)", page.read_text(encoding="utf-8"), flags=re.M
        )
    }
    assert {"demo", "test", "test-oldest", "check", "results"} <= named <= targets


@pytest.mark.parametrize(("page", "line"), list(commands()))
def test_commands_parse(page: str, line: str) -> None:
    """Each command's options exist and each method in it is registered; nothing is run."""
    words = shlex.split(line, comments=True)[1:]
    group = typer.main.get_command(app.app)
    command = group.commands[words[0]]  # type: ignore[attr-defined]
    if words[0] == "plot" and len(words) > 1:
        words = words[1:]
        command = command.commands[words[0]]
    if any(word.isupper() for word in words):
        pytest.skip("a pattern, not a command")
    if words in (["plot"], [words[0], "--help"]):
        return
    parameters = command.make_context(words[0], words[1:]).params
    named = parameters.get("methods") or [parameters.get("method") or parameters.get("shown")]
    configured = [method_of_row(name).config_class for name in named if name is not None]
    for setting in parameters.get("settings") or []:
        assert any(setting.partition("=")[0].replace("-", "_") in c.field_types() for c in configured)


def test_the_cost_of_narrow_passes_on_the_page_is_that_of_the_benchmark() -> None:
    document = json.loads((ROOT / "benchmarks" / "results" / "slim.json").read_text(encoding="utf-8"))
    models = [each for each in document["models"] if each["input_shape"] == [1, 28, 28]]
    measured = {
        width: [f"{100 * each['shares'][width]:.1f} %" for each in models]
        for width in ("0.75", "0.5", "0.25")
    }
    table = [cells for cells in rows(section(folder("fedhyb") / "README.md", "Equations")) if len(cells) == 6]
    assert {cells[0]: cells[1:] for cells in table} == measured


def test_the_speed_of_distillation_on_the_page_is_that_of_the_benchmark() -> None:
    document = json.loads((ROOT / "benchmarks" / "results" / "distill.json").read_text(encoding="utf-8"))
    text = " ".join(section(folder("fedhead") / "README.md", "Equations").split())
    assert f"{document['ratio']:.2f} times as fast" in text
    assert (
        f"{document['passes_once']:,} passes through a teacher instead of {document['passes_loop']:,}" in text
    )
    memory = {kind: f"{each['peak_above_start'] / 1e6:.0f} MB" for kind, each in document["memory"].items()}
    assert (
        f"by {memory['once']} above the teachers' arrays (133 MB), which come in the message, the loop's by "
        f"{memory['loop']}" in text
    )


def test_what_a_step_of_the_matrix_costs_on_the_page_is_that_of_the_benchmark() -> None:
    document = json.loads((ROOT / "benchmarks" / "results" / "ktpfl.json").read_text(encoding="utf-8"))
    measured = {
        f"{each['clients']:,}": [
            f"{1000 * each['seconds']:,.0f}",
            *(
                f"{each[way]['products_are_times_as_fast']}" if way in each else "–"
                for way in ("loop", "autograd")
            ),
        ]
        for each in document["steps"]
    }
    table = [cells for cells in rows(section(folder("ktpfl") / "README.md", "Equations")) if len(cells) == 4]
    assert {cells[0]: cells[1:] for cells in table} == measured


def test_the_speed_of_refinement_on_the_page_is_that_of_the_benchmark() -> None:
    document = json.loads((ROOT / "benchmarks" / "results" / "refine.json").read_text(encoding="utf-8"))
    shown = {
        tuple(cells[:1]): cells[1:]
        for cells in rows(section(folder("feddkc-kkr") / "README.md", "Equations"))
    }
    for each in document["speed"]:
        key = (f"{each['rows']:,} × {each['classes']}",)
        assert shown[key] == [
            f"{each[kind]:,}"
            for kind in ("kkr_rows_per_second", "skr_rows_per_second", "loop_rows_per_second")
        ] + [str(each["skr_over_loop"])]


def test_the_privacy_budget_on_the_page() -> None:
    found = privacy.budget(sigma=7, rounds=50, delta=0.01, dimensions=64, count=256)
    text = " ".join(section(folder("fedhkd") / "README.md", "Deviations").split())
    assert (
        f"ε = {found.vector_epsilon:.2f} in one round, and {found.total_epsilon:.1f} after 50 rounds" in text
    )


def test_the_memory_in_the_deployment_page_is_what_was_measured() -> None:
    page = (ROOT / "docs" / "deploy.md").read_text(encoding="utf-8")
    document = json.loads((ROOT / "benchmarks" / "results" / "load.json").read_text(encoding="utf-8"))
    peaks = {
        (row["method"], row["clients"]): f"{row['peak_above_start'] / 1e6:,.0f} MB"
        for row in document["rows"]
    }
    for clients in (10, 64, 100):
        cells = [f"{clients * document['rows'][0]['model'] / 1e6:,.0f} MB"]
        cells += [peaks[name, clients] for name in ("fedavg", "fedhkd")]
        assert f"| {clients} | {' | '.join(cells)} |" in page
    for program in ("flwr-serverapp", "flower-superlink"):
        for row in document["deployment"]:
            assert f"{row['peaks'][program] / 1e6:,.0f}" in page
