"""The tables: last round, paired differences, costs, and several results beside each other."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from flwr_kd.report.charts import style_class
from flwr_kd.report.curves import measured_accuracies
from flwr_kd.report.html import Child, Markup, element, table
from flwr_kd.results.columns import COLUMNS
from flwr_kd.results.measures import ACCURACIES
from flwr_kd.results.schema import Comparison, RunResult
from flwr_kd.results.statistics import Difference, differences
from flwr_kd.results.table import coverage

__all__ = ["cost_table", "difference_table", "main_table", "overview"]

_MEGABYTE = 10**6


def name_cell(method: str, styles: Mapping[str, int]) -> Markup:
    """Return a method's name with the colour and dashes of its lines before it."""
    return element("span", method, class_=f"named {style_class(styles[method])}", data_name=method)


def main_table(comparison: Comparison, styles: Mapping[str, int]) -> Markup:
    """Return the table that ``compare`` prints, with every column that has a value."""
    rows = comparison.summary()
    columns = [column for name, column in COLUMNS.items() if any(row[name]["n"] for row in rows)]
    counts = {len(row["seeds"]) for row in rows}
    seeds = " or ".join(map(str, sorted(counts)))
    caption = (
        f"last round, mean ± standard deviation over {seeds} seeds"
        if counts != {1}
        else "last round, one seed"
    )
    body: list[list[Child]] = [
        [
            name_cell(row["method"], styles),
            *(_lines(column.cell(row[column.name], len(row["seeds"]))) for column in columns),
        ]
        for row in rows
    ]
    notes = [*coverage(comparison)]
    if comparison.target is not None:
        notes.append(comparison.target_line)
    return element(
        "div",
        table(
            ["method", *(column.header.replace("\n", " ") for column in columns)],
            body,
            caption=f"{caption}; MB = 10⁶ bytes, all clients",
        ),
        [element("p", note, class_="note") for note in notes],
    )


def _lines(text: str) -> list[Child]:
    first, *others = text.split("\n")
    return [first, *(element("small", line) for line in others)]


def difference_table(comparison: Comparison, styles: Mapping[str, int]) -> Markup | None:
    """Return each method's difference to the first, paired by seed; None with one method.

    A difference whose interval does not contain 0 is bold.
    """
    groups = comparison.by_method()
    reference, *others = groups
    if not others:
        return None
    columns = {name: differences(comparison, name) for name in measured_accuracies([comparison])}
    columns = {name: column for name, column in columns.items() if any(column.values())}
    found = [value for column in columns.values() for value in column.values() if value is not None]
    if all(value.interval is None for value in found):
        note = f"Differences to {reference} have an interval from two common seeds on."
        return element("p", note, class_="note")
    rows: list[list[Child]] = [
        [
            name_cell(method, styles),
            *(_points(column[method], len(groups[method])) for column in columns.values()),
        ]
        for method in others
    ]
    head = ["method", *(f"{ACCURACIES[name].title}" for name in columns)]
    caption = (
        f"difference to {reference} in points, paired by seed: mean [95 % interval]; "
        "bold where 0 is outside it"
    )
    return table(head, rows, caption=caption)


def _points(difference: Difference | None, of: int) -> Child:
    if difference is None:
        return "–"
    text = _signed(difference.mean)
    if difference.interval is not None:
        low, high = difference.interval
        text += f" [{_signed(low)}, {_signed(high)}]"
    count = len(difference.seeds)
    seeds = element("small", f"{count} of {of} seeds") if count != of else None
    return [element("strong", text) if difference.decided else text, seeds]


def _signed(share: float) -> str:
    return f"{100 * share:+.2f}".replace("-", "−")


def overview(results: Mapping[str, Comparison], styles: Mapping[str, int]) -> Markup:
    """Return, for each accuracy, a table with a row per method and a column per result."""
    methods = list(styles)
    parts: list[Markup] = []
    for name in measured_accuracies(results.values()):
        columns = {
            title: ({row["method"]: row for row in result.summary()}, differences(result, name))
            for title, result in results.items()
        }
        columns = {
            title: (rows, gains)
            for title, (rows, gains) in columns.items()
            if any(row[name]["n"] for row in rows.values())
        }
        if not columns:
            continue
        body: list[list[Child]] = []
        for method in methods:
            cells = [
                _result_cell(rows.get(method), gains.get(method), name) for rows, gains in columns.values()
            ]
            body.append([name_cell(method, styles), *cells])
        text = table(["method", *columns], body, caption=f"{ACCURACIES[name].title} (%), last round")
        parts.append(element("details", element("summary", ACCURACIES[name].title), text, open=not parts))
    note = (
        "Below an accuracy: the difference to the result's first method, in points, with its 95 % interval; bold "
        "where 0 is outside it."
    )
    return element("div", element("p", note, class_="note"), parts)


def _result_cell(row: Mapping[str, Any] | None, gain: Difference | None, name: str) -> Child:
    if row is None:
        return "–"
    text = _lines(COLUMNS[name].cell(row[name], len(row["seeds"])))
    if gain is None or gain.interval is None:
        return text
    low, high = gain.interval
    difference = f"{_signed(gain.mean)} [{_signed(low)}, {_signed(high)}]"
    return [*text, element("small", element("strong", difference) if gain.decided else difference)]


def cost_table(results: Mapping[str, Comparison], styles: Mapping[str, int]) -> Markup:
    """Return bytes and seconds of each method, with bars of one scale for all results."""
    costs = {
        title: {m: _costs(runs) for m, runs in result.by_method().items()}
        for title, result in results.items()
    }
    most = [
        max((values[place] for rows in costs.values() for values in rows.values()), default=0.0)
        for place in range(len(_COSTS))
    ]
    parts = []
    for title, rows in costs.items():
        body: list[list[Child]] = [
            [name_cell(method, styles), *(_bar(*pair) for pair in zip(values, most, strict=True))]
            for method, values in rows.items()
        ]
        name = "" if len(results) == 1 else f" – {title}"
        caption = f"bytes and seconds, all clients, means over seeds{name}"
        parts.append(table(["method", *_COSTS], body, caption=caption, class_="bars"))
    return element("div", parts, class_="grid")


_COSTS = ("MB up /round", "MB down /round", "MB, all rounds", "s /round (median)", "s, all rounds")


def _costs(runs: list[RunResult]) -> list[float]:
    """Return the values of :data:`_COSTS`, means over seeds."""
    columns = []
    for run in runs:
        if run.rounds:
            up, down = (
                sum(getattr(stats, key) for stats in run.rounds) for key in ("bytes_up", "bytes_down")
            )
            count = len(run.rounds) * _MEGABYTE
            seconds = [stats.seconds for stats in run.rounds]
            columns.append(
                [up / count, down / count, (up + down) / _MEGABYTE, statistics.median(seconds), sum(seconds)]
            )
    return [statistics.fmean(column) for column in zip(*columns, strict=True)] or [0.0] * len(_COSTS)


def _bar(value: float, most: float) -> Markup:
    share = 100 * value / most if most else 0.0
    return element("td", f"{value:.3g}" if value < 1000 else f"{value:,.0f}", style=f"--share: {share:.1f}%")
