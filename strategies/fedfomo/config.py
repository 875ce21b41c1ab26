"""FedFomo's hyper-parameters."""

from __future__ import annotations

from dataclasses import dataclass

from flwr_kd.config import MethodConfig, hyper

STARTS = ("previous", "own")


@dataclass(frozen=True, kw_only=True)
class FedFomoConfig(MethodConfig):
    """FedFomo with the values of its paper's experiments."""

    optimizer: str = hyper("sgd", "local optimiser", choices=("adam", "sgd"))
    learning_rate: float = hyper(0.1, "learning rate in round 1", gt=0)
    lr_decay: float = hyper(0.99, "factor on the learning rate every lr-decay-every rounds", gt=0, le=1)
    lr_decay_every: int = hyper(1, "rounds between two decays", ge=1)
    models: int = hyper(4, "M, largest number of other clients' models that a client is sent", ge=1)
    validation_share: float = hyper(
        0.2, "share of a client's training samples that it never trains on, and weighs models by", gt=0, lt=1
    )
    epsilon: float = hyper(
        0.3, "ε, share of the models that are drawn at random instead of by affinity", ge=0, le=1
    )
    epsilon_decay: float = hyper(0.05, "what ε loses in each round, down to 0", ge=0)
    unhelped: str = hyper(
        "previous",
        "where training begins if no model helps: where the last training began, or where it ended",
        choices=STARTS,
    )

    def epsilon_at(self, server_round: int) -> float:
        """Return ε in a round, counted from 1.

        >>> [round(FedFomoConfig().epsilon_at(r), 2) for r in (1, 2, 6, 9)]
        [0.25, 0.2, 0.0, 0.0]
        """
        return max(0.0, self.epsilon - self.epsilon_decay * server_round)
