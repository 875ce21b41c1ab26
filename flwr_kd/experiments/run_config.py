"""What Flower Apps share: the experiment in a run config, a client's data, checks before the work, the result.

An app's own two files show what a ServerApp and a ClientApp of one method are made of; see ``apps/``.
"""

from __future__ import annotations

import functools
import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, cast

from flwr.app import ArrayRecord, Context, MetricRecord
from torch import nn

from flwr_kd import registry
from flwr_kd.checks import ConfigError, checked
from flwr_kd.config import MethodConfig
from flwr_kd.data import ArrayDataset, DataError, DataSpec, load_own, load_test
from flwr_kd.experiments import evaluation
from flwr_kd.experiments.data import bundle_of, client_splits, public_of
from flwr_kd.experiments.experiment import Experiment
from flwr_kd.experiments.runner import round_result
from flwr_kd.results.files import check_free
from flwr_kd.results.provenance import versions
from flwr_kd.results.schema import Comparison, RunResult
from flwr_kd.server.records import KDResult
from flwr_kd.server.strategy import MAX_EXAMPLES, KDStrategy
from flwr_kd.text import unknown_name

__all__ = [
    "ClientData",
    "chosen_method",
    "client_data",
    "comparison",
    "evaluator",
    "experiment",
    "hyperparameters",
    "output_folder",
    "phase_timeout",
    "public_options",
    "strategy_options",
]


def experiment(context: Context, clients: int | None = None) -> Experiment:
    """Return the data, partition and model of a run, which both sides read from the run config.

    Where ``classes`` is not empty, the clients have data of their own, of the form ``own``: ``dataset`` and
    ``partition`` are not used.

    Parameters
    ----------
    context : Context
        Flower's.
    clients : int, optional
        How many share the data; ``min-nodes`` if None, which is what the server knows before the run.

    Raises
    ------
    ConfigError, DataError
        If a value is not allowed.
    """
    settings = context.run_config
    own = _own_spec(context)
    return Experiment(
        dataset=str(settings["dataset"]),
        data_dir=str(settings["data-dir"]) or None,
        partition=str(settings["partition"]),
        clients=_whole(context, "min-nodes", 2) if clients is None else clients,
        rounds=_whole(context, "num-server-rounds", 3),
        # A run config has no None: 0 is no cut.
        imbalance=cast(float, settings.get("imbalance", 0)) or None,
        model=str(settings["model"]),
        seed=_whole(context, "seed", 0, least=0),
        fraction_train=_option(context, "fraction-train", 1.0, gt=0, le=1),
        # Of apps whose server needs public data; what is held back for it, no client may have.
        public=str(settings.get("public", "")) or None,
        public_limit=cast(int, settings.get("public-limit", Experiment.public_limit)),
        own=own,
    )


def chosen_method(context: Context, names: Sequence[str]) -> registry.Method:
    """Return the run config's ``method``, one of an app's.

    Raises
    ------
    ConfigError
        If it is none of them.
    """
    name = context.run_config["method"]
    if name not in names:
        raise ConfigError(f"method must be one of {', '.join(names)}, got {name!r}")
    return registry.get(str(name))


class ClientData(NamedTuple):
    """What a client is made of besides its method.

    Attributes
    ----------
    model : nn.Module
        Initial; the same for all clients of one architecture.
    train_set, test_set : ArrayDataset
        In the same order for every message.
    """

    model: nn.Module
    train_set: ArrayDataset
    test_set: ArrayDataset


def client_data(context: Context) -> ClientData:
    """Return a client's model and data: a part of the run's data set, or data of its own.

    Which, the run config says: with ``classes`` the data at ``data-path`` of the node config, see
    :func:`flwr_kd.data.load_own`; else the part of ``dataset`` that ``partition-id`` and ``num-partitions`` of the
    node config say, which a simulation sets by itself. Data is loaded once in a process.

    Of several models in the run config, a client takes the one that ``model`` of its node config names. Without
    that they are given to the parts of a data set in turn, and a client with data of its own takes the first.

    Raises
    ------
    ConfigError
        If the node config lacks a key, or a value is not allowed, does not go with the run config, or is a path
        whose data cannot be used. Each message has one line, since a server shows the last.
    DataError
        If the run's data set cannot be loaded.
    """
    run = experiment(context, clients=1)
    if run.own is not None:
        train, test = _own_data(_data_path(context), run.own, run.seed)
        return ClientData(run.build_model(_model_index(context, run, 0)), train, test)
    index, clients = _part_of(context)
    run = experiment(context, clients)
    samples, (train_rows, test_rows) = bundle_of(run).train, client_splits(run)[index]
    return ClientData(
        run.build_model(_model_index(context, run, index)),
        samples.subset(train_rows),
        samples.subset(test_rows),
    )


def public_options(context: Context, method: registry.Method) -> dict[str, Any]:
    """Return what a client is given where all have the same public data: ``public_set``, else nothing.

    Also nothing if the run config's ``public-at`` is ``server``: the server sends the samples.

    Raises
    ------
    ConfigError, DataError
        If the public data is not to be had.
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
    """Return which part of the data set a client has, and of how many."""
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


def _own_spec(context: Context) -> DataSpec | None:
    """Return what the run config says of data of the clients' own; None where they share a data set."""
    settings = context.run_config
    classes, shape = _option(context, "classes", ""), _option(context, "input-shape", "")
    if not classes:
        for name in ("input-shape", "test-path"):
            if value := settings.get(name, ""):
                raise ConfigError(f"{name} is for data of the clients' own: it needs classes, got {value!r}")
        return None
    if settings.get("imbalance", 0):
        raise ConfigError(
            f"imbalance must be 0 with classes: it cuts a data set; got {settings['imbalance']!r}"
        )
    return DataSpec.parse(classes, shape)


