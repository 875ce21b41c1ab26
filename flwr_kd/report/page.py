"""The whole page: its sections, and how it is written."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path

from flwr_kd.files import write_atomically
from flwr_kd.report.charts import style_class
from flwr_kd.report.classes import class_maps
from flwr_kd.report.clients import distribution
from flwr_kd.report.curves import against_cost, over_rounds
from flwr_kd.report.html import Markup, element, joined, raw
from flwr_kd.report.settings import commands, configuration, summary_of
from flwr_kd.report.tables import cost_table, difference_table, main_table, overview
from flwr_kd.results.errors import ResultError
from flwr_kd.results.schema import Comparison

__all__ = ["page", "write"]


def write(results: Mapping[str, Comparison], path: Path) -> Path:
    """Write the :func:`page` of results to a file.

    Parameters
    ----------
    results : mapping of str to Comparison
        By name, as :func:`page` takes them.
    path : Path
        The file. Its folder is made if it does not exist; an existing file is overwritten.

    Returns
    -------
    Path
        ``path``.

    Raises
    ------
    ResultError
        As :func:`page`.
    ImportError
        If ``scipy`` is not installed.
    """
    write_atomically(path, page(results).encode(), mode=0o666)
    return path


def page(results: Mapping[str, Comparison]) -> str:
    """Return the report of results as HTML that needs no other file and no network.

    Parameters
    ----------
    results : mapping of str to Comparison
        By the name that the page calls each result, such as its folder. They stand side by side.

    Returns
    -------
    str
        A document in UTF-8. Without JavaScript it shows the same; the script adds the values under the pointer.

    Raises
    ------
    ResultError
        If there is no result, a result has no run or a run no round, or its numbers are too large to draw.
    ImportError
        If ``scipy`` is not installed.
    """
    _check(results)
    names = dict.fromkeys(name for result in results.values() for name in result.by_method())
    styles = {name: index for index, name in enumerate(names)}
    try:
        return _document(results, styles)
    except (OverflowError, ValueError) as error:
        if isinstance(error, ResultError):
            raise
        raise ResultError(f"the numbers of a result are too large to draw: {error}") from error


def _check(results: Mapping[str, Comparison]) -> None:
    if not results:
        raise ResultError("there is no result to report")
    for title, result in results.items():
        if not result.runs:
            raise ResultError(f"{title}: runs is empty: there is nothing to report")
        for run in result.runs:
            if not run.rounds:
                raise ResultError(
                    f"{title}: {run.name} (seed {run.seed}) has no round: there is nothing to report"
                )


def _document(results: Mapping[str, Comparison], styles: Mapping[str, int]) -> str:
    style, script = (_own_file(name) for name in ("page.css", "page.js"))
    title = "Report: " + (next(iter(results)) if len(results) == 1 else f"{len(results)} results")
    sections = _sections(results, styles)
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=_policy(script)),
        element("meta", name_="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name_="color-scheme", content="light dark"),
        element("title", title),
        element("link", rel="icon", href="data:,"),
        element("style", raw(style)),
    )
    body = element(
        "body",
        element("header", element("h1", title), _introduction(results), _navigation(sections)),
        _legend(styles),
        element(
            "main",
            [
                element("section", element("h2", heading), content, id=key, aria_label=heading)
                for key, heading, content in sections
            ],
        ),
        element("div", id="pointer", role="status", aria_live="polite", hidden=True),
        element("script", raw(script)),
    )
    return f"<!doctype html>\n{element('html', head, body, lang='en')}\n"


def _sections(
    results: Mapping[str, Comparison], styles: Mapping[str, int]
) -> Sequence[tuple[str, str, Markup]]:
    tables = [
        element(
            "div",
            element("h3", title) if len(results) > 1 else None,
            main_table(result, styles),
            difference_table(result, styles),
        )
        for title, result in results.items()
    ]
    sections = [
        ("overview", "Side by side", overview(results, styles) if len(results) > 1 else None),
        ("tables", "Table", joined(tables)),
        ("curves", "Curves", over_rounds(results, styles)),
        ("clients", "Clients", distribution(results, styles)),
        ("classes", "Who has which classes", class_maps(results)),
        ("costs", "Bytes and seconds", joined(cost_table(results, styles), against_cost(results, styles))),
        ("settings", "Configuration", configuration(results)),
        ("command", "Command", commands(results)),
    ]
    return [(key, heading, content) for key, heading, content in sections if content is not None]


def _introduction(results: Mapping[str, Comparison]) -> Markup:
    items = [
        element("li", element("strong", title), " ", summary_of(result.config))
        for title, result in results.items()
    ]
    return element("ul", items, class_="results")


def _navigation(sections: Sequence[tuple[str, str, Markup]]) -> Markup:
    links = [element("a", heading, href=f"#{key}") for key, heading, _ in sections]
    return element("nav", links, aria_label="sections")


def _legend(styles: Mapping[str, int]) -> Markup:
    """Return a button for each method, with the line that it has in every chart; it makes the others fainter."""
    buttons = [
        element(
            "button",
            element(
                "svg",
                element("line", x1=0, x2=28, y1=6, y2=6, class_=f"sample {style_class(style)}"),
                viewBox="0 0 28 12",
                width=28,
                height=12,
                aria_hidden="true",
            ),
            name,
            type="button",
            aria_pressed="false",
            data_name=name,
        )
        for name, style in styles.items()
    ]
    return element("div", buttons, class_="legend", role="group", aria_label="methods: press to highlight")


def _policy(script: str) -> str:
    """Return a policy that loads nothing and runs this script alone, whatever the page's texts are."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _own_file(name: str) -> str:
    return resources.files("flwr_kd.report").joinpath(name).read_text(encoding="utf-8")
