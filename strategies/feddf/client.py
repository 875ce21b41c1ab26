"""FedDF's client half: local training, as in FedAvg."""

from flwr_kd.client import KDClient

from .config import FedDFConfig


class FedDFClient(KDClient):
    """Cross-entropy on the local data; the distillation is the server's."""

    config_class = FedDFConfig
