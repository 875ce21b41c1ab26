"""FedHKD and FedHKD*: weights and data-free hyper-knowledge."""

from typing import TYPE_CHECKING

from flwr_kd.formulas import PER_CLASS, Sent, Term, weights
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
        controlled_knowledge,
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
    "controlled_knowledge",
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
            "controlled_knowledge",
            "feature_loss",
            "local_knowledge",
            "noise_predictions",
        ),
        "messages": ("HyperKnowledge",),
        "strategy": ("FedHKD",),
    },
)

_PAPER = "Chen et al., The Best of Both Worlds (FedHKD), ICLR 2023"
_LEAVES = (
    "its weights; per class, for classes with enough samples: mean representation with noise, mean soft "
    "prediction, number of samples"
)
_EXCHANGED = "weights, class representations and soft predictions"
_DOWN, _UP = (f"FedHKD, algorithm 1, step {step}" for step in ("5", "20"))
_TERMS = (Term("K·D"), Term("K·C"))
_SENT = (
    weights("train", "down", _DOWN),
    Sent("train", "down", "knowledge", _TERMS, f"{_DOWN}; equation 9", PER_CLASS, when="later"),
    weights("train", "up", _UP),
    Sent("train", "up", "knowledge", _TERMS, f"{_UP}; equation 4", PER_CLASS),
)

register(
    Method(
        name="fedhkd",
        strategy_path=f"{__name__}.strategy:FedHKD",
        client_path=f"{__name__}.client:FedHKDClient",
        config_path=f"{__name__}.config:FedHKDConfig",
        paper=_PAPER,
        exchanged=_EXCHANGED,
        leaves_client=_LEAVES,
        reaches_others="means over the clients",
        benchmarks=("accuracy", "picture", "overhead", "scale", "load"),
        global_model=True,
        sent=_SENT,
        sizes_path=f"{__name__}.messages:sizes",
        rules_path=f"{__name__}.rules:RULES",
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
        leaves_client=_LEAVES,
        reaches_others="means over the clients",
        benchmarks=(),
        global_model=True,
        sent=_SENT,
        sizes_path=f"{__name__}.messages:sizes",
        fixed={"gamma": 0.0},
        rules_path=f"{__name__}.rules:RULES",
        client_options={"reproducible_noise": True},
    )
)
