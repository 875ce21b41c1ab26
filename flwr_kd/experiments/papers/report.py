"""What follows from a reproduction: numbers, verdicts, and what the paper's own numbers contradict."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from flwr_kd.checks import DataError
from flwr_kd.experiments.papers.computed import Quantity, class_counts, counted, quantities
from flwr_kd.experiments.papers.expectations import GridCell, Verdicts, verdict, without
from flwr_kd.experiments.papers.measures import value_of
from flwr_kd.experiments.papers.ours import our_grid, target_of
from flwr_kd.experiments.papers.printed import measure_of, paper_agrees, paper_grid, points, with_unit
from flwr_kd.experiments.papers.reproduction import Reproduction, others_of, results_of, stand_ins
from flwr_kd.experiments.papers.schema import Expectation, PaperCell, PaperExperiment, Printed, TextClaim
from flwr_kd.experiments.run_form import Values
from flwr_kd.files import write_atomically
from flwr_kd.plotting.beside_printed import Group
from flwr_kd.results.measures import Target
from flwr_kd.results.schema import Comparison
from flwr_kd.results.statistics import Difference

__all__ = [
    "CHANCE",
    "COSTS",
    "Report",
    "Ruled",
    "Said",
    "draw",
    "draw_clients",
    "little_learnt",
    "page_file",
    "report",
    "write",
]

_LEAST_SHARE = 0.5
CHANCE = 1.5
"""Times the accuracy of guessing, below which a page says that little was learnt."""
_OF_ONE_GUESS = (
    "local_accuracy",
    "trained_accuracy",
    "common_accuracy",
    "global_accuracy",
    "global_on_clients",
)
COSTS = (
    *("better_off", "bytes_up", "bytes_down", "bytes_knowledge", "seconds", "round_trips"),
    *("parameters_trained", "parameters_held", "parameters_server"),
    *("rounds_to_target", "bytes_to_target", "seconds_to_target"),
)
"""What a page says of each row beside its accuracies, by keys of a result's summary."""


@dataclass(frozen=True)
class Ruled:
    """A claim, the verdict on it, and what the paper's own numbers say of it."""

    expectation: Expectation
    found: Verdicts
    agrees: int
    of: int
    against: tuple[str, ...]


@dataclass(frozen=True)
class Said:
    """What a text says, and the same of our numbers where it is a count."""

    claim: TextClaim
    ours: str = ""


@dataclass(frozen=True)
class Report:
    """See the module.

    Attributes
    ----------
    reproduction : Reproduction
        What was run.
    grid : list of GridCell
        Our numbers.
    ruled : list of Ruled
        The claims.
    quantities : list of Quantity
        What is computed.
    class_counts : dict
        By cell, samples per client and class.
    texts : list of Said
        What the text says of the numbers.
    contradictions : tuple of str
        What the paper's own numbers contradict.
    not_run : dict of str to str
        By cell, why it has no numbers.
    summaries : dict of str to list
        By cell, the :meth:`~flwr_kd.results.schema.Comparison.summary` of its result, with what it takes to reach
        a target.
    targets : dict of str to Target
        By cell, that target; see :func:`flwr_kd.experiments.papers.ours.target_of`.
    versions : dict of str to str
        What the results were made with.
    command : str
        The command line.
    at_chance : tuple of str
        Cells in which no row is above :data:`CHANCE` times what guessing gives: their order of rows says little.
    """

    reproduction: Reproduction
    grid: list[GridCell]
    ruled: list[Ruled]
    quantities: list[Quantity] = field(default_factory=list)
    class_counts: dict[str, list[list[int]]] = field(default_factory=dict)
    texts: list[Said] = field(default_factory=list)
    contradictions: tuple[str, ...] = ()
    not_run: dict[str, str] = field(default_factory=dict)
    summaries: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    targets: dict[str, Target] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    command: str = ""
    at_chance: tuple[str, ...] = ()

    @property
    def cells(self) -> dict[str, PaperCell]:
        """The cells by id."""
        return {cell.id: cell for cell in self.reproduction.experiment.run}

    def printed(self, cell: str, measure: str, row: str) -> Printed | None:
        """Return the paper's number for one of ours; in a small version that of the cell in whose place it is."""
        name, _, client = cell.partition(" client ")
        found = self.cells.get(name)
        if found is not None and found.stands_for:
            found = next(each for each in self.reproduction.whole.run if each.id == found.stands_for)
        if found is None:
            return None
        if client:
            numbers = found.clients.get(measure, {}).get(row)
            return None if numbers is None else Printed(numbers[int(client) - 1])
        return found.printed.get(measure, {}).get(row)


