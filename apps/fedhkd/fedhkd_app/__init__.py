"""FedHKD as a Flower App: ``flwr run apps/fedhkd``."""

from functools import lru_cache
from typing import cast

from flwr.app import Context

from flwr_kd.data import Bundle, load
from flwr_kd.simulation import Experiment


def experiment(context: Context, clients: int) -> Experiment:
    """Return the data, partition and model of a run, which both sides read from the run config."""
    settings = context.run_config
    return Experiment(
        dataset=str(settings["dataset"]),
        data_dir=str(settings["data-dir"]) or None,
        partition=str(settings["partition"]),
        clients=clients,
        rounds=cast(int, settings["num-server-rounds"]),
        model=str(settings["model"]),
        seed=cast(int, settings["seed"]),
        fraction_train=cast(float, settings["fraction-train"]),
    )


@lru_cache(maxsize=1)
def data(dataset: str, seed: int, data_dir: str | None) -> Bundle:
    """Load once per process: a simulation's workers answer many messages."""
    return load(dataset, seed=seed, data_dir=data_dir)
