"""``flwr-kd plot``: pictures of what a result's runs ended with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Generic, NamedTuple, TypeVar

import typer

from flwr_kd import registry
from flwr_kd.checks import number, whole_number
from flwr_kd.cli.help import Command, Group
from flwr_kd.cli.options import Device, ResultDir, UsageError
from flwr_kd.results.errors import ResultError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from torch import nn

    from flwr_kd.experiments.experiment import Experiment
    from flwr_kd.results.schema import Comparison, RunResult

__all__ = [
    "PlotDataDir",
    "PlotOut",
    "PlotSeed",
    "plot_coefficients",
    "plot_curves",
    "plot_landscape",
    "plot_samples",
    "plot_top",
    "plot_tsne",
    "plots",
]

T = TypeVar("T")
_CLASSES = 4
plots = typer.Typer(cls=Group, help="Draw what a result's runs ended with.", rich_markup_mode=None)
"""The command ``flwr-kd plot``."""
PlotSeed = Annotated[int | None, typer.Option(help="draw the runs with this seed; the first if not set")]
"""The option ``--seed`` of pictures."""
PlotOut = Annotated[Path | None, typer.Option(help="the PNG; in RESULT_DIR, named like the plot, if not set")]
"""The option ``--out`` of pictures of one result."""
PlotDataDir = Annotated[str | None, typer.Option(help="folder of data files; the result's if not set")]
"""The option ``--data-dir`` of pictures that need the data."""


@plots.callback(invoke_without_command=True)
def plot_top(context: typer.Context) -> None:
    """Draw what a result's runs ended with."""
    if context.invoked_subcommand is None:
        print(context.get_help())


@plots.command("tsne", cls=Command)
def plot_tsne(
    result_dir: ResultDir,
    classes: Annotated[
        int | None, typer.Option(help="classes to show, drawn by the seed; 4, or all of fewer, if not set")
    ] = None,
    samples: Annotated[int, typer.Option(help="test samples to show, of all these classes together")] = 500,
    seed: PlotSeed = None,
    out: PlotOut = None,
    data_dir: PlotDataDir = None,
    device: Device = "auto",
) -> None:
    """Map the global models' features of test samples by t-SNE."""
    from flwr_kd.experiments.data import bundle_of
    from flwr_kd.plotting import measurements, tsne
    from flwr_kd.seeding import numpy_generator

    target, comparison = _target_and_result(result_dir, out, "tsne")
    embeddings = {}
    for run, experiment, model in _global_models(result_dir, comparison, seed, data_dir, device):
        test = bundle_of(experiment).test
        if not len(test):
            raise ResultError(
                f"{str(result_dir)!r} has no common test set (--merge-test), of which t-SNE shows samples"
            )
        shown = min(_CLASSES, len(set(test.y.tolist()))) if classes is None else classes
        rows = measurements.sample_of_classes(test.y, shown, samples, numpy_generator(run.seed, "t-sne"))
        drawn = test.subset(rows)
        features = measurements.features_of(model, drawn.x)
        embeddings[run.name] = (measurements.embed(features, run.seed), drawn.y.numpy())
    picture = tsne.plot(comparison, embeddings, target, seed=seed)
    print(f"t-SNE: {picture.resolve()}")