def report(
    reproduction: Reproduction,
    *,
    failed: dict[str, str] | None = None,
    settings: Values | None = None,
    command: str = "",
) -> Report:
    """Return what follows from the results that are there.

    Parameters
    ----------
    reproduction : Reproduction
        What was run.
    failed : dict, optional
        By cell, why it could not be run.
    settings : dict, optional
        Options by field that win over the file's, such as the folder of data files.
    command : str
        The command line.
    """
    experiment, whole = reproduction.experiment, reproduction.whole
    others = others_of(reproduction)
    grid, own = our_grid(reproduction), paper_grid(whole, others)
    ruled = [_ruled(experiment, whole, claim, grid, own) for claim in experiment.expect]
    not_run = dict(failed or {})
    counts: dict[str, list[list[int]]] = {}
    if experiment.kind == "partition":
        for cell in experiment.run:
            try:
                counts[cell.id] = class_counts(experiment, cell, reproduction.seeds[0], settings)
            except DataError as error:
                not_run[cell.id] = " ".join(str(error).split())
    results = results_of(reproduction)
    targets = {cell: target_of(experiment, result) for cell, result in results.items()}
    return Report(
        reproduction=reproduction,
        grid=grid,
        ruled=ruled,
        quantities=quantities(experiment, settings),
        class_counts=counts,
        texts=[Said(each, _ours_of(each, grid)) for each in experiment.text],
        contradictions=tuple(_contradictions(reproduction, ruled)),
        not_run=not_run,
        summaries={cell: _summary(result, targets[cell]) for cell, result in results.items()},
        targets={cell: target for cell, target in targets.items() if target is not None},
        versions=next((dict(result.versions) for result in results.values()), {}),
        command=command,
        at_chance=tuple(cell for cell, result in results.items() if _is_at_chance(experiment, result)),
    )


def _is_at_chance(experiment: PaperExperiment, result: Comparison) -> bool:
    """Whether no row has learnt much more than to guess one of the classes."""
    classes = max((len(row) for run in result.runs for row in run.histogram), default=0)
    found = []
    for row, runs in result.by_method().items():
        for measure in experiment.measures.values():
            name = measure.for_row(row)
            if name in _OF_ONE_GUESS:
                values = [value for run in runs if (value := value_of(run, name)) is not None]
                found += [fmean(values)] if values else []
    return classes > 0 and bool(found) and max(found) < CHANCE / classes


def _summary(result: Comparison, target: Target | None) -> list[dict[str, Any]]:
    text = None if target is None else f"{target.metric}:{target.percent}"
    return replace(result, config={**result.config, "target": text}).summary()


def _ruled(
    experiment: PaperExperiment,
    whole: PaperExperiment,
    claim: Expectation,
    grid: list[GridCell],
    own: list[GridCell],
) -> Ruled:
    agrees, count, against = paper_agrees(whole, claim, own)
    share = agrees / count if count else 1.0
    # Where the paper's own numbers contradict the claim, it is judged as it stands.
    found = verdict(
        claim,
        without(grid, experiment.controls),
        measure_of(experiment, claim),
        share=share if share >= _LEAST_SHARE else 1.0,
    )
    return Ruled(claim, found, agrees, count, against)


