"""``flwr-kd plot``: pictures of one or several results, and of a division of data without a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flwr_kd.checks import whole_number
from flwr_kd.cli.help import Command
from flwr_kd.cli.options import ARGUMENTS, ResultDir, UsageError, with_options
from flwr_kd.cli.plot import PlotSeed, plots
from flwr_kd.experiments.options import DataOptions, ExperimentOptions, option

if TYPE_CHECKING:
    from flwr_kd.results.schema import Comparison

__all__ = [
    "DivisionOptions",
    "plot_classes",
    "plot_clients",
    "plot_communication",
    "plot_optimum",
    "plot_partition",
    "plot_sweep",
    "plots",
]

_ONE = ExperimentOptions()
ResultDirs = Annotated[
    list[Path],
    typer.Argument(
        metavar="RESULT_DIR...",
        help=ARGUMENTS["result_dirs"],
    ),
]
PlotOut = Annotated[
    Path | None,
    typer.Option(help="the PNG; in the first RESULT_DIR, named like the plot, if not set"),
]
Dots = Annotated[bool, typer.Option("--dots", help="numbers of samples as areas of dots, not as colours")]


@dataclass(frozen=True, kw_only=True)
class DivisionOptions(DataOptions):
    """Which samples there are, and how they are divided among the clients."""

    partition: list[str] | None = option(
        None,
        "how the data is divided: a form of `flwr-kd partitions`; repeatable, a panel for each; "
        f"{_ONE.partition} if not set",
    )
    clients: int = option(_ONE.clients, "number of clients")
    client_samples: int | None = option(
        None, "number of samples that a client trains on, beside its test split; sets --limit"
    )
    seed: int = option(0, "seed of the division")


@plots.command("classes", cls=Command)
def plot_classes(
    result_dirs: ResultDirs, dots: Dots = False, seed: PlotSeed = None, out: PlotOut = None
) -> None:
    """Draw how many samples of each class each client has, a panel for each result."""
    from flwr_kd.plotting import classes
    from flwr_kd.plotting.style import heading, shared_config
    from flwr_kd.results.errors import ResultError

    results = read_results(result_dirs)
    config = shared_config(results.values())
    panels, seeds, names = {}, set(), set()
    for folder, comparison in results.items():
        run = next(iter(comparison.one_each(seed).values()))
        if not run.histogram:
            raise ResultError(
                f"{folder!r} has no numbers of samples per client and class: a deployment has them only if the "
                "node config of every SuperNode has share-histogram=true"
            )
        # One run is drawn, whatever other seeds its result has.
        panels[name_of(folder, comparison, {**config, "seeds": None})] = run.histogram
        seeds.add(run.seed)
        names.add(tuple(run.class_names))
    title = heading({name: config[name] for name in config if name not in ("rounds", "model")}, sorted(seeds))
    # Results of different classes have numbers.
    shared = names.pop() if len(names) == 1 else ()
    target = target_of(result_dirs, out, "classes")
    picture = classes.plot(panels, target, title=title, dots=dots, class_names=shared)
    print(f"classes: {picture.resolve()}")


@plots.command("partition", cls=Command)
@with_options
def plot_partition(
    options: DivisionOptions,
    out: Annotated[Path, typer.Option(help="the PNG")] = Path("partition.png"),
    dots: Dots = False,
) -> None:
    """Draw how data would be divided among clients: as `plot classes`, but without a run."""
    from dataclasses import asdict

    from flwr_kd.data import histogram
    from flwr_kd.experiments.data import bundle_of, client_splits
    from flwr_kd.experiments.experiment import Experiment
    from flwr_kd.plotting import classes
    from flwr_kd.plotting.style import heading

    check_file(out)
    whole_number("seed", options.seed, error=UsageError)
    values, panels = asdict(options), {}
    for spec in dict.fromkeys(options.partition or [_ONE.partition]):
        experiment = Experiment(**{**values, "partition": spec}, device="cpu")
        bundle, splits = bundle_of(experiment), client_splits(experiment)
        panels[spec] = histogram(bundle.train.y, [train for train, _ in splits], bundle.num_classes)
    title = heading({**values, "partition": None}, [options.seed])
    picture = classes.plot(panels, out, title=title, dots=dots, class_names=bundle.class_names)
    print(f"partition: {picture.resolve()}")


@plots.command("sweep", cls=Command)
def plot_sweep(
    result_dirs: ResultDirs,
    along: Annotated[
        str | None, typer.Option(help="the setting on the axis; the one that varies if not set")
    ] = None,
    metric: Annotated[
        str | None,
        typer.Option(
            help="global_accuracy, local_accuracy, server_accuracy or local_top5; the first that there is"
        ),
    ] = None,
    out: PlotOut = None,
) -> None:
    """Draw accuracy against a setting in which results, or runs of a method, differ."""
    from flwr_kd.plotting import sweep

    target = target_of(result_dirs, out, "sweep")
    picture = sweep.plot(list(read_results(result_dirs).values()), target, along=along, metric=metric)
    print(f"sweep: {picture.resolve()}")


@plots.command("clients", cls=Command)
def plot_clients(
    result_dirs: ResultDirs,
    metric: Annotated[
        str, typer.Option(help="what is kept of each client: local_accuracy, local_top5 and the like")
    ] = "local_accuracy",
    by_model: Annotated[
        bool, typer.Option("--by-model", help="a bar for each model of the clients, not for each client")
    ] = False,
    out: PlotOut = None,
) -> None:
    """Draw a bar for each client and method; results of one data set are averaged, others are panels."""
    from flwr_kd.plotting import clients

    results = list(read_results(result_dirs).values())
    picture = clients.plot(results, target_of(result_dirs, out, "clients"), metric=metric, by_model=by_model)
    print(f"clients: {picture.resolve()}")


@plots.command("communication", cls=Command)
def plot_communication(result_dirs: ResultDirs, out: PlotOut = None) -> None:
    """Draw the bytes that each method's clients send and are sent, a panel for each result."""
    from flwr_kd.plotting import communication

    results = list(read_results(result_dirs).values())
    picture = communication.plot(results, target_of(result_dirs, out, "communication"))
    print(f"communication: {picture.resolve()}")


