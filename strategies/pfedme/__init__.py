"""pFedMe: personal models near the global one, by Moreau envelopes."""

from typing import TYPE_CHECKING

from flwr_kd.formulas import averaging
from flwr_kd.lazy import exports
from flwr_kd.registry import BATCH_NORM, Method, register

if TYPE_CHECKING:
    from .client import PFedMeClient
    from .config import PFedMeConfig
    from .functional import follow, mixed
    from .strategy import PFedMe

__all__ = ["PFedMe", "PFedMeClient", "PFedMeConfig", "follow", "mixed"]

__getattr__, __dir__ = exports(
    __name__,
    {
        "client": ("PFedMeClient",),
        "config": ("PFedMeConfig",),
        "functional": ("follow", "mixed"),
        "strategy": ("PFedMe",),
    },
)

register(
    Method(
        name="pfedme",
        strategy_path=f"{__name__}.strategy:PFedMe",
        client_path=f"{__name__}.client:PFedMeClient",
        config_path=f"{__name__}.config:PFedMeConfig",
        paper="T. Dinh, Tran, Nguyen, Personalized Federated Learning with Moreau Envelopes, NeurIPS 2020",
        exchanged="weights; the personal model stays",
        leaves_client="its weights, without those of its personal model",
        reaches_others="the mean of all weights",
        global_model=True,
        takes_multi_label=True,
        fixed={"optimizer": "sgd", "momentum": 0.0},
        sent=averaging("T. Dinh et al. 2020, algorithm 1"),
        quick=(
            "local-epochs=0",
            "local-steps=3",
            "learning-rate=0.1",
            "personal-learning-rate=0.05",
            "proximal-lambda=4",
        ),
        variants=BATCH_NORM,
    )
)
