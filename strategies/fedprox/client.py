"""FedProx's client half: cross-entropy and the proximal term."""

from typing import cast

from torch import Tensor
from torch.nn import functional as F

from flwr_kd.client.client import KDClient, Objective
from flwr_kd.client.task import Task

from .config import FedProxConfig
from .functional import proximal_term


class FedProxClient(KDClient):
    """Adds μ/2 · ‖w - w_t‖² to the loss, w_t being the round's global weights."""

    config_class = FedProxConfig

    def objective(self, task: Task) -> Objective:
        """Return cross-entropy plus the proximal term."""
        mu = cast(FedProxConfig, task.config).proximal_mu
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        # A list of copies: the weights of the round's start, for every batch.
        reference = [p.detach().clone() for p in parameters]

        def loss(x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(self.model(x), y) + proximal_term(parameters, reference, mu)

        return loss
