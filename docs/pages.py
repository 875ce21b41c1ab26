"""Writes those parts of the pages that follow from the methods' folders; `make pages` calls it.

A page has the place of a part between ``<!-- methods: NAME ... -->`` and ``<!-- end -->``. With ``--check`` nothing
is written, and the exit status is 1 if a page is not up to date. Only methods of this repository are shown.

Usage: python docs/pages.py [--check]
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from flwr_kd import registry
from flwr_kd.cli.methods import PUBLIC_DATA
from flwr_kd.registry import Method

ROOT = Path(__file__).resolve().parents[1]
PATTERNS = ("*.md", "docs/*.md", "strategies/*/README.md", "apps/*/README.md")
PART = re.compile(r"<!-- methods: (.+?) -->\n.*?<!-- end -->", flags=re.DOTALL)
OWN = "flwr_kd.strategies."


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a page is stale")
    options = parser.parse_args()
    stale = update(write=not options.check)
    print(
        "\n".join(f"{'stale' if options.check else 'written'}: {name}" for name in stale) or "all up to date"
    )
    sys.exit(1 if options.check and stale else 0)


def update(*, write: bool) -> list[str]:
    """Return the pages that are not up to date, and write them if asked."""
    stale = []
    for page in (page for pattern in PATTERNS for page in sorted(ROOT.glob(pattern))):
        text = page.read_text(encoding="utf-8")
        new = filled(text)
        if new != text:
            stale.append(page.relative_to(ROOT).as_posix())
            if write:
                page.write_text(new, encoding="utf-8")
    return stale


def filled(text: str) -> str:
    """Return a page's text with its parts made anew.

    Raises
    ------
    KeyError
        If there is no part of that name.
    """

    def part(match: re.Match[str]) -> str:
        name, *words = match[1].split()
        return f"<!-- methods: {match[1]} -->\n\n{PARTS[name](*words)}\n\n<!-- end -->"

    return PART.sub(part, text)


# ---------------------------------------------------------------------- parts


def own_methods() -> list[Method]:
    """Return the methods of this repository, by folder and name."""
    own = [method for method in registry.methods().values() if method.strategy_path.startswith(OWN)]
    return sorted(own, key=folder)


def folder(method: Method) -> str:
    return method.strategy_path.removeprefix(OWN).partition(".")[0]


def title(name: str) -> str:
    """Return the heading of a folder's page."""
    text = (ROOT / "strategies" / name / "README.md").read_text(encoding="utf-8")
    return text.partition("\n")[0].removeprefix("# ")


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(header)} |", "|" + "---|" * len(header)]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def grouped(cells: Callable[[Method], Sequence[str]]) -> list[list[str]]:
    """Return rows of methods that have the same cells, with their names first."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for method in own_methods():
        groups.setdefault(tuple(cells(method)), []).append(f"`{method.name}`")
    return [[", ".join(names), *key] for key, names in groups.items()]


def list_of_methods() -> str:
    """Return the table of all methods."""

    def cells(method: Method) -> list[str]:
        yes = {True: "yes", False: "no"}
        page = folder(method)
        return [
            method.exchanged,
            yes[method.heterogeneous],
            PUBLIC_DATA[method.public_at],
            yes[method.global_model],
            f"[{title(page)}](../strategies/{page}/README.md)",
        ]

    header = ["name", "sent", "heterogeneous models", "public data", "global model", "page"]
    return table(header, grouped(cells))


def what_leaves_a_client() -> str:
    """Return the deployment page's table."""
    header = ["method", "from a client to the server", "what goes on to other clients"]
    return table(header, grouped(lambda method: [method.leaves_client, method.reaches_others]))


def links_to_what_is_sent() -> str:
    """Return links from the deployment page to each method's page."""
    names = dict.fromkeys(folder(method) for method in own_methods())
    links = [f"[{title(name)}](../strategies/{name}/README.md#what-is-sent)" for name in names]
    return 'Details and bytes are in "What is sent" of ' + ", ".join(links) + "."


def hyper_parameters(name: str) -> str:
    """Return the table of a method's hyper-parameters."""
    rows = registry.get(name).config_class.help()
    return table(
        ["name", "default", "meaning"],
        [[f"`{parameter}`", str(default), meaning] for parameter, _, default, meaning in rows],
    )


def list_of_apps() -> str:
    """Return the usage page's table of apps."""
    rows = []
    for path in sorted(ROOT.glob("apps/*/pyproject.toml")):
        name = path.parent.name
        heading = (path.parent / "README.md").read_text(encoding="utf-8").partition("\n")[0]
        shown = heading.removeprefix("# ").removesuffix(" as a Flower App")
        rows.append([f"[apps/{name}](../apps/{name}/README.md)", shown, f"`flwr run apps/{name} --stream`"])
    return table(["app", "method", "run"], rows)


PARTS: dict[str, Callable[..., str]] = {
    "list": list_of_methods,
    "what-leaves-a-client": what_leaves_a_client,
    "links-to-what-is-sent": links_to_what_is_sent,
    "hyper-parameters": hyper_parameters,
    "apps": list_of_apps,
}
"""By the name in a page."""


if __name__ == "__main__":
    main()
