"""The parts that all Flower Apps share: the experiment in a run config, a client's data, checks, the result.

An app's own two files show how a ServerApp and a ClientApp of one method are built from them; see ``apps/``.
"""

from __future__ import annotations

import functools
import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from logging import INFO, WARNING
from pathlib import Path
from typing import Any, NamedTuple, cast

from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.common.logger import log
from torch import nn

from flwr_kd import registry
from flwr_kd.checks import ConfigError, DataError, checked, number
from flwr_kd.config import MethodConfig, meant
from flwr_kd.data import ArrayDataset, DataSpec, load_own, load_test
from flwr_kd.experiments import evaluation
from flwr_kd.experiments.data import bundle_of, client_splits, public_of
from flwr_kd.experiments.experiment import Experiment
from flwr_kd.experiments.run_settings import (
    KEYS,
    absolute,
    aggregation,
    cores,
    experiment,
    fraction_train,
    knowledge_aggregation,
    measure,
    result_folder,
    text,
    whole,
)
from flwr_kd.experiments.runner import round_result
from flwr_kd.results.files import FILE_NAME, check_free
from flwr_kd.results.provenance import versions
from flwr_kd.results.schema import Comparison, RunResult
from flwr_kd.server.callbacks import Callbacks
from flwr_kd.server.parameters import parameters_of
from flwr_kd.server.records import KDResult, shared_histogram
from flwr_kd.server.strategy import KDStrategy
from flwr_kd.text import unknown_name
from flwr_kd.tracking import RoundLines, chosen_logs, open_logs

__all__ = [
    "ClientData",
    "chosen_method",
    "client_data",
    "common_test_data",
    "comparison",
    "evaluator",
    "experiment",
    "hyperparameters",
    "output_folder",
    "phase_timeout",
    "public_options",
    "strategy_options",
]


def chosen_method(context: Context, names: Sequence[str]) -> registry.Method:
    """Return the run config's ``method``, one of an app's; an app of one method needs no such key.

    Raises
    ------
    ConfigError
        If it is none of them.
    """
    name = context.run_config.get("method", names[0] if len(names) == 1 else "")
    if name not in names:
        raise ConfigError(f"method must be one of {', '.join(names)}, got {name!r}")
    return registry.get(str(name))


class ClientData(NamedTuple):
    """A client's model and data.

    Attributes
    ----------
    model : nn.Module
        Initial; the same object for all clients of one architecture in a process. Clients train copies.
    train_set, test_set : ArrayDataset
        In the same order for every message.
    """

    model: nn.Module
    train_set: ArrayDataset
    test_set: ArrayDataset


def client_data(context: Context) -> ClientData:
    """Return a client's model and data: a part of the run's data set, or data of its own.

    The run config decides: with ``classes``, the client has the data at ``data-path`` of its node config, see
    :func:`flwr_kd.data.load_own`. Otherwise it has the part of ``dataset`` that ``partition-id`` and
    ``num-partitions`` of its node config name, which a simulation sets by itself. Data is loaded once per process.

    If the run config has several models, a client takes the one that ``model`` of its node config names. Without
    that key, the models are given to the parts of a data set in turn, and a client with data of its own takes the
    first.

    Raises
    ------
    ConfigError
        If the node config lacks a key, or a value is not allowed, does not fit the run config, or is a path whose
        data cannot be used. Each message has one line, since a server shows the last line only.
    DataError
        If the run's data set cannot be loaded.
    """
    run = experiment(context, clients=1)
    if run.own is not None:
        train, test = _own_data(_data_path(context), run.own, run.seed)
        return ClientData(_initial_model(run, _model_index(context, run, 0) % len(run.models)), train, test)
    index, clients = _part_of(context)
    run = experiment(context, clients)
    samples, (train_rows, test_rows) = bundle_of(run).train, client_splits(run)[index]
    return ClientData(
        _initial_model(run, _model_index(context, run, index) % len(run.models)),
        samples.subset(train_rows),
        samples.subset(test_rows),
    )


