"""The command ``flwr-kd``."""

from __future__ import annotations

import json
import logging
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeVar

import click
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, track
from rich.table import Table
from typer.core import TyperCommand

from . import __version__, privacy, registry, results
from .config import ConfigError, MethodConfig, unknown_name
from .data import DataError
from .results import Comparison, ResultError, ResultExistsError, RunResult
from .strategy import RoundStats

if TYPE_CHECKING:
    from torch import nn

    from .simulation import Experiment
    from .unfinished import Unfinished

T = TypeVar("T")

app = typer.Typer(
    name="flwr-kd",
    help="Federated knowledge distillation for Flower.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

plots = typer.Typer(help="Draw what a result's runs ended with.", rich_markup_mode=None)
app.add_typer(plots, name="plot")

_ARGUMENTS = {
    "shown": "show the hyper-parameters of this one",
    "method": "a name from `flwr-kd methods`",
    "methods": "names from `flwr-kd methods`",
    "result_dir": "folder of a result of `simulate` or `compare`",
}

Dataset = Annotated[str, typer.Option(help="digits, fashion-mnist, mnist-5k, ..., or csv:PATH")]
Partition = Annotated[
    str,
    typer.Option(
        help="iid, dirichlet:ALPHA, inner-dirichlet:ALPHA, pathological:K, ktpfl-1[:MANY], ktpfl-2[:EACH]"
    ),
]
Clients = Annotated[int, typer.Option(help="number of clients")]
Rounds = Annotated[int, typer.Option(help="number of rounds")]
Model = Annotated[
    str | None,
    typer.Option(
        help="mlp, lenet, cnn, resnet8, ...; a list gives them out in turn; the method's own if not set"
    ),
]
FeatureDim = Annotated[
    int | None, typer.Option(help="size of the representation; the model's own if not set")
]
Settings = Annotated[
    list[str] | None, typer.Option("--set", help="a hyper-parameter, NAME=VALUE; repeatable")
]
Fraction = Annotated[float, typer.Option(help="share of the clients drawn per round")]
Backend = Annotated[str, typer.Option(help="ray or inline")]
Workers = Annotated[int, typer.Option(help="clients at the same time")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda")]
DataDir = Annotated[str | None, typer.Option(help="folder of data files")]
Limit = Annotated[int | None, typer.Option(help="use so many training samples only")]
Validation = Annotated[
    bool,
    typer.Option("--validation", help="measure on a fifth of the training samples, not on the test set"),
]
Imbalance = Annotated[
    float | None,
    typer.Option(
        help="cut the training samples to a long tail: largest class over smallest; FedHyb's are 10, 20, 50, 100"
    ),
]
ImageSize = Annotated[int | None, typer.Option(help="pad images to this side")]
Public = Annotated[
    str | None,
    typer.Option(
        help="public data of methods that need some; the data set's default if not set; its own name holds a "
        "fifth of its training part back"
    ),
]
PublicLimit = Annotated[int, typer.Option(help="use so many public samples at most")]
Augment = Annotated[str, typer.Option(help="none, crop or crop-flip, on training batches")]
Attack = Annotated[
    str | None,
    typer.Option(
        help="what malicious clients do: label-flip[:TARGET], label-flip:permute, gaussian:SIGMA, "
        "sign-flip[:SCALE], nan, payload[:KIND]"
    ),
]
Attackers = Annotated[int, typer.Option(help="number of malicious clients, drawn by the seed")]
Out = Annotated[Path | None, typer.Option(help="folder of the result; runs/NAME if not set")]
Force = Annotated[bool, typer.Option("--force", help="overwrite a result that is there")]
Resume = Annotated[
    bool,
    typer.Option(
        "--resume",
        help="go on with an interrupted comparison in this folder, or add methods and seeds to a whole one: "
        "finished runs are not run again",
    ),
]
NoArrays = Annotated[
    bool, typer.Option("--no-arrays", help="do not keep the last arrays, which `flwr-kd plot` needs")
]
Verbose = Annotated[bool, typer.Option("--verbose", help="show Flower's log")]
Seeds = Annotated[str, typer.Option(help="seeds separated by commas")]
ResultDir = Annotated[Path, typer.Argument(help=_ARGUMENTS["result_dir"])]
PlotSeed = Annotated[int | None, typer.Option(help="draw the runs with this seed; the first if not set")]
PlotOut = Annotated[Path | None, typer.Option(help="the PNG; in RESULT_DIR, named like the plot, if not set")]
PlotDataDir = Annotated[str | None, typer.Option(help="folder of data files; the result's if not set")]


_INTERRUPTED = 130
_PICTURES = ("tsne.png", "landscape.png", "samples.png", "coefficients.png")
PUBLIC_DATA = {
    "": "no",
    "server": "at the server",
    "synthetic": "synthetic, at the server",
    "clients": "at the clients",
}
"""What a method's ``public_data`` means to a reader."""


class UsageError(Exception):
    """A mistake of the user's, told in one line."""


class _Command(TyperCommand):
    """Shows what Typer 0.20 does not with newer versions of Click: an argument's help, and brackets as brackets."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                name, text = record[0], record[1].replace("\\[", "[")
                is_argument = isinstance(parameter, click.Argument)
                told = _ARGUMENTS[parameter.name or ""] if is_argument else ""
                text = text if told in text else f"{told}  {text}".rstrip()
                sections["Arguments" if is_argument else "Options"].append((name, text))
        for title, rows in sections.items():
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)


@app.command("methods", cls=_Command)
def list_methods(
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
    shown: Annotated[str | None, typer.Argument(metavar="METHOD", help=_ARGUMENTS["shown"])] = None,
) -> None:
    """List the methods, or one method's hyper-parameters."""
    if shown is not None:
        _describe(registry.get(shown), as_json)
        return
    rows = [
        {
            "name": m.name,
            "paper": m.paper,
            "exchanged": m.exchanged,
            "public_data": m.public_data,
            "different_models": m.heterogeneous,
            "global_model": m.global_model,
        }
        for m in registry.methods().values()
    ]
    if as_json:
        print(json.dumps(rows, indent=2, ensure_ascii=False))
        return
    table = Table("method", "exchanged", "public data", "different models", "global model", "paper")
    for row in rows:
        flags = ["yes" if row[key] else "no" for key in ("different_models", "global_model")]
        public = PUBLIC_DATA[str(row["public_data"])]
        table.add_row(str(row["name"]), str(row["exchanged"]), public, *flags, str(row["paper"]))
    Console().print(table)


@app.command(cls=_Command)
def simulate(
    method: Annotated[str, typer.Argument(help=_ARGUMENTS["method"])],
    dataset: Dataset = "digits",
    partition: Partition = "inner-dirichlet:0.1",
    clients: Clients = 10,
    rounds: Rounds = 10,
    model: Model = None,
    feature_dim: FeatureDim = None,
    seed: Annotated[int, typer.Option(help="of every random choice")] = 0,
    seeds: Annotated[str | None, typer.Option(help="several seeds, separated by commas")] = None,
    settings: Settings = None,
    fraction_train: Fraction = 1.0,
    backend: Backend = "ray",
    workers: Workers = 2,
    device: Device = "auto",
    data_dir: DataDir = None,
    limit: Limit = None,
    imbalance: Imbalance = None,
    validation: Validation = False,
    image_size: ImageSize = None,
    public: Public = None,
    public_limit: PublicLimit = 5000,
    augment: Augment = "none",
    attack: Attack = None,
    attackers: Attackers = 0,
    out: Out = None,
    force: Force = False,
    resume: Resume = False,
    no_arrays: NoArrays = False,
    verbose: Verbose = False,
) -> None:
    """Federate one method on one machine: progress, table, plot, JSON."""
    _compare(
        [method],
        seeds=str(seed) if seeds is None else seeds,
        settings=settings,
        out=out,
        force=force,
        resume=resume,
        keep=not no_arrays,
        verbose=verbose,
        dataset=dataset,
        partition=partition,
        clients=clients,
        rounds=rounds,
        model=model,
        feature_dim=feature_dim,
        fraction_train=fraction_train,
        backend=backend,
        workers=workers,
        device=device,
        data_dir=data_dir,
        limit=limit,
        imbalance=imbalance,
        validation=validation,
        image_size=image_size,
        public=public,
        public_limit=public_limit,
        augment=augment,
        attack=attack,
        attackers=attackers,
    )


@app.command(cls=_Command)
def compare(
    methods: Annotated[list[str], typer.Argument(help=_ARGUMENTS["methods"])],
    dataset: Dataset = "digits",
    partition: Partition = "inner-dirichlet:0.1",
    clients: Clients = 10,
    rounds: Rounds = 10,
    model: Model = None,
    feature_dim: FeatureDim = None,
    seeds: Seeds = "0,1,2",
    settings: Settings = None,
    fraction_train: Fraction = 1.0,
    backend: Backend = "ray",
    workers: Workers = 2,
    device: Device = "auto",
    data_dir: DataDir = None,
    limit: Limit = None,
    imbalance: Imbalance = None,
    validation: Validation = False,
    image_size: ImageSize = None,
    public: Public = None,
    public_limit: PublicLimit = 5000,
    augment: Augment = "none",
    attack: Attack = None,
    attackers: Attackers = 0,
    out: Out = None,
    force: Force = False,
    resume: Resume = False,
    no_arrays: NoArrays = False,
    verbose: Verbose = False,
) -> None:
    """Federate several methods on the same partitions from the same initial weights."""
    _compare(
        methods,
        seeds=seeds,
        settings=settings,
        out=out,
        force=force,
        resume=resume,
        keep=not no_arrays,
        verbose=verbose,
        dataset=dataset,
        partition=partition,
        clients=clients,
        rounds=rounds,
        model=model,
        feature_dim=feature_dim,
        fraction_train=fraction_train,
        backend=backend,
        workers=workers,
        device=device,
        data_dir=data_dir,
        limit=limit,
        imbalance=imbalance,
        validation=validation,
        image_size=image_size,
        public=public,
        public_limit=public_limit,
        augment=augment,
        attack=attack,
        attackers=attackers,
    )


@app.command("privacy", cls=_Command)
def show_privacy(
    sigma: Annotated[float, typer.Option(help="σ, the noise multiplier")] = 7.0,
    rounds: Annotated[int, typer.Option(help="rounds in which a client sends")] = 50,
    delta: Annotated[float, typer.Option(help="δ")] = 0.01,
    dimensions: Annotated[int, typer.Option(help="D, size of a representation")] = 64,
    classes: Annotated[int, typer.Option(help="classes that a change of one sample touches")] = 1,
    count: Annotated[int | None, typer.Option(help="N, samples of the class, for the noise's size")] = None,
    clip: Annotated[float, typer.Option(help="ζ, bound of each element")] = 3.0,
) -> None:
    """Print the privacy budget of FedHKD's noise, in one round and over a run."""
    found = privacy.budget(
        sigma=sigma,
        rounds=rounds,
        delta=delta,
        dimensions=dimensions,
        classes=classes,
        count=count,
        bound=clip,
    )
    console = Console()
    table = Table("quantity", "value", title="Privacy budget", title_justify="left")
    for label, value in found.rows():
        table.add_row(label, value)
    console.print(table)
    for heading, lines in (("It holds if", found.assumptions), ("Not covered", found.not_covered)):
        console.print(f"{heading}:")
        for line in lines:
            console.print(f"  - {line}")


@plots.callback(invoke_without_command=True)
def plot_top(context: typer.Context) -> None:
    """Draw what a result's runs ended with."""
    if context.invoked_subcommand is None:
        print(context.get_help())


@plots.command("tsne", cls=_Command)
def plot_tsne(
    result_dir: ResultDir,
    classes: Annotated[int, typer.Option(help="classes to show, drawn by the seed")] = 4,
    samples: Annotated[int, typer.Option(help="test samples to show, of all these classes together")] = 500,
    seed: PlotSeed = None,
    out: PlotOut = None,
    data_dir: PlotDataDir = None,
    device: Device = "auto",
) -> None:
    """Map the global models' features of test samples by t-SNE."""
    from . import analysis, plotting
    from .seeding import numpy_generator
    from .simulation import bundle_of

    target, comparison = _plot_of(result_dir, out, _PICTURES[0])
    embeddings = {}
    for run, experiment, model in _global_models(result_dir, comparison, seed, data_dir, device):
        test = bundle_of(experiment).test
        rows = analysis.sample_of_classes(test.y, classes, samples, numpy_generator(run.seed, "t-sne"))
        shown = test.subset(rows)
        features = analysis.features_of(model, shown.x)
        embeddings[run.method] = (analysis.embed(features, run.seed), shown.y.numpy())
    picture = plotting.tsne(comparison, embeddings, target, seed=seed)
    print(f"t-SNE: {picture.resolve()}")


@plots.command("landscape", cls=_Command)
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

    from . import analysis, kept, plotting
    from .seeding import numpy_generator, torch_generator
    from .simulation import bundle_of

    for name, value in (("directions", directions), ("samples", samples)):
        if value < 1:
            raise UsageError(f"{name} must be a whole number from 1, got {value}")
    if points < 3 or points % 2 == 0:
        raise UsageError(f"points must be an odd number from 3, got {points}")
    if not 0 < reach < float("inf"):
        raise UsageError(f"reach must be a finite number above 0, got {reach}")
    target, comparison = _plot_of(result_dir, out, _PICTURES[1])
    magnitudes = reach * np.arange(-(points // 2), points // 2 + 1) / (points // 2)
    losses = {}
    for run, experiment, model in _global_models(result_dir, comparison, seed, data_dir, device):
        rows = kept.training_rows(experiment, samples, numpy_generator(run.seed, "landscape"))
        shown = bundle_of(experiment).train.subset(rows)
        state, trained = model.state_dict(), {name for name, _ in model.named_parameters()}
        lines = []
        console = Console()
        for index in track(
            range(directions), run.method, transient=True, console=console, disable=not console.is_terminal
        ):
            direction = analysis.filter_normalised_direction(
                state, torch_generator(run.seed, "landscape", index), parameters=trained
            )
            lines.append(analysis.loss_along(model, state, [direction], magnitudes, shown.x, shown.y))
        losses[run.method] = np.concatenate(lines)
    picture = plotting.landscape(comparison, magnitudes, losses, target, seed=seed)
    print(f"landscape: {picture.resolve()}")


@plots.command("samples", cls=_Command)
def plot_samples(result_dir: ResultDir, seed: PlotSeed = None, out: PlotOut = None) -> None:
    """Draw the images that a server made for its distillation."""
    from . import kept, plotting

    target, comparison = _plot_of(result_dir, out, _PICTURES[2])
    images = _kept_by_method(
        comparison,
        seed,
        lambda run: kept.synthetic_images(result_dir, run),
        lacks="it makes no images",
        none=f"no method of {str(result_dir)!r} makes images at the server",
    )
    picture = plotting.samples(comparison, images, target, seed=seed)
    print(f"samples: {picture.resolve()}")


@plots.command("coefficients", cls=_Command)
def plot_coefficients(result_dir: ResultDir, seed: PlotSeed = None, out: PlotOut = None) -> None:
    """Draw how much each client learns from each other one."""
    from . import kept, plotting

    target, comparison = _plot_of(result_dir, out, _PICTURES[3])
    matrices = _kept_by_method(
        comparison,
        seed,
        lambda run: kept.coefficients(result_dir, run),
        lacks="it kept no coefficients",
        none=f"no method of {str(result_dir)!r} kept coefficients of its clients",
    )
    picture = plotting.coefficients(comparison, matrices, target, seed=seed)
    print(f"coefficients: {picture.resolve()}")


def _kept_by_method(
    comparison: Comparison, seed: int | None, find: Callable[[RunResult], T | None], *, lacks: str, none: str
) -> dict[str, T]:
    """Return what a run of each method has kept; name those that have not, and why."""
    found = {}
    for name, run in comparison.one_each(seed).items():
        each = find(run)
        if each is None:
            print(f"left out: {name} ({lacks})")
        else:
            found[name] = each
    if not found:
        raise ResultError(none)
    return found


def _plot_of(directory: Path, out: Path | None, name: str) -> tuple[Path, Comparison]:
    """Return where a picture is to be written, and the result that it is of."""
    target = out or directory / name
    if target.is_dir():
        raise UsageError(f"out must be a file, got the folder {str(target)!r}")
    if not directory.is_dir():
        raise UsageError(f"no folder {str(directory)!r}: name that of a result")
    try:
        return target, results.load(directory)
    except FileNotFoundError as error:
        raise UsageError(f"no result in {str(directory)!r}: {error.filename!r} is not there") from None


def _global_models(
    directory: Path, comparison: Comparison, seed: int | None, data_dir: str | None, device: str
) -> Iterator[tuple[RunResult, Experiment, nn.Module]]:
    """Yield a run of each method with a global model, its experiment and that model; name the others."""
    from . import kept
    from .client import resolve_device

    runs = comparison.one_each(seed)
    without = [name for name in runs if not registry.get(name).global_model]
    if len(without) == len(runs):
        raise ResultError(f"no method of {str(directory)!r} has a global model: {', '.join(without)}")
    if without:
        print(f"left out: {', '.join(without)} (no global model)")
    # All of them first: what is missing is told before the work begins.
    found = [(run, kept.read(directory, run)) for name, run in runs.items() if name not in without]
    for run, arrays in found:
        experiment = kept.experiment_of(comparison.config, run, data_dir=data_dir, device=device)
        yield run, experiment, kept.global_model(experiment, arrays).to(resolve_device(device))


@app.callback(invoke_without_command=True)
def top(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="print the version")] = False,
) -> None:
    """Federated knowledge distillation for Flower."""
    if version:
        print(f"flwr-kd {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())


def _describe(method: registry.Method, as_json: bool) -> None:
    # The defaults of the other commands, which may differ from the class's.
    used = method.config().to_wire()
    rows = [
        (name, kind, used[name], text)
        for name, kind, _, text in method.config_class.help()
        if name.replace("-", "_") not in method.fixed
    ]
    if as_json:
        keys = ("name", "type", "default", "help")
        print(json.dumps([dict(zip(keys, row, strict=True)) for row in rows], indent=2, ensure_ascii=False))
        return
    table = Table("hyper-parameter", "type", "default", "meaning", title=f"{method.name}: {method.paper}")
    for name, kind, default, text in rows:
        table.add_row(name, kind, str(default), text)
    Console().print(table)


def _compare(
    names: Sequence[str],
    *,
    seeds: str,
    settings: list[str] | None,
    out: Path | None,
    force: bool,
    resume: bool,
    keep: bool,
    verbose: bool,
    **shared: Any,
) -> None:
    # Imported here: `flwr-kd methods` need not wait for it.
    from . import plotting
    from .attacks import parse_attack
    from .simulation import Experiment, attacker_ids, check, run
    from .unfinished import Unfinished

    if force and resume:
        raise UsageError("--force begins anew, --resume goes on: give one of them")
    chosen = [registry.get(name) for name in dict.fromkeys(names)]
    configs = _configs(chosen, settings or [])
    experiments = [Experiment(seed=seed, **shared) for seed in _seeds(seeds)]
    models = {method.name: str(experiments[0].of(method).model) for method in chosen}
    folder = out or Path("runs") / "-".join(method.name for method in chosen)
    # Once, before the work: the checkout may be another after it.
    config, made_with = experiments[0].shared(), results.versions()
    command = shlex.join(["flwr-kd", *sys.argv[1:]])
    unfinished = Unfinished(
        folder,
        config=config,
        models=models,
        hyperparameters={name: each.to_wire() for name, each in configs.items()},
        versions=made_with,
        command=command,
    )
    results.check_free(folder, force=force or resume)
    for experiment in experiments:
        for method in chosen:
            check(experiment.of(method), configs[method.name], method)
    unfinished.begin(resume=resume, force=force)
    logging.getLogger("flwr").setLevel(logging.INFO if verbose else logging.WARNING)

    if experiments[0].attack is not None:
        attack = parse_attack(experiments[0].attack)
        if idle := [method.name for method in chosen if not attack.concerns(method.strategy)]:
            print(f"note: {experiments[0].attack} changes nothing of what {', '.join(idle)} send")
    if unfinished.runs:
        print(f"not run again: {', '.join(f'{run.method} (seed {run.seed})' for run in unfinished.runs)}")
    console = Console()
    total = len(chosen) * len(experiments) * experiments[0].rounds
    with (
        _tells_how_to_go_on(unfinished),
        Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("rounds"),
            TimeElapsedColumn(),
            console=console,
        ) as progress,
    ):
        bar = progress.add_task("", total=total)
        for experiment in experiments:
            for method in chosen:
                progress.update(bar, description=f"{method.name}, seed {experiment.seed}")
                if unfinished.find(method.name, experiment.seed) is not None:
                    progress.advance(bar, experiment.rounds)
                    continue
                place = unfinished.arrays_of(method.name, experiment.seed) if keep else None
                advance = _advance(progress, bar)
                unfinished.add(run(method, experiment, configs[method.name], on_round=advance, keep=place))
    # As if none had been interrupted; seeds of an earlier result that were not asked for come last.
    asked = [(experiment.seed, method.name) for experiment in experiments for method in chosen]
    runs = [each for seed, name in asked if (each := unfinished.find(name, seed)) is not None]
    runs += [each for each in unfinished.runs if each not in runs]
    ran = list(dict.fromkeys(each.seed for each in runs))
    shown: dict[str, Any] = {
        "model": models if len(set(models.values())) > 1 else models[chosen[0].name],
        "seeds": ran,
    }
    if experiments[0].attackers:
        # As text, since JSON has no other keys.
        seeded = [replace(experiments[0], seed=seed) for seed in ran]
        shown["attacker_ids"] = {str(one.seed): sorted(attacker_ids(one)) for one in seeded}
    comparison = Comparison(
        config={**config, **shown},
        versions=made_with,
        command=command,
        runs=tuple(runs),
    )
    for name in _PICTURES:
        (folder / name).unlink(missing_ok=True)
    saved = unfinished.finish(comparison)
    picture = plotting.plot(comparison, folder / "curves.png")
    console.print(results.table(comparison))
    print(f"result: {saved.resolve()}")
    print(f"curves: {picture.resolve()}")


@contextmanager
def _tells_how_to_go_on(unfinished: Unfinished) -> Iterator[None]:
    """Keep the finished runs of a comparison that ends early, and say so; remove what has none."""
    try:
        yield
    except BaseException:
        if unfinished.runs:
            count = len(unfinished.runs)
            print(
                f"{count} finished run{'' if count == 1 else 's'} kept in {str(unfinished.directory)!r}: the same "
                "command with --resume goes on"
            )
        else:
            unfinished.remove()
        raise


def _advance(progress: Progress, bar: Any) -> Callable[[RoundStats], None]:
    return lambda stats: progress.advance(bar)


def _configs(chosen: Sequence[registry.Method], settings: Sequence[str]) -> dict[str, MethodConfig]:
    """Give each setting to the methods that have it; it must exist in one at least."""
    used: set[str] = set()
    configs = {}
    for method in chosen:
        known = method.config_class.field_types()
        mine = []
        for text in settings:
            name = text.partition("=")[0].strip().replace("-", "_")
            taken = name in known and (name not in method.fixed or len(chosen) == 1)
            if taken or "=" not in text or len(chosen) == 1:
                mine.append(text)
            if name in known and (taken or name not in method.fixed):
                used.add(text)
        configs[method.name] = method.config(mine)
    for text in settings:
        if text not in used:
            name = text.partition("=")[0].strip().replace("-", "_")
            if fixing := [m.name for m in chosen if name in m.fixed]:
                raise ConfigError(f"{name.replace('_', '-')} is fixed by {', '.join(fixing)}, got {text!r}")
            every = sorted({name.replace("_", "-") for m in chosen for name in m.config_class.field_types()})
            name = text.partition("=")[0].strip().replace("_", "-")
            raise ConfigError(unknown_name("hyper-parameter", name, every))
    return configs


def _seeds(text: str) -> list[int]:
    try:
        found = list(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        raise UsageError(f"seeds must be whole numbers separated by commas, got {text!r}") from None
    if min(found) < 0:
        raise UsageError(f"seeds must be at least 0, got {text!r}")
    return found


def main() -> None:
    """Run the command: exit 2 with one line for a user's mistake, 1 where a run fails."""
    from .simulation import SimulationError

    try:
        # What a command's Exit carries, and 130 after an interrupt, is returned in this mode.
        code = app(standalone_mode=False) or 0
    except (ConfigError, DataError, ResultError, ResultExistsError, UsageError, ImportError) as error:
        _fail(str(error), 2)
    except click.UsageError as error:
        _fail(error.format_message(), 2)
    except click.Abort:
        code = _INTERRUPTED
    except SimulationError as error:
        _fail(str(error), 1)
    if code == _INTERRUPTED:
        _fail("interrupted", code)
    sys.exit(code)


def _fail(text: str, code: int) -> NoReturn:
    print("flwr-kd: " + " ".join(text.split()), file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
