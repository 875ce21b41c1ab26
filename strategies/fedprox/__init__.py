"""FedProx: FedAvg with a proximal term in the clients' loss."""

from typing import TYPE_CHECKING

from flwr_kd.formulas import averaging
from flwr_kd.lazy import exports
from flwr_kd.registry import Method, register

if TYPE_CHECKING:
    from .client import FedProxClient
    from .config import FedProxConfig
    from .functional import proximal_term
    from .strategy import FedProx

__all__ = ["FedProx", "FedProxClient", "FedProxConfig", "proximal_term"]

__getattr__, __dir__ = exports(
    __name__,
    {
        "client": ("FedProxClient",),
        "config": ("FedProxConfig",),
        "functional": ("proximal_term",),
        "strategy": ("FedProx",),
    },
)

register(
    Method(
        name="fedprox",
        strategy_path=f"{__name__}.strategy:FedProx",
        client_path=f"{__name__}.client:FedProxClient",
        config_path=f"{__name__}.config:FedProxConfig",
        paper="Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020",
        exchanged="weights",
        leaves_client="its weights",
        reaches_others="the mean of all weights",
        global_model=True,
        takes_multi_label=True,
        sent=averaging("Li et al. 2020, algorithm 2"),
    )
)
