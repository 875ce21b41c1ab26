"""One method, run once: strategy, clients, backend, result."""

from __future__ import annotations

import functools
import math
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from torch.utils.data import Dataset

from flwr_kd import registry
from flwr_kd.checks import ConfigError
from flwr_kd.client.own_model import LentModel
from flwr_kd.config import AVERAGE, MethodConfig
from flwr_kd.data import (
    Bundle,
    augmentation,
    histogram,
)
from flwr_kd.experiments.attacks import AttackedGrid, MaliciousClient, parse_attack
from flwr_kd.experiments.attacks.labels import LabelFlip
from flwr_kd.experiments.backends import chosen_backend
from flwr_kd.experiments.data import (
    bundle_of,
    client_splits,
    public_of,
    public_on_device,
    test_on_device,
    training_on_device,
)
from flwr_kd.experiments.distances import Trajectory
from flwr_kd.experiments.errors import AttackError, SimulationError
from flwr_kd.experiments.evaluation import evaluator
from flwr_kd.experiments.experiment import Experiment, attacker_ids
from flwr_kd.experiments.process_pool import BuiltApp, run_processes
from flwr_kd.experiments.ray_backend import run_ray
from flwr_kd.experiments.run_folder import CHECKPOINT_SECONDS, RunFolder
from flwr_kd.learning.determinism import be_deterministic, deterministic
from flwr_kd.learning.device import one_thread, resolve_device
from flwr_kd.learning.weights import size_of
from flwr_kd.models.reused import ModelPool
from flwr_kd.results.measures import ACCURACIES
from flwr_kd.results.schema import RoundResult, RunResult
from flwr_kd.seeding import derive_seed
from flwr_kd.server.averaged_model import averages_models
from flwr_kd.server.callbacks import Callback, Callbacks
from flwr_kd.server.checkpoint import Checkpoint
from flwr_kd.server.parameters import parameters_of
from flwr_kd.server.records import KDResult, RoundStats
from flwr_kd.server.strategy import KDStrategy
from flwr_kd.transport.inline_grid import InlineGrid
from flwr_kd.wording import assignment, option

if TYPE_CHECKING:
    from flwr.client import Client

__all__ = [
    "LARGE_STATE",
    "build_client",
    "check",
    "client_options",
    "round_result",
    "run",
    "run_inline",
    "server_options",
]

_MODELS = ModelPool()
LARGE_STATE = 10 * 10**6
"""Bytes of a personal model beyond which it is kept in a file, and not in Flower's client state."""


_Backend: TypeAlias = Callable[[ClientApp, Experiment, Callable[[Grid], None]], None]


@dataclass
class _Outcome:
    result: KDResult | None = None
    failure: BaseException | None = None
    attacked: AttackedGrid | None = None

    def check(self) -> None:
        """Raise the attack's error: what the server has without the attackers' replies is no result."""
        if self.attacked is not None:
            self.attacked.check()


