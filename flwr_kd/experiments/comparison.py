"""A comparison of methods on the same partitions from the same initial weights: prepared, run, written.

Examples
--------
>>> import tempfile
>>> from flwr_kd.experiments.options import ExperimentOptions
>>> options = ExperimentOptions(clients=2, rounds=1, limit=100, backend="inline", device="cpu")
>>> with tempfile.TemporaryDirectory() as folder:
...     comparison = compare(["fedavg", "fedproto"], options, seeds=[0], folder=Path(folder))
>>> [(run.method, run.seed, len(run.rounds)) for run in comparison.runs]
[('fedavg', 0, 1), ('fedproto', 0, 1)]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flwr_kd import registry
from flwr_kd.checks import ConfigError
from flwr_kd.config import MethodConfig
from flwr_kd.experiments import runner
from flwr_kd.experiments.attacks import parse_attack
from flwr_kd.experiments.experiment import Experiment, attacker_ids
from flwr_kd.experiments.options import ExperimentOptions
from flwr_kd.experiments.resumption import Unfinished
from flwr_kd.plotting import remove_pictures
from flwr_kd.results import files, provenance
from flwr_kd.results.schema import Comparison, RunResult
from flwr_kd.server.records import RoundStats
from flwr_kd.text import unknown_name
from flwr_kd.wording import one_comparison

__all__ = ["Plan", "compare", "configs_of", "prepare", "run", "write"]


@dataclass(frozen=True)
class Plan:
    """A comparison whose settings have been checked.

    Attributes
    ----------
    methods : tuple of Method
        In the order in which they run, each once.
    configs : mapping of str to MethodConfig
        Each method's hyper-parameters.
    experiments : tuple of Experiment
        One per seed.
    unfinished : Unfinished
        The runs that are finished, and where they are kept.
    config : mapping
        What the runs share, as a result holds it.
    versions : mapping of str to str
        As from :func:`flwr_kd.results.provenance.versions`, taken before the work: the checkout may be another
        after it.
    command : str
        The command line that gives the result again.
    """

    methods: tuple[registry.Method, ...]
    configs: Mapping[str, MethodConfig]
    experiments: tuple[Experiment, ...]
    unfinished: Unfinished
    config: Mapping[str, Any]
    versions: Mapping[str, str]
    command: str

    @property
    def rounds(self) -> int:
        """Number of rounds of all runs together."""
        return len(self.methods) * sum(experiment.rounds for experiment in self.experiments)

    @property
    def models(self) -> dict[str, str]:
        """Each method's model, or models separated by commas."""
        return {method.name: str(self.experiments[0].of(method).model) for method in self.methods}

    def runs(self) -> Iterator[tuple[registry.Method, Experiment]]:
        """Yield method and experiment of each run, in the order in which they run: seed by seed."""
        for experiment in self.experiments:
            for method in self.methods:
                yield method, experiment

    def unharmed(self) -> list[str]:
        """Return the methods whose clients send nothing that the attack changes; none without an attack."""
        spec = self.experiments[0].attack
        if spec is None:
            return []
        attack = parse_attack(spec)
        return [method.name for method in self.methods if not attack.concerns(method.strategy)]


def compare(
    names: Sequence[str],
    options: ExperimentOptions,
    *,
    seeds: Sequence[int] = (0, 1, 2),
    folder: Path | None = None,
    settings: Sequence[str] = (),
    resume: bool = False,
    force: bool = False,
    keep_arrays: bool = True,
) -> Comparison:
    """Run several methods on the same partitions from the same initial weights, and write the result.

    Parameters
    ----------
    keep_arrays : bool
        Whether each run's last arrays are kept beside the result, for ``flwr-kd plot``.
    **others
        As :func:`prepare` takes them.

    Raises
    ------
    ConfigError, DataError, ResultError, ResultExistsError
        As :func:`prepare`.
    SimulationError
        If a server failed. The runs before it and its last complete round are kept: ``resume=True`` continues
        after them.
    """
    plan = prepare(names, options, seeds=seeds, folder=folder, settings=settings, resume=resume, force=force)
    run(plan, keep_arrays=keep_arrays)
    return write(plan)[0]


def prepare(
    names: Sequence[str],
    options: ExperimentOptions,
    *,
    seeds: Sequence[int],
    folder: Path | None = None,
    settings: Sequence[str] = (),
    command: str = "",
    resume: bool = False,
    force: bool = False,
) -> Plan:
    """Check everything that a comparison needs before any of its runs, and read those that are finished.

    Parameters
    ----------
    names : sequence of str
        Methods of the registry; a repeated one runs once.
    options : ExperimentOptions
        Shared by all runs.
    seeds : sequence of int
        At least one.
    folder : Path, optional
        The result's; ``runs/`` and the methods' names if None.
    settings : sequence of str
        Hyper-parameters as ``name=value``; see :func:`configs_of`.
    command : str
        The command line that gives the result again.
    resume : bool
        Whether to continue an interrupted comparison, or extend a result, in this folder.
    force : bool
        Whether a result in this folder may be overwritten.

    Raises
    ------
    ConfigError, DataError
        If a value is not allowed, or does not fit another.
    ResultExistsError, ResultError
        If the folder has a result that may not be overwritten, that is of other settings, or cannot be written to.
    """
    methods = tuple(registry.get(name) for name in dict.fromkeys(names))
    configs = configs_of(methods, settings)
    experiments = tuple(Experiment.from_options(options, seed) for seed in seeds)
    models = {method.name: str(experiments[0].of(method).model) for method in methods}
    folder = folder or Path("runs") / "-".join(method.name for method in methods)
    config, versions = experiments[0].shared(), provenance.versions()
    unfinished = Unfinished(
        folder,
        config=config,
        models=models,
        hyperparameters={name: each.to_wire() for name, each in configs.items()},
        versions=versions,
        command=command,
    )
    files.check_free(folder, force=force or resume, ways=("force", "resume"))
    plan = Plan(methods, configs, experiments, unfinished, config, versions, command)
    for method, experiment in plan.runs():
        runner.check(experiment.of(method), configs[method.name], method)
    unfinished.begin(resume=resume, force=force)
    return plan


