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

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flwr_kd import registry
from flwr_kd.checks import ConfigError, check_label
from flwr_kd.config import MethodConfig
from flwr_kd.experiments import runner
from flwr_kd.experiments.attacks import parse_attack
from flwr_kd.experiments.experiment import Experiment, attacker_ids
from flwr_kd.experiments.options import ExperimentOptions
from flwr_kd.experiments.resumption import Unfinished
from flwr_kd.plotting import remove_pictures
from flwr_kd.results import provenance
from flwr_kd.results.clients import ALONE, is_alone
from flwr_kd.results.schema import Comparison, RunResult
from flwr_kd.server.callbacks import Callback
from flwr_kd.server.records import RoundStats
from flwr_kd.server.stated_privacy import stated_privacy
from flwr_kd.text import unknown_name
from flwr_kd.wording import one_comparison

__all__ = [
    "ALONE_BY",
    "ALONE_SETTINGS",
    "Entry",
    "Plan",
    "check_alone",
    "compare",
    "configs_of",
    "method_of_row",
    "prepare",
    "run",
    "settings_of",
    "write",
]

ALONE_BY, ALONE_SETTINGS = "fedproto", {"proto-weight": 0.0}
"""The method, and its settings, of a row :data:`~flwr_kd.results.clients.ALONE`: prototypes without a weight."""


@dataclass(frozen=True)
class Entry:
    """One row of a comparison: a method with its hyper-parameters.

    Attributes
    ----------
    method : Method
        From the registry.
    config : MethodConfig
        Its hyper-parameters.
    label : str
        The row's name, for a method that a comparison has several times; the method's if empty.
    model : str, optional
        The clients' models, in place of the experiment's.
    seeds : tuple of int
        Those of the comparison's seeds with which it runs; all of them if empty.

    Examples
    --------
    >>> fedhkd = registry.get("fedhkd")
    >>> [Entry(fedhkd, fedhkd.config(["gamma=0.1"]), label).name for label in ("", "gamma 0.1")]
    ['fedhkd', 'gamma 0.1']
    """

    method: registry.Method
    config: MethodConfig
    label: str = ""
    model: str | None = None
    seeds: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_label(self.label)
        if self.label == self.method.name:
            object.__setattr__(self, "label", "")

    @property
    def name(self) -> str:
        """What table and pictures call it."""
        return self.label or self.method.name

    def of(self, experiment: Experiment) -> Experiment:
        """Return the experiment with the entry's models; see :meth:`Experiment.of`."""
        own = experiment if self.model is None else replace(experiment, model=self.model)
        return own.of(self.method)


