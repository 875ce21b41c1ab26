"""How the results were made: configuration, hyper-parameters, versions, commands."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from flwr_kd.report.html import Child, Markup, element, table
from flwr_kd.results.schema import Comparison
from flwr_kd.text import plural

__all__ = ["commands", "configuration", "summary_of"]

_ABSENT = "–"


def summary_of(config: Mapping[str, Any]) -> str:
    """Return the settings that a reader looks for first, in one line.

    >>> summary_of({"dataset": "digits", "partition": "iid", "clients": 10, "rounds": 5, "model": "mlp"})
    'digits · iid · 10 clients · 5 rounds · mlp'
    """
    parts = [_text(config[name]) for name in ("dataset", "partition") if config.get(name) is not None]
    nouns = {"clients": "client", "rounds": "round"}
    parts += [plural(config[name], noun) for name, noun in nouns.items() if config.get(name) is not None]
    model = config.get("model")
    if isinstance(model, Mapping):
        # A comparison may have other models for each method.
        texts = dict.fromkeys(_text(value).replace(",", ", ") for value in model.values())
        parts.append(next(iter(texts)) if len(texts) == 1 else f"{len(texts)} kinds of models, by method")
    elif model is not None:
        parts.append(_text(model).replace(",", ", "))
    return " · ".join(parts)


def configuration(results: Mapping[str, Comparison]) -> Markup:
    """Return tables of settings, of versions and of hyper-parameters, with a column for each result."""
    return element(
        "div",
        _beside(results, lambda result: result.config, "settings"),
        _hyperparameters(results),
        _beside(results, lambda result: result.versions, "versions and machine"),
    )


def commands(results: Mapping[str, Comparison]) -> Markup:
    """Return the command that repeats each result."""
    parts = [
        element(
            "div",
            element("h3", title) if len(results) > 1 else None,
            element("pre", element("code", result.command), class_="command", tabindex=0)
            if result.command
            else element("p", "The result does not say by which command it was made.", class_="note"),
        )
        for title, result in results.items()
    ]
    note = "A command is a text of the result file: read it before you run it."
    return element("div", parts, element("p", note, class_="note"))


def _text(value: object) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False)


def _beside(
    results: Mapping[str, Comparison], of: Callable[[Comparison], Mapping[str, Any]], caption: str
) -> Markup:
    """Return a table of names and values, those first in which results differ."""
    columns = [of(result) for result in results.values()]
    names = list(dict.fromkeys(name for column in columns for name in column))
    rows = {
        name: [_text(column[name]) if name in column else _ABSENT for column in columns] for name in names
    }
    differ = [name for name in names if len(set(rows[name])) > 1]
    body: list[list[Child]] = [
        [
            [name, element("small", "differs") if name in differ else None],
            *(element("strong", cell) if name in differ else cell for cell in rows[name]),
        ]
        for name in [*differ, *(name for name in names if name not in differ)]
    ]
    head = ["setting", *(results if len(results) > 1 else ["value"])]
    inside = table(head, body, caption=caption, class_="settings")
    return element("details", element("summary", caption), inside, open=caption == "settings")


def _hyperparameters(results: Mapping[str, Comparison]) -> Markup:
    rows: list[list[Child]] = []
    for title, result in results.items():
        for method, runs in result.by_method().items():
            values = runs[0].hyperparameters
            written = [[element("code", f"{name}={_text(value)}"), " "] for name, value in values.items()]
            label = method if len(results) == 1 else f"{title}: {method}"
            rows.append([label, written or _ABSENT])
    inside = table(["method", "hyper-parameters"], rows, caption="hyper-parameters", class_="settings")
    return element("details", element("summary", "hyper-parameters"), inside)
