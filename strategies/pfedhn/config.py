"""pFedHN's hyper-parameters."""

from __future__ import annotations

from dataclasses import dataclass

from flwr_kd.config import LocalStepsConfig, hyper

STEPS = ("reply", "reply-as-sent", "round")


@dataclass(frozen=True, kw_only=True)
class PFedHNConfig(LocalStepsConfig):
    """pFedHN and pFedHN-PC with the values of the paper's experiments."""

    local_steps: int = hyper(50, "batches on which a client trains per round", ge=1)
    optimizer: str = hyper("sgd", "local optimiser", choices=("adam", "sgd"))
    learning_rate: float = hyper(5e-3, "learning rate of the clients in round 1", gt=0)
    momentum: float = hyper(0.9, "momentum of the clients' SGD", ge=0, lt=1)
    weight_decay: float = hyper(5e-5, "L2 penalty of the clients' optimiser", ge=0)
    clip_norm: float = hyper(
        50.0, "largest norm of a client's gradient in the produced parameters; a larger one is scaled", gt=0
    )
    embedding_size: int = hyper(
        0, "numbers in a client's embedding; 0 for 1 + n/4, rounded down, with n clients", ge=0
    )
    hidden_size: int = hyper(100, "width of the hypernetwork's hidden layers", ge=1)
    hidden_layers: int = hyper(3, "hidden layers of the hypernetwork after its first", ge=0)
    server_steps: str = hyper(
        "reply",
        "steps of the hypernetwork: one per reply, in the order of partitions, with the change from what it "
        "produces by then, or as the client sent it; or one per round on the mean",
        choices=STEPS,
    )
    server_learning_rate: float = hyper(0.01, "learning rate of the hypernetwork and the embeddings", gt=0)
    server_momentum: float = hyper(0.9, "momentum of their SGD", ge=0, lt=1)
    server_weight_decay: float = hyper(1e-3, "L2 penalty of their SGD", ge=0)
    server_clip_norm: float = hyper(
        50.0, "largest norm of their gradient, taken together; a larger one is scaled", gt=0
    )
    max_parameters: int = hyper(
        250_000_000, "largest number of the hypernetwork's parameters; a larger one is refused", ge=1
    )
