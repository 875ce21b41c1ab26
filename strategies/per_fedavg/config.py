"""Per-FedAvg's hyper-parameters."""

from __future__ import annotations

from dataclasses import dataclass

from flwr_kd.config import StepsConfig, hyper

FIRST_ORDER, HESSIAN_FREE = "first-order", "hessian-free"


@dataclass(frozen=True, kw_only=True)
class PerFedAvgConfig(StepsConfig):
    """Per-FedAvg's first-order and hessian-free versions."""

    learning_rate: float = hyper(0.001, "β, learning rate of a step of the global model in round 1", gt=0)
    alpha: float = hyper(0.005, "α, learning rate of a step to the personal model", gt=0)
    meta_gradient: str = hyper(
        FIRST_ORDER,
        "gradient of the loss after a step: without second derivatives, or with a difference of gradients in place "
        "of the Hessian",
        choices=(FIRST_ORDER, HESSIAN_FREE),
    )
    delta: float = hyper(
        0.001, "δ, share of the gradient in that difference, with meta-gradient=hessian-free", gt=0
    )
    personalize_steps: int = hyper(
        1, "steps from the global model to a personal model, on one training batch each; 0 for none", ge=0
    )
    personalize_epochs: int = hyper(
        0, "epochs of such steps in place of personalize-steps; 0 for personalize-steps", ge=0
    )

    @property
    def personalizes(self) -> bool:
        """Whether clients adapt copies of the last global model before they are measured."""
        return self.adaptation_steps(1) > 0

    def adaptation_steps(self, samples: int) -> int:
        """Return the number of steps to the personal model of a client that has a number of samples."""
        return self.adaptation_epochs * -(-samples // self.batch_size) or self.personalize_steps
