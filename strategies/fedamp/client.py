"""FedAMP's client half: cross-entropy, and the distance from the client's mixture of models."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from flwr_kd.client.client import KDClient, Objective
from flwr_kd.client.task import Task
from flwr_kd.learning.scores import label_loss
from flwr_kd.models import count_parameters

from ..fedprox.functional import proximal_term
from .config import FedAMPConfig
from .messages import HAS_MODEL


class FedAMPClient(KDClient[FedAMPConfig]):
    """Trains from its mixture u_i, and adds λ/(2α) · ‖w - u_i‖² to the loss.

    The server keeps the client's model; the client keeps nothing. For parameters see :class:`flwr_kd.KDClient`.
    """

    config_class = FedAMPConfig
    takes_multi_label = True
    dp_sgd = True

    def load(self, task: Task[FedAMPConfig]) -> None:
        """Load what the server sends; without anything, the model stays as it was built."""
        if task.arrays:
            super().load(task)
        self.has_own = bool(task.extra.get(HAS_MODEL))

    def held_parameters(self, config: FedAMPConfig) -> int:
        """Return the parameters of the model and of the mixture."""
        return 2 * count_parameters(self.model)

    def penalty(self, task: Task[FedAMPConfig]) -> Callable[[], Tensor]:
        """Return the proximal term; its constant is a copy of the mixture."""
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        mixture = [p.detach().clone() for p in parameters]
        mu = task.config.proximal_mu_at(task.server_round)
        return lambda: proximal_term(parameters, mixture, mu)

    def objective(self, task: Task[FedAMPConfig]) -> Objective:
        """Return cross-entropy plus the proximal term; in DP-SGD without it, since no sample decides it."""
        if task.config.dp_sgd_clip:
            return super().objective(task)
        penalty = self.penalty(task)
        return lambda x, y: label_loss(self.model(x), y) + penalty()
