"""Whole experiments on one machine: data, partitions, models, method, backend, result.

Everything that needs Flower's deprecated ``run_simulation`` is in :func:`_run_ray`: it is the only way that
gives the strategy's result back to the caller.
"""

from __future__ import annotations

import functools
import logging
import math
import os
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.client import Client, NumPyClient
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from torch import Tensor, nn
from torch.utils.data import Dataset

from . import registry
from .attacks import ATTACKS, MaliciousClient, draw_attackers, parse_attack
from .checkpoint import Checkpoint
from .client import resolve_device
from .config import ConfigError, MethodConfig, unknown_name
from .data import (
    ArrayDataset,
    Bundle,
    DataError,
    DataSpec,
    augmentation,
    histogram,
    load,
    load_public,
    long_tail,
    partition,
    public_name,
    split,
)
from .inline import InlineGrid
from .models import MODELS, build_model
from .results import RoundResult, RunResult
from .seeding import derive_seed
from .strategy import KDResult, KDStrategy, RoundStats
from .weights import size_of

__all__ = [
    "BACKENDS",
    "Experiment",
    "SimulationError",
    "attacker_ids",
    "bundle_of",
    "check",
    "client_options",
    "client_splits",
    "evaluator",
    "public_of",
    "round_result",
    "run",
    "server_options",
]

BACKENDS = ("ray", "inline")
_LARGE_STATE = 10 * 10**6
_RESTARTS = {"max_restarts": -1, "max_task_retries": 1}
"""Ray's options of an actor, which Flower takes among the resources of a client.

Flower keeps a dead actor in its pool, and what is handed to it is lost, in every later round. Ray starts it anew
instead. The retry makes messages wait for that; its price is that a client which has died is asked once more.
"""
_FOR_RAY = {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "OMP_NUM_THREADS": "1"}
_ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(2**25), "MALLOC_TRIM_THRESHOLD_": str(2**26)}
"""For glibc in Ray's workers, unless the user has set them: keep what is freed, up to 64 MiB.

By default it gives the memory of each layer's output back and asks for it anew in the next step. In a worker, where
each message builds a model, that takes 5 % of a CNN's training.
"""


