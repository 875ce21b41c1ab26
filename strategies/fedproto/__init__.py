"""FedProto: class prototypes instead of weights."""

from flwr_kd.registry import Method, register

from .client import FedProtoClient
from .config import FedProtoConfig
from .functional import ClassMeans, aggregate_means, class_means, prototype_loss
from .messages import Prototypes
from .strategy import FedProto

__all__ = [
    "ClassMeans",
    "FedProto",
    "FedProtoClient",
    "FedProtoConfig",
    "Prototypes",
    "aggregate_means",
    "class_means",
    "prototype_loss",
]

register(
    Method(
        name="fedproto",
        strategy=FedProto,
        client=FedProtoClient,
        paper="Tan et al., FedProto: Federated Prototype Learning across Heterogeneous Clients, AAAI 2022",
        exchanged="class prototypes",
        global_model=False,
        heterogeneous=True,
    )
)