def run(
    method: registry.Method,
    experiment: Experiment,
    config: MethodConfig | None = None,
    *,
    on_round: Callable[[RoundStats], None] | None = None,
    callbacks: Iterable[Callback] = (),
    name: str = "",
    checkpoint_dir: Path | None = None,
    resume: bool = False,
    keep: Path | None = None,
) -> RunResult:
    """Run one method once.

    Parameters
    ----------
    method : Method
        From the registry.
    experiment : Experiment
        Data, models, rounds, backend.
    config : MethodConfig, optional
        The method's hyper-parameters; its defaults if None.
    on_round : callable, optional
        Called after every round. Its error ends the run.
    callbacks : iterable of Callback
        Told of the run's beginning, phases, rounds and end; see :class:`flwr_kd.Callback`.
    name : str
        What callbacks are told to call the run; the method's name if empty.
    checkpoint_dir : path, optional
        A folder for what an interrupted run needs to go on: the last complete round, at most every few seconds, the
        numbers of all rounds, and the clients' personal models. Without ``resume`` an earlier run's are removed.
    resume : bool
        Go on after the last complete round, with the numbers of a run that was not interrupted.
    keep : path, optional
        A folder, made if it does not exist, into which the last global arrays and the strategy's own state
        are written as a :class:`~flwr_kd.server.checkpoint.Checkpoint`. Not made if the method has neither.

    Returns
    -------
    RunResult
        The numbers per round.

    Raises
    ------
    ConfigError, DataError
        If a setting is not allowed; nothing has been run.
    SimulationError
        If the server failed; an :class:`~flwr_kd.experiments.errors.AttackError` if the attack did.
    """
    experiment = experiment.of(method)
    config = method.config() if config is None else config
    splits = client_splits(experiment)
    bundle = bundle_of(experiment)
    _check_labels(method, experiment, bundle)
    config.check_classes(bundle.num_classes)
    folder = None if checkpoint_dir is None else RunFolder(checkpoint_dir)
    if folder is not None and not resume:
        folder.clear()
    outcome = _Outcome()
    strategy = method.strategy(
        config,
        **server_options(method, experiment),
        cores=experiment.workers,
        seed=experiment.seed,
        fraction_train=experiment.fraction_train,
        measure=experiment.measure,
        min_available_nodes=experiment.clients,
        # Known here, so that no honest client is cut, however unequal the parts are.
        max_examples=max(len(train) for train, _ in splits),
        aggregation=experiment.aggregation,
        knowledge_aggregation=experiment.knowledge_aggregation,
        on_round=_noting(folder, on_round, outcome),
        callbacks=Callbacks(callbacks, name=name or method.name, settings=experiment.shared()),
        checkpoint_dir=checkpoint_dir,
        checkpoint_seconds=CHECKPOINT_SECONDS,
        resume=resume,
    )
    initial = ArrayRecord(experiment.build_model().state_dict()) if strategy.sends_weights else ArrayRecord()
    trajectory = _trajectory(method, experiment, folder)
    measured = method.global_model or averages_models(config)
    evaluate = _evaluate_fn(experiment, bundle if measured else None, trajectory)

    attack = None if experiment.attack is None else parse_attack(experiment.attack)

    def serve(grid: Grid) -> None:
        if attack is not None:
            grid = outcome.attacked = AttackedGrid(grid, attack)
        try:
            result = strategy.start(grid, initial, num_rounds=experiment.rounds, evaluate_fn=evaluate)
            outcome.check()
            outcome.result = result
        except Exception as error:
            # Of a failed attack the strategy may have seen that too few replied, only.
            failed = None if outcome.attacked is None else outcome.attacked.failure
            outcome.failure = failed or error

    with _state_dir(experiment, folder) as state_dir, deterministic(_cuda_device(experiment)):
        build = functools.partial(build_client, method.name, experiment, state_dir)
        ray = functools.partial(run_ray, method=method.name, state_dir=state_dir)
        backends: dict[str, _Backend] = {"inline": run_inline, "processes": run_processes, "ray": ray}
        backends[chosen_backend(experiment)](BuiltApp(build), experiment, serve)
    if isinstance(outcome.failure, AttackError):
        raise AttackError(f"{method.name}: {outcome.failure}") from outcome.failure
    if outcome.result is None:
        reason = outcome.failure or "it ended without a result"
        raise SimulationError(f"{method.name}: the server failed: {reason}") from outcome.failure
    if keep is not None:
        arrays = outcome.result.arrays if method.global_model else ArrayRecord()
        _keep(keep, experiment.rounds, strategy, arrays)
    labels, rounds = bundle.train.y.numpy(), _all_rounds(folder, outcome.result)
    return RunResult(
        method=method.name,
        seed=experiment.seed,
        rounds=rounds if trajectory is None else trajectory.measured(rounds),
        hyperparameters=dict(config.to_wire()),
        parameters=parameters_of(strategy),
        histogram=histogram(labels, [train for train, _ in splits], bundle.num_classes),
        class_names=list(bundle.class_names),
    )


def _trajectory(
    method: registry.Method, experiment: Experiment, folder: RunFolder | None
) -> Trajectory | None:
    """Return what keeps the global models of all rounds; None where no distances are measured."""
    if not (experiment.distances and method.global_model):
        return None
    names = [name for name, _ in experiment.build_model().named_parameters()]
    return Trajectory(None if folder is None else folder.models, names)


