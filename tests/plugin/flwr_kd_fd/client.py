"""FD's client half: a personal model that also learns from the other clients' mean logits."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from flwr_kd import KDClient, Task

from .config import FDConfig
from .functional import class_logits, distillation_term
from .messages import ClassLogits, pack, unpack


class FDClient(KDClient[FDConfig]):
    """Cross-entropy, plus γ times the distance to the mean logits of the sample's class at the other clients."""

    config_class = FDConfig
    personal = True

    def objective(self, task: Task[FDConfig]):
        """Return cross-entropy, plus the distillation term once there are teachers."""
        message = task.read(ClassLogits, C=self.num_classes)
        if message is None:
            return super().objective(task)
        teacher, counts = (part.to(self.device) for part in unpack(message))

        def loss(x: Tensor, y: Tensor) -> Tensor:
            logits = self.model(x)
            term = distillation_term(logits, y, teacher, counts > 0)
            return F.cross_entropy(logits, y) + task.config.distill_weight * term

        return loss

    def knowledge(self, task: Task[FDConfig]) -> ClassLogits:
        """Return the mean logits of the client's classes after training."""
        _, logits, labels = self.extract(task.config.batch_size)
        means, counts = class_logits(logits, labels, self.num_classes)
        return pack(means.clamp(-65504, 65504), counts)
