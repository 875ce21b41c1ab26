"""FedAMP: each client learns towards a mixture of all models, in which similar models weigh most."""

from typing import TYPE_CHECKING, Any

from flwr_kd.formulas import weights
from flwr_kd.lazy import exports
from flwr_kd.registry import BATCH_NORM, Method, register

if TYPE_CHECKING:
    from .client import FedAMPClient
    from .config import FedAMPConfig
    from .functional import Attention, cosine_attention, distance_attention
    from .strategy import FedAMP

__all__ = ["Attention", "FedAMP", "FedAMPClient", "FedAMPConfig", "cosine_attention", "distance_attention"]

__getattr__, __dir__ = exports(
    __name__,
    {
        "client": ("FedAMPClient",),
        "config": ("FedAMPConfig",),
        "functional": ("Attention", "cosine_attention", "distance_attention"),
        "strategy": ("FedAMP",),
    },
)


def _register(name: str, **more: Any) -> None:
    register(
        Method(
            name=name,
            strategy_path=f"{__name__}.strategy:FedAMP",
            client_path=f"{__name__}.client:FedAMPClient",
            config_path=f"{__name__}.config:FedAMPConfig",
            paper="Huang et al., Personalized Cross-Silo Federated Learning on Non-IID Data, AAAI 2021",
            exchanged="weights, a mixture for each client",
            leaves_client="its weights",
            reaches_others="a mixture of all weights, in which similar models weigh most",
            global_model=False,
            takes_multi_label=True,
            sent=(
                weights("train", "down", "Huang et al. 2021, algorithm 1: the clouds u_i", when="later"),
                weights("train", "up", "Huang et al. 2021, algorithm 1: the models w_i"),
            ),
            variants=BATCH_NORM,
            **more,
        )
    )


_register("fedamp")
_register("heur-fedamp", fixed={"attention": "cosine"}, benchmarks=())
