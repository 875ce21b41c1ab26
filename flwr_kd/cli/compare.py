"""``flwr-kd simulate`` and ``flwr-kd compare``."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple, TextIO

import typer
from click.core import ParameterSource

from flwr_kd.checks import ConfigError, DataError, whole_number
from flwr_kd.cli.completion import values_of
from flwr_kd.cli.interrupts import Interrupted
from flwr_kd.cli.log import showing_log
from flwr_kd.cli.options import ARGUMENTS, RunOptions, UsageError, read_seeds, with_options
from flwr_kd.cli.table import check_format, print_tables
from flwr_kd.experiments.options import ExperimentOptions
from flwr_kd.text import clipped, plural

if TYPE_CHECKING:
    from rich.console import Console

    from flwr_kd.experiments.comparison import Entry, Plan
    from flwr_kd.experiments.resumption import Unfinished
    from flwr_kd.server.records import RoundStats
    from flwr_kd.tracking import LogChoice, RunLog

__all__ = ["compare", "run_plan", "simulate"]

_SEEDS = "0,1,2"
_WIDE, _NUMBERS = 100, 59
"""Columns that a bar beside numbers needs, and those that the numbers need: rounds, two accuracies, times."""


@with_options
def simulate(
    method: Annotated[str, typer.Argument(help=ARGUMENTS["method"], autocompletion=values_of("method"))],
    experiment: ExperimentOptions,
    options: RunOptions,
    seed: Annotated[int | None, typer.Option(help="seed of every random choice; 0 if not set")] = None,
    seeds: Annotated[
        str | None, typer.Option(help="several seeds, separated by commas: a run for each")
    ] = None,
) -> None:
    """Federate one method on one machine: progress, table, plot, JSON."""
    if seed is not None and seeds is not None:
        raise UsageError(f"give either --seed or --seeds, got --seed {seed} and --seeds {seeds}")
    if seeds is None:
        seeds = str(whole_number("seed", seed or 0, error=UsageError))
    _run_all([_Job([method], experiment, read_seeds(seeds), options.out, options.settings or ())], options)


@with_options
def compare(
    context: typer.Context,
    experiment: ExperimentOptions,
    options: RunOptions,
    methods: Annotated[
        list[str] | None, typer.Argument(help=ARGUMENTS["methods"], autocompletion=values_of("methods"))
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            help="a TOML file of methods and settings, or a result.json, which is run again; methods and options "
            "of the command line win"
        ),
    ] = None,
    seeds: Annotated[str | None, typer.Option(help="seeds separated by commas; 0,1,2 if not set")] = None,
) -> None:
    """Federate several methods on the same partitions from the same initial weights."""
    methods = methods or []
    if listed := [name for name in methods if "," in name]:
        raise UsageError(f"methods are separated by spaces, got {listed[0]!r}")
    if config is not None:
        _run_all(_jobs_of_file(config, context, methods, options, seeds), options)
        return
    if not methods:
        raise UsageError("name at least one method of `flwr-kd methods`, or a file with --config")
    job = _Job(
        methods,
        experiment,
        read_seeds(_SEEDS if seeds is None else seeds),
        options.out,
        options.settings or (),
    )
    _run_all([job], options)


class _Job(NamedTuple):
    """One comparison to run."""

    rows: Sequence[str] | Sequence[Entry]
    experiment: ExperimentOptions
    seeds: Sequence[int]
    folder: Path | None
    settings: Sequence[str] = ()


def _jobs_of_file(
    file: Path, context: typer.Context, methods: Sequence[str], options: RunOptions, seeds: str | None
) -> list[_Job]:
    from flwr_kd.experiments import run_form

    given = {
        each.name: context.params[each.name]
        for each in fields(ExperimentOptions)
        if context.get_parameter_source(each.name) is ParameterSource.COMMANDLINE
    }
    form = run_form.read_run_form(file)
    plans = run_form.planned(form, settings=given, assignments=options.settings or (), methods=methods)
    chosen = form.seeds or read_seeds(_SEEDS) if seeds is None else read_seeds(seeds)
    if seeds is not None:
        plans = [
            replace(plan, entries=tuple(replace(row, seeds=()) for row in plan.entries)) for plan in plans
        ]
    several = options.out or Path("runs") / (file.parent.name if file.suffix == ".json" else file.stem)
    return [
        _Job(
            plan.entries,
            ExperimentOptions(**plan.settings),  # type: ignore[arg-type]
            chosen,
            several / plan.id if plan.id else options.out,
        )
        for plan in plans
    ]


def _run_all(jobs: Sequence[_Job], options: RunOptions) -> None:
    from flwr_kd.experiments import resumption
    from flwr_kd.results.columns import check_columns
    from flwr_kd.tracking import chosen_logs

    if options.force and options.resume:
        raise UsageError("--force begins anew, --resume goes on: give one of them")
    check_format(options.format)
    choices = chosen_logs(options.log or ())
    columns = [] if options.columns is None else check_columns(options.columns.split(","))
    # All are checked before the first one runs.
    checked = []
    for job in jobs:
        # Where there are several comparisons, --resume starts those that an interruption left unbegun.
        begun = len(jobs) == 1 or job.folder is None or resumption.is_there(job.folder)
        resume = options.resume and begun
        checked.append((_plan(job, options, resume=resume, one_of_several=len(jobs) > 1), resume))
    target = sys.stdout
    with nullcontext() if options.format == "text" else redirect_stdout(sys.stderr):
        for plan, resume in checked:
            if len(jobs) > 1:
                print(f"{plan.unfinished.directory}:")
            plan.begin(resume=resume, force=options.force)
            _compare(plan, options, choices, columns, target)


def _plan(job: _Job, options: RunOptions, *, resume: bool, one_of_several: bool) -> Plan:
    """Return a comparison that has been checked; an error in one of several says in which."""
    from flwr_kd.experiments import comparison

    try:
        return comparison.prepare(
            job.rows,
            job.experiment,
            seeds=job.seeds,
            folder=job.folder,
            settings=job.settings,
            command=shlex.join(["flwr-kd", *sys.argv[1:]]),
            resume=resume,
            force=options.force,
            begin=False,
        )
    except (ConfigError, DataError) as error:
        if not one_of_several or job.folder is None:
            raise
        raise type(error)(f"{job.folder.name}: {error}") from None


def _compare(
    plan: Plan, options: RunOptions, choices: Sequence[LogChoice], columns: Sequence[str], target: TextIO
) -> None:
    from rich.console import Console

    from flwr_kd.experiments import comparison
    from flwr_kd.plotting import curves, picture_file

    experiment = plan.experiments[0]
    if unharmed := plan.unharmed():
        print(f"note: {experiment.attack} changes nothing of what {', '.join(unharmed)} send")
    if experiment.merge_test and not experiment.validation:
        print(
            "note: the common test set is divided among the clients (--merge-test): no global accuracy is measured"
        )
    if runs := plan.unfinished.runs:
        print(f"not run again: {', '.join(f'{run.name} (seed {run.seed})' for run in runs)}")
    for name, seed, last in plan.unfinished.interrupted():
        print(f"goes on after round {last}: {name} (seed {seed})")
    console = Console()
    with showing_log(verbose=options.verbose), _says_how_to_resume(plan.unfinished):
        logs = run_plan(plan, console, keep_arrays=not options.no_arrays, logs=choices)
        result, file = comparison.write(plan)
    picture = curves.plot(result, picture_file(file.parent, "curves"))
    print_tables(result, options.format, columns, target)
    stated = plan.privacy()
    for line in stated:
        print(f"privacy: {line}")
    if stated:
        print(
            "privacy: so it is if deployed; the noise of a simulation comes from its seed, and protects nobody"
        )
    print(f"result: {file.resolve()}")
    print(f"curves: {picture.resolve()}")
    for tracker in logs:
        print(f"log: {tracker.place}")


def run_plan(
    plan: Plan, console: Console, *, keep_arrays: bool, logs: Sequence[LogChoice] = ()
) -> list[RunLog]:
    """Run a comparison with a bar over the rounds of all its runs: accuracy so far, time so far and time left.

    Returns the trackers that were written, of those in ``logs``.
    """
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    from flwr_kd.experiments import comparison
    from flwr_kd.experiments.experiment import Experiment
    from flwr_kd.server.callbacks import Callback
    from flwr_kd.tracking import accuracies, open_logs

    # On 80 columns there is no room for a bar beside the numbers, which would be cut.
    wide = console.width >= _WIDE
    room = max(8, console.width - (_NUMBERS + 16 + len("rounds") + 2 if wide else _NUMBERS))
    columns = (
        TextColumn("{task.description}"),
        *([BarColumn(bar_width=16)] if wide else []),
        MofNCompleteColumn(),
        *([TextColumn("rounds")] if wide else []),
        TextColumn("{task.fields[accuracy]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )

    class Bar(Callback):
        def on_round(self, stats: RoundStats) -> None:
            progress.update(bar, advance=1, accuracy=accuracies(stats))

    opened = open_logs(logs, plan.unfinished.directory)
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("", total=plan.rounds, accuracy="")

        def begin(entry: comparison.Entry, experiment: Experiment, done: int) -> None:
            seed = f", seed {experiment.seed}"
            name = clipped(entry.name, room - len(seed))
            progress.update(bar, description=name + seed, accuracy="")
            if done:
                # Rounds that took no time now must not make the time left look short.
                progress.reset(bar, completed=int(progress.tasks[0].completed) + done)

        comparison.run(plan, keep_arrays=keep_arrays, on_run=begin, callbacks=[Bar(), *opened])
    return opened


@contextmanager
def _says_how_to_resume(unfinished: Unfinished) -> Iterator[None]:
    """Keep what is done of a comparison that ends early, and say how to resume it; remove what has nothing."""
    try:
        yield
    except BaseException as error:
        kept = _kept(unfinished)
        if not kept:
            unfinished.remove()
        if isinstance(error, KeyboardInterrupt):
            raise Interrupted(
                f"interrupted; {kept or 'no round was complete, and nothing is kept'}"
            ) from None
        if kept:
            print(kept)
        raise


def _kept(unfinished: Unfinished) -> str:
    """Say what is done of a comparison, and how to go on; nothing if no round is."""
    count = len(unfinished.runs)
    parts = [plural(count, "finished run")] if count else []
    parts += [f"{name} (seed {seed}) up to round {last}" for name, seed, last in unfinished.interrupted()]
    if not parts:
        return ""
    return (
        f"{' and '.join(parts)} kept in {str(unfinished.directory)!r}: the same command with --resume goes on"
    )