# For the architectures of one run.
@functools.lru_cache(maxsize=8)
def _initial_model(run: Experiment, index: int) -> nn.Module:
    return run.build_model(index)


def common_test_data(context: Context) -> ArrayDataset | None:
    """Return a client's ``common_test_set``, the test samples that all clients share; None if it has none.

    It is the test set of the run's data set. A client with data of its own has the one at ``common-test-path`` of
    its node config, if that is there; see :func:`flwr_kd.data.load_test`. None with ``measure="never"`` in the run
    config, since nothing is measured on it.

    Raises
    ------
    ConfigError, DataError
        If the path is not absolute, or the data cannot be loaded.
    """
    if measure(context) == "never":
        return None
    run = experiment(context, clients=1)
    if run.own is None:
        test = bundle_of(run).test
        return test if len(test) else None
    path = context.node_config.get("common-test-path", "")
    if path == "":
        return None
    if not isinstance(path, str) or not Path(path).is_absolute():
        raise ConfigError(f"common-test-path in the node config must be an absolute path, got {path!r}")
    try:
        return _common_test(path, run.own)
    except DataError as error:
        raise ConfigError(f"common-test-path in the node config: {error}") from None


@functools.lru_cache(maxsize=2)
def _common_test(path: str, spec: DataSpec) -> ArrayDataset:
    return load_test(Path(path), spec)


def public_options(context: Context, method: registry.Method) -> dict[str, Any]:
    """Return a client's argument ``public_set`` if all clients have the same public data, else nothing.

    Also nothing if the run config's ``public-at`` is ``server``, since then the server sends the samples.

    Raises
    ------
    ConfigError, DataError
        If the public data cannot be loaded.
    """
    if method.public_at != "clients" or context.run_config.get("public-at") == "server":
        return {}
    return {"public_set": public_of(experiment(context))}


def _data_path(context: Context) -> str:
    path = context.node_config.get("data-path", "")
    if path == "":
        raise ConfigError(
            "data-path is not in this SuperNode's node config, but the run's classes say that each client has data "
            "of its own: start it with --node-config \"data-path='/absolute/path'\""
        )
    if not isinstance(path, str) or not Path(path).is_absolute():
        raise ConfigError(f"data-path in the node config must be an absolute path, got {path!r}")
    return path


@functools.lru_cache(maxsize=8)
def _own_data(path: str, spec: DataSpec, seed: int) -> tuple[ArrayDataset, ArrayDataset]:
    try:
        return load_own(path, spec, seed=seed)
    except DataError as error:
        raise ConfigError(f"data-path in the node config: {error}") from None


def _part_of(context: Context) -> tuple[int, int]:
    """Return the index of a client's part of the data set, and the number of parts."""
    node = context.node_config
    if "data-path" in node:
        raise ConfigError(
            f"data-path={node['data-path']!r} in the node config is data of the client's own, for which the run "
            "config must name classes, the labels separated by commas, and input-shape; got classes=''"
        )
    values = [node.get(name) for name in ("partition-id", "num-partitions")]
    try:
        index, clients = (int(cast(str, value)) for value in values)
    except (TypeError, ValueError):
        index, clients = -1, 0
    if not 0 <= index < clients:
        raise ConfigError(
            "the node config must have partition-id from 0 and a larger num-partitions, or data-path where the run "
            f"config names classes; got partition-id={values[0]!r} and num-partitions={values[1]!r}"
        )
    return index, clients


def _model_index(context: Context, run: Experiment, index: int) -> int:
    name = context.node_config.get("model")
    if name is None:
        return index
    if name not in run.models:
        raise ConfigError(f"model in the node config: {unknown_name('model', str(name), run.models)}")
    return run.models.index(str(name))


