"""``flwr-kd reproduce``: the papers' tables and figures, listed and run."""

from __future__ import annotations

import shlex
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flwr_kd.cli.help import columns, rows_of_width
from flwr_kd.cli.interrupts import Interrupted
from flwr_kd.cli.log import showing_log
from flwr_kd.cli.options import ARGUMENTS, LOG, UsageError, read_seeds, with_options
from flwr_kd.experiments.options import option

if TYPE_CHECKING:
    from flwr_kd.experiments.comparison import Plan
    from flwr_kd.experiments.papers.paper import Paper
    from flwr_kd.experiments.papers.reproduction import Reproduction
    from flwr_kd.experiments.papers.schema import PaperExperiment
    from flwr_kd.experiments.run_form import Values
    from flwr_kd.tracking import LogChoice

__all__ = ["ReproduceOptions", "reproduce"]

_WIDEST = 120
_LEGEND = """\
data: + there, – not there. Steps of SGD in local training and their time: all cells, methods and 3 seeds, on one
core, from a few timed steps of each model: right within a factor of two or so."""
_SEEDS = 3
_SETTINGS = ("target", "measure", "data_dir", "workers", "device", "backend")
_OF_ONE = ("only", "dry_run", "seeds", "out", "force")
_UNITS = (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1))


@dataclass(frozen=True, kw_only=True)
class ReproduceOptions:
    """Options of `reproduce`."""

    only: str | None = option(
        None, "cells to run, by words and NAME=VALUE that they all have, such as cifar10,clients=10"
    )
    scale: str = option(
        "paper", "paper, or small: the same methods and measures on data that needs no download"
    )
    dry_run: bool = option(False, "say what would run, and run nothing")
    seeds: str | None = option(None, "seeds separated by commas; the experiment's, or 0,1,2, if not set")
    out: Path | None = option(
        None, "folder of results and page; runs/reproduce/PAPER/EXPERIMENT-SCALE if not set"
    )
    target: str | None = option(
        None,
        "accuracy to which rounds, bytes and seconds are counted: PERCENT of the local accuracy, or NAME:PERCENT; "
        "nine tenths of what the first row ends with if not set",
    )
    measure: str | None = option(
        None,
        "after which rounds clients also measure their models on the common test set: never, last or every:N; the "
        "experiment's if not set",
    )
    data_dir: str | None = option(None, "folder of data files")
    workers: int | None = option(None, "number of clients that run at the same time; 2 if not set")
    device: str | None = option(None, "auto, cpu or cuda; auto if not set")
    backend: str | None = option(None, "auto, processes, inline or ray; auto if not set")
    log: list[str] | None = option(None, LOG)
    force: bool = option(False, "overwrite results, for example those of another version")
    verbose: bool = option(False, "show Flower's log")


@with_options
def reproduce(
    options: ReproduceOptions,
    experiment: Annotated[
        str | None, typer.Argument(metavar="[EXPERIMENT]", help=ARGUMENTS["experiment"])
    ] = None,
) -> None:
    """List the papers' tables and figures, or run one: ours beside the printed numbers, a verdict per claim."""
    if experiment is None:
        if useless := [name for name in _OF_ONE if getattr(options, name) not in (None, False)]:
            name = useless[0].replace("_", "-")
            raise UsageError(f"--{name} is for one experiment: name it, such as fedhkd/table-1")
        _list(options.data_dir)
        return
    from flwr_kd.experiments.papers import reproduction
    from flwr_kd.tracking import chosen_logs

    logs = chosen_logs(options.log or ())
    given = {name: getattr(options, name) for name in _SETTINGS}
    settings = {name: value for name, value in given.items() if value is not None}
    only = None if options.only is None else [_without_spaces(term) for term in options.only.split(",")]
    if only is not None and not all(only):
        raise UsageError(f"--only must be words and NAME=VALUE separated by commas, got {options.only!r}")
    chosen = reproduction.prepare(
        experiment,
        only=only or (),
        scale=options.scale,
        seeds=() if options.seeds is None else read_seeds(options.seeds),
        out=options.out,
        settings=settings,
    )
    if options.dry_run:
        _say(chosen, options.data_dir)
        return
    _run(chosen, settings, logs, force=options.force, verbose=options.verbose)


