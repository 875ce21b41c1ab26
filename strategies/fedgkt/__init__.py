"""FedGKT: features and logits of every sample instead of weights, a large predictor at the server."""

from typing import TYPE_CHECKING

from flwr_kd.formulas import Sent, Term
from flwr_kd.lazy import exports
from flwr_kd.registry import Method, Variant, register

if TYPE_CHECKING:
    from .client import FedGKTClient
    from .config import FedGKTConfig
    from .functional import transfer_loss
    from .messages import ClientFeatures, ServerLogits
    from .strategy import FedGKT

__all__ = [
    "METHOD",
    "ClientFeatures",
    "FedGKT",
    "FedGKTClient",
    "FedGKTConfig",
    "ServerLogits",
    "transfer_loss",
]

__getattr__, __dir__ = exports(
    __name__,
    {
        "client": ("FedGKTClient",),
        "config": ("FedGKTConfig",),
        "functional": ("transfer_loss",),
        "messages": ("ClientFeatures", "ServerLogits"),
        "strategy": ("FedGKT",),
    },
)

_SOURCE = "FedDKC, algorithm 1, step {}; section 2.1, after FedGKT"

METHOD = register(
    Method(
        name="fedgkt",
        strategy_path=f"{__name__}.strategy:FedGKT",
        client_path=f"{__name__}.client:FedGKTClient",
        config_path=f"{__name__}.config:FedGKTConfig",
        paper="He et al., Group Knowledge Transfer (FedGKT), NeurIPS 2020",
        exchanged="features, logits and labels of every sample",
        leaves_client="**of every training sample: label, features, logits**; with `send-test-features`, features "
        "and labels of the test samples",
        reaches_others="nothing: each gets the server's logits for its own samples",
        global_model=False,
        sent=(
            Sent("train", "down", "knowledge", (Term("N·C"),), _SOURCE.format("1.7"), when="later"),
            Sent(
                "train",
                "up",
                "knowledge",
                (Term("N·D"), Term("N·C"), Term("N", "int64")),
                _SOURCE.format("1.3"),
                (("sample numbers", Term("N", "int64")),),
            ),
        ),
        heterogeneous=True,
        model="resnet2,resnet4,resnet6,resnet10,resnet12",
        simulated=("send-test-features=true",),
        server_device=True,
        quick=("server-epochs=1",),
        variants={"float16": Variant(("send-test-features=false", "feature-dtype=float16"))},
        rules_path=f"{__name__}.rules:RULES",
    )
)
"""The description of FedGKT, from which FedDKC's are made."""
