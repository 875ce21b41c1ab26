"""FedDF: the server distils all clients' models into their mean, on unlabelled public data."""

from flwr_kd.registry import Method, register

from .client import FedDFClient
from .config import FedDFConfig
from .strategy import FedDF

__all__ = ["FedDF", "FedDFClient", "FedDFConfig"]

register(
    Method(
        name="feddf",
        strategy=FedDF,
        client=FedDFClient,
        paper="Lin et al., Ensemble Distillation for Robust Model Fusion (FedDF), NeurIPS 2020",
        exchanged="weights",
        global_model=True,
        public_data="server",
    )
)
