"""FedProx: FedAvg with a proximal term in the clients' loss."""

from flwr_kd.registry import Method, register

from .client import FedProxClient
from .config import FedProxConfig
from .functional import proximal_term
from .strategy import FedProx

__all__ = ["FedProx", "FedProxClient", "FedProxConfig", "proximal_term"]

register(
    Method(
        name="fedprox",
        strategy=FedProx,
        client=FedProxClient,
        paper="Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020",
        exchanged="weights",
        global_model=True,
    )
)
