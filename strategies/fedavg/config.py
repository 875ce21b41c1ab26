"""FedAvg's hyper-parameters."""

from dataclasses import dataclass

from flwr_kd.config import StepDecayConfig


@dataclass(frozen=True, kw_only=True)
class FedAvgConfig(StepDecayConfig):
    """FedAvg has those of local training alone."""
