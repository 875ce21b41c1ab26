"""Our numbers as a grid, from the results of an experiment's cells."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean

from flwr_kd.experiments.papers.computed import quantities
from flwr_kd.experiments.papers.expectations import GridCell, Seeds
from flwr_kd.experiments.papers.measures import MEASURES, value_of
from flwr_kd.experiments.papers.printed import derived, keys_of
from flwr_kd.experiments.papers.reproduction import (
    Reproduction,
    default_folder,
    others_of,
    prepare,
    results_of,
)
from flwr_kd.experiments.papers.schema import PaperCell, PaperExperiment
from flwr_kd.measured_rounds import MeasuredRounds
from flwr_kd.results.measures import ACCURACIES, Target
from flwr_kd.results.schema import Comparison, RunResult

__all__ = ["our_grid", "target_of"]

_OF_FIRST = 0.9
_LEAST_PERCENT = 2


def our_grid(reproduction: Reproduction) -> list[GridCell]:
    """Return our numbers in points of percent, by cell, measure, row and seed.

    Those of an experiment that derives from other tables are read from these tables' default folders.
    """
    experiment = reproduction.experiment
    if experiment.tables:
        return derived(experiment, others_of(reproduction), lambda table: _of_table(reproduction, table))
    if experiment.kind == "cost":
        return _computed(experiment)
    results = results_of(reproduction)
    return [
        each
        for cell in experiment.run
        if cell.id in results
        for each in _of_cell(experiment, cell, results[cell.id])
    ]


def _computed(experiment: PaperExperiment) -> list[GridCell]:
    """Return what is computed; a formula has the same value with each seed."""
    measure, found = next(iter(experiment.measures)), quantities(experiment)
    return [
        GridCell(
            cell.id,
            keys_of(experiment, cell),
            {
                measure: {
                    each.row: dict.fromkeys((0, 1), each.ours)
                    for each in found
                    if each.cell == cell.id and each.ours is not None and not each.part
                }
            },
        )
        for cell in experiment.run
    ]


def _of_table(reproduction: Reproduction, table: PaperExperiment) -> list[GridCell]:
    """Return the numbers of another table of the paper, at the same scale, where it was run."""
    paper, scale = reproduction.paper.id, reproduction.scale
    if not default_folder(paper, table, scale).is_dir():
        return []
    other = prepare(f"{paper}/{table.id}", scale=scale, seeds=reproduction.seeds)
    results = results_of(other)
    form = other.experiment
    clients = table.clients
    return [
        each
        for cell in form.run
        if cell.id in results
        for each in _of_cell(form, cell, results[cell.id], clients)
    ]


def _of_cell(
    experiment: PaperExperiment, cell: PaperCell, result: Comparison, clients: tuple[int, ...] | None = None
) -> list[GridCell]:
    keys, rows = keys_of(experiment, cell), result.by_method()
    clients = experiment.clients if clients is None else clients
    found = []
    for client in clients or (None,):
        values = {
            measure: {row: _seeds(experiment, cell, measure, row, rows, client) for row in rows}
            for measure in experiment.measures
        }
        more = {} if client is None else {"client": client}
        found.append(
            GridCell(cell.id if client is None else f"{cell.id} client {client}", {**keys, **more}, values)
        )
    return found


def target_of(experiment: PaperExperiment, result: Comparison) -> Target | None:
    """Return the accuracy to which a cell's rounds, bytes and seconds are counted.

    That of ``--target`` where there is one. Otherwise nine tenths, in whole percent, of what the first row ends
    with, in the experiment's first measure that has a value and is measured after each round.

    Parameters
    ----------
    experiment : PaperExperiment
        With the measures.
    result : Comparison
        Of the cell.

    Returns
    -------
    Target or None
        None where no such measure is an accuracy of the first row, or the accuracy is below two percent.
    """
    if result.target is not None or not result.runs:
        return result.target
    row, runs = next(iter(result.by_method().items()))
    each_round = MeasuredRounds.parse(result.config.get("measure", "never")).every == 1
    for measure in experiment.measures.values():
        name = measure.for_row(row)
        counted = MEASURES[name].accuracy and (each_round or not ACCURACIES[name].scheduled)
        values = [value_of(run, name) for run in runs] if counted else []
        known = [value for value in values if value is not None]
        percent = int(100 * _OF_FIRST * fmean(known)) if known else 0
        if percent >= _LEAST_PERCENT:
            return Target(percent, name)
    return None


def _seeds(
    experiment: PaperExperiment,
    cell: PaperCell,
    measure: str,
    row: str,
    rows: Mapping[str, list[RunResult]],
    client: int | None,
) -> Seeds:
    name = experiment.measures[measure].for_row(row)
    if name == "rounds_to_global":
        return _rounds_to(cell, rows[row], next(iter(rows.values())))
    if not MEASURES[name].accuracy:
        return {}
    values = {run.seed: value_of(run, name, client) for run in rows[row]}
    return {seed: 100 * value for seed, value in values.items() if value is not None}


def _rounds_to(cell: PaperCell, runs: list[RunResult], reference: list[RunResult]) -> Seeds:
    """Return the rounds to a share of the first row's last accuracy.

    A run that does not reach it counts as one round more than it had, the least that it can need. Without a value
    it would be left out of the means, and a method that seldom gets there would look quick.
    """
    found = {}
    for run in runs:
        last = next((value_of(each, "global_accuracy") for each in reference if each.seed == run.seed), None)
        if last is not None and cell.target is not None and run.rounds:
            found[run.seed] = float(run.rounds_to(cell.target * last) or run.rounds[-1].round + 1)
    return found
