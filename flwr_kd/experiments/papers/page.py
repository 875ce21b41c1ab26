"""The page of a reproduction, as Markdown: verdicts, ours beside the printed numbers, and what is open."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import fmean, stdev

from flwr_kd.experiments.papers.computed import Quantity
from flwr_kd.experiments.papers.expectations import GridCell, Seeds, Verdict
from flwr_kd.experiments.papers.measures import MEASURES
from flwr_kd.experiments.papers.page_parts import (
    NONE,
    controls,
    cost_columns,
    costs,
    filled_table,
    interval,
    table,
)
from flwr_kd.experiments.papers.printed import points, with_unit
from flwr_kd.experiments.papers.report import Report, Ruled, little_learnt
from flwr_kd.experiments.papers.reproduction import stand_ins
from flwr_kd.experiments.papers.schema import PaperCell, PaperExperiment, Printed
from flwr_kd.results.statistics import Difference, paired_difference

__all__ = ["page"]


def page(report: Report) -> str:
    """Return the page.

    Parameters
    ----------
    report : Report
        What was run, and what follows from it.
    """
    reproduction = report.reproduction
    experiment, paper = reproduction.experiment, reproduction.paper
    lines = [
        f"# {reproduction.name}: {experiment.title}",
        "",
        f"{paper.authors}: *{paper.title}*{f', {paper.venue}' if paper.venue else ''}. "
        f"{experiment.source[:1].upper()}{experiment.source[1:]}.",
        "",
        f"The paper concludes: {experiment.claim}",
        "",
        *_scale(report),
        *_verdicts(report),
        *_numbers(report),
        *controls(report),
        *costs(report),
        *cost_columns(report),
        *_quantities(report.quantities),
        *_class_counts(report),
        *_texts(report),
        *_listed("What the paper's own numbers contradict", report.contradictions),
        *_listed("Printed numbers to be read with care", experiment.doubts),
        *_listed(
            "What the paper leaves open", [_open(each.question, each.taken) for each in experiment.open]
        ),
        *_listed("Values that the paper does not print", list(_inferred(reproduction.whole))),
        *_listed("Notes", [f"Metric: {experiment.metric}.", experiment.metric_note, *experiment.notes]),
        *_listed("Not run", [f"{cell}: {reason}" for cell, reason in report.not_run.items()]),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _scale(report: Report) -> Iterator[str]:
    reproduction = report.reproduction
    if reproduction.scale == "small" and reproduction.whole.small is not None:
        note = reproduction.whole.small.note
        yield (
            f"This is the **small version**, with the same methods and measures: {note}"
            + (" Printed numbers are beside ours to compare the order of methods." if report.grid else "")
        )
        yield ""
        if found := stand_ins(reproduction):
            yield f"Stand-in: {'; '.join(found)}."
            yield ""
    if report.command:
        yield f"`{report.command}`"
        yield ""
    if report.versions:
        made = ", ".join(f"{name} {value}" for name, value in report.versions.items())
        seeds = ", ".join(map(str, reproduction.seeds))
        yield f"Seeds {seeds}. Made with {made}."
        yield ""
    if report.at_chance:
        warning = little_learnt(report.at_chance)
        yield f"**{warning[:1].upper()}{warning[1:]}.**"
        yield ""


def _verdicts(report: Report) -> Iterator[str]:
    if not report.ruled:
        return
    yield "## Verdicts"
    yield ""
    yield from table(
        ("claim", "verdict", "order", "by intervals", "mean margin", "the paper's own numbers"),
        [_verdict_row(each, report.reproduction.experiment) for each in report.ruled],
    )
    yield ""
    if _is_formula(report.reproduction.experiment):
        yield "Order: comparisons that are as the claim says. Numbers that follow from formulas have no interval."
        yield ""
        return
    yield (
        "Order: comparisons whose means are as the claim says. By intervals: how many of them hold, are undecided, "
        "contradict, by the 95 % interval of the paired differences over seeds. A claim holds if as large a share "
        "of them hold as of the paper's own numbers, or if that share is in order and the mean margin is above 0."
    )
    yield ""


def _verdict_row(ruled: Ruled, experiment: PaperExperiment) -> tuple[str, ...]:
    found = ruled.found
    own = f"{ruled.agrees} of {ruled.of}" if ruled.of else NONE
    if ruled.against:
        own += f"; not {', '.join(ruled.against)}"
    if not found.checks:
        return _said(ruled), found.verdict.value, NONE, NONE, NONE, own
    counts = " / ".join(str(found.count(each)) for each in (Verdict.HOLDS, Verdict.UNDECIDED, Verdict.FAILS))
    order = f"{found.in_order} of {len(found.checks)}"
    return _said(ruled), f"**{found.verdict.value}**", order, counts, _margin(experiment, found.pooled), own


def _said(ruled: Ruled) -> str:
    note = f" ({ruled.expectation.note})" if ruled.expectation.note else ""
    return f"{ruled.expectation.claim}{note}"


def _numbers(report: Report) -> Iterator[str]:
    experiment = report.reproduction.experiment
    if not report.grid or not experiment.measures:
        return
    yield "## Ours beside the printed numbers"
    yield ""
    how = "by the formula" if _is_formula(experiment) else "mean ± standard deviation over seeds"
    yield f"{_unit(experiment)} Ours: {how}."
    yield ""
    single = len(experiment.methods) == 1
    if single:
        rows = [row for cell in report.grid for row in _rows_of(report, cell, named=True)]
        yield from table(("cell", *_headers(experiment, difference=False)), rows)
        yield ""
        return
    for cell in report.grid:
        yield f"### {cell.id}"
        yield ""
        if settings := _settings(experiment, report.cells.get(cell.id)):
            yield f"{settings}"
            yield ""
        yield from table(("method", *_headers(experiment, difference=True)), _rows_of(report, cell))
        yield ""


def _unit(experiment: PaperExperiment) -> str:
    meanings = []
    for measure, each in experiment.measures.items():
        others = [f"; of {row}: {MEASURES[name].meaning}" for row, name in each.of.items()]
        meanings.append(f"{measure}: {MEASURES[each.name].meaning}{''.join(others)}")
    accuracy = any(MEASURES[each.name].accuracy for each in experiment.measures.values())
    return f"{'In percent. ' if accuracy else ''}{'. '.join(meanings)}."


def _headers(experiment: PaperExperiment, *, difference: bool) -> Iterator[str]:
    for measure in experiment.measures:
        yield f"{with_unit(experiment, measure)}, ours"
        if difference:
            yield f"{measure}, to the first{'' if _is_formula(experiment) else ' [95 %]'}"
        yield f"{measure}, printed"


def _rows_of(report: Report, cell: GridCell, *, named: bool = False) -> list[tuple[str, ...]]:
    experiment = report.reproduction.experiment
    rows = list(dict.fromkeys(row for rows in cell.values.values() for row in rows))
    first = rows[0] if rows else ""
    found = []
    for row in rows:
        cells = [cell.id if named else f"`{row}`"]
        for measure in experiment.measures:
            ours = cell.of(measure, row)
            cells.append(_ours(experiment, ours))
            if not named:
                other = None if row == first else paired_difference(dict(ours), dict(cell.of(measure, first)))
                cells.append(_margin(experiment, other))
            cells.append(_printed(experiment, report.printed(cell.id, measure, row), measure))
        found.append(tuple(cells))
    return found


def _is_formula(experiment: PaperExperiment) -> bool:
    """Whether our numbers are computed, the same with each seed."""
    return experiment.kind == "cost"


def _ours(experiment: PaperExperiment, by_seed: Seeds) -> str:
    values = list(by_seed.values())
    if not values:
        return NONE
    text = f"{fmean(values):.2f}"
    return f"{text} ± {stdev(values):.2f}" if len(values) > 1 and not _is_formula(experiment) else text


def _margin(experiment: PaperExperiment, found: Difference | None) -> str:
    return interval(found if found is None or not _is_formula(experiment) else replace(found, interval=None))


def _printed(experiment: PaperExperiment, number: Printed | None, measure: str) -> str:
    """Return a printed number in our unit, with the digits that the paper has."""
    if number is None:
        return NONE
    if points(experiment, measure) == 1:
        return str(number)
    value = f"{number.value.scaleb(2):f}"
    return value if number.spread is None else f"{value} ± {number.spread.scaleb(2):f}"


def _settings(experiment: PaperExperiment, cell: PaperCell | None) -> str:
    if cell is None:
        return ""
    values = {**cell.settings, **cell.set}
    text = ", ".join(f"{name}={value}" for name, value in values.items())
    stands = f"In place of the paper's {cell.stands_for}. " if cell.stands_for else ""
    return f"{stands}`{text}`" if text else stands.strip()


def _quantities(found: Sequence[Quantity]) -> Iterator[str]:
    if not found:
        return
    yield "## Computed"
    yield ""
    rows = []
    for each in found:
        ours = NONE if each.ours is None else f"{each.ours:.5g}"
        printed = NONE if each.printed is None else str(each.printed)
        rows.append((each.cell, each.row or NONE, each.name, ours, printed, each.note))
    yield from filled_table(("cell", "row", "quantity", "ours", "printed", "note"), rows)
    yield ""


def _class_counts(report: Report) -> Iterator[str]:
    for cell, counts in report.class_counts.items():
        yield f"## Samples per client and class: {cell}, seed {report.reproduction.seeds[0]}"
        yield ""
        held = [sum(value > 0 for value in row) for row in counts]
        largest = [max(row) / sum(row) for row in counts if sum(row)]
        yield (
            f"Clients have {fmean(held):.1f} classes on average; the largest class of a client has "
            f"{100 * fmean(largest):.0f} % of its samples."
        )
        yield ""
        if counts and len(counts[0]) <= 20:
            header = ("partition", *(str(index) for index in range(len(counts[0]))))
            yield from table(header, [(str(i), *map(str, row)) for i, row in enumerate(counts)])
            yield ""


def _texts(report: Report) -> Iterator[str]:
    if not report.texts:
        return
    yield "## What the text says of the numbers"
    yield ""
    rows = [
        (
            each.claim.says,
            ", ".join(map(str, each.claim.printed)) or NONE,
            ", ".join(map(str, each.claim.recomputed)) or NONE,
            each.ours or NONE,
            f"{'yes' if each.claim.agrees else '**no**'}{f': {each.claim.note}' if each.claim.note else ''}",
        )
        for each in report.texts
    ]
    yield from table(("quantity", "text", "paper's table", "ours", "text and table agree"), rows)
    yield ""


def _open(question: str, taken: str) -> str:
    question = f"{question[:1].upper()}{question[1:]}."
    return f"{question} Taken: {taken}." if taken else question


def _inferred(experiment: PaperExperiment) -> Iterator[str]:
    for each in experiment.inferred:
        values = [*each.settings.items()]
        values += [
            (f"{row} {name}", value) for row, h in each.hyperparameters.items() for name, value in h.items()
        ]
        text = ", ".join(f"{name}={value}" for name, value in values)
        note = f" ({each.note})" if each.note else ""
        yield f"{each.source}, {'taken' if each.taken else 'noted only'}: {text}{note}"


def _listed(title: str, items: Sequence[str]) -> Iterator[str]:
    items = [item for item in items if item]
    if items:
        yield f"## {title}"
        yield ""
        yield from (f"- {item}" for item in items)
        yield ""
