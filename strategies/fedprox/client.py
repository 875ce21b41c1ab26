"""FedProx's client half: cross-entropy and the proximal term."""

from collections.abc import Callable

from torch import Tensor

from flwr_kd.client.client import KDClient, Objective
from flwr_kd.client.task import Task
from flwr_kd.learning.scores import label_loss
from flwr_kd.models import count_parameters

from .config import FedProxConfig
from .functional import proximal_term


class FedProxClient(KDClient[FedProxConfig]):
    """Adds μ/2 · ‖w - w_t‖² to the loss, where w_t are the round's global weights."""

    config_class = FedProxConfig
    takes_multi_label = True
    dp_sgd = True

    def held_parameters(self, config: FedProxConfig) -> int:
        """Return the parameters of the model and of the received one."""
        return 2 * count_parameters(self.model)

    def penalty(self, task: Task[FedProxConfig]) -> Callable[[], Tensor]:
        """Return the proximal term."""
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        # Copies of the weights at the start of the round; a list, since each batch reads it again.
        reference = [p.detach().clone() for p in parameters]
        return lambda: proximal_term(parameters, reference, task.config.proximal_mu)

    def objective(self, task: Task[FedProxConfig]) -> Objective:
        """Return cross-entropy plus the proximal term; in DP-SGD without it, since no sample decides it."""
        if task.config.dp_sgd_clip:
            return super().objective(task)
        penalty = self.penalty(task)
        return lambda x, y: label_loss(self.model(x), y) + penalty()
