"""MOON: FedAvg with a contrastive term between the client's, the global and the client's previous model."""

from typing import TYPE_CHECKING

from flwr_kd.formulas import averaging
from flwr_kd.lazy import exports
from flwr_kd.registry import BATCH_NORM, Method, register

if TYPE_CHECKING:
    from .client import MOONClient
    from .config import MOONConfig
    from .functional import contrastive_loss
    from .projection import with_projection
    from .strategy import MOON

__all__ = ["MOON", "MOONClient", "MOONConfig", "contrastive_loss", "with_projection"]

__getattr__, __dir__ = exports(
    __name__,
    {
        "client": ("MOONClient",),
        "config": ("MOONConfig",),
        "functional": ("contrastive_loss",),
        "projection": ("with_projection",),
        "strategy": ("MOON",),
    },
)

register(
    Method(
        name="moon",
        strategy_path=f"{__name__}.strategy:MOON",
        client_path=f"{__name__}.client:MOONClient",
        config_path=f"{__name__}.config:MOONConfig",
        paper="Li, He and Song, Model-Contrastive Federated Learning, CVPR 2021",
        exchanged="weights",
        leaves_client="its weights",
        reaches_others="the mean of all weights",
        global_model=True,
        takes_multi_label=True,
        sent=averaging("Li, He and Song 2021, algorithm 1"),
        variants=BATCH_NORM,
    )
)
