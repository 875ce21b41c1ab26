"""Per-FedAvg's server half: the mean of the models."""

from flwr_kd.server.strategy import KDStrategy

from .config import PerFedAvgConfig


class PerFedAvg(KDStrategy[PerFedAvgConfig]):
    """Per-FedAvg (Fallah, Mokhtari, Ozdaglar, NeurIPS 2020): the server averages as FedAvg's does.

    After the last round all connected clients are measured before and after their step to a personal model. For
    parameters, see :class:`flwr_kd.KDStrategy`.
    """

    config_class = PerFedAvgConfig
