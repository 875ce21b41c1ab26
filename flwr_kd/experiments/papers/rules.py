"""Checks of an experiment's file beyond its form: names of methods, options, data sets, measures and rows exist."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from decimal import Decimal

from flwr_kd import catalogue
from flwr_kd.checks import ConfigError, DataError
from flwr_kd.experiments.experiment import Experiment
from flwr_kd.experiments.options import ExperimentOptions
from flwr_kd.experiments.papers.measures import MEASURES
from flwr_kd.experiments.papers.printed import keys_of
from flwr_kd.experiments.papers.schema import Expectation, PaperCell, PaperExperiment, Printed
from flwr_kd.experiments.run_form import Values, entries_of, option_values
from flwr_kd.text import unknown_name

__all__ = ["check", "small_form", "taken"]


def taken(experiment: PaperExperiment) -> PaperExperiment:
    """Return the experiment with inferred values where the paper prints none."""
    settings: Values = {}
    hyperparameters: dict[str, Values] = {}
    for inferred in experiment.inferred:
        if inferred.taken:
            settings |= inferred.settings
            _add(hyperparameters, inferred.hyperparameters)
    _add(hyperparameters, experiment.hyperparameters)
    return replace(
        experiment, settings={**settings, **experiment.settings}, hyperparameters=hyperparameters, inferred=()
    )


def small_form(experiment: PaperExperiment) -> PaperExperiment:
    """Return the cheaper version of an experiment, in the form of the experiment.

    Raises
    ------
    ConfigError
        If it has none.
    """
    small = experiment.small
    if small is None:
        raise ConfigError(f"{experiment.id} has no small version: leave --scale out")
    whole = taken(experiment)
    hyperparameters = {name: dict(values) for name, values in whole.hyperparameters.items()}
    _add(hyperparameters, small.hyperparameters)
    return replace(
        whole,
        settings={**whole.settings, **small.settings},
        hyperparameters=hyperparameters,
        named={**whole.named, **small.named},
        methods=small.methods or whole.methods,
        run=small.run or whole.run,
        cost=(),
    )


def _add(values: dict[str, Values], more: Mapping[str, Values]) -> None:
    for name, each in more.items():
        values[name] = {**values.get(name, {}), **each}


def check(experiment: PaperExperiment, where: str) -> None:
    """Check an experiment.

    Raises
    ------
    ConfigError
        If it names what does not exist, or has a value that is not allowed; the text begins with ``where``.
    """
    for name in ("title", "claim", "source"):
        if not getattr(experiment, name).strip():
            raise ConfigError(f"{where}: {name} must not be empty")
    _unique(experiment.run, f"{where}: run")
    for measure in (name for each in experiment.measures.values() for name in (each.name, *each.of.values())):
        if measure not in MEASURES:
            raise ConfigError(f"{where}: measures: {unknown_name('measure', measure, MEASURES)}")
    if experiment.trained:
        _check_runs(taken(experiment), where)
    if experiment.small is not None:
        _unique(experiment.small.run, f"{where}: small.run")
        if experiment.trained:
            _check_runs(small_form(experiment), f"{where}: small")
        for cell in experiment.small.run:
            if cell.stands_for and cell.stands_for not in {each.id for each in experiment.run}:
                raise ConfigError(f"{where}: small.run.{cell.id}: no cell {cell.stands_for!r} to stand for")
    _check_printed(experiment, where)
    for index, expectation in enumerate(experiment.expect):
        _check_expectation(experiment, expectation, f"{where}: expect[{index + 1}]")


def _unique(cells: Iterable[PaperCell], where: str) -> None:
    seen: set[str] = set()
    for cell in cells:
        if cell.id in seen:
            raise ConfigError(f"{where}: two cells have the id {cell.id!r}")
        seen.add(cell.id)


def _check_runs(form: PaperExperiment, where: str) -> None:
    if not form.methods:
        raise ConfigError(f"{where}: methods is missing")
    cells = form.run or (PaperCell(id="all"),)
    try:
        for cell in cells:
            options = option_values({**form.settings, **cell.settings})
            for name in ("dataset", "public"):
                _check_data_set(options.get(name))
            _check_options(ExperimentOptions(**options))  # type: ignore[arg-type]
            entries_of(form, form.rows, cell.set)
    except ConfigError as error:
        raise ConfigError(f"{where}: {cell.id}: {error}") from None


def _check_options(options: ExperimentOptions) -> None:
    """Check the range of each option; whether there is data is another question."""
    with suppress(DataError):
        Experiment.from_options(options, 0)


def _check_data_set(name: object) -> None:
    if name is not None and not (name in catalogue.DATASETS or str(name).startswith(("csv:", "hf:"))):
        raise ConfigError(unknown_name("data set", str(name), catalogue.DATASETS))


def _check_printed(experiment: PaperExperiment, where: str) -> None:
    for cell in experiment.run:
        for what, tables in (("printed", cell.printed), ("clients", cell.clients)):
            for measure, rows in tables.items():
                place = f"{where}: run.{cell.id}.{what}.{measure}"
                if experiment.measures and measure not in experiment.measures:
                    raise ConfigError(f"{place}: {unknown_name('measure', measure, experiment.measures)}")
                if experiment.trained:
                    _check_rows(experiment, rows, place)
                    _check_numbers(experiment, measure, rows, place)


def _check_numbers(
    experiment: PaperExperiment,
    measure: str,
    rows: Mapping[str, Printed | tuple[Decimal, ...]],
    where: str,
) -> None:
    """Refuse an accuracy that is none in the experiment's unit, such as 63.4 as a fraction."""
    named = experiment.measures.get(measure)
    if named is None or not MEASURES[named.name].accuracy:
        return
    most = 1 if experiment.unit == "fraction" else 100
    for row, printed in rows.items():
        for value in (printed.value,) if isinstance(printed, Printed) else printed:
            if not 0 <= value <= most:
                raise ConfigError(
                    f"{where}.{row} must be from 0 to {most}, since unit is {experiment.unit!r}, got {value}"
                )


