"""KT-pFL's hyper-parameters."""

from __future__ import annotations

from dataclasses import dataclass

from flwr_kd.checks import ConfigError
from flwr_kd.config import MethodConfig, hyper
from flwr_kd.public_data.config import REDUCTIONS, PublicKnowledgeConfig

NORMALIZATIONS = ("simplex", "softmax", "none")
COEFFICIENTS = ("learned", "cosine", "top-k")


@dataclass(frozen=True, kw_only=True)
class CoefficientConfig(MethodConfig):
    """Hyper-parameters of learning the knowledge coefficient matrix."""

    coefficient_learning_rate: float = hyper(0.01, "η₃, learning rate of the coefficient matrix", ge=0)
    rho: float = hyper(0.6, "ρ, weight of the pull of all coefficients towards 1/N", ge=0)
    normalize: str = hyper(
        "simplex",
        "normalisation of each row after a step: projection onto the simplex, the softmax of 5 times the row, "
        "or none",
        choices=NORMALIZATIONS,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if 2 * self.coefficient_learning_rate * self.rho > 1:
            raise ConfigError(
                f"coefficient-learning-rate times rho must be <= 0.5, or a step goes beyond 1/N; got "
                f"{self.coefficient_learning_rate:g} times {self.rho:g}"
            )


@dataclass(frozen=True, kw_only=True)
class KTpFLConfig(PublicKnowledgeConfig, CoefficientConfig):
    """KT-pFL, Sim-pFL and TopK-pFL with the values of KT-pFL's heterogeneous experiments (its appendix B.2)."""

    coefficients: str = hyper(
        "learned",
        "how the matrix is computed: by gradient descent, or from the cosine similarity of predictions, with "
        "all clients or the top-k",
        choices=COEFFICIENTS,
    )
    top_k: int = hyper(5, "K, number of most similar clients, itself included, with coefficients=top-k", ge=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.normalize == "none" and self.reduction == "sum":
            raise ConfigError(
                "normalize=none needs reduction=mean: a step down the sum over all public samples takes every "
                "coefficient far below 0, got reduction=sum"
            )


@dataclass(frozen=True, kw_only=True)
class KTpFLWeightsConfig(CoefficientConfig):
    """KT-pFL on models with the values of its homogeneous experiments (appendix B.2)."""

    local_epochs: int = hyper(20, "E, passes over the client's training data per round", ge=1)
    batch_size: int = hyper(32, "samples per training batch", ge=1)
    optimizer: str = hyper("sgd", "local optimiser", choices=("adam", "sgd"))
    learning_rate: float = hyper(0.01, "η₁, learning rate of local training in round 1", gt=0)
    lr_decay: float = hyper(1.0, "factor on η₁ and η₂ every lr-decay-every rounds", gt=0, le=1)
    distill_steps: int = hyper(1, "R, steps towards the personal global model", ge=0)
    distill_learning_rate: float = hyper(0.01, "η₂, learning rate of these steps", gt=0)
    distill_weight: float = hyper(1.0, "λ, weight of the distance from the personal global model", ge=0)
    reduction: str = hyper(
        "sum",
        "whether the squared distance is the sum over a model's weights or their mean",
        choices=REDUCTIONS,
    )
    coefficient_learning_rate: float = hyper(0.005, "η₃, learning rate of the coefficient matrix", ge=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reduction == "sum" and self.distill_learning_rate * self.distill_weight > 0.5:
            raise ConfigError(
                f"distill-learning-rate times distill-weight must be <= 0.5 with reduction=sum, or a step goes "
                f"beyond the target; got {self.distill_learning_rate:g} times {self.distill_weight:g}"
            )