def _without_spaces(term: str) -> str:
    """Return a term of --only without the spaces around it and around its =."""
    return "=".join(part.strip() for part in term.split("="))


def _run(
    chosen: Reproduction, settings: Values, logs: Sequence[LogChoice], *, force: bool, verbose: bool
) -> None:
    from rich.console import Console

    from flwr_kd.cli.compare import run_plan
    from flwr_kd.experiments.papers import report, reproduction

    console, command = Console(), shlex.join(["flwr-kd", *sys.argv[1:]])
    for line in reproduction.stand_ins(chosen):
        print(f"stand-in: {line}")
    places: dict[str, None] = {}

    def run(plan: Plan) -> None:
        keep_arrays = chosen.experiment.kind == "picture"
        trackers = run_plan(plan, console, keep_arrays=keep_arrays, logs=logs)
        places.update(dict.fromkeys(tracker.place for tracker in trackers))

    with showing_log(verbose=verbose):
        try:
            failed = reproduction.run(
                chosen,
                command=command,
                force=force,
                runner=run,
                on_job=lambda job: print(f"{', '.join(cell.id for cell in job.cells)}: {job.folder}"),
            )
        except KeyboardInterrupt:
            where = str(chosen.folder)
            raise Interrupted(f"interrupted; the same command goes on with what is in {where!r}") from None
    made = report.report(chosen, failed=failed, settings=settings, command=command)
    for reason in dict.fromkeys(made.not_run.values()):
        cells = ", ".join(cell for cell, why in made.not_run.items() if why == reason)
        print(f"not run: {cells}: {reason}")
    if made.not_run and not made.grid and not made.class_counts:
        hint = "; --scale small has other data" if chosen.scale == "paper" and chosen.whole.small else ""
        raise UsageError(f"no cell of {chosen.name} could be run, for what is said above{hint}")
    for each in made.ruled:
        print(f"{each.found.verdict.value}: {each.expectation.claim}")
    if made.at_chance:
        print(f"note: {report.little_learnt(made.at_chance)}")
    for text in made.contradictions:
        print(f"the paper's own numbers: {text}")
    page, picture = report.write(made), report.draw(made)
    print(f"page: {page.resolve()}")
    if picture is not None:
        print(f"plot: {picture.resolve()}")
    for drawn in report.draw_clients(made):
        print(f"plot: {drawn.resolve()}")
    for place in places:
        print(f"log: {place}")
    _draw(chosen)


def _draw(chosen: Reproduction) -> None:
    """Draw the pictures that an experiment is about, such as t-SNE or the loss around the global models."""
    from flwr_kd.cli.plot import plot_landscape, plot_tsne
    from flwr_kd.cli.plot_results import plot_optimum
    from flwr_kd.experiments.resumption import is_there

    drawing: dict[str, Callable[..., None]] = {
        "tsne": plot_tsne,
        "landscape": plot_landscape,
        "distance_to_last": plot_optimum,
    }
    for measure in chosen.experiment.measures.values():
        for job in chosen.jobs:
            if measure.name in drawing and is_there(job.folder):
                drawing[measure.name](job.folder)


