"""FedGen: weights, and a generator of features that guides the clients; fedgen-head exchanges only heads."""

from typing import TYPE_CHECKING

from flwr_kd.formulas import Sent, Term, averaging
from flwr_kd.lazy import exports
from flwr_kd.registry import BATCH_NORM, Method, register

if TYPE_CHECKING:
    from .client import FedGenClient, FedGenHeadClient
    from .config import FedGenConfig
    from .functional import (
        FeatureGenerator,
        build_feature_generator,
        diversity_loss,
        ensemble_loss,
        guidance_loss,
        label_weights,
    )
    from .messages import LabelCounts, SharedGenerator
    from .strategy import FedGen, FedGenHead

__all__ = [
    "FeatureGenerator",
    "FedGen",
    "FedGenClient",
    "FedGenConfig",
    "FedGenHead",
    "FedGenHeadClient",
    "LabelCounts",
    "SharedGenerator",
    "build_feature_generator",
    "diversity_loss",
    "ensemble_loss",
    "guidance_loss",
    "label_weights",
]

__getattr__, __dir__ = exports(
    __name__,
    {
        "client": ("FedGenClient", "FedGenHeadClient"),
        "config": ("FedGenConfig",),
        "functional": (
            "FeatureGenerator",
            "build_feature_generator",
            "diversity_loss",
            "ensemble_loss",
            "guidance_loss",
            "label_weights",
        ),
        "messages": ("LabelCounts", "SharedGenerator"),
        "strategy": ("FedGen", "FedGenHead"),
    },
)

_PAPER = (
    "Zhu et al., Data-Free Knowledge Distillation for Heterogeneous Federated Learning (FedGen), ICML 2021"
)
_SOURCE = "Zhu et al. 2021, algorithm 1"
# Linear from D + C inputs to H, BatchNorm, Linear from H to D.
_PARAMETERS = (*(Term(each) for each in ("H·D", "H·C", "H", "H", "H", "H·D", "D")),)
_BESIDE = (
    ("BatchNorm statistics", Term("H")),
    ("BatchNorm statistics", Term("H")),
    ("classes", Term("C", "bits")),
)
_KNOWLEDGE = (
    Sent("train", "down", "knowledge", _PARAMETERS, f"{_SOURCE}: the generator", _BESIDE, when="later"),
    Sent("train", "up", "knowledge", (Term("C", "int64"),), f"{_SOURCE}: label counts"),
)
# The mean of a head that is one Linear.
_HEAD = (Term("C·D"), Term("C"))

register(
    Method(
        name="fedgen",
        strategy_path=f"{__name__}.strategy:FedGen",
        client_path=f"{__name__}.client:FedGenClient",
        config_path=f"{__name__}.config:FedGenConfig",
        paper=_PAPER,
        exchanged="weights, a generator of features, label counts",
        leaves_client="its weights; the number of its samples of each class",
        reaches_others=(
            "the mean of all weights, a generator trained against all heads, and which classes any client has"
        ),
        global_model=True,
        sent=(*averaging(_SOURCE), *_KNOWLEDGE),
        sizes_path=f"{__name__}.messages:sizes",
        server_device=True,
        server_model=True,
        quick=("generator-hidden=16", "generator-batch=4", "label-weight=1", "prediction-weight=1"),
        variants=BATCH_NORM,
        rules_path=f"{__name__}.rules:RULES",
    )
)
register(
    Method(
        name="fedgen-head",
        strategy_path=f"{__name__}.strategy:FedGenHead",
        client_path=f"{__name__}.client:FedGenHeadClient",
        config_path=f"{__name__}.config:FedGenConfig",
        paper=_PAPER + ", its variant that shares heads only",
        exchanged="heads, a generator of features, label counts",
        leaves_client="its head's weights; the number of its samples of each class",
        reaches_others=(
            "the mean of all heads, a generator trained against all heads, and which classes any client has"
        ),
        benchmarks=(),
        global_model=False,
        sent=(
            Sent("train", "down", "weights", _HEAD, f"{_SOURCE}; section 4.3: the head"),
            Sent("train", "up", "weights", _HEAD, f"{_SOURCE}; section 4.3: the head"),
            *_KNOWLEDGE,
        ),
        heterogeneous=True,
        sizes_path=f"{__name__}.messages:sizes",
        server_device=True,
        server_model=True,
        quick=("generator-hidden=16", "generator-batch=4", "label-weight=1", "prediction-weight=1"),
        rules_path=f"{__name__}.rules:RULES",
    )
)
