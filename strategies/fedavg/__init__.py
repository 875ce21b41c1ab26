"""FedAvg: weights, averaged."""

from flwr_kd.registry import Method, register

from .client import FedAvgClient
from .strategy import FedAvg

__all__ = ["FedAvg", "FedAvgClient"]

register(
    Method(
        name="fedavg",
        strategy=FedAvg,
        client=FedAvgClient,
        paper="McMahan et al., Communication-Efficient Learning of Deep Networks, AISTATS 2017",
        exchanged="weights",
        global_model=True,
    )
)
