"""A paper's own numbers as a grid, and what they say of the paper's claims."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from flwr_kd.experiments.papers.expectations import GridCell, checks
from flwr_kd.experiments.papers.measures import MEASURES
from flwr_kd.experiments.papers.schema import Expectation, PaperCell, PaperExperiment, Printed

__all__ = [
    "averaged",
    "derived",
    "keys_of",
    "measure_of",
    "paper_agrees",
    "paper_grid",
    "points",
    "with_unit",
]


def points(experiment: PaperExperiment, measure: str) -> float:
    """Return the factor from a printed number to points of percent; 1 for what is no accuracy."""
    named = experiment.measures.get(measure)
    accuracy = named is not None and MEASURES[named.name].accuracy
    return 100.0 if accuracy and experiment.unit == "fraction" else 1.0


def with_unit(experiment: PaperExperiment, measure: str) -> str:
    """Return a measure's name with the unit of our numbers, such as ``"top1 (%)"``."""
    unit = MEASURES[experiment.measures[measure].name].unit
    return f"{measure} ({unit})" if unit else measure


def measure_of(experiment: PaperExperiment, expectation: Expectation) -> str:
    """Return the measure of a claim."""
    return expectation.measure or next(iter(experiment.measures), "")


def keys_of(experiment: PaperExperiment, cell: PaperCell) -> dict[str, Any]:
    """Return a cell's settings, and its own hyper-parameters."""
    return {**experiment.settings, **cell.settings, **cell.set}


def paper_grid(
    experiment: PaperExperiment, others: Mapping[str, PaperExperiment] | None = None
) -> list[GridCell]:
    """Return the paper's numbers.

    Parameters
    ----------
    experiment : PaperExperiment
        Its cells; those of other tables where it derives from them.
    others : mapping, optional
        The paper's experiments by id.
    """
    if experiment.tables:
        return derived(experiment, others or {}, paper_grid)
    if not experiment.clients:
        return [
            GridCell(cell.id, keys_of(experiment, cell), _of_cell(experiment, cell.printed))
            for cell in experiment.run
        ]
    found = []
    for cell in experiment.run:
        for client in experiment.clients:
            values = {
                measure: {
                    row: {0: float(numbers[client - 1]) * points(experiment, measure)}
                    for row, numbers in rows.items()
                }
                for measure, rows in cell.clients.items()
            }
            found.append(
                GridCell(
                    f"{cell.id} client {client}", {**keys_of(experiment, cell), "client": client}, values
                )
            )
    return found


def _of_cell(
    experiment: PaperExperiment, printed: Mapping[str, Mapping[str, Printed]]
) -> dict[str, dict[str, dict[int, float]]]:
    return {
        measure: {row: {0: float(each.value) * points(experiment, measure)} for row, each in rows.items()}
        for measure, rows in printed.items()
    }


def derived(
    experiment: PaperExperiment,
    others: Mapping[str, PaperExperiment],
    grid: Callable[[PaperExperiment], list[GridCell]],
) -> list[GridCell]:
    """Return the numbers that follow from other tables, of the paper or ours.

    Parameters
    ----------
    experiment : PaperExperiment
        Of the kind ``derived``.
    others : mapping
        The paper's experiments by id.
    grid : callable
        Returns the numbers of one of them.
    """
    cells: list[GridCell] = []
    for name in experiment.tables:
        table = others[name]
        table = _with_clients(table, experiment.clients)
        for cell in grid(table):
            keys = {
                **{key: table.settings[key] for key in ("dataset",) if key in table.settings},
                **cell.keys,
            }
            cells.append(GridCell(f"{name} {cell.id}", keys, cell.values))
    return averaged(cells, experiment.mean_over)


def _with_clients(table: PaperExperiment, clients: tuple[int, ...]) -> PaperExperiment:

    return replace(table, clients=clients) if clients else table


def averaged(cells: Sequence[GridCell], over: Sequence[str]) -> list[GridCell]:
    """Return the means over cells that differ in some settings alone, by seed."""
    if not over:
        return list(cells)
    groups: dict[str, list[GridCell]] = {}
    for cell in cells:
        rest = {key: value for key, value in cell.keys.items() if key not in over}
        groups.setdefault(repr(sorted(map(repr, rest.items()))), []).append(cell)
    found = []
    for group in groups.values():
        keys = {key: value for key, value in group[0].keys.items() if key not in over}
        name = " ".join(str(keys[key]) for key in ("dataset", "client") if key in keys)
        found.append(GridCell(name or group[0].id, keys, dict(_means(group))))
    return found


def _means(group: Sequence[GridCell]) -> Iterator[tuple[str, dict[str, dict[int, float]]]]:
    for measure in group[0].values:
        rows = {}
        for row in group[0].values[measure]:
            columns = [cell.of(measure, row) for cell in group]
            seeds = set.intersection(*(set(column) for column in columns))
            rows[row] = {seed: fmean(column[seed] for column in columns) for seed in sorted(seeds)}
        yield measure, rows


def paper_agrees(
    experiment: PaperExperiment, expectation: Expectation, cells: Sequence[GridCell]
) -> tuple[int, int, tuple[str, ...]]:
    """Return how many of a claim's comparisons the paper's own numbers satisfy, of how many, and where they do not.

    Comparisons without a printed number do not count.
    """
    if expectation.kind == "text":
        return 0, 0, ()
    found = [each for each in checks(expectation, cells, measure_of(experiment, expectation)) if each.known]
    against = tuple(each.cell or each.place for each in found if not each.in_order)
    return sum(each.in_order for each in found), len(found), against