@dataclass(frozen=True)
class Plan:
    """A comparison whose settings have been checked.

    Attributes
    ----------
    entries : tuple of Entry
        The rows of the comparison, in the order in which they run.
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

    entries: tuple[Entry, ...]
    experiments: tuple[Experiment, ...]
    unfinished: Unfinished
    config: Mapping[str, Any]
    versions: Mapping[str, str]
    command: str

    @property
    def rounds(self) -> int:
        """Number of rounds of all runs together."""
        return sum(experiment.rounds for _, experiment in self.runs())

    @property
    def models(self) -> dict[str, str]:
        """Each entry's model, or models separated by commas, by its name."""
        return {entry.name: str(entry.of(self.experiments[0]).model) for entry in self.entries}

    def runs(self) -> Iterator[tuple[Entry, Experiment]]:
        """Yield entry and experiment of each run, in the order in which they run: seed by seed."""
        for experiment in self.experiments:
            for entry in self.entries:
                if not entry.seeds or experiment.seed in entry.seeds:
                    yield entry, experiment

    def begin(self, *, resume: bool = False, force: bool = False) -> None:
        """Read the runs that are finished, see :meth:`flwr_kd.experiments.resumption.Unfinished.begin`."""
        self.unfinished.begin(resume=resume, force=force)

    def unharmed(self) -> list[str]:
        """Return the entries whose clients send nothing that the attack changes; none without an attack."""
        spec = self.experiments[0].attack
        if spec is None:
            return []
        attack = parse_attack(spec)
        return [entry.name for entry in self.entries if not attack.concerns(entry.method.strategy)]

    def privacy(self) -> list[str]:
        """Return what each entry states of the privacy of clients' weights; nothing without any."""
        rounds, lines = self.experiments[0].rounds, []
        for entry in self.entries:
            kind = entry.method.strategy
            stated = stated_privacy(entry.config, kind.phases, kind.reply_arrays, rounds)
            lines += [f"{entry.name}: {line}" for line in stated]
        return lines


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
    callbacks: Iterable[Callback] = (),
) -> Comparison:
    """Run several methods on the same partitions from the same initial weights, and write the result.

    Parameters
    ----------
    keep_arrays : bool
        Whether each run's last arrays are kept beside the result, for ``flwr-kd plot``.
    callbacks : iterable of Callback
        Told of each run's beginning, phases, rounds and end; see :class:`flwr_kd.Callback`.
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
    run(plan, keep_arrays=keep_arrays, callbacks=callbacks)
    return write(plan)[0]


def prepare(
    names: Sequence[str] | Sequence[Entry],
    options: ExperimentOptions,
    *,
    seeds: Sequence[int],
    folder: Path | None = None,
    settings: Sequence[str] = (),
    command: str = "",
    resume: bool = False,
    force: bool = False,
    begin: bool = True,
) -> Plan:
    """Check everything that a comparison needs before any of its runs, and read those that are finished.

    Parameters
    ----------
    names : sequence of str or of Entry
        Methods of the registry; a repeated one runs once. With ``alone`` there is a row in which each client trains
        by itself, and others have the share of clients that are better off. Entries have hyper-parameters and a
        name of their own.
    options : ExperimentOptions
        Shared by all runs.
    seeds : sequence of int
        At least one; a repeated one runs once.
    folder : Path, optional
        The result's; ``runs/`` and the entries' names if None.
    settings : sequence of str
        Hyper-parameters as ``name=value``, see :func:`configs_of`; none with entries.
    command : str
        The command line that gives the result again.
    resume : bool
        Whether to continue an interrupted comparison, or extend a result, in this folder.
    force : bool
        Whether a result in this folder may be overwritten.
    begin : bool
        Whether :meth:`Plan.begin` is called. Without it nothing is written, so that others can be checked first.

    Raises
    ------
    ConfigError, DataError
        If a value is not allowed, or does not fit another.
    ResultExistsError, ResultError
        If the folder has a result that may not be overwritten, that is of other settings, or cannot be written to.
    """
    entries = _entries(names, settings)
    experiments = tuple(Experiment.from_options(options, seed) for seed in dict.fromkeys(seeds))
    folder = folder or Path("runs") / "-".join(entry.name for entry in entries)
    config, versions = experiments[0].shared(), provenance.versions()
    unfinished = Unfinished(
        folder,
        config=config,
        methods={entry.name: entry.method.name for entry in entries},
        models={entry.name: str(entry.of(experiments[0]).model) for entry in entries},
        hyperparameters={entry.name: entry.config.to_wire() for entry in entries},
        versions=versions,
        command=command,
    )
    unfinished.check_free(resume=resume, force=force)
    plan = Plan(entries, experiments, unfinished, config, versions, command)
    for entry, experiment in plan.runs():
        try:
            runner.check(entry.of(experiment), entry.config, entry.method)
        except ConfigError as error:
            if is_alone(entry.name) and entry.method.name == ALONE_BY:
                raise ConfigError(
                    f"the row {entry.name}, {ALONE_BY} with {_texts(ALONE_SETTINGS)}: {error}"
                ) from None
            raise
    if begin:
        plan.begin(resume=resume, force=force)
    return plan


@one_comparison()
def run(
    plan: Plan,
    *,
    keep_arrays: bool = True,
    on_run: Callable[[Entry, Experiment, int], None] | None = None,
    on_round: Callable[[RoundStats], None] | None = None,
    callbacks: Iterable[Callback] = (),
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
        Called before each run with its entry, its experiment, and the number of its rounds that are done already.
    on_round : callable, optional
        Called after every round. Its error ends the run.
    callbacks : iterable of Callback
        Told of each run's beginning, phases, rounds and end. Finished runs are not run, and not told.

    Raises
    ------
    SimulationError
        If a server failed.
    """
    unfinished, callbacks = plan.unfinished, tuple(callbacks)
    for entry, experiment in plan.runs():
        finished = unfinished.find(entry.name, experiment.seed) is not None
        folder = unfinished.folder_of(entry.name, experiment.seed)
        if on_run is not None:
            on_run(entry, experiment, experiment.rounds if finished else folder.last_round)
        if finished:
            continue
        unfinished.begin_run(entry.name, experiment.seed)
        result = runner.run(
            entry.method,
            entry.of(experiment),
            entry.config,
            on_round=on_round,
            callbacks=callbacks,
            name=entry.name,
            checkpoint_dir=folder.path,
            resume=folder.last_round > 0,
            keep=unfinished.arrays_of(entry.name, experiment.seed) if keep_arrays else None,
        )
        if is_alone(entry.name):
            # What carries these runs is no part of training alone.
            result = replace(result, rounds=tuple(stats.without_traffic() for stats in result.rounds))
        unfinished.add(replace(result, label=entry.label))


