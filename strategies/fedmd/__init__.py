"""FedMD: the mean of all clients' soft predictions on public data is everyone's teacher."""

from typing import TYPE_CHECKING

from flwr_kd.lazy import exports
from flwr_kd.public_data.formula import predictions_sent
from flwr_kd.registry import Method, Variant, register

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
        leaves_client="its soft predictions of public samples",
        reaches_others="the mean of all predictions",
        global_model=False,
        sent=predictions_sent(
            "Li and Wang 2019, algorithm 1: Distribute", "Li and Wang 2019, algorithm 1: Communicate"
        ),
        sizes_path="flwr_kd.public_data.formula:sizes",
        public_at="clients",
        client_options={"shares_model": True},
        heterogeneous=True,
        variants={"float16": Variant(("precision=float16",))},
        rules_path="flwr_kd.public_data.rules:RULES",
    )
)
