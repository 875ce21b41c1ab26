"""An experiment of a paper, run: each of its cells is a comparison in a folder of its own.

A cell that is finished is not run again, and one that was interrupted goes on after its last complete round
(:mod:`flwr_kd.experiments.resumption`). Cells with the same settings share their runs, as do a table's figures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from flwr_kd.checks import ConfigError, DataError
from flwr_kd.experiments import comparison
from flwr_kd.experiments.comparison import Entry, Plan
from flwr_kd.experiments.experiment import Experiment
from flwr_kd.experiments.options import ExperimentOptions
from flwr_kd.experiments.papers import library, rules
from flwr_kd.experiments.papers.paper import Paper
from flwr_kd.experiments.papers.schema import PaperCell, PaperExperiment
from flwr_kd.experiments.resumption import is_there
from flwr_kd.experiments.run_form import Values, entries_of, option_values
from flwr_kd.plotting import curves, picture_file
from flwr_kd.results import files
from flwr_kd.results.schema import Comparison

__all__ = [
    "SCALES",
    "Job",
    "Reproduction",
    "default_folder",
    "finished",
    "others_of",
    "prepare",
    "results_of",
    "run",
    "stand_ins",
]

SCALES = ("paper", "small")
"""Names of ``--scale``: as in the paper, or a small version."""
_SEEDS = (0, 1, 2)


@dataclass(frozen=True)
class Job:
    """One comparison.

    Attributes
    ----------
    cells : tuple of PaperCell
        Those whose numbers it has; they have the same settings.
    options : ExperimentOptions
        Its settings.
    entries : tuple of Entry
        Its rows.
    folder : Path
        Where its result is.
    """

    cells: tuple[PaperCell, ...]
    options: ExperimentOptions
    entries: tuple[Entry, ...]
    folder: Path


@dataclass(frozen=True)
class Reproduction:
    """An experiment that is to be run.

    Attributes
    ----------
    paper : Paper
        Its paper.
    experiment : PaperExperiment
        With the values and the cells of its scale.
    whole : PaperExperiment
        As the paper has it.
    scale : str
        One of :data:`SCALES`.
    seeds : tuple of int
        Of each comparison.
    folder : Path
        Where everything is.
    jobs : tuple of Job
        What is run.
    """

    paper: Paper
    experiment: PaperExperiment
    whole: PaperExperiment
    scale: str
    seeds: tuple[int, ...]
    folder: Path
    jobs: tuple[Job, ...] = ()

    @property
    def name(self) -> str:
        """Such as ``fedhkd/table-1``."""
        return f"{self.paper.id}/{self.experiment.id}"


def default_folder(paper: str, experiment: PaperExperiment, scale: str) -> Path:
    """Return where an experiment's runs are; a figure of a table's runs has the table's."""
    return Path("runs") / "reproduce" / paper / f"{experiment.runs_of or experiment.id}-{scale}"


def prepare(
    name: str,
    *,
    only: Sequence[str] = (),
    scale: str = "paper",
    seeds: Sequence[int] = (),
    out: Path | None = None,
    settings: Values | None = None,
) -> Reproduction:
    """Return what an experiment runs.

    Parameters
    ----------
    name : str
        Such as ``fedhkd/table-1``.
    only : sequence of str
        Terms that choose cells, see :func:`flwr_kd.experiments.papers.library.chosen`; all if empty.
    scale : str
        ``"paper"`` or ``"small"``.
    seeds : sequence of int
        The file's, or 0, 1 and 2, if empty.
    out : Path, optional
        The folder; :func:`default_folder` if None.
    settings : dict, optional
        Options by field that win over the file's, such as the folder of data files.

    Raises
    ------
    ConfigError
        If there is no such experiment, scale or cell, or a value is not allowed.
    ResultError
        If the folder is a file.
    """
    if scale not in SCALES:
        raise ConfigError(f"scale must be one of {', '.join(SCALES)}, got {scale!r}")
    paper, whole = library.find(name)
    # What is computed needs no cheaper version, unless it is of data that has to be downloaded.
    small = scale == "small" and (whole.trained or whole.small is not None)
    form = rules.small_form(whole) if small else rules.taken(whole)
    cells = library.chosen(form.run, only, form.settings)
    if only and not cells:
        raise ConfigError(f"only: {library.why_none(form.run, only, form.settings)}")
    folder = out or default_folder(paper.id, whole, scale)
    files.check_free(folder, force=True)
    jobs: dict[str, Job] = {}
    if form.trained:
        for cell in cells:
            _add_job(jobs, form, cell, folder, settings or {})
    return Reproduction(
        paper=paper,
        experiment=form if len(cells) == len(form.run) else _with_cells(form, cells),
        whole=whole,
        scale=scale,
        seeds=tuple(seeds) or form.seeds or _SEEDS,
        folder=folder,
        jobs=tuple(jobs.values()),
    )


