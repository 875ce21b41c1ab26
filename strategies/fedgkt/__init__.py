"""FedGKT: features and logits of every sample instead of weights, a large predictor at the server."""

from flwr_kd.registry import Method, register

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

METHOD = register(
    Method(
        name="fedgkt",
        strategy=FedGKT,
        client=FedGKTClient,
        paper="He et al., Group Knowledge Transfer (FedGKT), NeurIPS 2020",
        exchanged="features, logits and labels of every sample",
        global_model=False,
        heterogeneous=True,
        model="resnet2,resnet4,resnet6,resnet10,resnet12",
        simulated=("send-test-features=true",),
        server_device=True,
    )
)