def strategy_options(context: Context) -> dict[str, Any]:
    """Return a strategy's options from the run config.

    ===================  ===================================  ================
    key                  option of :class:`KDStrategy`        if it is missing
    ===================  ===================================  ================
    ``seed``             ``seed``                             0
    ``fraction-train``   ``fraction_train``                   1.0
    ``min-nodes``        ``min_available_nodes``              2
    ``min-train-nodes``  ``min_train_nodes``                  1
    ``max-void-rounds``  ``max_void_rounds``                  3
    ``max-examples``     ``max_examples``                     1,000,000
    ``checkpoint-dir``   ``checkpoint_dir``; None if empty    empty
    ``resume``           ``resume``                           false
    ===================  ===================================  ================

    ``timeout`` is not among them: :func:`phase_timeout`.

    Raises
    ------
    ConfigError
        If a value is not allowed; the message names the key. A path that is not absolute is not: a server's working
        directory is not the caller's.
    """
    phase_timeout(context)
    folder, resume = _absolute(context, "checkpoint-dir"), _option(context, "resume", False)
    if resume and folder is None:
        raise ConfigError("resume=true needs checkpoint-dir, an absolute path; got ''")
    return {
        "seed": _whole(context, "seed", 0, least=0),
        "fraction_train": _option(context, "fraction-train", 1.0, gt=0, le=1),
        "min_available_nodes": _whole(context, "min-nodes", 2),
        "min_train_nodes": _whole(context, "min-train-nodes", 1),
        "max_void_rounds": _whole(context, "max-void-rounds", 3),
        "max_examples": _whole(context, "max-examples", MAX_EXAMPLES),
        "checkpoint_dir": folder,
        "resume": resume,
    }


def phase_timeout(context: Context) -> float:
    """Return ``timeout`` of the run config: seconds that a phase waits for answers; 3,600 if it is missing.

    Raises
    ------
    ConfigError
        If it is not a finite number above 0.
    """
    return cast(float, _option(context, "timeout", 3600.0, gt=0))


def evaluator(context: Context, run: Experiment) -> Callable[[int, ArrayRecord], MetricRecord | None] | None:
    """Return an ``evaluate_fn`` for the global model; None where the server has no test data.

    Test data is the data set's or, where clients have data of their own, that at ``test-path`` of the run config;
    see :func:`flwr_kd.data.load_test`.

    Parameters
    ----------
    context : Context
        The ServerApp's.
    run : Experiment
        Its :func:`experiment`.

    Raises
    ------
    ConfigError, DataError
        If ``test-path`` is not absolute, or the data is not to be had.
    """
    bundle = bundle_of(run)
    if run.own is not None:
        path = _absolute(context, "test-path")
        if path is None:
            return None
        try:
            bundle = replace(bundle, test=load_test(path, run.own))
        except DataError as error:
            raise ConfigError(f"test-path: {error}") from None
    return evaluation.evaluator(run.build_model, bundle)


def _whole(context: Context, name: str, default: int, *, least: int = 1) -> int:
    return cast(int, _option(context, name, default, ge=least))


def _option(
    context: Context, name: str, default: Any, *, gt: Any = None, ge: Any = None, le: Any = None
) -> Any:
    """Return a value of the run config, of the type of its default and within bounds."""
    bounds = {sign: bound for sign, bound in ((">", gt), (">=", ge), ("<=", le)) if bound is not None}
    return checked(name, context.run_config.get(name, default), type(default), {"bounds": bounds})


def _absolute(context: Context, name: str) -> Path | None:
    """Return a path of the run config; None where it is empty."""
    text = _option(context, name, "")
    if not text:
        return None
    if not Path(text).is_absolute():
        raise ConfigError(f"{name} must be an absolute path, got {text!r}")
    return Path(text)


def hyperparameters(method: registry.Method, settings: Mapping[str, Any]) -> MethodConfig:
    """Return a method's hyper-parameters from a run config, whose other keys are ignored.

    A run config lists a value for each, of all methods of an app: what a method fixes replaces the default there.

    Parameters
    ----------
    method : Method
        From the registry.
    settings : mapping
        The run config; a hyper-parameter that it does not have has its default.

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
        # 1 is equal to True, but is no truth value.
        if isinstance(given, bool) != isinstance(value, bool) or given not in (value, defaults[name]):
            raise ConfigError(f"{name} is fixed at {value!r} by {method.name}, got {given!r}")
    return method.config_class.from_wire({**settings, **fixed})


def output_folder(context: Context) -> Path | None:
    """Return the folder ``out`` of the run config, where a result can be saved; None where it is empty.

    Raises
    ------
    ConfigError
        If it is not absolute: a server's working directory is not the caller's.
    ResultExistsError, ResultError
        If a result is there, or the folder cannot be one.
    """
    out = _absolute(context, "out")
    if out is not None:
        check_free(out, force=False)
    return out


def comparison(
    context: Context, strategy: KDStrategy, result: KDResult, *, method: str, app: str
) -> Comparison:
    """Return a finished run as what :func:`flwr_kd.results.files.save` writes.

    Parameters
    ----------
    context : Context
        The ServerApp's.
    strategy : KDStrategy
        What ran.
    result : KDResult
        What its ``start`` returned.
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
    return Comparison(
        # The run's backend is Flower's own, not one of the Experiment's.
        config={**shared, "backend": "flwr", "workers": None, "seeds": [strategy.seed]},
        versions=versions(),
        command=shlex.join(["flwr", "run", app, "--run-config", values]),
        runs=(RunResult(method, strategy.seed, rounds, dict(strategy.config.to_wire())),),
    )