@plots.command("optimum", cls=Command)
def plot_optimum(result_dir: ResultDir, out: PlotOut = None) -> None:
    """Draw how far the global models are from those that the runs ended with (of `compare --distances`)."""
    from flwr_kd.plotting import optimum

    results = read_results([result_dir])
    if len(results) > 1:
        raise UsageError(f"name one result, got {len(results)} in {str(result_dir)!r}")
    (comparison,) = results.values()
    picture = optimum.plot(comparison, target_of([result_dir], out, "optimum"))
    print(f"optimum: {picture.resolve()}")


def read_results(directories: Sequence[Path]) -> dict[str, Comparison]:
    """Return the results in folders, or in the folders inside them, by folder."""
    from flwr_kd.results import files

    found: dict[str, Comparison] = {}
    for directory in directories:
        if not directory.is_dir():
            raise UsageError(f"no folder {str(directory)!r}: name that of a result")
        inside = [directory] if (directory / files.FILE_NAME).exists() else _folders_inside(directory)
        if not inside:
            raise UsageError(
                f"no result in {str(directory)!r}: there is no {files.FILE_NAME}, nor in its folders"
            )
        found |= {str(folder): files.load(folder) for folder in inside}
    return found


def _folders_inside(directory: Path) -> list[Path]:
    from flwr_kd.results import files

    folders = (file.parent for file in directory.rglob(files.FILE_NAME))
    # Folders that begin with a dot are of runs that are not finished.
    return sorted(
        folder
        for folder in folders
        if not any(part.startswith(".") for part in folder.relative_to(directory).parts)
    )


def target_of(directories: Sequence[Path], out: Path | None, picture: str) -> Path:
    """Return the file to which a picture of results is written."""
    from flwr_kd.plotting import picture_file

    target = out or picture_file(directories[0], picture)
    check_file(target)
    return target


def check_file(target: Path) -> None:
    """Refuse a folder as the file of a picture."""
    if target.is_dir():
        raise UsageError(f"out must be a file, got the folder {str(target)!r}")


def name_of(folder: str, comparison: Comparison, shared: dict[str, object]) -> str:
    """Return a panel's title: the data settings in which results differ, else the folder."""
    names = ("dataset", "classes", "partition", "clients", "limit", "imbalance", "seeds")
    own = [
        str(comparison.config[name])
        if name in ("dataset", "partition")
        else f"{name} {comparison.config[name]}"
        for name in names
        if name not in shared and comparison.config.get(name) is not None
    ]
    return ", ".join(own) or folder