class SimulationError(RuntimeError):
    """The server failed, so that there is no result."""


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """What the methods of a comparison share: data, partitions, models, rounds.

    Two methods with the same experiment get the same partitions, the same initial weights and the same
    order of batches; what differs is the method.

    Parameters
    ----------
    dataset : str
        See :func:`flwr_kd.data.load`.
    partition : str
        See :func:`flwr_kd.data.partition`.
    clients, rounds : int
        At least 1.
    model : str, optional
        A name of :data:`flwr_kd.models.MODELS`, or several separated by commas, which are given to the
        clients in turn; for methods that allow different models. The method's own if None.
    feature_dim : int, optional
        D; each model's own if None.
    seed : int
        At least 0.
    fraction_train : float
        Share of the clients drawn per round.
    backend : str
        ``"ray"`` or ``"inline"``.
    workers : int
        Clients at the same time.
    device : str
        ``"auto"``, ``"cpu"``, ``"cuda"``.
    data_dir : str, optional
        Where data files are.
    limit : int, optional
        Use so many training samples only.
    imbalance : float, optional
        Cut what is left to a long tail with this factor, before it is divided among the clients; see
        :func:`flwr_kd.data.long_tail`. Test set and public data keep their class mix.
    validation : bool
        Measure the global model on a fifth of the training samples, which no client then has, in place of the test
        set: for the choice of hyper-parameters. Taken before ``imbalance``.
    image_size : int, optional
        Pad images to this side.
    public : str, optional
        Public data of methods that need some, see :func:`flwr_kd.data.load_public`; the data set's default if
        None. The data set's own name holds a fifth of its training part back from the clients, whatever the method.
    public_limit : int
        Use so many public samples at most; 5,000 is FedHEAD's number.
    augment : str
        What is done to training batches; see :func:`flwr_kd.data.augmentation`.
    attack : str, optional
        What malicious clients do; see :mod:`flwr_kd.attacks`.
    attackers : int
        How many there are, 0 to ``clients``: none without an attack, at least one with it.
    own : DataSpec, optional
        The clients have data of their own, of this form, in place of ``dataset`` and ``partition``. For Flower
        Apps: see :func:`flwr_kd.app.client_data`.

    Raises
    ------
    ConfigError
        If a value is not allowed. Data sets and partitions are checked when they are loaded.
    """

    dataset: str = "digits"
    partition: str = "inner-dirichlet:0.1"
    clients: int = 10
    rounds: int = 10
    model: str | None = None
    feature_dim: int | None = None
    seed: int = 0
    fraction_train: float = 1.0
    backend: str = "ray"
    workers: int = 2
    device: str = "auto"
    data_dir: str | None = None
    limit: int | None = None
    imbalance: float | None = None
    validation: bool = False
    image_size: int | None = None
    public: str | None = None
    public_limit: int = 5000
    augment: str = "none"
    attack: str | None = None
    attackers: int = 0
    own: DataSpec | None = None

    def __post_init__(self) -> None:
        whole = {"clients": 1, "rounds": 1, "workers": 1, "seed": 0, "public_limit": 1, "attackers": 0}
        for name, least in whole.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ConfigError(f"{name} must be a whole number from {least}, got {value!r}")
        if self.backend not in BACKENDS:
            raise ConfigError(unknown_name("backend", self.backend, BACKENDS))
        for name in self.models:
            if name not in MODELS:
                raise ConfigError(unknown_name("model", name, MODELS))
        if self.feature_dim is not None and self.feature_dim < 1:
            raise ConfigError(f"feature-dim must be a whole number from 1, got {self.feature_dim!r}")
        if not 0 < self.fraction_train <= 1:
            raise ConfigError(f"fraction-train must be in (0, 1], got {self.fraction_train}")
        if self.imbalance is not None:
            real = isinstance(self.imbalance, int | float) and not isinstance(self.imbalance, bool)
            if not real or not (math.isfinite(self.imbalance) and self.imbalance >= 1):
                raise ConfigError(f"imbalance must be a finite number from 1, got {self.imbalance!r}")
        resolve_device(self.device)
        augmentation(self.augment)
        if self.attack is not None:
            parse_attack(self.attack)
            if not self.attackers:
                raise ConfigError(f"attack {self.attack!r} needs attackers from 1, got 0")
        elif self.attackers:
            raise ConfigError(
                f"attackers={self.attackers} needs an attack, one of {', '.join(ATTACKS)}; got none"
            )
        if self.attackers > self.clients:
            raise ConfigError(f"attackers must be at most clients={self.clients}, got {self.attackers}")

    @property
    def models(self) -> list[str]:
        """The models' names, given to the clients in turn; ``mlp`` where neither was chosen, nor a method."""
        return [name.strip() for name in (self.model or "mlp").split(",")]

    def of(self, method: registry.Method) -> Experiment:
        """Return the experiment with the method's own models where it names none.

        Raises
        ------
        ConfigError
            If there are several models, and the method needs the same at all clients.
        """
        found = self if self.model is not None else replace(self, model=method.model)
        if len(set(found.models)) > 1 and not method.heterogeneous:
            raise ConfigError(f"{method.name} needs one model for all clients, got --model {found.model}")
        return found

    def shared(self) -> dict[str, Any]:
        """Return everything but the seed, for a result's ``config``; the public data's name even if not given."""
        values = {name: value for name, value in asdict(self).items() if name not in ("seed", "own")}
        if self.own is not None:
            return {**values, "dataset": "own", "partition": None, **asdict(self.own)}
        return {
            **values,
            "public": public_name(self.public, dataset=self.dataset, data_dir=self.data_dir),
        }

    def build_model(self, index: int = 0) -> nn.Module:
        """Return the initial model of a client; the same for all clients with the same architecture.

        Raises
        ------
        ConfigError
            If the model does not take the data set's inputs.
        """
        bundle = bundle_of(self)
        name = self.models[index % len(self.models)]
        try:
            return build_model(
                name,
                input_shape=bundle.input_shape,
                num_classes=bundle.num_classes,
                seed=derive_seed(self.seed, "model", name),
                feature_dim=self.feature_dim,
                vocabulary=bundle.vocabulary,
            )
        except ValueError as error:
            raise ConfigError(f"model {name} does not fit {bundle.name}: {error}") from None


