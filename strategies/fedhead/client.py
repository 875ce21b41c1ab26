"""FedHEAD's client half: local training and, where it leads its sector, the sector's distillation."""

from __future__ import annotations

from typing import Any, cast

from flwr_kd.client.client import KDClient
from flwr_kd.client.task import Answer, Task
from flwr_kd.distillation.samples import check_samples
from flwr_kd.distillation.student import Distillation, distil_ensemble
from flwr_kd.transport.payload import PayloadError

from .config import FedHEADConfig
from .messages import SectorEnsemble


class FedHEADClient(KDClient):
    """Trains on cross-entropy; as a leader it distils its sector's models into the global mean (equation 4).

    A leader's distillation uses its training samples without augmentation (``knowledge_set``), and not their
    labels. For parameters see :class:`flwr_kd.KDClient`.

    Raises
    ------
    DatasetError
        If the samples for the distillation are none, or come from a loader with a sampler of its own.
    """

    config_class = FedHEADConfig

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        same = self.knowledge_batches is self.train_batches
        check_samples(self.knowledge_batches, "train_set" if same else "knowledge_set")

    def phase_distill(self, task: Task) -> Answer:
        """Distil the ensemble of the sector's models into z, and return the result."""
        config, message = cast(FedHEADConfig, task.config), task.read(SectorEnsemble)
        if message is None:
            raise PayloadError("a leader needs its sector's weights, none came")
        models, size = 1 + len(message.weights), len(task.names) or len(self.model.state_dict())
        if len(task.arrays) != models * size:
            raise PayloadError(f"{len(task.arrays)} arrays came, expected {models} models of {size}")
        student, *teachers = (self.named(task, task.arrays[i * size : (i + 1) * size]) for i in range(models))
        done = distil_ensemble(
            self.model,
            student,
            teachers,
            message.weights.tolist(),
            self.knowledge_batches,
            Distillation.in_round(config, task.server_round, epochs=config.sector_epochs, seed=task.seed),
            self.device,
        )
        metrics = {
            "distill-epochs": float(done.epochs),
            "distill-loss": done.loss,
            "distill-left-out": float(len(done.left_out)),
        }
        return Answer(self.arrays(task.names), num_examples=len(self.knowledge_batches), metrics=metrics)

    def phase_distill_again(self, task: Task) -> Answer:
        """Do the same in place of a leader that failed."""
        return self.phase_distill(task)