@plots.command("landscape", cls=Command)
def plot_landscape(
    result_dir: ResultDir,
    directions: Annotated[int, typer.Option(help="random directions, a line each")] = 10,
    points: Annotated[int, typer.Option(help="points of a line; odd, so that one is the model itself")] = 21,
    reach: Annotated[float, typer.Option(help="largest perturbation, in norms of each filter")] = 1.0,
    samples: Annotated[int, typer.Option(help="training samples of all clients together")] = 1000,
    seed: PlotSeed = None,
    out: PlotOut = None,
    data_dir: PlotDataDir = None,
    device: Device = "auto",
) -> None:
    """Draw the training loss around the global models."""
    import numpy as np

    from flwr_kd.plotting import landscape

    whole_number("directions", directions, 1, error=UsageError)
    whole_number("samples", samples, 1, error=UsageError)
    if points < 3 or points % 2 == 0:
        raise UsageError(f"points must be an odd number from 3, got {points}")
    number("reach", reach, 0, open_low=True, error=UsageError)
    target, comparison = _target_and_result(result_dir, out, "landscape")
    magnitudes = reach * np.arange(-(points // 2), points // 2 + 1) / (points // 2)
    losses = {
        run.name: _losses(run, experiment, model, directions, magnitudes, samples)
        for run, experiment, model in _global_models(result_dir, comparison, seed, data_dir, device)
    }
    picture = landscape.plot(comparison, magnitudes, losses, target, seed=seed)
    print(f"landscape: {picture.resolve()}")


def _losses(
    run: RunResult,
    experiment: Experiment,
    model: nn.Module,
    directions: int,
    magnitudes: npt.NDArray[np.float64],
    samples: int,
) -> npt.NDArray[np.float64]:
    """Measure a global model's loss ``[directions, M]`` on training samples, with a progress bar on a terminal."""
    import numpy as np
    from rich.console import Console
    from rich.progress import track

    from flwr_kd.experiments import saved_arrays
    from flwr_kd.experiments.data import bundle_of
    from flwr_kd.learning.scores import label_loss
    from flwr_kd.plotting import measurements
    from flwr_kd.seeding import numpy_generator, torch_generator

    rows = saved_arrays.training_rows(experiment, samples, numpy_generator(run.seed, "landscape"))
    drawn = bundle_of(experiment).train.subset(rows)
    state, trained = model.state_dict(), {name for name, _ in model.named_parameters()}
    console = Console()
    steps: Iterable[int] = track(
        range(directions), run.name, transient=True, console=console, disable=not console.is_terminal
    )
    lines = []
    for index in steps:
        direction = measurements.filter_normalised_direction(
            state, torch_generator(run.seed, "landscape", index), parameters=trained
        )
        lines.append(
            measurements.loss_along(model, state, [direction], magnitudes, *drawn.tensors, loss=label_loss)
        )
    return np.concatenate(lines)


@plots.command("curves", cls=Command)
def plot_curves(
    result_dir: ResultDir,
    accuracies: Annotated[
        str | None,
        typer.Option(
            help="accuracies and training-loss separated by commas, a panel each, such as "
            "common-accuracy,global-on-clients; local and global accuracy if not set"
        ),
    ] = None,
    over: Annotated[
        str, typer.Option(help="rounds; or bytes or seconds, those of all rounds so far")
    ] = "rounds",
    out: PlotOut = None,
) -> None:
    """Draw accuracies, or the training loss, over rounds, bytes or seconds."""
    from flwr_kd.plotting import curves

    target, comparison = _target_and_result(result_dir, out, "curves")
    names = [] if accuracies is None else accuracies.split(",")
    print(f"curves: {curves.plot(comparison, target, names, over=over).resolve()}")


@plots.command("samples", cls=Command)
def plot_samples(result_dir: ResultDir, seed: PlotSeed = None, out: PlotOut = None) -> None:
    """Draw the images that a server made for its distillation."""
    from flwr_kd.experiments.saved_arrays import synthetic_images
    from flwr_kd.plotting import samples

    source = _Saved("samples", synthetic_images, "it makes no images", "makes images at the server")
    _plot_saved(source, samples.plot, result_dir, seed, out)


@plots.command("coefficients", cls=Command)
def plot_coefficients(result_dir: ResultDir, seed: PlotSeed = None, out: PlotOut = None) -> None:
    """Draw how much each client learns from each other one."""
    from flwr_kd.experiments import saved_arrays
    from flwr_kd.plotting import coefficients

    read = saved_arrays.coefficients
    source = _Saved("coefficients", read, "it kept no coefficients", "kept coefficients of its clients")
    _plot_saved(source, coefficients.plot, result_dir, seed, out)


class _Saved(NamedTuple, Generic[T]):
    """What a picture shows of a run's last arrays: how it is read, and the texts where there is nothing."""

    picture: str
    read: Callable[[Path, RunResult], T | None]
    lacks: str
    shows: str


def _plot_saved(
    source: _Saved[T], plot: Callable[..., Path], result_dir: Path, seed: int | None, out: Path | None
) -> None:
    """Draw what the methods' runs have saved; print which methods have nothing, and why."""
    target, comparison = _target_and_result(result_dir, out, source.picture)
    saved = {}
    for name, run in comparison.one_each(seed).items():
        arrays = source.read(result_dir, run)
        if arrays is None:
            print(f"left out: {name} ({source.lacks})")
        else:
            saved[name] = arrays
    if not saved:
        raise ResultError(f"no method of {str(result_dir)!r} {source.shows}")
    print(f"{source.picture}: {plot(comparison, saved, target, seed=seed).resolve()}")


def _target_and_result(directory: Path, out: Path | None, picture: str) -> tuple[Path, Comparison]:
    """Return the file to which a picture is written, and the result that it shows."""
    from flwr_kd.plotting import picture_file
    from flwr_kd.results import files

    target = out or picture_file(directory, picture)
    if target.is_dir():
        raise UsageError(f"out must be a file, got the folder {str(target)!r}")
    if not directory.is_dir():
        raise UsageError(f"no folder {str(directory)!r}: name that of a result")
    try:
        return target, files.load(directory)
    except FileNotFoundError as error:
        raise UsageError(f"no result in {str(directory)!r}: {error.filename!r} is not there") from None


def _global_models(
    directory: Path, comparison: Comparison, seed: int | None, data_dir: str | None, device: str
) -> Iterator[tuple[RunResult, Experiment, nn.Module]]:
    """Yield a run of each method with a global model, its experiment and that model; print the other methods."""
    from flwr_kd.experiments import saved_arrays
    from flwr_kd.learning.device import resolve_device

    runs = comparison.one_each(seed)
    without = [name for name, run in runs.items() if not registry.get(run.method).global_model]
    if len(without) == len(runs):
        raise ResultError(f"no method of {str(directory)!r} has a global model: {', '.join(without)}")
    if without:
        print(f"left out: {', '.join(without)} (no global model)")
    # All arrays are read first, so that a missing one is reported before the work begins.
    saved = [(run, saved_arrays.read(directory, run)) for name, run in runs.items() if name not in without]
    for run, arrays in saved:
        experiment = saved_arrays.experiment_of(comparison.config, run, data_dir=data_dir, device=device)
        yield run, experiment, saved_arrays.global_model(experiment, arrays).to(resolve_device(device))
