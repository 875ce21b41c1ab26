"""The client half of FedAvg with local fine-tuning."""

from flwr_kd.client.client import KDClient

from .config import FedAvgFTConfig


class FedAvgFTClient(KDClient[FedAvgFTConfig]):
    """Trains as FedAvg's client does, and fine-tunes a copy of the last global model, which the base implements."""

    config_class = FedAvgFTConfig
    takes_multi_label = True
    dp_sgd = True