def _check_rows(experiment: PaperExperiment, rows: Iterable[str], where: str) -> None:
    for row in rows:
        if row not in experiment.methods:
            raise ConfigError(f"{where}: {unknown_name('row', row, experiment.methods)}")


def _check_expectation(experiment: PaperExperiment, expectation: Expectation, where: str) -> None:
    if expectation.measure and expectation.measure not in experiment.measures:
        raise ConfigError(f"{where}: {unknown_name('measure', expectation.measure, experiment.measures)}")
    if expectation.kind != "text" and not expectation.measure and len(experiment.measures) != 1:
        raise ConfigError(f"{where}: measure is missing, one of {', '.join(experiment.measures)}")
    names = (expectation.methods, expectation.among, expectation.left, expectation.right, expectation.order)
    if experiment.methods:
        _check_rows(experiment, (row for each in names for row in each), where)
    if experiment.run:
        known = {key for cell in experiment.run for key in keys_of(experiment, cell)}
        for key in _keys(expectation):
            if key not in known:
                raise ConfigError(f"{where}: {unknown_name('setting of a cell', key, sorted(known))}")
    if not expectation.claim.strip():
        raise ConfigError(f"{where}: claim must not be empty")
    for name in ("agrees", "clients"):
        text = getattr(expectation.paper, name)
        if text and not re.fullmatch(r"\d+ of \d+", text):
            raise ConfigError(f"{where}: paper.{name} must be like '8 of 9', got {text!r}")
    for cell in expectation.paper.not_in:
        if cell not in {each.id for each in experiment.run}:
            raise ConfigError(f"{where}: paper.not-in: no cell {cell!r}")


def _keys(expectation: Expectation) -> Iterator[str]:
    yield from expectation.where
    yield from (key for key in (expectation.along, expectation.key) if key)
