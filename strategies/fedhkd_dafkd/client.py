"""The client half of FedHKD+DaFKD: FedHKD's loss and knowledge, beside DaFKD's discriminator and generator."""

from typing import Any

from flwr_kd.client.client import Objective
from flwr_kd.client.task import Task

from ..dafkd.client import DaFKDClient
from ..fedhkd.client import FedHKDClient
from .config import FedHKDDaFKDConfig
from .messages import ScoredKnowledge, with_scores


class FedHKDDaFKDClient(DaFKDClient[FedHKDDaFKDConfig], FedHKDClient):
    """Trains by FedHKD's equation 11 and, in its first participations, a discriminator and the generator.

    For parameters see :class:`~flwr_kd.strategies.dafkd.DaFKDClient` and
    :class:`~flwr_kd.strategies.fedhkd.FedHKDClient`.
    """

    config_class = FedHKDDaFKDConfig
    method = "fedhkd-dafkd"

    def objective(self, task: Task[Any]) -> Objective:
        """Return FedHKD's loss, with the discriminator's terms and the generator's steps."""
        return super().objective(task)

    def knowledge(self, task: Task[Any]) -> ScoredKnowledge:
        """Return FedHKD's hyper-knowledge and DaFKD's scores."""
        return with_scores(FedHKDClient.knowledge(self, task), self.scores(task))
