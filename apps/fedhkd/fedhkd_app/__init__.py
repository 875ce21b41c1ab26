"""FedHKD as a Flower App: ``flwr run apps/fedhkd``."""

from typing import cast

from flwr.app import Context

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
