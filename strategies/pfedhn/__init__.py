"""pFedHN: a hypernetwork at the server produces each client's own model from an embedding of the client."""

from typing import TYPE_CHECKING

from flwr_kd.formulas import Sent, Term
from flwr_kd.lazy import exports
from flwr_kd.registry import BATCH_NORM, Method, register

if TYPE_CHECKING:
    from .client import PFedHNClient, PFedHNPCClient
    from .config import PFedHNConfig
    from .functional import embedding_size, hypernetwork_size, vector_jacobian
    from .hypernetwork import HyperNetwork
    from .strategy import PFedHN

__all__ = [
    "HyperNetwork",
    "PFedHN",
    "PFedHNClient",
    "PFedHNConfig",
    "PFedHNPCClient",
    "embedding_size",
    "hypernetwork_size",
    "vector_jacobian",
]

__getattr__, __dir__ = exports(
    __name__,
    {
        "client": ("PFedHNClient", "PFedHNPCClient"),
        "config": ("PFedHNConfig",),
        "functional": ("embedding_size", "hypernetwork_size", "vector_jacobian"),
        "hypernetwork": ("HyperNetwork",),
        "strategy": ("PFedHN",),
    },
)

_PAPER = "Shamsian et al., Personalized Federated Learning using Hypernetworks, ICML 2021"


def _register(name: str, client: str, paper: str, exchanged: str, letter: str) -> None:
    register(
        Method(
            name=name,
            strategy_path=f"{__name__}.strategy:PFedHN",
            client_path=f"{__name__}.client:{client}",
            config_path=f"{__name__}.config:PFedHNConfig",
            paper=paper,
            exchanged=exchanged,
            leaves_client="how it changed the weights that it received, in effect its weights",
            reaches_others="weights made by a hypernetwork that is trained on all clients' changes",
            benchmarks=("accuracy",) if name == "pfedhn" else (),
            global_model=False,
            takes_multi_label=True,
            server_device=True,
            sent=(
                Sent("train", "down", "weights", (Term(letter),), "Shamsian et al. 2021, algorithm 1"),
                Sent("train", "up", "weights", (Term(letter),), "Shamsian et al. 2021, algorithm 1"),
            ),
            quick=("local-epochs=4", "learning-rate=0.01"),
            variants=BATCH_NORM,
        )
    )


_register("pfedhn", "PFedHNClient", _PAPER, "weights made for each client, and how it changed them", "W")
_register(
    "pfedhn-pc",
    "PFedHNPCClient",
    f"{_PAPER}; pFedHN-PC, with personal classifiers",
    "the same without the classifier, which stays at the client",
    "E",
)