def _ours_of(claim: TextClaim, grid: list[GridCell]) -> str:
    found = counted(claim, grid)
    return "" if found is None else f"{found[0]} of {found[2]}" + (f", {found[1]} ties" if found[1] else "")


def _contradictions(reproduction: Reproduction, ruled: list[Ruled]) -> list[str]:
    """Return the paper's findings about this experiment, and claims of its text that its numbers do not keep."""
    experiment = reproduction.experiment
    name = f"{experiment.id.replace('-', ' ')} "
    found = [
        f"{each.about}: {each.text}"
        for each in reproduction.paper.findings
        if (name in f"{each.about.replace('-', ' ').replace(',', ' ')} ")
        or _is_of_all(each.about, experiment)
    ]
    for each in ruled:
        if each.expectation.source == "stated" and each.of and each.agrees < each.of:
            places = ", ".join(each.against)
            found.append(f'"{each.expectation.claim}" is true of {each.agrees} of {each.of}: not of {places}')
    for claim in experiment.text:
        if not claim.agrees:
            said = f", {', '.join(map(str, claim.printed))} in the text" if claim.printed else ""
            table = claim.note or f"{', '.join(map(str, claim.recomputed))} by the table"
            found.append(f"{claim.says}{said}: {table}")
    return found


def _is_of_all(about: str, experiment: PaperExperiment) -> bool:
    """Return whether a finding that names no table is one of this experiment's kind."""
    return experiment.trained and not any(character.isdigit() for character in about)


def little_learnt(cells: Sequence[str]) -> str:
    """Return the warning of :attr:`Report.at_chance`."""
    return (
        f"little was learnt in {', '.join(cells)}: no row is above {CHANCE:g} times the accuracy of guessing, so "
        "that the order of rows says little"
    )


def page_file(reproduction: Reproduction) -> Path:
    """Return where the page is; the JSON and the plot are beside it."""
    return reproduction.folder / f"{reproduction.experiment.id}.md"


def write(made: Report) -> Path:
    """Write the page, and what it says as JSON; return the page's file."""
    from flwr_kd.experiments.papers.page import page

    file = page_file(made.reproduction)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, page(made).encode(), mode=0o666)
    text = json.dumps(_document(made), indent=2, ensure_ascii=False, allow_nan=False)
    write_atomically(file.with_suffix(".json"), f"{text}\n".encode(), mode=0o666)
    return file


def draw(made: Report) -> Path | None:
    """Write the plot beside the page; None if there is nothing to draw.

    Class counts; accuracy against the setting of a sweep, whose numbers no paper prints; distances to the end of a
    run; otherwise our numbers beside the printed ones.
    """
    from flwr_kd.plotting import beside_printed, classes, optimum

    file = page_file(made.reproduction).with_suffix(".png")
    title = [f"{made.reproduction.name}: {made.reproduction.experiment.title}"]
    if made.reproduction.scale == "small":
        title += ["small version", *stand_ins(made.reproduction)]
    if made.class_counts:
        return classes.plot(made.class_counts, file, title=[*title, f"seed {made.reproduction.seeds[0]}"])
    # Cells with the same settings have one result.
    results = list({id(each): each for each in results_of(made.reproduction).values()}.values())
    if made.reproduction.experiment.kind == "sweep" and len(results) > 1:
        return _sweep(made, results, file)
    if len(results) == 1 and results[0].config.get("distances"):
        return optimum.plot(results[0], file)
    panels = {}
    for measure in made.reproduction.experiment.measures:
        groups = [_group(made, cell, measure) for cell in made.grid]
        if any(group.ours or group.printed for group in groups):
            panels[with_unit(made.reproduction.experiment, measure)] = groups
    return beside_printed.plot(panels, title, file) if panels else None