def write(plan: Plan) -> tuple[Comparison, Path]:
    """Write the result of a comparison all of whose runs are finished; return it and its file.

    Pictures of an earlier result in the folder are removed: they would show other numbers.
    """
    runs = _in_order(plan)
    seeds = list(dict.fromkeys(each.seed for each in runs))
    models = plan.models
    config = {
        **plan.config,
        "model": models if len(set(models.values())) > 1 else models[plan.entries[0].name],
        "seeds": seeds,
    }
    first = plan.experiments[0]
    if first.attackers:
        # The seeds are written as texts: JSON has no other keys.
        config["attacker_ids"] = {
            str(seed): sorted(attacker_ids(replace(first, seed=seed))) for seed in seeds
        }
    comparison = Comparison(config, dict(plan.versions), _command(plan, runs), tuple(runs))
    remove_pictures(plan.unfinished.directory)
    return comparison, plan.unfinished.finish(comparison)


def _texts(settings: Mapping[str, float]) -> str:
    return ", ".join(f"{name}={value:g}" for name, value in settings.items())


def _command(plan: Plan, runs: Sequence[RunResult]) -> str:
    """Return what gives the result again: with those before, if they made runs which are not in the plan."""
    planned = {(entry.name, experiment.seed) for entry, experiment in plan.runs()}
    if any((run.name, run.seed) not in planned for run in runs):
        return plan.unfinished.commands
    return " ".join(word for word in plan.command.split(" ") if word != "--resume")


def _in_order(plan: Plan) -> list[RunResult]:
    """Return the runs as if none had been interrupted; seeds of an earlier result that are not in the plan last."""
    found = (plan.unfinished.find(entry.name, experiment.seed) for entry, experiment in plan.runs())
    planned = [run for run in found if run is not None]
    return planned + [run for run in plan.unfinished.runs if run not in planned]


def _entries(rows: Sequence[str] | Sequence[Entry], settings: Sequence[str]) -> tuple[Entry, ...]:
    names = dict.fromkeys(row for row in rows if isinstance(row, str))
    methods = {name: method_of_row(name) for name in names}
    check_alone(methods, settings)
    each_once = list({method.name: method for method in methods.values()}.values())
    configs = configs_of(each_once, settings) if methods else {}
    entries = [row for row in rows if isinstance(row, Entry)]
    for name, method in methods.items():
        own: Mapping[str, Any] = ALONE_SETTINGS if name == ALONE else {}
        config = replace(configs[method.name], **{key.replace("-", "_"): each for key, each in own.items()})
        entries.append(Entry(method, config, name))
    repeated = sorted(name for name, count in Counter(entry.name for entry in entries).items() if count > 1)
    if repeated:
        raise ConfigError(f"two rows of a comparison have the name {repeated[0]!r}: give one of them another")
    return tuple(entries)


def method_of_row(name: str) -> registry.Method:
    """Return the method of a row by its name, which is a method's or :data:`~flwr_kd.results.clients.ALONE`.

    Raises
    ------
    ConfigError
        If there is no such method.
    """
    return registry.get(ALONE_BY if name == ALONE else name)


def check_alone(rows: Mapping[str, registry.Method], settings: Sequence[str]) -> None:
    """Refuse a setting that only clients that train alone would have: it makes them what they are.

    Parameters
    ----------
    rows : mapping of str to Method
        The rows' methods by their names.
    settings : sequence of str
        As ``name=value``.

    Raises
    ------
    ConfigError
        If there is such a setting.

    Examples
    --------
    >>> check_alone({"alone": method_of_row("alone"), "fedavg": registry.get("fedavg")}, ["proto-weight=1"])
    Traceback (most recent call last):
    ...
    flwr_kd.checks.ConfigError: proto-weight is fixed at 0 in the row alone, got 'proto-weight=1'
    """
    others = [method for name, method in rows.items() if name != ALONE]
    by_default = ALONE in rows and rows[ALONE].name == ALONE_BY
    for text in settings if by_default else ():
        name = _setting_name(text)
        fixed = ALONE_SETTINGS.get(name.replace("_", "-"))
        if fixed is not None and not any(name in method.config_class.field_types() for method in others):
            raise ConfigError(
                f"{name.replace('_', '-')} is fixed at {fixed:g} in the row {ALONE}, got {text!r}"
            )


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
    configs = {method.name: method.config(settings_of(method, settings)) for method in methods}
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


def settings_of(method: registry.Method, settings: Sequence[str]) -> list[str]:
    """Return the settings that a method takes, and those that are not of the form ``name=value``, for its error."""
    known = method.config_class.field_types()
    return [
        text
        for text in settings
        if "=" not in text or (_setting_name(text) in known and _setting_name(text) not in method.fixed)
    ]


def _setting_name(text: str) -> str:
    return text.partition("=")[0].strip().replace("-", "_")
