"""The experiments of all registered methods: found, read and checked."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from flwr_kd import registry
from flwr_kd.checks import ConfigError
from flwr_kd.experiments.papers.paper import Paper
from flwr_kd.experiments.papers.rules import check
from flwr_kd.experiments.papers.schema import PaperCell, PaperExperiment
from flwr_kd.experiments.run_form import Named
from flwr_kd.experiments.strict_toml import Value, build, read_toml
from flwr_kd.text import unknown_name

__all__ = [
    "FOLDER",
    "PAPER",
    "chosen",
    "every",
    "find",
    "folders",
    "papers",
    "read_file",
    "read_folder",
    "why_none",
]

FOLDER = "experiments"
"""Name of the folder inside a method's."""
PAPER = "paper.toml"
"""Name of the file of a paper's settings in a method's folder."""


def folders() -> list[Path]:
    """Return the folders of experiments beside the registered methods, each once, by the methods' names."""
    found = dict.fromkeys(_beside(method.strategy_path) for method in registry.methods().values())
    return [folder for folder in found if folder is not None and (folder / PAPER).is_file()]


def _beside(path: str) -> Path | None:
    """Return ``experiments/`` in the package that a method's class is in."""
    module = path.partition(":")[0]
    spec = importlib.util.find_spec(module.rpartition(".")[0] or module)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations))) / FOLDER


def read_folder(folder: Path) -> tuple[Paper, tuple[PaperExperiment, ...]]:
    """Read a folder of experiments.

    Raises
    ------
    ConfigError
        If a file is malformed, or names what does not exist.
    """
    paper = build(Paper, read_toml(folder / PAPER), str(folder / PAPER))
    files = [file for file in sorted(folder.glob("*.toml"), key=_order) if file.name != PAPER]
    read = {file.stem: _read(file, paper.id) for file in files}
    for each in read.values():
        for other in (*([each.runs_of] if each.runs_of else []), *each.tables):
            if other not in read:
                where = f"{folder / each.id}.toml: experiment {paper.id}/{each.id}"
                raise ConfigError(f"{where}: {unknown_name('experiment', other, read)}")
    experiments = tuple(_with_controls(_with_runs(each, read), paper, folder) for each in read.values())
    for each in experiments:
        check(each, f"{folder / each.id}.toml: experiment {paper.id}/{each.id}")
    return paper, experiments


def read_file(file: Path) -> PaperExperiment:
    """Read one experiment's file, with those of its folder that it refers to; see :func:`read_folder`."""
    _, experiments = read_folder(file.parent)
    return next(each for each in experiments if each.id == file.stem)


def _order(file: Path) -> tuple[bool, str, int]:
    """Return tables first, then figures, each by its number."""
    kind, _, number = file.stem.partition("-")
    return not kind.startswith("table"), kind, int(number) if number.isdigit() else 0


def _read(file: Path, paper: str) -> PaperExperiment:
    where = f"{file}: experiment {paper}/{file.stem}"
    experiment = build(PaperExperiment, read_toml(file), where)
    if experiment.id != file.stem:
        raise ConfigError(f"{where}: id must be {file.stem!r}, the file's name, got {experiment.id!r}")
    return experiment


def _with_runs(experiment: PaperExperiment, others: Mapping[str, PaperExperiment]) -> PaperExperiment:
    """Return an experiment that shows another's runs with these runs."""
    if not experiment.runs_of:
        return experiment
    source = others[experiment.runs_of]
    cells, small = chosen(source.run, experiment.only, source.settings), source.small
    if small is not None and small.run:
        own = {cell.id for cell in cells}
        like = {cell.id for cell in chosen(small.run, experiment.only, source.settings)}
        kept = tuple(
            each for each in small.run if each.stands_for in own or (not each.stands_for and each.id in like)
        )
        small = replace(small, run=kept)
    return replace(
        experiment,
        methods=experiment.methods or source.methods,
        settings=source.settings,
        hyperparameters=source.hyperparameters,
        named=source.named,
        controls=source.controls,
        inferred=source.inferred,
        run=cells,
        small=experiment.small or small,
    )


def _with_controls(experiment: PaperExperiment, paper: Paper, folder: Path) -> PaperExperiment:
    """Return an experiment with the controls that it names: named rows of its own, or else the paper's."""
    where = f"{folder / experiment.id}.toml: experiment {paper.id}/{experiment.id}"
    known: dict[str, Named] = {**paper.controls, **experiment.named}
    for name in experiment.controls:
        if name not in known:
            raise ConfigError(f"{where}: controls: {unknown_name('control', name, known)}")
        if name in experiment.methods:
            raise ConfigError(f"{where}: controls: {name!r} is a row of methods already")
    return replace(
        experiment, named={**experiment.named, **{name: known[name] for name in experiment.controls}}
    )


def chosen(
    cells: tuple[PaperCell, ...], terms: Sequence[str], settings: Mapping[str, Value]
) -> tuple[PaperCell, ...]:
    """Return the cells that all of some terms name.

    Parameters
    ----------
    cells : tuple of PaperCell
        Of an experiment.
    terms : sequence of str
        ``name=value`` of a setting or a hyper-parameter, or a word: a cell's id, a value of one of its settings, or
        the name of one of its own hyper-parameters.
    settings : mapping
        The experiment's own, which cells have where they say nothing else.
    """
    return tuple(cell for cell in cells if all(_named(cell, term, settings) for term in terms))


def why_none(cells: tuple[PaperCell, ...], terms: Sequence[str], settings: Mapping[str, Value]) -> str:
    """Say which of the terms no cell has, and what there is."""
    known: dict[str, dict[str, None]] = {}
    for cell in cells:
        for name, value in {**settings, **cell.own}.items():
            known.setdefault(name, {})[str(value)] = None
    for term in terms:
        name, sign, value = term.partition("=")
        if sign and name not in known:
            return unknown_name("setting of a cell", name, sorted(known))
        if sign and value not in known[name]:
            return f"{name} must be {' or '.join(known[name])}, got {value!r}"
    ids = ", ".join(cell.id for cell in cells)
    return f"no cell has {'all of ' if len(terms) > 1 else ''}{', '.join(terms)}; there are {ids}"


def _named(cell: PaperCell, term: str, settings: Mapping[str, Value]) -> bool:
    own = cell.own
    name, sign, value = term.partition("=")
    if sign:
        return str({**settings, **own}.get(name)) == value
    return term in (cell.id, *cell.set, *map(str, own.values()))


@functools.lru_cache(maxsize=1)
def papers() -> dict[str, tuple[Paper, tuple[PaperExperiment, ...]]]:
    """Return all papers with experiments, by id."""
    found: dict[str, tuple[Paper, tuple[PaperExperiment, ...]]] = {}
    for folder in folders():
        paper, experiments = read_folder(folder)
        if paper.id in found:
            raise ConfigError(
                f"{folder / PAPER}: id {paper.id!r} is that of another paper, {found[paper.id][0].title!r}"
            )
        found[paper.id] = paper, experiments
    return found


def find(name: str) -> tuple[Paper, PaperExperiment]:
    """Return an experiment by its name, such as ``fedhkd/table-1``.

    Raises
    ------
    ConfigError
        If there is none.
    """
    known = {f"{paper.id}/{each.id}": (paper, each) for paper, each in every()}
    if name not in known:
        raise ConfigError(unknown_name("experiment", name, known))
    return known[name]


def every() -> Iterator[tuple[Paper, PaperExperiment]]:
    """Yield all experiments with their papers."""
    for paper, experiments in papers().values():
        for experiment in experiments:
            yield paper, experiment
