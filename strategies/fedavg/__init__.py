"""FedAvg: weights, averaged."""

from typing import TYPE_CHECKING

from flwr_kd.formulas import averaging
from flwr_kd.lazy import exports
from flwr_kd.registry import BATCH_NORM, Method, register

if TYPE_CHECKING:
    from .client import FedAvgClient
    from .config import FedAvgConfig
    from .strategy import FedAvg

__all__ = ["FedAvg", "FedAvgClient", "FedAvgConfig"]

__getattr__, __dir__ = exports(
    __name__,
    {
        "client": ("FedAvgClient",),
        "config": ("FedAvgConfig",),
        "strategy": ("FedAvg",),
    },
)

register(
    Method(
        name="fedavg",
        strategy_path=f"{__name__}.strategy:FedAvg",
        client_path=f"{__name__}.client:FedAvgClient",
        config_path=f"{__name__}.config:FedAvgConfig",
        paper="McMahan et al., Communication-Efficient Learning of Deep Networks, AISTATS 2017",
        exchanged="weights",
        leaves_client="its weights",
        reaches_others="the mean of all weights",
        benchmarks=("accuracy", "picture", "overhead", "scale", "load"),
        global_model=True,
        takes_multi_label=True,
        sent=averaging("McMahan et al. 2017, algorithm 1"),
        variants=BATCH_NORM,
    )
)
