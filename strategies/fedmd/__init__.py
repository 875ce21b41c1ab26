"""FedMD: the mean of all clients' soft predictions on public data is everyone's teacher."""

from typing import TYPE_CHECKING

from flwr_kd.lazy import exports
from flwr_kd.registry import Method, register

if TYPE_CHECKING:
    from .client import FedMDClient
    from .config import FedMDConfig
    from .strategy import FedMD

__all__ = ["FedMD", "FedMDClient", "FedMDConfig"]

__getattr__, __dir__ = exports(
    __name__,
    {
        "client": ("FedMDClient",),
        "config": ("FedMDConfig",),
        "strategy": ("FedMD",),
    },
)

register(
    Method(
        name="fedmd",
        strategy_path=f"{__name__}.strategy:FedMD",
        client_path=f"{__name__}.client:FedMDClient",
        config_path=f"{__name__}.config:FedMDConfig",
        paper="Li and Wang, FedMD: Heterogenous Federated Learning via Model Distillation, NeurIPS workshop 2019",
        exchanged="soft predictions on public data",
        global_model=False,
        public_at="clients",
        heterogeneous=True,
    )
)
