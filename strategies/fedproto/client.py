"""FedProto's client half: a personal model, trained towards the global prototypes."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from flwr_kd.client.client import Objective
from flwr_kd.client.shared_model import SharedModelClient
from flwr_kd.client.task import Task

from .config import FedProtoConfig
from .functional import class_means, prototype_loss
from .messages import Prototypes, pack, unpack


class FedProtoClient(SharedModelClient[FedProtoConfig]):
    """Cross-entropy plus λ times the distance of the batch's prototypes to the global ones.

    The model stays at the client, in ``context.state`` or its ``state-dir``.
    """

    config_class = FedProtoConfig
    personal = True

    def objective(self, task: Task[FedProtoConfig]) -> Objective:
        """Return cross-entropy, plus the regulariser once there are global prototypes."""
        message = task.read(Prototypes, D=self.feature_dim)
        if message is None:
            return super().objective(task)
        global_means = unpack(message)
        prototypes, known = global_means.means.to(self.device), (global_means.counts > 0).to(self.device)

        def loss(x: Tensor, y: Tensor) -> Tensor:
            features = self.model.features(x)
            term = prototype_loss(features, y, prototypes, known)
            return F.cross_entropy(self.model.classify(features), y) + task.config.proto_weight * term

        return loss

    def knowledge(self, task: Task[FedProtoConfig]) -> Prototypes:
        """Return the prototypes of the client's classes."""
        features, _, labels = self.extract(task.config.batch_size)
        return pack(class_means(features, labels, self.num_classes))
