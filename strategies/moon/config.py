"""MOON's hyper-parameters."""

from dataclasses import dataclass

from flwr_kd.config import MethodConfig, hyper


@dataclass(frozen=True, kw_only=True)
class MOONConfig(MethodConfig):
    """MOON; μ = 1 and τ = 0.5 are the values in FedHKD's comparison (appendix A.1).

    The paper tries μ in 0.1, 1, 5 and 10.
    """

    contrastive_mu: float = hyper(1.0, "μ, weight of the contrastive term", ge=0)
    temperature: float = hyper(0.5, "τ, temperature of the contrastive term", gt=0)
    previous_models: int = hyper(1, "number of the client's own last models in the contrastive term", ge=1)
