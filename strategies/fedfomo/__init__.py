"""FedFomo: each client mixes other clients' models by how much each helps on its own validation samples."""

from typing import TYPE_CHECKING

from flwr_kd.formulas import Sent, Term, weights
from flwr_kd.lazy import exports
from flwr_kd.registry import BATCH_NORM, Method, register

if TYPE_CHECKING:
    from .client import FedFomoClient
    from .config import FedFomoConfig
    from .functional import draw_models, helpfulness, mixture_weights
    from .messages import Affinities
    from .strategy import AffinityMatrix, FedFomo

__all__ = [
    "Affinities",
    "AffinityMatrix",
    "FedFomo",
    "FedFomoClient",
    "FedFomoConfig",
    "draw_models",
    "helpfulness",
    "mixture_weights",
]

__getattr__, __dir__ = exports(
    __name__,
    {
        "client": ("FedFomoClient",),
        "config": ("FedFomoConfig",),
        "functional": ("draw_models", "helpfulness", "mixture_weights"),
        "messages": ("Affinities",),
        "strategy": ("AffinityMatrix", "FedFomo"),
    },
)

_SOURCE = "Zhang et al. 2021, algorithm 1"

register(
    Method(
        name="fedfomo",
        strategy_path=f"{__name__}.strategy:FedFomo",
        client_path=f"{__name__}.client:FedFomoClient",
        config_path=f"{__name__}.config:FedFomoConfig",
        paper="Zhang et al., Personalized Federated Learning with First Order Model Optimization, ICLR 2021",
        exchanged="weights; to each client those of some others",
        leaves_client="its weights; how much each model that it was sent helps on its validation samples",
        reaches_others="**its weights, as they are, to other clients**, without its name",
        global_model=False,
        takes_multi_label=True,
        sent=(
            Sent(
                "train",
                "down",
                "weights",
                (Term("M·W"),),
                _SOURCE,
                (("BatchNorm statistics", Term("M·B")), ("BatchNorm counters", Term("M·L", "int64"))),
                when="later",
            ),
            weights("train", "up", _SOURCE),
            Sent("train", "up", "knowledge", (Term("M"),), f"{_SOURCE}: the weights w for the matrix P"),
        ),
        sizes_path=f"{__name__}.messages:sizes",
        rules_path=f"{__name__}.rules:RULES",
        variants=BATCH_NORM,
    )
)
