"""Parts of a reproduction's page: tables, the controls beside the claims, and what each row costs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from flwr_kd.experiments.papers.paper import Control
from flwr_kd.results.columns import COLUMNS
from flwr_kd.results.statistics import Difference, paired_difference

if TYPE_CHECKING:
    from flwr_kd.experiments.papers.report import Report

__all__ = ["NONE", "controls", "costs", "interval", "table"]

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
    names = [name for name in COSTS if any(row[name]["n"] for row in all_rows)]
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


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _line(text: Any) -> str:
    """Return a cell of several lines in one."""
    return " ".join(str(text).replace("\n/", "/").split())
