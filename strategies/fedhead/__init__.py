"""FedHEAD and FedHEAD+: ensemble distillation inside sectors of a hierarchy, and at its top."""

from typing import TYPE_CHECKING

from flwr_kd.formulas import Sent, Term, weights
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
_LEAVES = "its weights; of a sector's leader, the distilled model as well"
_REACHES = "**its weights, as they are, to its sector's leader**, another client each round; the mean of all"
# In the paper clients send their models to the leader themselves; here they pass the server. The leader's own is
# among the S. The mean of a sector (step 11, W values up from each leader) is made at the server, and not sent.
_SENT = (
    weights("train", "down", "FedHEAD, algorithm 1, steps 21 and 23"),
    weights("train", "up", "FedHEAD, algorithm 1, step 8"),
    weights("distill", "down", "FedHEAD, algorithm 1, steps 8 and 14", copies="S"),
    Sent("distill", "down", "knowledge", (Term("S", "float64"),), "FedHEAD, algorithm 1, step 5"),
    weights("distill", "up", "FedHEAD, algorithm 1, step 18"),
)

register(
    Method(
        name="fedhead",
        strategy_path=f"{__name__}.strategy:FedHEAD",
        client_path=f"{__name__}.client:FedHEADClient",
        config_path=f"{__name__}.config:FedHEADConfig",
        paper=_PAPER,
        exchanged="weights; to each sector's leader those of its sector",
        benchmarks=("accuracy", "picture", "scale"),
        leaves_client=_LEAVES,
        reaches_others=_REACHES,
        global_model=True,
        sent=_SENT,
        sizes_path=f"{__name__}.messages:sizes",
        quick=("sector-epochs=1", "server-epochs=1"),
    )
)
register(
    Method(
        name="fedhead-plus",
        strategy_path=f"{__name__}.strategy:FedHEADPlus",
        client_path=f"{__name__}.client:FedHEADClient",
        config_path=f"{__name__}.config:FedHEADConfig",
        paper=_PAPER,
        exchanged="weights; to each sector's leader those of its sector; distilled at the server",
        leaves_client=_LEAVES,
        reaches_others=_REACHES,
        global_model=True,
        sent=_SENT,
        sizes_path=f"{__name__}.messages:sizes",
        quick=("sector-epochs=1", "server-epochs=1"),
        public_at="server",
    )
)
