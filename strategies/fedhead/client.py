"""FedHEAD's client half: local training and, at a sector's leader, the sector's distillation."""

from __future__ import annotations

from typing import Any

from flwr_kd.client.client import KDClient
from flwr_kd.client.task import Answer, Task
from flwr_kd.distillation.samples import check_samples
from flwr_kd.distillation.student import Distillation, distil_ensemble
from flwr_kd.distillation.teachers import by_rule, soft_labels
from flwr_kd.transport.payload import PayloadError

from .config import FedHEADConfig
from .messages import KNOWLEDGE, SectorEnsemble, unpack


class FedHEADClient(KDClient[FedHEADConfig]):
    """Trains on cross-entropy; as a leader it distils its sector's models into the global mean (equation 4).

    A leader distils on its training samples without augmentation (``knowledge_set``), and ignores their labels. For
    parameters see :class:`flwr_kd.KDClient`.

    Raises
    ------
    DatasetError
        If there are no samples for the distillation.
    """

    config_class = FedHEADConfig

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        same = self.knowledge_batches is self.train_batches
        check_samples(self.knowledge_batches, "train_set" if same else "knowledge_set")

    def phase_distill(self, task: Task[FedHEADConfig]) -> Answer:
        """Distil the ensemble of the sector's models into z, and return the result."""
        config, message = task.config, task.read(SectorEnsemble)
        if message is None:
            raise PayloadError("a leader needs its sector's weights, got none")
        size = len(task.names) or len(self.model.state_dict())
        student, *teachers = (self.named(task, model) for model in unpack(message, task.arrays, size))
        done = distil_ensemble(
            self.model,
            student,
            teachers,
            message.weights.tolist(),
            self.knowledge_batches,
            Distillation.in_round(
                config,
                task.server_round,
                epochs=config.sector_epochs,
                seed=task.seed,
                matching=by_rule(soft_labels(), task.extra.get(KNOWLEDGE, "mean")),
                steps_before=task.steps_before,
            ),
            self.device,
        )
        metrics = {
            "distill-epochs": float(done.epochs),
            "distill-loss": done.loss,
            "distill-left-out": float(len(done.left_out)),
        }
        return Answer(self.arrays(task.names), num_examples=len(self.knowledge_batches), metrics=metrics)

    def phase_distill_again(self, task: Task[FedHEADConfig]) -> Answer:
        """Distil in place of a leader that failed."""
        return self.phase_distill(task)
