"""The hyper-parameters of FedAvg with local fine-tuning."""

from __future__ import annotations

from dataclasses import dataclass

from flwr_kd.config import MethodConfig, hyper


@dataclass(frozen=True, kw_only=True)
class FedAvgFTConfig(MethodConfig):
    """FedAvg with local fine-tuning: ``personalize-epochs`` is never 0.

    >>> FedAvgFTConfig(local_epochs=3).adaptation_epochs, FedAvgFTConfig(personalize_epochs=1).adaptation_epochs
    (3, 1)
    """

    personalize_epochs: int = hyper(
        0,
        "epochs in which every client fine-tunes a copy of the last global model before it is measured; 0 for "
        "those of local-epochs",
        ge=0,
    )

    @property
    def adaptation_epochs(self) -> int:
        """Epochs in which clients adapt copies of the last global model."""
        return self.personalize_epochs or self.local_epochs
