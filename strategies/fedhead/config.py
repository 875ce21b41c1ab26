"""FedHEAD's hyper-parameters."""

from dataclasses import dataclass

from flwr_kd.config import hyper, rows_to_train_on
from flwr_kd.distillation.config import DistillationConfig


@dataclass(frozen=True, kw_only=True)
class FedHEADConfig(DistillationConfig):
    """FedHEAD and FedHEAD+ with the paper's values (its H.1)."""

    sectors: int = hyper(2, "M, number of sectors; ignored with assignment=client", ge=1)
    assignment: str = hyper(
        "random",
        "how clients are assigned to sectors: at random by the server, or by the client's node config",
        choices=("random", "client"),
    )
    leader: str = hyper(
        "random",
        "a sector's leader: drawn with probability p_km/p_m, or the client with the most samples",
        choices=("random", "largest"),
    )
    sector_epochs: int = hyper(20, "n_s, maximum passes of a leader over its data in the distillation", ge=1)
    server_epochs: int = hyper(20, "n_g, maximum passes of FedHEAD+'s server over the public data", ge=1)

    def planned_steps(self, phase: str, samples: int) -> int:
        """Return the steps of a client's training, or of a leader's distillation with all its epochs."""
        if phase == "train":
            return super().planned_steps(phase, samples)
        return self.sector_epochs * self.batches(rows_to_train_on(samples, self.validation_share))
