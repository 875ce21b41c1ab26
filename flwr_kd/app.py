"""What Flower Apps share: the experiment in a run config, checks before the work, the result.

An app's own two files show what a ServerApp and a ClientApp of one method are made of; see ``apps/``.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from flwr.app import Context

from . import registry
from .config import ConfigError, MethodConfig
from .results import Comparison, RunResult, check_free, versions
from .simulation import Experiment, check, round_result
from .strategy import KDResult, KDStrategy

__all__ = ["check", "comparison", "experiment", "hyperparameters", "output_folder"]


def experiment(context: Context, clients: int | None = None) -> Experiment:
    """Return the data, partition and model of a run, which both sides read from the run config.

    Parameters
    ----------
    context : Context
        Flower's.
    clients : int, optional
        How many share the data; ``min-nodes`` if None, which is what the server knows before the run.

    Raises
    ------
    ConfigError
        If a value is not allowed.
    """
    settings = context.run_config
    return Experiment(
        dataset=str(settings["dataset"]),
        data_dir=str(settings["data-dir"]) or None,
        partition=str(settings["partition"]),
        clients=cast(int, settings["min-nodes"]) if clients is None else clients,
        rounds=cast(int, settings["num-server-rounds"]),
        # A run config has no None: 0 is no cut.
        imbalance=cast(float, settings.get("imbalance", 0)) or None,
        model=str(settings["model"]),
        seed=cast(int, settings["seed"]),
        fraction_train=cast(float, settings["fraction-train"]),
        # Of apps whose server needs public data; what is held back for it, no client may have.
        public=str(settings.get("public", "")) or None,
        public_limit=cast(int, settings.get("public-limit", Experiment.public_limit)),
    )


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
    >>> found = hyperparameters(method, {"self-weight": 0.1, "batch-size": 32, "dataset": "digits"}).to_wire()
    >>> found["self-weight"], found["batch-size"]
    (0.0, 32)
    >>> hyperparameters(method, {"self-weight": 7.0})
    Traceback (most recent call last):
    flwr_kd.config.ConfigError: self-weight is fixed at 0.0 by fedhyb-3, got 7.0
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
    text = str(context.run_config["out"])
    if not text:
        return None
    out = Path(text)
    if not out.is_absolute():
        raise ConfigError(f"out must be an absolute path, got {text!r}")
    check_free(out, force=False)
    return out


def comparison(
    context: Context, strategy: KDStrategy, result: KDResult, *, method: str, app: str
) -> Comparison:
    """Return a finished run as what :func:`flwr_kd.results.save` writes.

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
    asked = {client for stats in result.rounds for client in stats.bytes_by_partition}
    shared = experiment(context, clients=len(asked)).shared()
    settings = {name: value for name, value in context.run_config.items() if name != "out"}
    values = " ".join(f"{name}={json.dumps(value)}" for name, value in sorted(settings.items()))
    rounds = tuple(round_result(stats) for stats in result.rounds)
    return Comparison(
        # The run's backend is Flower's; the Experiment's has no part in it.
        config={**shared, "backend": "flwr", "workers": None, "seeds": [strategy.seed]},
        versions=versions(),
        command=shlex.join(["flwr", "run", app, "--run-config", values]),
        runs=(RunResult(method, strategy.seed, rounds, dict(strategy.config.to_wire())),),
    )
