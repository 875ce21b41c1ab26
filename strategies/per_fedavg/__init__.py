"""Per-FedAvg: a global model that is good after one step on a client's data."""

from typing import TYPE_CHECKING

from flwr_kd.formulas import averaging
from flwr_kd.lazy import exports
from flwr_kd.registry import BATCH_NORM, Method, register

if TYPE_CHECKING:
    from .client import PerFedAvgClient
    from .config import PerFedAvgConfig
    from .functional import draw_rows, meta_gradient
    from .strategy import PerFedAvg

__all__ = ["PerFedAvg", "PerFedAvgClient", "PerFedAvgConfig", "draw_rows", "meta_gradient"]

__getattr__, __dir__ = exports(
    __name__,
    {
        "client": ("PerFedAvgClient",),
        "config": ("PerFedAvgConfig",),
        "functional": ("draw_rows", "meta_gradient"),
        "strategy": ("PerFedAvg",),
    },
)

_PAPER = (
    "Fallah, Mokhtari, Ozdaglar, Personalized Federated Learning with Theoretical Guarantees, NeurIPS 2020"
)

for _name, _what, _gradient in (
    ("per-fedavg", "", "first-order"),
    ("per-fedavg-hf", "; hessian-free", "hessian-free"),
):
    register(
        Method(
            name=_name,
            strategy_path=f"{__name__}.strategy:PerFedAvg",
            client_path=f"{__name__}.client:PerFedAvgClient",
            config_path=f"{__name__}.config:PerFedAvgConfig",
            paper=_PAPER + _what,
            exchanged="weights",
            leaves_client="its weights",
            reaches_others="the mean of all weights",
            benchmarks=("accuracy",) if _name == "per-fedavg" else (),
            global_model=True,
            takes_multi_label=True,
            fixed={"optimizer": "sgd", "momentum": 0.0, "meta_gradient": _gradient},
            sent=averaging("Fallah et al. 2020, algorithm 1"),
            quick=("local-epochs=0", "local-steps=3", "learning-rate=0.08", "alpha=0.01"),
            variants=BATCH_NORM,
        )
    )
