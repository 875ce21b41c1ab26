"""FedHKD and FedHKD*: weights and data-free hyper-knowledge."""

from typing import TYPE_CHECKING

from flwr_kd.lazy import exports
from flwr_kd.registry import Method, register

if TYPE_CHECKING:
    from .client import FedHKDClient
    from .config import FedHKDConfig
    from .functional import (
        Knowledge,
        add_noise,
        aggregate_knowledge,
        classifier_loss,
        feature_loss,
        local_knowledge,
        noise_predictions,
    )
    from .messages import HyperKnowledge
    from .strategy import FedHKD

__all__ = [
    "FedHKD",
    "FedHKDClient",
    "FedHKDConfig",
    "HyperKnowledge",
    "Knowledge",
    "add_noise",
    "aggregate_knowledge",
    "classifier_loss",
    "feature_loss",
    "local_knowledge",
    "noise_predictions",
]

__getattr__, __dir__ = exports(
    __name__,
    {
        "client": ("FedHKDClient",),
        "config": ("FedHKDConfig",),
        "functional": (
            "Knowledge",
            "add_noise",
            "aggregate_knowledge",
            "classifier_loss",
            "feature_loss",
            "local_knowledge",
            "noise_predictions",
        ),
        "messages": ("HyperKnowledge",),
        "strategy": ("FedHKD",),
    },
)

_PAPER = "Chen et al., The Best of Both Worlds (FedHKD), ICLR 2023"
_EXCHANGED = "weights, class representations and soft predictions"

register(
    Method(
        name="fedhkd",
        strategy_path=f"{__name__}.strategy:FedHKD",
        client_path=f"{__name__}.client:FedHKDClient",
        config_path=f"{__name__}.config:FedHKDConfig",
        paper=_PAPER,
        exchanged=_EXCHANGED,
        global_model=True,
        client_options={"reproducible_noise": True},
    )
)
register(
    Method(
        name="fedhkd-star",
        strategy_path=f"{__name__}.strategy:FedHKD",
        client_path=f"{__name__}.client:FedHKDClient",
        config_path=f"{__name__}.config:FedHKDConfig",
        paper=_PAPER + ", FedHKD* (γ = 0)",
        exchanged=_EXCHANGED,
        global_model=True,
        fixed={"gamma": 0.0},
        client_options={"reproducible_noise": True},
    )
)
