"""FedProto: class prototypes instead of weights."""

from typing import TYPE_CHECKING

from flwr_kd.formulas import PER_CLASS, Sent, Term
from flwr_kd.lazy import exports
from flwr_kd.registry import Method, register

if TYPE_CHECKING:
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

__getattr__, __dir__ = exports(
    __name__,
    {
        "client": ("FedProtoClient",),
        "config": ("FedProtoConfig",),
        "functional": ("ClassMeans", "aggregate_means", "class_means", "prototype_loss"),
        "messages": ("Prototypes",),
        "strategy": ("FedProto",),
    },
)

_SOURCE = "Tan et al. 2022, algorithm 1; FedHKD's section 3.2: means of representations only"

register(
    Method(
        name="fedproto",
        strategy_path=f"{__name__}.strategy:FedProto",
        client_path=f"{__name__}.client:FedProtoClient",
        config_path=f"{__name__}.config:FedProtoConfig",
        paper="Tan et al., FedProto: Federated Prototype Learning across Heterogeneous Clients, AAAI 2022",
        exchanged="class prototypes",
        leaves_client="per class that it has: mean representation, number of samples",
        reaches_others="means over the clients",
        benchmarks=("accuracy", "picture"),
        global_model=False,
        sent=(
            Sent("train", "down", "knowledge", (Term("K·D"),), _SOURCE, PER_CLASS, when="later"),
            Sent("train", "up", "knowledge", (Term("K·D"),), _SOURCE, PER_CLASS),
        ),
        heterogeneous=True,
        client_options={"shares_model": True},
        rules_path=f"{__name__}.rules:RULES",
    )
)
