"""``flwr-kd reproduce``: the papers' tables and figures, listed and run."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from flwr_kd.cli.help import columns, rows_of_width
from flwr_kd.cli.options import ARGUMENTS

if TYPE_CHECKING:
    from flwr_kd.experiments.papers.schema import Paper, PaperExperiment

__all__ = ["reproduce"]

_WIDEST = 120
_LEGEND = """\
data: + there, – not there. Steps of SGD in local training and their time: all cells, methods and 3 seeds, on one
core, from a few timed steps of each model. What a method does besides is not in it."""
_SEEDS = 3
_UNITS = (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1))


def reproduce(
    experiment: Annotated[
        str | None, typer.Argument(metavar="[EXPERIMENT]", help=ARGUMENTS["experiment"])
    ] = None,
    data_dir: Annotated[str | None, typer.Option(help="folder of data files")] = None,
) -> None:
    """List the papers' tables and figures, or run one: ours beside the printed number, and a verdict per claim."""
    _list(data_dir)


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