def _evaluate_fn(
    experiment: Experiment, bundle: Bundle | None, trajectory: Trajectory | None
) -> Callable[[int, ArrayRecord], MetricRecord | None] | None:
    """Return what is done with the global model after each round; None if that is nothing, or without a bundle."""
    measure = None
    if bundle is not None and len(bundle.test):
        measure = evaluator(
            experiment.build_model, bundle, threads=experiment.workers, device=experiment.device
        )
    if trajectory is None:
        return measure

    def keep_and_measure(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        trajectory.keep(server_round, arrays)
        return None if measure is None else measure(server_round, arrays)

    return keep_and_measure


def _keep(folder: Path, last_round: int, strategy: KDStrategy, arrays: ArrayRecord) -> None:
    state = strategy.state_arrays()
    if arrays or state:
        name, config = type(strategy).__name__, strategy.config.to_wire()
        Checkpoint(name, last_round, config, strategy.seed, arrays, state).save(folder)


def check(experiment: Experiment, config: MethodConfig, method: registry.Method | None = None) -> None:
    """Check what would make all clients fail, before a server waits for them: data, models, classes.

    Parameters
    ----------
    experiment : Experiment
        With the method's models; see :meth:`Experiment.of`.
    config : MethodConfig
        The method's hyper-parameters.
    method : Method, optional
        Its server half is checked as well: public data, and a model that takes it.

    Raises
    ------
    ConfigError, DataError
        If a setting does not fit another.
    """
    if experiment.own is None:
        client_splits(experiment)
    else:
        config.check_unlabelled()
    bundle = bundle_of(experiment)
    _check_labels(method, experiment, bundle)
    config.check_classes(bundle.num_classes)
    for index in range(len(experiment.models)):
        experiment.build_model(index)
    if method is not None:
        if averages_models(config) and len(set(experiment.models)) > 1:
            raise ConfigError(
                f"{assignment('global_model', AVERAGE)} needs the same model at all clients, got "
                f"{option('model', str(experiment.model))}: leave one of them out"
            )
        if method.public_at == "clients" and experiment.own is None:
            labels = getattr(public_of(experiment), "y", None)
            if labels is not None and labels.ndim == 1:
                config.check_public_labels(int(labels.max()), bundle.num_classes)
        method.strategy(
            config,
            **server_options(method, experiment),
            min_available_nodes=experiment.clients,
            aggregation=experiment.aggregation,
            knowledge_aggregation=experiment.knowledge_aggregation,
        )


def server_options(method: registry.Method, experiment: Experiment) -> dict[str, Any]:
    """Return a strategy's arguments besides its config: device, model and public data, if the method needs them.

    Raises
    ------
    ConfigError, DataError
        If the public data cannot be loaded, or the model does not take it.
    """
    if method.public_at == "server":
        model: dict[str, Any] = {"model": experiment.build_model()}
        if method.heterogeneous:
            model = {"models": [experiment.build_model(index) for index in range(len(experiment.models))]}
        return {**model, "public_set": public_on_device(experiment), "device": experiment.device}
    if method.public_at == "clients":
        return {"public_set": public_of(experiment)}
    if method.public_at == "synthetic":
        return {
            "model": experiment.build_model(),
            "input_shape": bundle_of(experiment).input_shape,
            "device": experiment.device,
        }
    model = {"model": experiment.build_model()} if method.server_model else {}
    return {**model, "device": experiment.device} if method.server_device else model


def client_options(method: registry.Method, experiment: Experiment) -> dict[str, Any]:
    """Return a client's arguments besides its model and data: public data, if all clients have it."""
    public = {"public_set": public_on_device(experiment)} if method.public_at == "clients" else {}
    return {**method.client_options, **public}


def _check_labels(method: registry.Method | None, experiment: Experiment, bundle: Bundle) -> None:
    if bundle.multi_label and method is not None and not method.takes_multi_label:
        raise ConfigError(registry.needs_one_class(method.name))
    if experiment.attack is not None:
        attack = parse_attack(experiment.attack)
        attack.check_classes(bundle.num_classes)
        if bundle.multi_label and isinstance(attack, LabelFlip):
            raise ConfigError(
                f"attack {experiment.attack!r} needs one class per sample, and these have several labels"
            )


def build_client(method_name: str, experiment: Experiment, state_dir: str | None, context: Context) -> Client:
    """Build one node's client.

    It runs in other processes, so it is given names and not data.

    Parameters
    ----------
    method_name : str
        A name of the registry.
    experiment : Experiment
        Data and models; its workers load the data themselves.
    state_dir : str, optional
        A folder for personal models that are too large for Flower's client state.
    context : Context
        The node's.
    """
    method = registry.get(method_name)
    # Equal runs have equal numbers.
    context.node_config["reproducible-noise"] = True
    if state_dir is not None:
        context.node_config.update({"state-dir": state_dir, "state-sync": False})
    index = int(context.node_config["partition-id"])
    # In a worker's process, which ends with the run; in this process the run restores the settings.
    be_deterministic(_cuda_device(experiment))
    samples, (train, test) = training_on_device(experiment), client_splits(experiment)[index]
    train_set: Dataset[Any] = samples.subset(train)
    attack = None
    if experiment.attack is not None and index in attacker_ids(experiment):
        attack = parse_attack(experiment.attack)
        seed = derive_seed(experiment.seed, "attack", index)
        train_set = attack.poison(train_set, bundle_of(experiment).num_classes, seed)
    build = functools.partial(experiment.build_model, index)
    model: Any = LentModel(_MODELS, experiment.model_key(index), build)
    client: Any = method.client(
        model,
        train_set,
        samples.subset(test),
        common_test_set=test_on_device(experiment),
        context=context,
        device=experiment.device,
        precision=experiment.precision,
        channels_last=experiment.channels_last,
        augment=augmentation(experiment.augment),
        **client_options(method, experiment),
    )
    if attack is not None:
        client = MaliciousClient(client, attack, partition=index)
    served: Client = client.to_client()
    return served


def _cuda_device(experiment: Experiment) -> torch.device:
    """Return the device that is to be deterministic; the CPU, which always is, if none is."""
    return resolve_device("cpu" if experiment.nondeterministic else experiment.device)


@contextmanager
def _state_dir(experiment: Experiment, folder: RunFolder | None) -> Iterator[str | None]:
    """Return the folder for personal models; None where they are small and need not outlive the run.

    Then they travel with each message, in Flower's client state.
    """
    if folder is not None:
        try:
            yield str(folder.personal)
        finally:
            folder.close()
        return
    states = [experiment.build_model(index).state_dict() for index in range(len(experiment.models))]
    if max(size_of(state) for state in states) <= LARGE_STATE:
        yield None
        return
    # A worker that is being ended may still write.
    with tempfile.TemporaryDirectory(prefix="flwr-kd-state-", ignore_cleanup_errors=True) as temporary:
        yield temporary


def _noting(
    folder: RunFolder | None, on_round: Callable[[RoundStats], None] | None, outcome: _Outcome
) -> Callable[[RoundStats], None]:
    """Return a function that keeps a round's numbers, and then calls ``on_round``.

    It raises an attack's error before, so that a run that is resumed repeats the round.
    """

    def note(stats: RoundStats) -> None:
        outcome.check()
        if folder is not None:
            folder.add(round_result(stats))
        if on_round is not None:
            on_round(stats)

    return note


def _all_rounds(folder: RunFolder | None, result: KDResult) -> tuple[RoundResult, ...]:
    """Return the numbers of all rounds, also of those before the run was resumed."""
    rounds = [round_result(stats) for stats in result.rounds]
    first = rounds[0].round if rounds else math.inf
    earlier = [] if folder is None else [other for other in folder.rounds() if other.round < first]
    return (*earlier, *rounds)


def run_inline(app: ClientApp, experiment: Experiment, serve: Callable[[Grid], None]) -> None:
    """Run a server against clients in this process."""
    grid = InlineGrid(app, experiment.clients, workers=experiment.workers, seed=experiment.seed)
    # The workers of other backends also have one thread: all give the same numbers to the last bit.
    with closing(grid), one_thread():
        serve(grid)


def round_result(stats: RoundStats) -> RoundResult:
    """Return a round's numbers as a result holds them."""
    return RoundResult(
        round=stats.server_round,
        **{name: getattr(stats, name) for name in ACCURACIES},
        train_loss=stats.train_loss,
        bytes_up=stats.bytes_up,
        bytes_down=stats.bytes_down,
        bytes_knowledge=stats.bytes_knowledge,
        round_trips=stats.round_trips,
        seconds=stats.seconds,
        participants=stats.participants,
        failures=stats.failures,
        clients={
            str(key): {name.replace("-", "_"): value for name, value in values.items()}
            for key, values in sorted(stats.clients.items())
        },
        available=stats.available,
        stored=tuple(map(str, sorted(stats.stored))),
        accuracy_before=stats.accuracy_before,
        received=tuple(map(str, sorted(stats.received))),
    )
