"""FedHEAD and FedHEAD+: ensemble distillation inside sectors of a hierarchy, and at its top."""

from flwr_kd.registry import Method, register

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

_PAPER = (
    "Chowdhury et al., Communication-Efficient Loss Minimization over Heterogeneous Data with Federated "
    "Hierarchical Ensemble Aggregation via Distillation"
)

register(
    Method(
        name="fedhead",
        strategy=FedHEAD,
        client=FedHEADClient,
        paper=_PAPER,
        exchanged="weights; to each sector's leader those of its sector",
        global_model=True,
    )
)
register(
    Method(
        name="fedhead-plus",
        strategy=FedHEADPlus,
        client=FedHEADClient,
        paper=_PAPER,
        exchanged="weights; to each sector's leader those of its sector",
        global_model=True,
        public_at="server",
    )
)
