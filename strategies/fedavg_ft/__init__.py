"""FedAvg with local fine-tuning: every client adapts its own copy of the last global model."""

from typing import TYPE_CHECKING

from flwr_kd.formulas import averaging
from flwr_kd.lazy import exports
from flwr_kd.registry import BATCH_NORM, Method, register

if TYPE_CHECKING:
    from .client import FedAvgFTClient
    from .config import FedAvgFTConfig
    from .strategy import FedAvgFT

__all__ = ["FedAvgFT", "FedAvgFTClient", "FedAvgFTConfig"]

__getattr__, __dir__ = exports(
    __name__,
    {
        "client": ("FedAvgFTClient",),
        "config": ("FedAvgFTConfig",),
        "strategy": ("FedAvgFT",),
    },
)

register(
    Method(
        name="fedavg-ft",
        strategy_path=f"{__name__}.strategy:FedAvgFT",
        client_path=f"{__name__}.client:FedAvgFTClient",
        config_path=f"{__name__}.config:FedAvgFTConfig",
        paper="Yu, Bagdasaryan, Shmatikov, Salvaging Federated Learning by Local Adaptation, 2020",
        exchanged="weights",
        leaves_client="its weights",
        reaches_others="the mean of all weights",
        global_model=True,
        takes_multi_label=True,
        sent=averaging("McMahan et al. 2017, algorithm 1"),
        variants=BATCH_NORM,
    )
)
