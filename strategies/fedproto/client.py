"""FedProto's client half: a personal model, drawn towards the global prototypes."""

from __future__ import annotations

from typing import cast

from torch import Tensor
from torch.nn import functional as F

from flwr_kd.client.client import KDClient, Objective
from flwr_kd.client.task import Task

from .config import FedProtoConfig
from .functional import class_means, prototype_loss
from .messages import Prototypes, pack, unpack


class FedProtoClient(KDClient):
    """Cross-entropy plus λ times the distance of the batch's prototypes to the global ones.

    The model stays at the client, in ``context.state`` or its ``state-dir``.
    """

    config_class = FedProtoConfig
    personal = True

    def objective(self, task: Task) -> Objective:
        """Return cross-entropy, with the regulariser once there are global prototypes."""
        weight = cast(FedProtoConfig, task.config).proto_weight
        message = task.read(Prototypes, D=self.feature_dim)
        if message is None:
            return super().objective(task)
        known = unpack(message)
        prototypes, present = known.means.to(self.device), (known.counts > 0).to(self.device)

        def loss(x: Tensor, y: Tensor) -> Tensor:
            features = self.model.features(x)
            term = prototype_loss(features, y, prototypes, present)
            return F.cross_entropy(self.model.classify(features), y) + weight * term

        return loss

    def knowledge(self, task: Task) -> Prototypes:
        """Return the prototypes of the client's classes."""
        features, _, labels = self.extract(task.config.batch_size)
        return pack(class_means(features, labels, self.num_classes))