def _with_cells(form: PaperExperiment, cells: tuple[PaperCell, ...]) -> PaperExperiment:
    return replace(form, run=cells)


def _add_job(
    jobs: dict[str, Job], form: PaperExperiment, cell: PaperCell, folder: Path, settings: Values
) -> None:
    values = {**option_values({**form.settings, **cell.settings}), **settings}
    options = ExperimentOptions(**values)  # type: ignore[arg-type]
    # Its values, before any data is read.
    Experiment.from_options(options, seed=0)
    entries = entries_of(form, form.rows, cell.set)
    key = repr((options, [(entry.name, entry.model, entry.config) for entry in entries]))
    known = jobs.get(key)
    if known is None:
        jobs[key] = Job((cell,), options, entries, folder / cell.id)
    else:
        jobs[key] = Job((*known.cells, cell), options, entries, known.folder)


def run(
    reproduction: Reproduction,
    *,
    command: str = "",
    force: bool = False,
    runner: Callable[[Plan], None] = comparison.run,
    on_job: Callable[[Job], None] | None = None,
) -> dict[str, str]:
    """Run the comparisons that are not finished, and write their results and curves.

    Parameters
    ----------
    reproduction : Reproduction
        From :func:`prepare`.
    command : str
        The command line that gives the results again.
    force : bool
        Whether results in the folder are overwritten, for example those of another version.
    runner : callable
        Runs a plan, such as :func:`flwr_kd.experiments.comparison.run`.
    on_job : callable, optional
        Called before each comparison.

    Returns
    -------
    dict of str to str
        By cell, why it could not be run: its data is not there. The others are run all the same.

    Raises
    ------
    ConfigError
        If a value does not fit another.
    SimulationError
        If a server failed.
    """
    failed: dict[str, str] = {}
    for job in reproduction.jobs:
        if on_job is not None:
            on_job(job)
        try:
            plan = comparison.prepare(
                job.entries,
                job.options,
                seeds=reproduction.seeds,
                folder=job.folder,
                command=command,
                resume=is_there(job.folder) and not force,
                force=force,
            )
        except DataError as error:
            failed |= {cell.id: " ".join(str(error).split()) for cell in job.cells}
            continue
        runner(plan)
        result, file = comparison.write(plan)
        curves.plot(result, picture_file(file.parent, "curves"))
    return failed


def results_of(reproduction: Reproduction) -> dict[str, Comparison]:
    """Return the results that are there, by cell, with the runs of the reproduction's seeds."""
    found: dict[str, Comparison] = {}
    for job in reproduction.jobs:
        if (job.folder / files.FILE_NAME).exists():
            whole = files.load(job.folder)
            runs = tuple(run for run in whole.runs if run.seed in reproduction.seeds)
            if runs:
                result = whole if len(runs) == len(whole.runs) else replace(whole, runs=runs)
                found |= {cell.id: result for cell in job.cells}
    return found


def finished(reproduction: Reproduction, job: Job, result: Comparison | None) -> bool:
    """Return whether a comparison's result has all its rows with all seeds."""
    there = set() if result is None else {(run.name, run.seed) for run in result.runs}
    return there >= {(entry.name, seed) for entry in job.entries for seed in reproduction.seeds}


def stand_ins(reproduction: Reproduction) -> list[str]:
    """Return which data sets are in place of the paper's, such as ``"fashion-mnist for cifar10"``.

    Cells that stand for none of the paper's have no line.
    """
    form, whole = reproduction.experiment, reproduction.whole
    cells = {cell.id: cell for cell in whole.run}
    found: dict[str, dict[str, None]] = {}
    for cell in form.run:
        original = cells.get(cell.stands_for or cell.id)
        ours = str({**form.settings, **cell.settings}.get("dataset", ""))
        theirs = str({**whole.settings, **original.settings}.get("dataset", "")) if original else ""
        if ours and theirs and ours != theirs:
            found.setdefault(ours, {})[theirs] = None
    return [f"{ours} for {' and '.join(theirs)}" for ours, theirs in found.items()]


def others_of(reproduction: Reproduction) -> Mapping[str, PaperExperiment]:
    """Return the paper's experiments by id."""
    return {each.id: each for each in library.papers()[reproduction.paper.id][1]}
