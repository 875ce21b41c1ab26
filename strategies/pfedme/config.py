"""pFedMe's hyper-parameters."""

from __future__ import annotations

from dataclasses import dataclass

from flwr_kd.checks import ConfigError
from flwr_kd.config import StepsConfig, hyper

WEIGHTINGS = ("samples", "uniform")


@dataclass(frozen=True, kw_only=True)
class PFedMeConfig(StepsConfig):
    """pFedMe with the values of the authors' experiments.

    >>> PFedMeConfig(proximal_lambda=20.0).beta
    1.0
    """

    local_steps: int = hyper(20, "R, batches on which a client trains per round", ge=1)
    inner_steps: int = hyper(5, "K, steps of the personal model on each batch", ge=1)
    learning_rate: float = hyper(0.005, "η, learning rate of a client's own model in round 1", gt=0)
    personal_learning_rate: float = hyper(
        0.09, "η_p, learning rate of the personal model in round 1; 0.01 for the paper's CIFAR", gt=0
    )
    lr_decay: float = hyper(1.0, "factor on η and η_p every lr-decay-every rounds", gt=0, le=1)
    proximal_lambda: float = hyper(
        15.0, "λ, weight of the distance between the personal model and the client's own", gt=0
    )
    beta: float = hyper(
        1.0, "β, weight of the clients' mean in the new global model, which is 1 - β of the old one", gt=0
    )
    weighting: str = hyper("samples", "whether the mean is weighted by sample counts", choices=WEIGHTINGS)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, rate in (
            ("personal-learning-rate", self.personal_learning_rate),
            ("learning-rate", self.learning_rate),
        ):
            if rate * self.proximal_lambda >= 2:
                raise ConfigError(
                    f"{name} times proximal-lambda must be < 2, or the steps diverge; got {rate:g} times "
                    f"{self.proximal_lambda:g}, which is {rate * self.proximal_lambda:g}: reduce one of them"
                )
