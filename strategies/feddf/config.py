"""FedDF's hyper-parameters."""

from dataclasses import dataclass

from flwr_kd.config import DistillationConfig, hyper
from flwr_kd.ensemble import AVERAGES


@dataclass(frozen=True, kw_only=True)
class FedDFConfig(DistillationConfig):
    """FedDF with the values of FedHEAD's comparison (its H.1)."""

    server_epochs: int = hyper(20, "n_g, most passes over the public data per round", ge=1)
    average: str = hyper(
        "logits", "what is averaged over the teachers: logits, or their softmax", choices=AVERAGES
    )
