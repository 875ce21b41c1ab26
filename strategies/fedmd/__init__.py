"""FedMD: the mean of all clients' soft predictions on public data is everyone's teacher."""

from flwr_kd.registry import Method, register

from .client import FedMDClient
from .config import FedMDConfig
from .strategy import FedMD

__all__ = ["FedMD", "FedMDClient", "FedMDConfig"]

register(
    Method(
        name="fedmd",
        strategy=FedMD,
        client=FedMDClient,
        paper="Li and Wang, FedMD: Heterogenous Federated Learning via Model Distillation, NeurIPS workshop 2019",
        exchanged="soft predictions on public data",
        global_model=False,
        public_at="clients",
        heterogeneous=True,
    )
)
