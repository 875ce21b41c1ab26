"""DaFKD's hyper-parameters."""

from dataclasses import dataclass

from typing_extensions import TypeVar

from flwr_kd.config import hyper
from flwr_kd.distillation.config import StudentConfig

ROUND_START, ROUND_MEAN = SCORED_GENERATORS = "round-start", "round-mean"


@dataclass(frozen=True, kw_only=True)
class DaFKDConfig(StudentConfig):
    """DaFKD; the defaults of its own fields are the authors', with as many server batches as local epochs."""

    discriminator_rounds: int = hyper(
        3, "participations in which a client trains its discriminator; 0 for uniform weights", ge=0
    )
    generator_rounds: int = hyper(5, "participations in which a client trains the generator", ge=0)
    adversarial_epochs: int = hyper(5, "first local epochs of a round in which both are trained", ge=0)
    penalty_weight: float = hyper(0.3, "weight of the gradient penalty", ge=0)
    noise_dim: int = hyper(100, "size of the generator's noise", ge=1)
    scored_generator: str = hyper(
        ROUND_START,
        "generator whose samples are scored and distilled: that with which the round starts, or the mean of those "
        "that the round's clients trained, for which a second phase sends each client its model and this generator",
        choices=SCORED_GENERATORS,
    )
    server_batches: int = hyper(5, "J, batches of generated samples in the server's distillation", ge=1)
    server_temperature: float = hyper(10.0, "T of the server's distillation", gt=0)
    server_learning_rate: float = hyper(1e-5, "learning rate of the server's distillation (Adam)", gt=0)

    @property
    def scores_later(self) -> bool:
        """Whether samples are scored in a phase of their own, after the training."""
        return self.scored_generator == ROUND_MEAN

    @property
    def server_samples(self) -> int:
        """Number of generated samples of a round."""
        return self.server_batches * self.batch_size


DaFKDConfigT = TypeVar("DaFKDConfigT", bound=DaFKDConfig, default=DaFKDConfig, covariant=True)
"""The config class of a method that builds on DaFKD."""
