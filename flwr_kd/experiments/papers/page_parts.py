"""Parts of a reproduction's page: tables, the controls beside the claims, and what each row costs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

from flwr_kd.experiments.papers.paper import Control
from flwr_kd.results.columns import COLUMNS
from flwr_kd.results.statistics import Difference, paired_difference

if TYPE_CHECKING:
    from flwr_kd.experiments.papers.report import Report
    from flwr_kd.experiments.papers.schema import PaperCell

__all__ = ["NONE", "controls", "cost_columns", "costs", "filled_table", "interval", "table"]

NONE = "–"
"""Where there is no number."""


def controls(report: Report) -> Iterator[str]:
    """Yield what the methods are above each control: the same without knowledge, or each client alone."""
    experiment = report.reproduction.experiment
    found = [(name, rows) for name in experiment.controls if (rows := _above(report, name))]
    if not found:
        return
    yield "## Controls"
    yield ""
    yield (
        "What is left of a claim where the knowledge is missing. Differences to the control in points, paired by "
        "seed, with their 95 % intervals."
    )
    yield ""
    for name, rows in found:
        yield f"### Above `{name}`"
        yield ""
        yield f"{experiment.named[name].note}."
        yield ""
        yield from table(("cell", "method", *experiment.measures), rows)
        yield ""


def _above(report: Report, control: str) -> list[tuple[str, ...]]:
    experiment = report.reproduction.experiment
    named = experiment.named[control]
    names = named.of if isinstance(named, Control) else ()
    rows = []
    for cell in report.grid:
        for row in experiment.methods:
            if names and row not in names:
                continue
            found = [
                paired_difference(dict(cell.of(measure, row)), dict(cell.of(measure, control)))
                for measure in experiment.measures
            ]
            if any(found):
                rows.append((cell.id, f"`{row}`", *map(interval, found)))
    return rows


def costs(report: Report) -> Iterator[str]:
    """Yield what each row costs, and how many clients are better off than alone."""
    if not report.summaries:
        return
    from flwr_kd.experiments.papers.report import COSTS

    all_rows = [row for rows in report.summaries.values() for row in rows]
    # That no row reaches a target that was named is a number too.
    to_target = [name for name in COSTS if name.endswith("_to_target")] if report.targets else []
    names = [name for name in COSTS if name in to_target or any(row[name]["n"] for row in all_rows)]
    yield "## Cost, and clients better off"
    yield ""
    yield (
        "MB are 10^6 bytes of all clients, seconds those of the run on this machine. A target is nine tenths of "
        "what the first row ends with, or that of `--target`; behind a mean stands how many seeds reach it."
    )
    yield ""
    shown = [COLUMNS[name] for name in names]
    rows = []
    for cell, of_cell in report.summaries.items():
        target = report.targets.get(cell)
        for row in of_cell:
            cells = (column.cell(row[column.name], len(row["seeds"])) for column in shown)
            rows.append(
                (cell, f"`{row['method']}`", "" if target is None else target.described, *map(_line, cells))
            )
    yield from table(("cell", "method", "target", *(_line(column.header) for column in shown)), rows)
    yield ""


def cost_columns(report: Report) -> Iterator[str]:
    """Yield a paper's columns of cost beside ours, each over the first row's: the machines are others."""
    cells = report.reproduction.whole.cost
    if not cells or not report.summaries:
        return
    shown = [
        (ours, header, printed)
        for ours, header in _COST_COLUMNS.items()
        if (printed := _ratios([_floats(cell, header) for cell in cells]))
    ]
    yield "## The paper's columns of cost"
    yield ""
    yield "Each number is divided by the first row's; a mean over the cells."
    yield ""
    header = ("method", *(f"{name}, {whose}" for _, name, _ in shown for whose in ("ours", "printed")))
    columns = [
        (_ratios([_means(rows, ours) for rows in report.summaries.values()]), printed)
        for ours, _, printed in shown
    ]
    rows = [
        (f"`{row}`", *(_times(each.get(row)) for pair in columns for each in pair))
        for row in report.reproduction.experiment.rows
    ]
    yield from table(header, rows)
    yield ""


_COST_COLUMNS = {"parameters_held": "parameters-million", "seconds": "seconds-per-round-and-client"}
"""By a key of a result's summary, a column of a paper's table."""


def _floats(cell: PaperCell, column: str) -> dict[str, float]:
    return {row: float(each.value) for row, each in cell.printed.get(column, {}).items()}


def _means(rows: Sequence[Mapping[str, Any]], name: str) -> dict[str, float]:
    return {row["method"]: row[name]["mean"] for row in rows if row[name]["n"]}


def _ratios(cells: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return each row's mean ratio to the cell's first row."""
    found: dict[str, list[float]] = {}
    for cell in cells:
        first = next(iter(cell.values()), 0.0)
        for row, value in cell.items():
            if first > 0:
                found.setdefault(row, []).append(value / first)
    return {row: fmean(values) for row, values in found.items()}


def _times(value: float | None) -> str:
    return NONE if value is None else f"{value:.2f}"


def interval(found: Difference | None) -> str:
    """Write a mean difference with its interval."""
    if found is None:
        return NONE
    # Without the sign of a number that is rounded to zero.
    mean, *limits = (f"{round(value, 2) + 0.0:+.2f}" for value in (found.mean, *(found.interval or ())))
    return f"{mean} [{', '.join(limits)}]" if limits else mean


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table."""
    yield _row(header)
    yield "|" + "---|" * len(header)
    for row in rows:
        yield _row(row)


def filled_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table, without the columns in which no row has anything.

    >>> list(filled_table(("cell", "row", "ours"), [("a", NONE, "1"), ("b", "", "2")]))
    ['| cell | ours |', '|---|---|', '| a | 1 |', '| b | 2 |']
    """
    rows = list(rows)
    kept = [index for index in range(len(header)) if any(row[index] not in ("", NONE) for row in rows)]
    yield from table([header[index] for index in kept], [[row[index] for index in kept] for row in rows])


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _line(text: Any) -> str:
    """Return a cell of several lines in one."""
    return " ".join(str(text).replace("\n/", "/").split())
