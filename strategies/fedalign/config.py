"""FedAlign's hyper-parameters."""

from dataclasses import dataclass

from flwr_kd.config import MethodConfig, hyper


@dataclass(frozen=True, kw_only=True)
class FedAlignConfig(MethodConfig):
    """FedAlign; local training and its own hyper-parameters are those of the paper and of FedHKD's comparison."""

    optimizer: str = hyper("sgd", "local optimiser", choices=("adam", "sgd"))
    learning_rate: float = hyper(0.01, "learning rate in round 1", gt=0)
    momentum: float = hyper(0.9, "momentum of SGD", ge=0, lt=1)
    weight_decay: float = hyper(1e-4, "L2 penalty of the optimiser", ge=0)
    nesterov: bool = hyper(True, "whether SGD's momentum, where there is any, is Nesterov's")
    clip_norm: float = hyper(
        10.0, "largest norm of the gradients of a step, of all parameters together", gt=0
    )
    align_mu: float = hyper(0.45, "μ, weight of the alignment", ge=0)
    align_width: float = hyper(0.25, "ω, share of the last block's channels in its slim part", gt=0, le=1)
