"""FedHKD+DaFKD: FedHKD's knowledge at the clients, DaFKD's distillation at the server."""

from typing import TYPE_CHECKING

from flwr_kd.formulas import PER_CLASS, Sent, Term
from flwr_kd.lazy import exports
from flwr_kd.registry import Method, register

from ..dafkd import WEIGHTS

if TYPE_CHECKING:
    from .client import FedHKDDaFKDClient
    from .config import FedHKDDaFKDConfig
    from .messages import ScoredKnowledge
    from .strategy import FedHKDDaFKD

__all__ = ["FedHKDDaFKD", "FedHKDDaFKDClient", "FedHKDDaFKDConfig", "ScoredKnowledge"]

__getattr__, __dir__ = exports(
    __name__,
    {
        "client": ("FedHKDDaFKDClient",),
        "config": ("FedHKDDaFKDConfig",),
        "messages": ("ScoredKnowledge",),
        "strategy": ("FedHKDDaFKD",),
    },
)

_SOURCE = "FedHKD, equations 4 and 9"
_TERMS = (Term("K·D"), Term("K·C"))

register(
    Method(
        name="fedhkd-dafkd",
        strategy_path=f"{__name__}.strategy:FedHKDDaFKD",
        client_path=f"{__name__}.client:FedHKDDaFKDClient",
        config_path=f"{__name__}.config:FedHKDDaFKDConfig",
        paper="FedHKD+DaFKD of Liu et al. (FedHyb): Chen et al., ICLR 2023, and Wang et al., CVPR 2023",
        exchanged="weights, class representations, soft predictions, a generator of samples and their scores",
        leaves_client=(
            "its weights; per class, for classes with enough samples: mean representation with noise, mean soft "
            "prediction, number of samples; a generator of samples that it has trained against its data; how much "
            "generated samples look like its own data"
        ),
        reaches_others="means over the clients, and the mean generator, which may imitate samples",
        global_model=True,
        sent=(
            *WEIGHTS,
            Sent("train", "down", "knowledge", _TERMS, _SOURCE, PER_CLASS, when="later"),
            Sent("train", "up", "knowledge", (*_TERMS, Term("Q")), f"{_SOURCE}; DaFKD: D_k(x)", PER_CLASS),
        ),
        public_at="synthetic",
        one_tensor="makes up samples of floating point with a generator, such as images or rows of numbers",
        sizes_path=f"{__name__}.messages:sizes",
        quick=("server-batches=1",),
        rules_path=f"{__name__}.rules:RULES",
        client_options={"reproducible_noise": True},
    )
)
