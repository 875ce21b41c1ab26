"""FedGKT: features and logits of every sample instead of weights, a large predictor at the server."""

from typing import TYPE_CHECKING

from flwr_kd.lazy import exports
from flwr_kd.registry import Method, register

if TYPE_CHECKING:
    from .client import FedGKTClient
    from .config import FedGKTConfig
    from .functional import transfer_loss
    from .messages import ClientFeatures, ServerLogits
    from .strategy import FedGKT

__all__ = [
    "METHOD",
    "ClientFeatures",
    "FedGKT",
    "FedGKTClient",
    "FedGKTConfig",
    "ServerLogits",
    "transfer_loss",
]

__getattr__, __dir__ = exports(
    __name__,
    {
        "client": ("FedGKTClient",),
        "config": ("FedGKTConfig",),
        "functional": ("transfer_loss",),
        "messages": ("ClientFeatures", "ServerLogits"),
        "strategy": ("FedGKT",),
    },
)

METHOD = register(
    Method(
        name="fedgkt",
        strategy_path=f"{__name__}.strategy:FedGKT",
        client_path=f"{__name__}.client:FedGKTClient",
        config_path=f"{__name__}.config:FedGKTConfig",
        paper="He et al., Group Knowledge Transfer (FedGKT), NeurIPS 2020",
        exchanged="features, logits and labels of every sample",
        global_model=False,
        heterogeneous=True,
        model="resnet2,resnet4,resnet6,resnet10,resnet12",
        simulated=("send-test-features=true",),
        server_device=True,
    )
)
