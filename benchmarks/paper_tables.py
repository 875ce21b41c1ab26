"""The parts of docs/reproductions.md, from the results of reproduce.py."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.figure import Figure

from flwr_kd.experiments.papers import library
from flwr_kd.experiments.papers.expectations import Verdict
from flwr_kd.experiments.papers.measures import MEASURES
from flwr_kd.experiments.papers.page_parts import NONE, filled_table, interval, table
from flwr_kd.experiments.papers.printed import points
from flwr_kd.experiments.papers.report import little_learnt
from flwr_kd.experiments.papers.schema import PaperExperiment
from flwr_kd.plotting import beside_printed
from flwr_kd.plotting.beside_printed import Group
from flwr_kd.results.clients import ALONE
from flwr_kd.results.statistics import Difference, paired_difference

Document = Mapping[str, Any]
DECIDED = (Verdict.HOLDS, Verdict.FAILS, Verdict.UNDECIDED)
_MEGABYTE = 10**6


def loaded(folder: Path) -> dict[str, Document]:
    """Return the results by the experiment's name."""
    documents = (json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json")))
    return {document["experiment"]: document for document in documents}


def summary(folder: Path) -> tuple[Sequence[str], list[list[str]]]:
    """Return header and rows: of each paper, how many experiments have a result, and how many claims hold."""
    found, rows = loaded(folder), []
    for paper, experiments in library.papers().values():
        names = [f"{paper.id}/{experiment.id}" for experiment in experiments]
        claims = [claim["verdict"] for name in names if name in found for claim in found[name]["claims"]]
        counts = [str(claims.count(verdict.value)) for verdict in DECIDED]
        rows.append(
            [f"[{paper.id}](#{paper.id})", f"{sum(n in found for n in names)} of {len(names)}", *counts]
        )
    return ("paper", "experiments with a result", *(f"claims: {verdict.value}" for verdict in DECIDED)), rows


def of_paper(folder: Path, paper: str) -> str:
    """Return what is known of a paper: each experiment with its verdicts and numbers."""
    found, (_, experiments) = loaded(folder), library.papers()[paper]
    lines: list[str] = []
    absent = []
    for experiment in experiments:
        name = f"{paper}/{experiment.id}"
        if name in found:
            lines += _experiment(name, experiment, found[name])
        else:
            absent.append(f"`{name}`")
    if absent:
        lines += [f"No result yet: {', '.join(absent)}.", ""]
    return "\n".join(lines).rstrip()


def figure(document: Document) -> Figure:
    """Draw an experiment's numbers beside the printed ones: a panel per measure, a group per cell."""
    name = document["experiment"]
    _, experiment = library.find(name)
    panels: dict[str, list[Group]] = {}
    for measure, cells in _by_measure(document["cells"]).items():
        factor = points(experiment, measure)
        numbers: dict[str, tuple[dict[str, list[float]], dict[str, float]]] = {}
        for cell in cells:
            ours, printed = numbers.setdefault(cell["cell"], ({}, {}))
            if cell["ours"]:
                ours[cell["row"]] = list(cell["ours"].values())
            if cell["printed"] is not None:
                printed[cell["row"]] = _value(cell["printed"], factor)
        panels[f"{measure} %"] = [Group(cell, *both) for cell, both in numbers.items()]
    return beside_printed.figure(panels, [f"{name}, in the small version, and as printed"])


def _experiment(name: str, experiment: PaperExperiment, document: Document) -> Iterator[str]:
    yield f"### {name}: {experiment.title}"
    yield ""
    yield f"The paper concludes: {experiment.claim}"
    yield ""
    yield _conditions(experiment, document)
    yield ""
    # Results of before have no such list.
    if cells := document.get("at-chance"):
        yield f"**{little_learnt(cells)}**"
        yield ""
    if document["claims"]:
        header = ("claim", "here", "in order", "mean margin [95 %]", "the paper's own numbers")
        yield from table(header, map(_claim, document["claims"]))
        yield ""
    for measure, cells in _by_measure(document["cells"]).items():
        yield from _numbers(experiment, measure, cells)
        yield ""
    if rows := list(_rows(experiment, document)):
        yield from rows
        yield ""
    if document["computed"]:
        columns = ("cell", "row", "quantity", "ours", "printed")
        yield from filled_table(columns, map(_computed, document["computed"]))
        yield ""
    if document["class-counts"]:
        header = ("cell", "clients", "classes of a client", "share of a client's largest class %")
        yield from table(
            header, (_division(cell, counts) for cell, counts in document["class-counts"].items())
        )
        yield ""
    for cell, reason in document["not-run"].items():
        yield f"Not run: {cell}: {reason}."
        yield ""


def _conditions(experiment: PaperExperiment, document: Document) -> str:
    parts = []
    # The first results did not say what their small version was.
    known = experiment.small.note if experiment.small is not None and document["scale"] == "small" else ""
    if note := document.get("note", known):
        parts.append(f"Small version: {note}")
    if document["stand-ins"]:
        parts.append(f"Stand-in: {'; '.join(document['stand-ins'])}.")
    if document["versions"]:
        version = document["versions"]
        seeds = ", ".join(map(str, document["seeds"]))
        parts.append(f"Seeds {seeds}; commit {version.get('commit', 'not known')}.")
    parts.append(f"`{document['command']}`")
    return " ".join(parts)


def _claim(claim: Mapping[str, Any]) -> tuple[str, ...]:
    agrees, of = claim["paper-agrees"]
    order = f"{claim['in-order']} of {claim['comparisons']}" if claim["comparisons"] else NONE
    margin = claim["mean-margin"]
    difference = None
    if margin is not None:
        limits = margin["interval"]
        difference = Difference(margin["mean"], None if limits is None else (limits[0], limits[1]), ())
    own = f"{agrees} of {of}" if of else NONE
    return claim["claim"], f"**{claim['verdict']}**", order, interval(difference), own


def _by_measure(cells: Sequence[Document]) -> dict[str, list[Document]]:
    found: dict[str, list[Document]] = {}
    for cell in cells:
        found.setdefault(cell["measure"], []).append(cell)
    return {measure: each for measure, each in found.items() if any(cell["ours"] for cell in each)}


def _numbers(experiment: PaperExperiment, measure: str, cells: Sequence[Document]) -> Iterator[str]:
    """Yield a row per cell and a column per method: ours, and below it what the paper prints."""
    rows = list(dict.fromkeys(cell["row"] for cell in cells))
    factor = points(experiment, measure)
    by_cell: dict[str, dict[str, Document]] = {}
    for cell in cells:
        by_cell.setdefault(cell["cell"], {})[cell["row"]] = cell
    unit = MEASURES[experiment.measures[measure].name].unit
    header = f"{measure}{f' {unit}' if unit else ''}, ours / printed"
    lines = [(name, *(_both(of_rows.get(row), factor) for row in rows)) for name, of_rows in by_cell.items()]
    yield from table((header, *(f"`{row}`" for row in rows)), lines)


def _both(cell: Document | None, factor: float) -> str:
    if cell is None:
        return NONE
    ours = f"{fmean(cell['ours'].values()):.1f}" if cell["ours"] else NONE
    if cell["printed"] is None:
        return ours
    return f"{ours} / {_value(cell['printed'], factor):.1f}"


def _value(printed: str, factor: float) -> float:
    """Return a printed number without its spread."""
    return factor * float(printed.partition(" ")[0])


def _rows(experiment: PaperExperiment, document: Document) -> Iterator[str]:
    """Yield what each row is above the controls and costs, as means over the cells."""
    costs: dict[str, list[Document]] = {}
    for cost in document["costs"]:
        costs.setdefault(cost["row"], []).append(cost)
    if not costs:
        return
    measures = list(_by_measure(document["cells"]))
    above = [(control, measure) for control in document["controls"] for measure in measures]
    header = ["row", *(f"{measure} above `{control}` [95 %]" for control, measure in above)]
    if ALONE in costs:
        header.append("clients better off than alone %")
    header += ["MB/round", "s/round", "rounds to target", "MB to target", "s to target"]
    rows = []
    for row, of_cells in costs.items():
        cells = [
            f"`{row}`",
            *(_above(document["cells"], row, control, measure) for control, measure in above),
        ]
        if ALONE in costs:
            share = _mean(of_cells, "better-off")
            cells.append(NONE if share is None else f"{100 * share:.0f}")
        sent = [_mean(of_cells, name) for name in ("bytes-up", "bytes-down")]
        # What carries clients that train alone is no part of it.
        cells.append(NONE if row == ALONE else _short(sum(number or 0 for number in sent) / _MEGABYTE))
        cells.append(_short(_mean(of_cells, "seconds")))
        reached = [cell for cell in of_cells if "rounds-to-target" in cell]
        some = "" if len(reached) == len(of_cells) else f" ({len(reached)} of {len(of_cells)} cells)"
        for name, unit in (("rounds-to-target", 1), ("bytes-to-target", _MEGABYTE), ("seconds-to-target", 1)):
            value = None if row == ALONE and unit == _MEGABYTE else _mean(reached, name)
            cells.append(NONE if value is None else f"{_short(value / unit)}{some}")
        rows.append(cells)
    yield from table(header, rows)


def _above(cells: Sequence[Document], row: str, control: str, measure: str) -> str:
    """Return the difference of a row to a control: by seed the mean over cells, and its interval over seeds."""
    values = {
        (cell["cell"], cell["row"]): cell["ours"]
        for cell in cells
        if cell["measure"] == measure and cell["row"] in (row, control)
    }
    by_seed: dict[str, list[float]] = {}
    for (cell, name), ours in values.items():
        other = values.get((cell, control), {})
        if name == row != control:
            for seed, value in ours.items():
                if seed in other:
                    by_seed.setdefault(seed, []).append(value - other[seed])
    means = {int(seed): fmean(each) for seed, each in by_seed.items()}
    return interval(paired_difference(means, dict.fromkeys(means, 0.0)))


def _mean(of_cells: Sequence[Document], name: str) -> float | None:
    values = [cell[name]["mean"] for cell in of_cells if name in cell]
    return fmean(values) if values else None


def _short(value: float | None) -> str:
    if value is None:
        return NONE
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


def _division(cell: str, counts: Sequence[Sequence[int]]) -> tuple[str, ...]:
    classes = fmean(sum(count > 0 for count in row) for row in counts)
    largest = fmean(100 * max(row) / sum(row) for row in counts if sum(row))
    return cell, str(len(counts)), f"{classes:.1f}", f"{largest:.0f}"


def _computed(each: Mapping[str, Any]) -> tuple[str, ...]:
    ours = NONE if each["ours"] is None else f"{each['ours']:.5g}"
    printed = each["printed"] or NONE
    return each["cell"], each["row"] or NONE, each["quantity"], ours, printed
