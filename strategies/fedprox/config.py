"""FedProx's hyper-parameters."""

from dataclasses import dataclass

from flwr_kd.config import MethodConfig, hyper


@dataclass(frozen=True, kw_only=True)
class FedProxConfig(MethodConfig):
    """FedProx; μ = 0.5 is the value in FedHKD's comparison (appendix A.1)."""

    proximal_mu: float = hyper(0.5, "μ, weight of the proximal term", ge=0)