def _say(chosen: Reproduction, data_dir: str | None) -> None:
    """Print what would run."""
    from flwr_kd.experiments.papers import estimate, reproduction

    form = chosen.experiment
    print(f"{chosen.name}, {chosen.scale}: {form.title}")
    for line in reproduction.stand_ins(chosen):
        print(f"  stand-in: {line}")
    if chosen.scale == "small" and form.small is not None:
        print(f"  {form.small.note}")
    print(f"  folder {chosen.folder}, seeds {', '.join(map(str, chosen.seeds))}")
    for cell in form.run if not chosen.jobs else ():
        print(f"{cell.id}: computed; {', '.join(f'{name}={value}' for name, value in cell.own.items())}")
    there = reproduction.results_of(chosen)
    for job in chosen.jobs:
        result = there.get(job.cells[0].id)
        if reproduction.finished(chosen, job, result):
            left = "finished"
        else:
            cost = estimate.cost_of(form, job.cells[:1], len(chosen.seeds))
            left = f"{_short(cost.steps)} steps, {_duration(cost.seconds)}"
        print(f"{', '.join(cell.id for cell in job.cells)}: {left}")
        values = {**form.settings, **job.cells[0].settings}
        print(f"  {', '.join(f'{name}={value}' for name, value in values.items())}")
        for entry in job.entries:
            base = entry.method.config().to_wire()
            other = {name: value for name, value in entry.config.to_wire().items() if base[name] != value}
            print(
                f"  {entry.name}: {', '.join(f'{name}={value}' for name, value in other.items()) or 'defaults'}"
            )
    print(f"data: {' '.join(_data(form, data_dir)) or 'none'}; + there, – not there")


def _list(data_dir: str | None) -> None:
    from flwr_kd.experiments.papers import library

    width = min(columns(), _WIDEST)
    for paper, experiments in library.papers().values():
        print(f"{paper.title}\n  {paper.authors}{f'; {paper.venue}' if paper.venue else ''}")
        rows = [_row(paper, each, data_dir) for each in experiments]
        for line, each in zip(rows_of_width(rows, columns()), experiments, strict=True):
            print(f"  {line}")
            print(textwrap.fill(each.claim, width, initial_indent=" " * 6, subsequent_indent=" " * 6))
        print()
    print(_LEGEND)


def _row(paper: Paper, experiment: PaperExperiment, data_dir: str | None) -> tuple[str, ...]:
    name = f"{paper.id}/{experiment.id}"
    data = " ".join(_data(experiment, data_dir)) or "no data"
    if not experiment.trained:
        return name, experiment.kind, data, "computed", ""
    from flwr_kd.experiments.papers import estimate, rules

    whole = rules.taken(experiment)
    cost = estimate.cost_of(whole, whole.run, _SEEDS)
    parts = [name, experiment.kind, data, f"{_short(cost.steps)} steps, {_duration(cost.seconds)}"]
    if experiment.small is not None:
        small = rules.small_form(experiment)
        cheap = estimate.cost_of(small, small.run, len(small.seeds) or _SEEDS)
        return (*parts, f"small: {_short(cheap.steps)}, {_duration(cheap.seconds)}")
    return (*parts, "")


def _data(experiment: PaperExperiment, data_dir: str | None) -> Iterator[str]:
    from flwr_kd.data.presence import data_is_there
    from flwr_kd.experiments.papers import estimate

    for name in estimate.data_of(experiment):
        yield f"{'+' if data_is_there(name, data_dir) else '–'}{name}"


def _short(count: int) -> str:
    """Write a number with two digits.

    >>> [_short(count) for count in (7, 1_234, 56_789_000)]
    ['7', '1.2 k', '57 M']
    """
    for unit, size in (("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if count >= size:
            return f"{count / size:.2g} {unit}" if count < 100 * size else f"{count / size:.0f} {unit}"
    return str(count)


def _duration(seconds: float | None) -> str:
    """Write a time in its largest unit.

    >>> _duration(90), _duration(40_000), _duration(None)
    ('1.5 min', '11 h', 'time not known')
    """
    if seconds is None:
        return "time not known"
    for unit, size in _UNITS:
        if seconds >= size:
            return f"{seconds / size:.2g} {unit}" if seconds < 100 * size else f"{seconds / size:.0f} {unit}"
    return f"{seconds:.1g} s"