def strategy_options(context: Context) -> dict[str, Any]:
    """Return a strategy's options from the run config.

    =========================  ===================================  ================
    key                        option of :class:`KDStrategy`        if it is missing
    =========================  ===================================  ================
    ``seed``                   ``seed``                             0
    ``measure``                ``measure``                          last
    ``fraction-train``         ``fraction_train``                   1.0
    ``min-nodes``              ``min_available_nodes``              2
    ``min-train-nodes``        ``min_train_nodes``                  1
    ``max-void-rounds``        ``max_void_rounds``                  3
    ``max-examples``           ``max_examples``; None if 0          0
    ``aggregation``            ``aggregation``                      mean
    ``knowledge-aggregation``  ``knowledge_aggregation``            mean
    ``checkpoint-dir``         ``checkpoint_dir``; None if empty    empty
    ``resume``                 ``resume``                           false
    ``cores``                  ``cores``; all of them if 0          0
    ``log``                    ``callbacks``, besides round lines   empty
    =========================  ===================================  ================

    ``timeout`` is not among them; see :func:`phase_timeout`.

    Raises
    ------
    ConfigError
        If a value is not allowed; the message names the key. Paths must be absolute, since a server's working
        directory is not the caller's.
    """
    _warn_of_unread(context)
    phase_timeout(context)
    folder, resume = absolute(context, "checkpoint-dir"), context.run_config.get("resume", False)
    checked("resume", resume, bool, {})
    if resume and folder is None:
        raise ConfigError("resume=true needs checkpoint-dir, an absolute path; got ''")
    return {
        "seed": whole(context, "seed", 0, least=0),
        "measure": measure(context),
        "fraction_train": fraction_train(context),
        "min_available_nodes": whole(context, "min-nodes", 2),
        "min_train_nodes": whole(context, "min-train-nodes", 1),
        "max_void_rounds": whole(context, "max-void-rounds", 3),
        # A run config has no None; 0 means that the bound follows from the clients.
        "max_examples": whole(context, "max-examples", 0, least=0) or None,
        "aggregation": aggregation(context),
        "knowledge_aggregation": knowledge_aggregation(context),
        "checkpoint_dir": folder,
        "resume": resume,
        "cores": cores(context),
        "callbacks": _callbacks(context),
    }


def _callbacks(context: Context) -> Callbacks:
    """Return the callbacks that log a line per round, and those of the trackers that ``log`` names."""
    named = text(context, "log")
    choices = chosen_logs([named] if named else [])
    for kind, target in choices:
        if kind == "tensorboard" and target and not Path(target).is_absolute():
            raise ConfigError(f"log: the folder of tensorboard must be an absolute path, got {target!r}")
    home, result = Path.home() / "flwr-kd", result_folder(context)
    logs = open_logs(choices, result or home / "runs" / str(context.run_id), home)
    for tracker in logs:
        log(INFO, "log: %s", tracker.place)
    lines = RoundLines(None if result is None else result / FILE_NAME)
    return Callbacks([lines, *logs], settings=experiment(context).shared() if logs else {})


def _warn_of_unread(context: Context) -> None:
    """Log a warning for each key of the run config that neither an app nor a method of the registry reads."""
    known = {name for method in registry.methods().values() for name in method.config_class().to_wire()}
    for key in sorted(context.run_config.keys() - known - set(KEYS)):
        ours = meant(key, [*sorted(known), *KEYS])
        hint = "" if ours is None else f": did you mean {ours!r}?"
        log(WARNING, "%r in the run config is not read%s", key, hint)


def phase_timeout(context: Context) -> float:
    """Return ``timeout`` of the run config: seconds that a phase waits for replies; 3,600 if it is missing.

    Raises
    ------
    ConfigError
        If it is not a finite number above 0.
    """
    return number("timeout", context.run_config.get("timeout", 3600.0), 0, open_low=True)


def evaluator(context: Context, run: Experiment) -> Callable[[int, ArrayRecord], MetricRecord | None] | None:
    """Return an ``evaluate_fn`` for the global model; None if the server has no test data.

    Test data is the data set's. If clients have data of their own, it is the data at ``test-path`` of the run
    config; see :func:`flwr_kd.data.load_test`.

    Parameters
    ----------
    context : Context
        The ServerApp's.
    run : Experiment
        Its :func:`experiment`.

    Raises
    ------
    ConfigError, DataError
        If ``test-path`` is not absolute, or the data cannot be loaded.
    """
    bundle = bundle_of(run)
    if run.own is not None:
        path = absolute(context, "test-path")
        if path is None:
            return None
        try:
            bundle = replace(bundle, test=load_test(path, run.own))
        except DataError as error:
            raise ConfigError(f"test-path: {error}") from None
    return evaluation.evaluator(run.build_model, bundle, threads=cores(context), device=run.device)


