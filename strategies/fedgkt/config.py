"""FedGKT's hyper-parameters."""

from dataclasses import dataclass
from typing import Any

from typing_extensions import TypeVar

from flwr_kd.catalogue import PREDICTORS
from flwr_kd.config import MethodConfig, hyper, knowledge_control

SERVER_ORDER: dict[str, Any] = {
    "help": "order of the server's training: all rows shuffled together, or client by client",
    "choices": ("client-by-client", "pooled"),
}
"""Help and choices of ``server-order``, whose default differs between FedGKT and FedDKC."""


@dataclass(frozen=True, kw_only=True)
class FedGKTConfig(MethodConfig):
    """FedGKT with the values of FedDKC's comparison (its section 4.1); the numbers of epochs are ours."""

    local_epochs: int = hyper(1, "passes over the client's training data per round", ge=1)
    batch_size: int = hyper(1024, "samples per training batch, at clients and server", ge=1)
    optimizer: str = hyper("sgd", "optimiser of clients and server", choices=("adam", "sgd"))
    learning_rate: float = hyper(0.03, "learning rate in round 1", gt=0)
    lr_decay: float = hyper(1.0, "factor on the learning rate every lr-decay-every rounds", gt=0, le=1)
    weight_decay: float = hyper(5e-4, "L2 penalty of the optimiser", ge=0)
    beta: float = hyper(1.5, "β, weight of the knowledge-similarity loss at clients and server", ge=0)
    server_epochs: int = hyper(1, "passes over the clients' features per round", ge=1)
    server_order: str = hyper("pooled", **SERVER_ORDER)
    initial_logits: str = hyper(
        "zero", "the clients' teacher in round 1: zero logits, or none", choices=("zero", "none")
    )
    predictor: str = hyper(
        "bottleneck",
        "the server's model for features that are maps: bottleneck blocks, with the paper's number of "
        "parameters, or the larger basic blocks of ResNet20",
        choices=tuple(PREDICTORS),
    )
    server_knowledge: str = knowledge_control(
        "what the server learns from beside the labels: the clients' knowledge; as controls, a uniform teacher "
        "or the knowledge of a client's other samples"
    )
    client_knowledge: str = knowledge_control(
        "what the clients learn from beside the labels: the server's knowledge; as controls, a uniform teacher "
        "or the knowledge of a client's other samples"
    )
    feature_dtype: str = hyper(
        "float32",
        "dtype of the features in messages; float16 halves their size",
        choices=("float16", "float32"),
    )
    send_test_features: bool = hyper(
        False, "whether clients also send test features and labels, to evaluate the server's model"
    )


FedGKTConfigT = TypeVar("FedGKTConfigT", bound=FedGKTConfig, default=FedGKTConfig, covariant=True)
"""FedGKT's config class, or that of a method built on it."""
