"""The server half of FedAvg with local fine-tuning."""

from flwr_kd.server.strategy import KDStrategy

from .config import FedAvgFTConfig


class FedAvgFT(KDStrategy[FedAvgFTConfig]):
    """FedAvg whose clients adapt the last global model (Yu, Bagdasaryan, Shmatikov 2020).

    After the last round all connected clients, drawn in it or not, are measured before and after. For parameters,
    see :class:`flwr_kd.KDStrategy`.
    """

    config_class = FedAvgFTConfig
