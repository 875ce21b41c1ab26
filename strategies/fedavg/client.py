"""FedAvg's client half."""

from flwr_kd.client.client import KDClient

from .config import FedAvgConfig


class FedAvgClient(KDClient[FedAvgConfig]):
    """Trains on cross-entropy on the local data, which the base class implements."""

    config_class = FedAvgConfig
    takes_multi_label = True
    dp_sgd = True
