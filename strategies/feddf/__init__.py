"""FedDF and pFedDF: the server distils all clients' models into their mean, or a mean per architecture."""

from flwr_kd.registry import Method, register

from .client import FedDFClient, PFedDFClient
from .config import FedDFConfig, PFedDFConfig
from .strategy import FedDF, PFedDF

__all__ = ["FedDF", "FedDFClient", "FedDFConfig", "PFedDF", "PFedDFClient", "PFedDFConfig"]

register(
    Method(
        name="feddf",
        strategy=FedDF,
        client=FedDFClient,
        paper="Lin et al., Ensemble Distillation for Robust Model Fusion (FedDF), NeurIPS 2020",
        exchanged="weights",
        global_model=True,
        public_at="server",
    )
)
register(
    Method(
        name="pfeddf",
        strategy=PFedDF,
        client=PFedDFClient,
        paper="Zhang et al., Parameterized Knowledge Transfer for Personalized Federated Learning (KT-pFL), "
        "NeurIPS 2021; FedDF with groups of unlike models, then fine-tuning",
        exchanged="weights, of one architecture per group",
        global_model=False,
        public_at="server",
        heterogeneous=True,
    )
)
