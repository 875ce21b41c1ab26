"""``flwr-kd simulate`` and ``flwr-kd compare``."""

from __future__ import annotations

import logging
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from flwr_kd import registry
from flwr_kd.checks import ConfigError, read_whole_number
from flwr_kd.cli.options import (
    ARGUMENTS,
    Attack,
    Attackers,
    Augment,
    Backend,
    Clients,
    DataDir,
    Dataset,
    Device,
    FeatureDim,
    Force,
    Fraction,
    ImageSize,
    Imbalance,
    Limit,
    Model,
    NoArrays,
    Out,
    Partition,
    Public,
    PublicLimit,
    Resume,
    Rounds,
    Seeds,
    Settings,
    UsageError,
    Validation,
    Verbose,
    Workers,
)
from flwr_kd.cli.plot import PICTURES
from flwr_kd.config import MethodConfig
from flwr_kd.results import files, provenance, table
from flwr_kd.results.schema import Comparison
from flwr_kd.server.records import RoundStats
from flwr_kd.text import unknown_name

if TYPE_CHECKING:
    from flwr_kd.experiments.resumption import Unfinished

__all__ = ["compare", "simulate"]


def simulate(
    method: Annotated[str, typer.Argument(help=ARGUMENTS["method"])],
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


def compare(
    methods: Annotated[list[str], typer.Argument(help=ARGUMENTS["methods"])],
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
    from flwr_kd.experiments.attacks import parse_attack
    from flwr_kd.experiments.experiment import Experiment, attacker_ids
    from flwr_kd.experiments.resumption import Unfinished
    from flwr_kd.experiments.runner import check, run
    from flwr_kd.plotting import curves

    if force and resume:
        raise UsageError("--force begins anew, --resume goes on: give one of them")
    chosen = [registry.get(name) for name in dict.fromkeys(names)]
    configs = _configs(chosen, settings or [])
    experiments = [Experiment(seed=seed, **shared) for seed in _seeds(seeds)]
    models = {method.name: str(experiments[0].of(method).model) for method in chosen}
    folder = out or Path("runs") / "-".join(method.name for method in chosen)
    # Once, before the work: the checkout may be another after it.
    config, made_with = experiments[0].shared(), provenance.versions()
    command = shlex.join(["flwr-kd", *sys.argv[1:]])
    unfinished = Unfinished(
        folder,
        config=config,
        models=models,
        hyperparameters={name: each.to_wire() for name, each in configs.items()},
        versions=made_with,
        command=command,
    )
    files.check_free(folder, force=force or resume)
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
    for name in PICTURES:
        (folder / name).unlink(missing_ok=True)
    saved = unfinished.finish(comparison)
    picture = curves.plot(comparison, folder / "curves.png")
    console.print(table.table(comparison))
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
    seeds = [
        read_whole_number("each of seeds, separated by commas,", part, error=UsageError)
        for part in text.split(",")
    ]
    return list(dict.fromkeys(seeds))
