"""FedHEAD's hyper-parameters."""

from dataclasses import dataclass

from flwr_kd.config import hyper
from flwr_kd.distillation.config import DistillationConfig


@dataclass(frozen=True, kw_only=True)
class FedHEADConfig(DistillationConfig):
    """FedHEAD and FedHEAD+ with the paper's values (its H.1)."""

    sectors: int = hyper(2, "M, number of sectors; not used with assignment=client", ge=1)
    assignment: str = hyper(
        "random",
        "who says which sector a client is in: the server at random, or the client's node config",
        choices=("random", "client"),
    )
    leader: str = hyper(
        "random",
        "who leads a sector: drawn with probability p_km/p_m, or the client with the most samples",
        choices=("random", "largest"),
    )
    sector_epochs: int = hyper(20, "n_s, most passes of a leader over its data in the distillation", ge=1)
    server_epochs: int = hyper(20, "n_g, most passes of FedHEAD+'s server over the public data", ge=1)
