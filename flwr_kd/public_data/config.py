"""Hyper-parameters of methods that exchange soft predictions on public data."""

from __future__ import annotations

from dataclasses import dataclass

from typing_extensions import TypeVar

from flwr_kd.config import MethodConfig, hyper

__all__ = ["PRECISIONS", "REDUCTIONS", "PublicConfigT", "PublicKnowledgeConfig"]

PRECISIONS = ("float32", "float16", "uint8")
"""Types in which soft predictions may be sent."""
REDUCTIONS = ("sum", "mean")
"""Whether a divergence is the sum over public samples or their mean."""
_TOO_LARGE = 0.01
"""Adam's rate of distillation with which FedMD's local accuracy on digits was 12 % after 20 rounds; with a tenth of
it 89 % after 6."""


@dataclass(frozen=True, kw_only=True)
class PublicKnowledgeConfig(MethodConfig):
    """Methods that exchange soft predictions on public data; the defaults are those of KT-pFL's appendix B.2."""

    local_epochs: int = hyper(20, "E, passes over the client's training data per round", ge=1)
    batch_size: int = hyper(128, "samples per batch of the client's own data", ge=1)
    optimizer: str = hyper("sgd", "optimiser of training and distillation", choices=("adam", "sgd"))
    learning_rate: float = hyper(0.01, "η₁, learning rate of local training in round 1", gt=0)
    lr_decay: float = hyper(1.0, "factor on η₁ and η₂ every lr-decay-every rounds", gt=0, le=1)
    public_at: str = hyper(
        "clients",
        "where the public data is: the same at every client, and positions are sent; or at the server, which "
        "sends samples",
        choices=("clients", "server"),
    )
    public_samples: int = hyper(3000, "public samples drawn per round; all if there are fewer", ge=1)
    public_batch_size: int = hyper(256, "public samples per batch", ge=1)
    temperature: float = hyper(10.0, "T of the soft predictions", gt=0)
    distill_epochs: int = hyper(1, "R, passes over the round's public samples", ge=0)
    distill_learning_rate: float = hyper(0.01, "η₂, learning rate of the distillation in round 1", gt=0)
    distill_weight: float = hyper(1.0, "λ, weight of the divergence from the targets", ge=0)
    reduction: str = hyper(
        "sum", "whether the divergence is the sum over public samples or their mean", choices=REDUCTIONS
    )
    precision: str = hyper("float32", "dtype of soft predictions in messages", choices=PRECISIONS)

    def doubts(self) -> list[str]:
        """Return a warning of Adam at a rate that is meant for SGD, with which clients forget what they learn."""
        distils = self.distill_epochs and self.distill_weight
        if not (distils and self.optimizer == "adam" and self.distill_learning_rate >= _TOO_LARGE):
            return super().doubts()
        return [
            *super().doubts(),
            f"distill-learning-rate={self.distill_learning_rate:g} is a rate for SGD: with optimizer=adam the "
            "distillation may undo what clients have learnt; try 0.001",
        ]


PublicConfigT = TypeVar(
    "PublicConfigT", bound=PublicKnowledgeConfig, default=PublicKnowledgeConfig, covariant=True
)
"""The config class of a method that exchanges soft predictions."""