@one_comparison()
def run(
    plan: Plan,
    *,
    keep_arrays: bool = True,
    on_run: Callable[[registry.Method, Experiment, int], None] | None = None,
    on_round: Callable[[RoundStats], None] | None = None,
) -> None:
    """Run what is not finished; each finished run is on the disk before the next begins.

    A run that is interrupted leaves the checkpoint of its last complete round.

    Parameters
    ----------
    plan : Plan
        From :func:`prepare`.
    keep_arrays : bool
        Whether each run's last arrays are kept.
    on_run : callable, optional
        Called before each run with its method, its experiment, and the number of its rounds that are done already.
    on_round : callable, optional
        Called after every round.

    Raises
    ------
    SimulationError
        If a server failed.
    """
    unfinished = plan.unfinished
    for method, experiment in plan.runs():
        finished = unfinished.find(method.name, experiment.seed) is not None
        folder = unfinished.folder_of(method.name, experiment.seed)
        if on_run is not None:
            on_run(method, experiment, experiment.rounds if finished else folder.last_round)
        if finished:
            continue
        unfinished.begin_run(method.name, experiment.seed)
        result = runner.run(
            method,
            experiment,
            plan.configs[method.name],
            on_round=on_round,
            checkpoint_dir=folder.path,
            resume=folder.last_round > 0,
            keep=unfinished.arrays_of(method.name, experiment.seed) if keep_arrays else None,
        )
        unfinished.add(result)


def write(plan: Plan) -> tuple[Comparison, Path]:
    """Write the result of a comparison all of whose runs are finished; return it and its file.

    Pictures of an earlier result in the folder are removed: they would show other numbers.
    """
    runs = _in_order(plan)
    seeds = list(dict.fromkeys(each.seed for each in runs))
    models = plan.models
    config = {
        **plan.config,
        "model": models if len(set(models.values())) > 1 else models[plan.methods[0].name],
        "seeds": seeds,
    }
    first = plan.experiments[0]
    if first.attackers:
        # The seeds are written as texts: JSON has no other keys.
        config["attacker_ids"] = {
            str(seed): sorted(attacker_ids(replace(first, seed=seed))) for seed in seeds
        }
    comparison = Comparison(config, dict(plan.versions), plan.command, tuple(runs))
    remove_pictures(plan.unfinished.directory)
    return comparison, plan.unfinished.finish(comparison)


def _in_order(plan: Plan) -> list[RunResult]:
    """Return the runs as if none had been interrupted; seeds of an earlier result that are not in the plan last."""
    found = (plan.unfinished.find(method.name, experiment.seed) for method, experiment in plan.runs())
    planned = [run for run in found if run is not None]
    return planned + [run for run in plan.unfinished.runs if run not in planned]


def configs_of(methods: Sequence[registry.Method], settings: Sequence[str]) -> dict[str, MethodConfig]:
    """Return each method's hyper-parameters; a setting applies to the methods that have it.

    Parameters
    ----------
    methods : sequence of Method
        At least one.
    settings : sequence of str
        As ``name=value``. A method that fixes the value keeps it.

    Raises
    ------
    ConfigError
        If no method has a setting or all of them fix it, or if a value is not allowed.

    Examples
    --------
    >>> both = [registry.get("fedavg"), registry.get("fedhkd")]
    >>> configs = configs_of(both, ["local-epochs=2", "gamma=0.5"])
    >>> configs["fedavg"].local_epochs, configs["fedhkd"].to_wire()["gamma"]
    (2, 0.5)
    """
    if len(methods) == 1:
        return {methods[0].name: methods[0].config(settings)}
    configs = {method.name: method.config(_settings_of(method, settings)) for method in methods}
    for text in settings:
        name = _setting_name(text)
        having = [method for method in methods if name in method.config_class.field_types()]
        if not having:
            known = {each for method in methods for each in method.config_class.field_types()}
            names = sorted(each.replace("_", "-") for each in known)
            raise ConfigError(unknown_name("hyper-parameter", name.replace("_", "-"), names))
        if all(name in method.fixed for method in having):
            fixing = ", ".join(method.name for method in having)
            raise ConfigError(f"{name.replace('_', '-')} is fixed by {fixing}, got {text!r}")
    return configs


def _settings_of(method: registry.Method, settings: Sequence[str]) -> list[str]:
    """Return the settings that a method takes, and those that are not of the form ``name=value``, for its error."""
    known = method.config_class.field_types()
    return [
        text
        for text in settings
        if "=" not in text or (_setting_name(text) in known and _setting_name(text) not in method.fixed)
    ]


def _setting_name(text: str) -> str:
    return text.partition("=")[0].strip().replace("-", "_")