def draw_clients(made: Report) -> list[Path]:
    """Write the curves of the clients that a figure shows, a picture in the folder of each cell; return the files.

    Of the experiment's first measure that clients have in several rounds. Where the common test set was measured
    after the last round alone, these are curves of local accuracy.
    """
    from flwr_kd.plotting import client_curves, picture_file

    experiment, files_ = made.reproduction.experiment, []
    if experiment.kind != "curve" or not experiment.clients:
        return []
    results = results_of(made.reproduction)
    names = [measure.name for measure in experiment.measures.values()]
    for job in made.reproduction.jobs:
        result = results.get(job.cells[0].id)
        metric = None if result is None else client_curves.most_measured(result, [*names, "local_accuracy"])
        if result is not None and metric is not None:
            file = picture_file(job.folder, "client-curves")
            files_.append(
                client_curves.plot(result, file, [number - 1 for number in experiment.clients], metric)
            )
    return files_


def _sweep(made: Report, results: Sequence[Comparison], file: Path) -> Path:
    """Draw a sweep along the setting that its claims name; cells that are not there are left out."""
    from flwr_kd.plotting import sweep

    experiment = made.reproduction.experiment
    varying = sweep.settings_that_vary(results)
    along = next((each.along for each in experiment.expect if each.along in varying), None)
    names = [measure.name for measure in experiment.measures.values()]
    metric = next((name for name in names if name in sweep.METRICS), None)
    return sweep.plot(results, file, along=along, metric=metric)


def _group(made: Report, cell: GridCell, measure: str) -> Group:
    factor = points(made.reproduction.whole, measure)
    rows = cell.values.get(measure, {})
    printed = {
        row: float(number.value) * factor
        for row in rows
        if (number := made.printed(cell.id, measure, row)) is not None
    }
    return Group(cell.id, {row: list(seeds.values()) for row, seeds in rows.items() if seeds}, printed)


def _document(made: Report) -> dict[str, Any]:
    reproduction = made.reproduction
    return {
        "experiment": reproduction.name,
        "scale": reproduction.scale,
        "note": _note(reproduction),
        "stand-ins": stand_ins(reproduction),
        "seeds": list(reproduction.seeds),
        "command": made.command,
        "versions": made.versions,
        "claims": [
            {
                "claim": each.expectation.claim,
                "verdict": each.found.verdict.value,
                "in-order": each.found.in_order,
                "comparisons": len(each.found.checks),
                "mean-margin": _difference(each.found.pooled),
                "paper-agrees": [each.agrees, each.of],
                "checks": [
                    {
                        "place": check.place,
                        "verdict": check.verdict.value,
                        "margins": [_difference(margin.difference) for margin in check.margins],
                    }
                    for check in each.found.checks
                ],
            }
            for each in made.ruled
        ],
        "cells": [
            {
                "cell": cell.id,
                "measure": measure,
                "row": row,
                "ours": {str(seed): value for seed, value in seeds.items()},
                "printed": None if (number := made.printed(cell.id, measure, row)) is None else str(number),
            }
            for cell in made.grid
            for measure, rows in cell.values.items()
            for row, seeds in rows.items()
        ],
        "controls": list(reproduction.experiment.controls),
        "costs": [
            {
                "cell": cell,
                "row": row["method"],
                "target": None if cell not in made.targets else made.targets[cell].described,
                **{name.replace("_", "-"): row[name] for name in COSTS if row[name]["n"]},
            }
            for cell, rows in made.summaries.items()
            for row in rows
        ],
        "computed": [
            {
                "cell": each.cell,
                "row": each.row,
                "quantity": each.name,
                "ours": each.ours,
                "printed": None if each.printed is None else str(each.printed),
            }
            for each in made.quantities
        ],
        "class-counts": made.class_counts,
        "at-chance": list(made.at_chance),
        "not-run": made.not_run,
    }


def _note(reproduction: Reproduction) -> str:
    """Return what a small version is, as it was run; empty at the paper's size."""
    small = reproduction.whole.small
    return small.note if reproduction.scale == "small" and small is not None else ""


def _difference(found: Difference | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {"mean": found.mean, "interval": None if found.interval is None else list(found.interval)}