def hyperparameters(method: registry.Method, settings: Mapping[str, Any]) -> MethodConfig:
    """Return a method's hyper-parameters from a run config, whose other keys are ignored.

    A run config lists the hyper-parameters of all methods of an app. A value that a method fixes replaces the
    default.

    Parameters
    ----------
    method : Method
        From the registry.
    settings : mapping
        The run config; hyper-parameters that it does not have get their defaults.

    Raises
    ------
    ConfigError
        If a value is not allowed, or is neither the default nor what the method fixes.

    Examples
    --------
    >>> method = registry.get("fedhyb-3")
    >>> config = hyperparameters(method, {"self-weight": 0.1, "batch-size": 32, "dataset": "digits"}).to_wire()
    >>> config["self-weight"], config["batch-size"]
    (0.0, 32)
    >>> hyperparameters(method, {"self-weight": 7.0})
    Traceback (most recent call last):
    flwr_kd.ConfigError: self-weight is fixed at 0.0 by fedhyb-3, got 7.0
    """
    defaults = method.config_class().to_wire()
    fixed = {name.replace("_", "-"): value for name, value in method.fixed.items()}
    for name, value in fixed.items():
        given = settings.get(name, value)
        # 1 is equal to True, but is not a bool.
        if isinstance(given, bool) != isinstance(value, bool) or given not in (value, defaults[name]):
            raise ConfigError(f"{name} is fixed at {value!r} by {method.name}, got {given!r}")
    return method.config_class.from_wire({**settings, **fixed})


def output_folder(context: Context) -> Path | None:
    """Return the folder of the result: ``out`` of the run config, or one of the run's own if it is empty.

    That is ``flwr-kd/runs/`` and the run's id in the home folder of the server's user. None if ``out`` is ``none``:
    no result is written.

    Raises
    ------
    ConfigError
        If it is not absolute: a server's working directory is not the caller's.
    ResultExistsError, ResultError
        If the folder has a result, or is no folder.
    """
    out = result_folder(context)
    if out is not None:
        check_free(out, force=False, ways=())
    return out


def comparison(
    context: Context, strategy: KDStrategy, result: KDResult, *, method: str, app: str
) -> Comparison:
    """Return the result of a finished run, which :func:`flwr_kd.results.files.save` writes.

    Parameters
    ----------
    context : Context
        The ServerApp's.
    strategy : KDStrategy
        The strategy that ran.
    result : KDResult
        The value that its ``start`` returned.
    method : str
        The method's name in the registry.
    app : str
        The app's folder, as in ``flwr run``.
    """
    clients = {client for stats in result.rounds for client in stats.bytes_by_partition}
    # A run that was resumed after its last round has sent nothing to any client.
    shared = experiment(context, clients=len(clients) or None).shared()
    settings = {name: value for name, value in context.run_config.items() if name != "out"}
    values = " ".join(f"{name}={json.dumps(value)}" for name, value in sorted(settings.items()))
    rounds = tuple(round_result(stats) for stats in result.rounds)
    histogram = shared_histogram(strategy.current_run.roster.nodes.values())
    return Comparison(
        # The run's backend is Flower's own, not one of the Experiment's.
        config={**shared, "backend": "flwr", "workers": None, "seeds": [strategy.seed]},
        versions=versions(),
        command=shlex.join(["flwr", "run", app, "--run-config", values]),
        runs=(
            RunResult(
                method,
                strategy.seed,
                rounds,
                dict(strategy.config.to_wire()),
                histogram,
                parameters=parameters_of(strategy),
            ),
        ),
    )
