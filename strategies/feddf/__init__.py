"""FedDF and pFedDF: the server distils all clients' models into their mean, or a mean per architecture."""

from typing import TYPE_CHECKING

from flwr_kd.formulas import averaging, weights
from flwr_kd.lazy import exports
from flwr_kd.registry import BATCH_NORM, Method, register

if TYPE_CHECKING:
    from .client import FedDFClient, PFedDFClient
    from .config import FedDFConfig, PFedDFConfig
    from .strategy import FedDF, PFedDF

__all__ = ["FedDF", "FedDFClient", "FedDFConfig", "PFedDF", "PFedDFClient", "PFedDFConfig"]

__getattr__, __dir__ = exports(
    __name__,
    {
        "client": ("FedDFClient", "PFedDFClient"),
        "config": ("FedDFConfig", "PFedDFConfig"),
        "strategy": ("FedDF", "PFedDF"),
    },
)

register(
    Method(
        name="feddf",
        strategy_path=f"{__name__}.strategy:FedDF",
        client_path=f"{__name__}.client:FedDFClient",
        config_path=f"{__name__}.config:FedDFConfig",
        paper="Lin et al., Ensemble Distillation for Robust Model Fusion (FedDF), NeurIPS 2020",
        exchanged="weights, distilled at the server",
        leaves_client="its weights",
        reaches_others="the global model",
        benchmarks=("accuracy", "picture"),
        global_model=True,
        sent=averaging("Lin et al. 2020, algorithm 1: soft labels are made at the server"),
        public_at="server",
        quick=("server-epochs=1",),
        variants=BATCH_NORM,
    )
)
register(
    Method(
        name="pfeddf",
        strategy_path=f"{__name__}.strategy:PFedDF",
        client_path=f"{__name__}.client:PFedDFClient",
        config_path=f"{__name__}.config:PFedDFConfig",
        paper="Zhang et al., Parameterized Knowledge Transfer for Personalized Federated Learning (KT-pFL), "
        "NeurIPS 2021; FedDF with heterogeneous models in groups, then fine-tuning",
        exchanged="weights, distilled at the server, a model per architecture",
        leaves_client="its weights",
        reaches_others="a model distilled from all, one for each architecture",
        global_model=False,
        sent=(
            *averaging("Lin et al. 2020, for models of several kinds: each client its group's"),
            weights(
                "finetune",
                "down",
                "KT-pFL's paper, footnote 3: the prototypes of the last round",
                when="last",
            ),
        ),
        public_at="server",
        heterogeneous=True,
        quick=("server-epochs=1", "finetune-epochs=1"),
    )
)
