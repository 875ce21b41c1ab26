"""A run config's values, each checked, and the experiment that they describe."""

from __future__ import annotations

from pathlib import Path

from flwr.app import Context

from flwr_kd.by_name import refuse_in_messages
from flwr_kd.checks import ConfigError, checked, number, share, whole_number
from flwr_kd.data import DataSpec
from flwr_kd.experiments.experiment import Experiment
from flwr_kd.learning.cores import available_cores
from flwr_kd.measured_rounds import MeasuredRounds
from flwr_kd.wording import Interface, speak

__all__ = [
    "KEYS",
    "absolute",
    "aggregation",
    "cores",
    "experiment",
    "fraction_train",
    "knowledge_aggregation",
    "measure",
    "result_folder",
    "text",
    "whole",
]

KEYS = (
    *("dataset", "data-dir", "partition", "imbalance", "limit", "test-limit", "model", "seed", "method"),
    *("public", "public-limit", "classes", "input-shape", "test-path", "out", "checkpoint-dir", "resume"),
    "log",
    *(
        "num-server-rounds",
        "min-nodes",
        "fraction-train",
        "min-train-nodes",
        "max-void-rounds",
        "max-examples",
    ),
    *("timeout", "cores", "measure", "aggregation", "knowledge-aggregation", "test-fraction"),
    # Read by apps' own files.
    "reproducible-noise",
)
"""Keys of a run config besides hyper-parameters."""


def experiment(context: Context, clients: int | None = None) -> Experiment:
    """Return the data, partition and model of a run, which both sides read from the run config.

    If ``classes`` is not empty, the clients have data of their own, of the form ``own``, and ``dataset`` and
    ``partition`` are not used.

    Parameters
    ----------
    context : Context
        Flower's.
    clients : int, optional
        Number of clients that share the data; ``min-nodes`` if None, which is what the server knows before the run.

    Raises
    ------
    ConfigError, DataError
        If a value is not allowed.
    """
    speak(Interface.APP)
    settings = context.run_config
    for name in ("dataset", "model"):
        for part in str(settings[name]).split(","):
            refuse_in_messages(part.strip(), name)
    own = _own_spec(context)
    return Experiment(
        dataset=str(settings["dataset"]),
        data_dir=str(settings["data-dir"]) or None,
        partition=str(settings["partition"]),
        clients=whole(context, "min-nodes", 2) if clients is None else clients,
        rounds=whole(context, "num-server-rounds", 3),
        # A run config has no None; 0 means that nothing is cut.
        limit=whole(context, "limit", 0, least=0) or None,
        test_limit=whole(context, "test-limit", 0, least=0) or None,
        imbalance=number("imbalance", settings.get("imbalance", 0), 0) or None,
        model=str(settings["model"]),
        seed=whole(context, "seed", 0, least=0),
        fraction_train=fraction_train(context),
        aggregation=aggregation(context),
        knowledge_aggregation=knowledge_aggregation(context),
        measure=measure(context),
        test_fraction=number(
            "test-fraction", settings.get("test-fraction", Experiment.test_fraction), 0, 1, open_high=True
        ),
        # For apps whose server needs public data: no client may have the samples that are held back for it.
        public=str(settings.get("public", "")) or None,
        public_limit=whole(context, "public-limit", Experiment.public_limit),
        own=own,
    )


def _own_spec(context: Context) -> DataSpec | None:
    """Return the form of the clients' own data from the run config; None if they share a data set."""
    settings = context.run_config
    classes, shape = text(context, "classes"), text(context, "input-shape")
    if not classes:
        for name in ("input-shape", "test-path"):
            if value := settings.get(name, ""):
                raise ConfigError(f"{name} is for data of the clients' own: it needs classes, got {value!r}")
        return None
    for name in ("limit", "test-limit", "imbalance"):
        if value := settings.get(name, 0):
            raise ConfigError(f"{name} must be 0 with classes: it cuts a data set; got {value!r}")
    fraction = settings.get("test-fraction", Experiment.test_fraction)
    if fraction != Experiment.test_fraction:
        raise ConfigError(
            f"test-fraction must be {Experiment.test_fraction:g} with classes, since it divides a data set: the "
            f"test part of own data is its folder test/, else a fifth; got {fraction!r}"
        )
    return DataSpec.parse(classes, shape)


def cores(context: Context) -> int:
    """Return ``cores``, the number of cores at the server; all of them if it is 0 or missing."""
    return whole(context, "cores", 0, least=0) or available_cores()


def whole(context: Context, name: str, default: int, *, least: int = 1) -> int:
    """Return a whole number of at least ``least``."""
    return whole_number(name, context.run_config.get(name, default), least)


def measure(context: Context) -> str:
    """Return ``measure``, checked; see :class:`flwr_kd.measured_rounds.MeasuredRounds`."""
    rounds = str(context.run_config.get("measure", "last"))
    MeasuredRounds.parse(rounds)
    return rounds


def text(context: Context, name: str) -> str:
    """Return a text; an empty one if the key is missing."""
    return str(checked(name, context.run_config.get(name, ""), str, {}))


def aggregation(context: Context) -> str:
    """Return ``aggregation``; ``mean`` if it is missing or empty."""
    return text(context, "aggregation") or "mean"


def knowledge_aggregation(context: Context) -> str:
    """Return how a server averages clients' knowledge; ``mean`` if the key is missing or empty."""
    return text(context, "knowledge-aggregation") or "mean"


def fraction_train(context: Context) -> float:
    """Return ``fraction-train``; 1 if it is missing."""
    return share("fraction-train", context.run_config.get("fraction-train", 1.0), open_low=True)


def result_folder(context: Context) -> Path | None:
    """Return the folder of a run's result; None if ``out`` is ``none``.

    If ``out`` is empty or missing, it is a folder of the run's own in the home folder of the server's user: the
    server's working directory is that of whoever started the SuperLink.
    """
    if text(context, "out") == "none":
        return None
    return absolute(context, "out") or Path.home() / "flwr-kd" / "runs" / str(context.run_id)


def absolute(context: Context, name: str) -> Path | None:
    """Return a path of the run config; None if it is empty."""
    path = text(context, name)
    if not path:
        return None
    if not Path(path).is_absolute():
        raise ConfigError(f"{name} must be an absolute path, got {path!r}")
    return Path(path)
