"""The hyper-parameters of FedHKD+DaFKD: those of both."""

from dataclasses import dataclass

from ..dafkd.config import DaFKDConfig
from ..fedhkd.config import FedHKDConfig


@dataclass(frozen=True, kw_only=True)
class FedHKDDaFKDConfig(FedHKDConfig, DaFKDConfig):
    """FedHKD's hyper-parameters at the clients, and DaFKD's."""
