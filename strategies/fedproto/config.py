"""FedProto's hyper-parameters."""

from dataclasses import dataclass

from flwr_kd.config import MethodConfig, global_model, hyper


@dataclass(frozen=True, kw_only=True)
class FedProtoConfig(MethodConfig):
    """FedProto; λ = 0.05 is the value in FedHKD's comparison (appendix A.1)."""

    global_model: str = global_model()
    proto_weight: float = hyper(0.05, "λ, weight of the distance to the global prototypes", ge=0)