@dataclass
class _Outcome:
    result: KDResult | None = None
    failure: BaseException | None = None


def run(
    method: registry.Method,
    experiment: Experiment,
    config: MethodConfig | None = None,
    *,
    on_round: Callable[[RoundStats], None] | None = None,
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
        Called after every round.
    checkpoint_dir : path, optional
        Arrays and the method's state are written there after every round.
    resume : bool
        Go on after the checkpoint's round. What clients keep to themselves (personal models) is not in it, and lost
        with the simulation.
    keep : path, optional
        A folder, made if it does not exist, into which the last global arrays and the strategy's own state
        are written as a :class:`~flwr_kd.checkpoint.Checkpoint`; not where the method has neither.

    Returns
    -------
    RunResult
        The numbers per round.

    Raises
    ------
    ConfigError, DataError
        If something that the caller chose is not allowed; nothing has been run.
    SimulationError
        If the server failed.
    """
    experiment = experiment.of(method)
    config = method.config() if config is None else config
    splits = client_splits(experiment)
    bundle = bundle_of(experiment)
    config.check_classes(bundle.num_classes)
    _check_attack(experiment, bundle)
    strategy = method.strategy(
        config,
        **server_options(method, experiment),
        seed=experiment.seed,
        fraction_train=experiment.fraction_train,
        min_available_nodes=experiment.clients,
        on_round=on_round,
        checkpoint_dir=checkpoint_dir,
        resume=resume,
    )
    initial = ArrayRecord(experiment.build_model().state_dict()) if strategy.sends_weights else ArrayRecord()
    evaluate = None
    if method.global_model:
        evaluate = evaluator(experiment.build_model, bundle, threads=experiment.workers)
    outcome = _Outcome()

    def serve(grid: Grid) -> None:
        try:
            outcome.result = strategy.start(grid, initial, num_rounds=experiment.rounds, evaluate_fn=evaluate)
        except Exception as error:
            outcome.failure = error

    backend = _run_inline if experiment.backend == "inline" else _run_ray
    with tempfile.TemporaryDirectory(prefix="flwr-kd-state-") as folder:
        build = functools.partial(_build_client, method.name, experiment, _state_dir(experiment, folder))
        backend(ClientApp(client_fn=build), experiment, serve)
    if outcome.result is None:
        reason = outcome.failure or "it ended without a result"
        raise SimulationError(f"{method.name}: the server failed: {reason}") from outcome.failure
    if keep is not None:
        arrays = outcome.result.arrays if method.global_model else ArrayRecord()
        _keep(keep, experiment.rounds, strategy, arrays)
    labels = bundle.train.y.numpy()
    return RunResult(
        method=method.name,
        seed=experiment.seed,
        rounds=tuple(round_result(stats) for stats in outcome.result.rounds),
        hyperparameters=dict(config.to_wire()),
        histogram=histogram(labels, [train for train, _ in splits], bundle.num_classes),
    )


def _keep(folder: Path, last_round: int, strategy: KDStrategy, arrays: ArrayRecord) -> None:
    state = strategy.state_arrays()
    if arrays or state:
        name, config = type(strategy).__name__, strategy.config.to_wire()
        Checkpoint(name, last_round, config, strategy.seed, arrays, state).save(folder)


def check(experiment: Experiment, config: MethodConfig, method: registry.Method | None = None) -> None:
    """Check, before the server waits for clients, what would make them all fail: data, models, classes.

    With a ``method``, its server's part as well: public data, and a model that takes it.

    Raises
    ------
    ConfigError, DataError
        If a setting does not go with another.
    """
    if experiment.own is None:
        client_splits(experiment)
    bundle = bundle_of(experiment)
    config.check_classes(bundle.num_classes)
    _check_attack(experiment, bundle)
    for index in range(len(experiment.models)):
        experiment.build_model(index)
    if method is not None:
        method.strategy(config, **server_options(method, experiment), min_available_nodes=experiment.clients)


def server_options(method: registry.Method, experiment: Experiment) -> dict[str, Any]:
    """Return what a method's strategy is given besides its config: device, model, public data, if it needs them.

    Raises
    ------
    ConfigError, DataError
        If the public data is not to be had, or the model does not take it.
    """
    if method.public_data == "server":
        model: dict[str, Any] = {"model": experiment.build_model()}
        if method.heterogeneous:
            model = {"models": [experiment.build_model(index) for index in range(len(experiment.models))]}
        return {**model, "public_data": public_of(experiment), "device": experiment.device}
    if method.public_data == "clients":
        return {"public_set": public_of(experiment)}
    if method.public_data == "synthetic":
        return {
            "model": experiment.build_model(),
            "input_shape": bundle_of(experiment).input_shape,
            "device": experiment.device,
        }
    return {"device": experiment.device} if method.server_device else {}


def client_options(method: registry.Method, experiment: Experiment) -> dict[str, Any]:
    """Return what a method's client is given besides its model and data: public data, if all clients have it."""
    public = {"public_set": public_of(experiment)} if method.public_data == "clients" else {}
    return {**method.client_options, **public}


def public_of(experiment: Experiment) -> ArrayDataset:
    """Return an experiment's public data, in the form of the clients' inputs."""
    if experiment.own is not None:
        form, data_dir, limit = experiment.own, experiment.data_dir, experiment.public_limit
        return _public(experiment.public, form, experiment.seed, data_dir, limit)
    dataset, seed, data_dir, *_ = key = _key(experiment)
    public = _public(experiment.public, dataset, seed, data_dir, experiment.public_limit)
    if experiment.image_size is None:
        return public
    return replace(_loaded(*key), train=public).padded(experiment.image_size).train


def client_splits(experiment: Experiment) -> list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
    """Return each client's training and test rows; the same for all methods of a comparison."""
    if experiment.own is not None:
        raise ConfigError(
            "data of the clients' own (own=...) is at the clients: there is nothing to divide here"
        )
    return _splits(experiment.partition, experiment.clients, experiment.seed, _key(experiment))


def attacker_ids(experiment: Experiment) -> frozenset[int]:
    """Return the partitions of the malicious clients; the same for all methods of a comparison."""
    return draw_attackers(experiment.clients, experiment.attackers, experiment.seed)


def _check_attack(experiment: Experiment, bundle: Bundle) -> None:
    if experiment.attack is not None:
        parse_attack(experiment.attack).check_classes(bundle.num_classes)


def evaluator(
    build: Callable[[], nn.Module], bundle: Bundle, batch_size: int = 128, *, threads: int = 1
) -> Callable[[int, ArrayRecord], MetricRecord | None]:
    """Return an ``evaluate_fn``: the global model's accuracy and loss on the common test set, in eval mode.

    Parameters
    ----------
    build : callable
        Returns the model.
    bundle : Bundle
        Its test set is measured.
    batch_size : int
        Small ones stay in the processor's caches.
    threads : int
        Batches at the same time, each on one thread, so that the numbers do not depend on it. In a simulation the
        workers are idle meanwhile.
    """
    model = build()

    @torch.no_grad()
    def measure(batch: tuple[Tensor, Tensor]) -> tuple[int, float]:
        x, y = batch
        logits = model(x)
        loss = nn.functional.cross_entropy(logits, y, reduction="sum")
        return int((logits.argmax(dim=1) == y).sum()), float(loss)

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        model.load_state_dict(arrays.to_torch_state_dict())
        model.eval()
        test = bundle.test
        batches = zip(torch.split(test.x, batch_size), torch.split(test.y, batch_size), strict=True)
        if threads == 1:
            found = list(map(measure, batches))
        else:
            with ThreadPoolExecutor(threads, thread_name_prefix="flwr-kd-evaluate") as pool:
                found = list(pool.map(measure, batches))
        right, loss = sum(each for each, _ in found), sum(each for _, each in found)
        return MetricRecord({"accuracy": right / len(test), "loss": loss / len(test)})

    return evaluate


def bundle_of(experiment: Experiment) -> Bundle:
    """Return an experiment's data, loaded once per process: workers answer many messages."""
    if experiment.own is not None:
        return experiment.own.bundle()
    side, key = experiment.image_size, _key(experiment)
    bundle = _loaded(*key) if side is None else _padded(key, side)
    if experiment.augment != "none" and len(bundle.input_shape) != 3:
        raise DataError(
            f"augment={experiment.augment} is for images, {bundle.name} has {list(bundle.input_shape)}"
        )
    return bundle


_Key = tuple[str, int, str | None, int | None, float | None, bool, bool]


def _key(experiment: Experiment) -> _Key:
    """Return what decides which samples there are."""
    dataset, data_dir = experiment.dataset, experiment.data_dir
    public = experiment.public
    hold_back = public is not None and public_name(public, dataset=dataset, data_dir=data_dir) == dataset
    cuts = experiment.limit, experiment.imbalance, experiment.validation
    return dataset, experiment.seed, data_dir, *cuts, hold_back


@functools.lru_cache(maxsize=2)
def _loaded(
    dataset: str,
    seed: int,
    data_dir: str | None,
    limit: int | None,
    imbalance: float | None,
    validation: bool,
    hold_back: bool,
) -> Bundle:
    bundle = load(dataset, seed=seed, data_dir=data_dir, limit=limit, hold_back=hold_back)
    if validation:
        rows = np.arange(len(bundle.train))
        fit, held = split(bundle.train.y, rows, test_fraction=0.2, seed=derive_seed(seed, "validation"))
        bundle = replace(bundle, train=bundle.train.subset(fit), test=bundle.train.subset(held))
    if imbalance is None:
        return bundle
    return replace(bundle, train=bundle.train.subset(long_tail(bundle.train.y, imbalance, seed=seed)))


@functools.lru_cache(maxsize=1)
def _public(
    name: str | None, dataset: str | DataSpec, seed: int, data_dir: str | None, limit: int
) -> ArrayDataset:
    return load_public(name, dataset=dataset, seed=seed, data_dir=data_dir, limit=limit)


@functools.lru_cache(maxsize=1)
def _padded(key: _Key, side: int) -> Bundle:
    return _loaded(*key).padded(side)


@functools.lru_cache(maxsize=2)
def _splits(
    spec: str, clients: int, seed: int, key: _Key
) -> list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
    labels = _loaded(*key).train.y
    parts = partition(labels, spec, num_clients=clients, seed=seed)
    return [split(labels, part, seed=derive_seed(seed, "split", i)) for i, part in enumerate(parts)]


def _build_client(
    method_name: str, experiment: Experiment, state_dir: str | None, context: Context
) -> Client:
    """Build one node's client; runs in Ray's workers, so it is given names and not data."""
    method = registry.get(method_name)
    if state_dir is not None:
        context.node_config["state-dir"] = state_dir
    index = int(context.node_config["partition-id"])
    bundle, (train, test) = bundle_of(experiment), client_splits(experiment)[index]
    train_set: Dataset[Any] = bundle.train.subset(train)
    attack = None
    if experiment.attack is not None and index in attacker_ids(experiment):
        attack = parse_attack(experiment.attack)
        seed = derive_seed(experiment.seed, "attack", index)
        train_set = attack.poison(train_set, bundle.num_classes, seed)
    client: NumPyClient = method.client(
        experiment.build_model(index),
        train_set,
        bundle.train.subset(test),
        context=context,
        device=experiment.device,
        augment=augmentation(experiment.augment),
        **client_options(method, experiment),
    )
    if attack is not None:
        client = MaliciousClient(client, attack, partition=index)
    return client.to_client()


def _state_dir(experiment: Experiment, folder: str) -> str | None:
    """Name a folder for personal models that are too large to be copied around with each message."""
    states = [experiment.build_model(index).state_dict() for index in range(len(experiment.models))]
    size = max(size_of(state) for state in states)
    return folder if size > _LARGE_STATE else None


def _run_inline(app: ClientApp, experiment: Experiment, serve: Callable[[Grid], None]) -> None:
    grid = InlineGrid(app, experiment.clients, workers=experiment.workers, seed=experiment.seed)
    before = torch.get_num_threads()
    # As many as a Ray worker has, so that both backends give the same numbers to the last bit.
    torch.set_num_threads(1)
    try:
        serve(grid)
    finally:
        torch.set_num_threads(before)
        grid.close()


def _run_ray(app: ClientApp, experiment: Experiment, serve: Callable[[Grid], None]) -> None:
    try:
        import ray
    except ImportError:
        raise ConfigError(
            "backend ray needs Ray: pip install 'flwr-kd[simulation]', or --backend inline"
        ) from None
    from flwr.simulation import run_simulation

    server = ServerApp()

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        # One thread, as the workers have: the server's own sums must not depend on the machine's cores.
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            serve(grid)
        finally:
            torch.set_num_threads(before)
            _end_workers()

    gpus = (
        torch.cuda.device_count() / experiment.workers
        if resolve_device(experiment.device).type == "cuda"
        else 0.0
    )
    backend: dict[str, Any] = {
        "client_resources": {"num_cpus": 1, "num_gpus": gpus, **_RESTARTS},
        "init_args": {"num_cpus": experiment.workers, "include_dashboard": False, "log_to_driver": False},
    }
    if ray.is_initialized():
        # A Ray of an earlier run would keep that run's number of workers.
        ray.shutdown()
    with _environment(**{**_ALLOCATOR, **os.environ, **_FOR_RAY}), _quiet_flower():
        try:
            run_simulation(
                server_app=server,
                client_app=app,
                num_supernodes=experiment.clients,
                backend_config=backend,
            )
        finally:
            ray.shutdown()


def _end_workers() -> None:
    """End Ray's workers for good, before Flower asks them to.

    What Flower asks ends in an error by design, and a worker that is restarted is asked again: Ray would print that
    into the output. It has no public way to end actors to which one has no handle; where this one fails, it prints.
    """
    with suppress(Exception):
        import ray
        from ray._private import state, worker

        for actor_id in state.actors():
            core: Any = worker.global_worker.core_worker  # type: ignore[attr-defined]
            core.kill_actor(ray.ActorID.from_hex(actor_id), True)


@contextmanager
def _environment(**values: str) -> Iterator[None]:
    """Set variables for Ray's workers; what Flower changes in the environment is put back, too."""
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


class _NoDeprecation(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        return "DEPRECATED" not in record.getMessage()


@contextmanager
def _quiet_flower() -> Iterator[None]:
    """Keep back the notice that ``run_simulation`` is deprecated: the reader cannot act on it."""
    logger, notice = logging.getLogger("flwr"), _NoDeprecation()
    logger.addFilter(notice)
    try:
        yield
    finally:
        logger.removeFilter(notice)


def round_result(stats: RoundStats) -> RoundResult:
    """Return what a round did, as a result file holds it."""
    return RoundResult(
        round=stats.server_round,
        local_accuracy=stats.local_accuracy,
        global_accuracy=stats.global_accuracy,
        train_loss=stats.train_loss,
        bytes_up=stats.bytes_up,
        bytes_down=stats.bytes_down,
        seconds=stats.seconds,
        participants=stats.participants,
        failures=stats.failures,
        local_top5=stats.local_top5,
        server_accuracy=stats.server_accuracy,
        clients={
            str(key): {name.replace("-", "_"): value for name, value in values.items()}
            for key, values in sorted(stats.clients.items())
        },
    )
