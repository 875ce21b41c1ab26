"""FedHEAD and FedHEAD+: ensemble distillation inside sectors of a hierarchy, and at its top."""

from typing import TYPE_CHECKING

from flwr_kd.lazy import exports
from flwr_kd.registry import Method, register

if TYPE_CHECKING:
    from .client import FedHEADClient
    from .config import FedHEADConfig
    from .functional import assign_sectors, communication_cost, draw_leader
    from .messages import SectorEnsemble
    from .strategy import FedHEAD, FedHEADPlus

__all__ = [
    "FedHEAD",
    "FedHEADClient",
    "FedHEADConfig",
    "FedHEADPlus",
    "SectorEnsemble",
    "assign_sectors",
    "communication_cost",
    "draw_leader",
]

__getattr__, __dir__ = exports(
    __name__,
    {
        "client": ("FedHEADClient",),
        "config": ("FedHEADConfig",),
        "functional": ("assign_sectors", "communication_cost", "draw_leader"),
        "messages": ("SectorEnsemble",),
        "strategy": ("FedHEAD", "FedHEADPlus"),
    },
)

_PAPER = (
    "Chowdhury et al., Communication-Efficient Loss Minimization over Heterogeneous Data with Federated "
    "Hierarchical Ensemble Aggregation via Distillation"
)

register(
    Method(
        name="fedhead",
        strategy_path=f"{__name__}.strategy:FedHEAD",
        client_path=f"{__name__}.client:FedHEADClient",
        config_path=f"{__name__}.config:FedHEADConfig",
        paper=_PAPER,
        exchanged="weights; to each sector's leader those of its sector",
        global_model=True,
    )
)
register(
    Method(
        name="fedhead-plus",
        strategy_path=f"{__name__}.strategy:FedHEADPlus",
        client_path=f"{__name__}.client:FedHEADClient",
        config_path=f"{__name__}.config:FedHEADConfig",
        paper=_PAPER,
        exchanged="weights; to each sector's leader those of its sector",
        global_model=True,
        public_at="server",
    )
)
