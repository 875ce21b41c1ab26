"""FedHyb's hyper-parameters."""

from dataclasses import dataclass

from flwr_kd.checks import ConfigError
from flwr_kd.config import hyper
from flwr_kd.distillation.config import BATCHNORMS, DistillationConfig


@dataclass(frozen=True, kw_only=True)
class FedHybConfig(DistillationConfig):
    """FedHyb and its variants, with the values of the paper's section 4.1 where it gives any.

    a, η, ν and the server's learning rate and epochs were chosen on validation data (see the method's page); the
    other values are ours.

    Raises
    ------
    ConfigError
        If a value is not allowed, or ``min-scale`` is above ``max-scale``.
    """

    local_epochs: int = hyper(5, "passes over the client's training data per round", ge=1)
    batch_size: int = hyper(64, "samples per batch, in training and distillation", ge=1)
    weight_decay: float = hyper(0.0, "L2 penalty of the optimiser", ge=0)
    validation_share: float = hyper(
        0.0, "share of the distillation samples held out for the validation loss", ge=0, lt=1
    )
    distill_batchnorm: str = hyper(
        "eval",
        "BatchNorm of the global model in the server's distillation: a batch's statistics, which move the running "
        "ones; the running ones of the models' mean; or those estimated anew on the proxy data before it",
        choices=BATCHNORMS,
    )
    self_weight: float = hyper(0.1, "a, weight of the clients' self-distillation; 0 disables it", ge=0)
    sub_networks: int = hyper(2, "M, number of slim sub-networks per batch, each with its own view", ge=1)
    min_width: float = hyper(
        0.5, "minimum share of the channels in a sub-network; drawn for each", gt=0, le=1
    )
    degrees: float = hyper(15.0, "maximum rotation of a view, in degrees", ge=0, le=180)
    min_scale: float = hyper(0.8, "minimum scale of a view", gt=0)
    max_scale: float = hyper(1.2, "maximum scale of a view", gt=0)
    dynamic_weighting: bool = hyper(
        True, "whether a sub-network's term has the weight β of equation 4, else 1"
    )
    detach_target: bool = hyper(True, "whether the full network's output is a constant in the KL")
    detach_weight: bool = hyper(True, "whether β is a constant")
    server_epochs: int = hyper(1, "passes over the proxy data per round", ge=1)
    server_learning_rate: float = hyper(3e-4, "learning rate of the server's distillation in round 1", gt=0)
    logits_weight: float = hyper(1.0, "η, weight of the soft predictions in the server's distillation", ge=0)
    feature_weight: float = hyper(0.1, "ν, weight of the features in the server's distillation", ge=0)
    generator_steps: int = hyper(20, "FedHyb*: training steps of the generator per round", ge=1)
    generator_learning_rate: float = hyper(5e-3, "FedHyb*: learning rate of the generator (Adam)", gt=0)
    latent_dim: int = hyper(64, "FedHyb*: dimension of the generator's noise", ge=1)
    synthetic_samples: int = hyper(500, "FedHyb*: number of generated samples per round", ge=1)
    balance_weight: float = hyper(1.0, "FedHyb*: weight of class-balanced predictions", ge=0)
    diversity_weight: float = hyper(1.0, "FedHyb*: weight of the samples' diversity", ge=0)
    batchnorm_weight: float = hyper(1.0, "FedHyb*: weight of the clients' BatchNorm statistics, if any", ge=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.min_scale > self.max_scale:
            raise ConfigError(
                f"min-scale must be at most max-scale, got {self.min_scale} and {self.max_scale}"
            )

    def server_learning_rate_at(self, server_round: int) -> float:
        """Return the learning rate of the server's distillation in a round, with the clients' decay.

        >>> FedHybConfig(server_learning_rate=0.1, lr_decay=0.5, lr_decay_every=1).server_learning_rate_at(3)
        0.025
        """
        return self.server_learning_rate * self.learning_rate_at(server_round) / self.learning_rate
