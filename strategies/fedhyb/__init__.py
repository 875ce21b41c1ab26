"""FedHyb: client self-distillation, server ensemble distillation; its ablations, and FedHyb* without proxy data."""

from typing import TYPE_CHECKING

from flwr_kd.formulas import averaging
from flwr_kd.lazy import exports
from flwr_kd.registry import Method, register

if TYPE_CHECKING:
    from .client import FedHybClient
    from .config import FedHybConfig
    from .functional import ensemble_distillation_loss, self_distillation_loss, sub_network_weight
    from .strategy import FedHyb, FedHybSelf, FedHybStar
    from .synthesis import synthesise, train_generator

__all__ = [
    "FedHyb",
    "FedHybClient",
    "FedHybConfig",
    "FedHybSelf",
    "FedHybStar",
    "ensemble_distillation_loss",
    "self_distillation_loss",
    "sub_network_weight",
    "synthesise",
    "train_generator",
]

__getattr__, __dir__ = exports(
    __name__,
    {
        "client": ("FedHybClient",),
        "config": ("FedHybConfig",),
        "functional": ("ensemble_distillation_loss", "self_distillation_loss", "sub_network_weight"),
        "strategy": ("FedHyb", "FedHybSelf", "FedHybStar"),
        "synthesis": ("synthesise", "train_generator"),
    },
)

_PAPER = (
    "Liu et al., Federated Learning with Hybrid Knowledge Distillations on Long-Tailed Heterogeneous "
    "Client Data"
)

_BOTH = "weights, distilled at the clients and at the server"
_CLIENTS, _SERVER = "weights, distilled at the clients", "weights, distilled at the server"

_VIEWED = "trains slim parts of the model on turned and scaled views of images"
_GENERATED = "makes up samples of floating point with a generator, and trains on views of images"

for _name, _strategy, _exchanged, _public, _fixed in (
    ("fedhyb", "FedHyb", _BOTH, "server", {}),
    ("fedhyb-star", "FedHybStar", _BOTH, "synthetic", {}),
    ("fedhyb-1", "FedHybSelf", _CLIENTS, "", {"dynamic_weighting": False}),
    ("fedhyb-2", "FedHybSelf", _CLIENTS, "", {"dynamic_weighting": True}),
    ("fedhyb-3", "FedHyb", _SERVER, "server", {"self_weight": 0.0}),
):
    register(
        Method(
            name=_name,
            strategy_path=f"{__name__}.strategy:{_strategy}",
            client_path=f"{__name__}.client:FedHybClient",
            config_path=f"{__name__}.config:FedHybConfig",
            paper=_PAPER,
            exchanged=_exchanged,
            leaves_client="its weights",
            reaches_others="the global model",
            benchmarks=("accuracy", "picture", "scale") if _name == "fedhyb" else (),
            global_model=True,
            sent=averaging(
                "FedHyb, algorithm 1, steps 6 and 8: predictions and features are made at the server"
            ),
            public_at=_public,
            one_tensor=_GENERATED if _public == "synthetic" else _VIEWED,
            fixed=_fixed,
            quick=("server-epochs=1", "generator-steps=2", "synthetic-samples=16"),
        )
    )
