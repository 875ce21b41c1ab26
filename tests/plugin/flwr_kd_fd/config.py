"""FD's hyper-parameters."""

from dataclasses import dataclass

from flwr_kd.config import MethodConfig, hyper


@dataclass(frozen=True, kw_only=True)
class FDConfig(MethodConfig):
    """FD; the paper prints no γ, the default is ours."""

    distill_weight: float = hyper(0.1, "γ, weight of the distance to the other clients' mean logits", ge=0)
