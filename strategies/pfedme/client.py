"""pFedMe's client half: a personal model near the client's own, which follows it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from flwr_kd.client.client import KDClient, Objective
from flwr_kd.client.stream import endless_batches
from flwr_kd.client.task import Answer, Task
from flwr_kd.learning.loop import fit, make_optimizer
from flwr_kd.learning.scores import label_loss
from flwr_kd.learning.weights import check_finite_weights, size_of
from flwr_kd.models import count_parameters
from flwr_kd.transport import flower_records

from ..fedprox.functional import proximal_term
from .config import PFedMeConfig
from .functional import follow


class PFedMeClient(KDClient[PFedMeConfig]):
    """Trains a personal model θ, which the client keeps, near its own model w_i, which it sends.

    What is measured is θ, also of a client that was not drawn in the last round; without a θ, the global model.
    """

    config_class = PFedMeConfig
    takes_multi_label = True

    def load(self, task: Task[PFedMeConfig]) -> None:
        """Load the global model; where the client's model is measured, its last θ, if it has one."""
        super().load(task)
        if task.phase == flower_records.MEASURE:
            self.load_own()

    def kept_bytes(self) -> int:
        """Return the size of θ, with its buffers."""
        return size_of(self.model.state_dict())

    def held_parameters(self, config: PFedMeConfig) -> int:
        """Return the parameters of the personal model and of the client's own."""
        return 2 * count_parameters(self.model)

    def phase_train(self, task: Task[PFedMeConfig]) -> Answer:
        """Train, measure and keep θ, and return w_i.

        Raises
        ------
        FloatingPointError
            If the loss or θ is no longer finite. The θ that was kept before stays.
        """
        self.load(task)
        config = task.config
        decay = config.decay_at(task.server_round)
        personal = [p for p in self.model.parameters() if p.requires_grad]
        own = [p.detach().clone() for p in personal]
        optimizer = make_optimizer(self.model, config, config.personal_learning_rate * decay)

        def epoch() -> Iterator[tuple[Any, ...]]:
            for batch in islice(endless_batches(self, task), config.steps(len(self.train_batches))):
                for _ in range(config.inner_steps):
                    yield batch
                # Reached when the next batch is asked for, after the last of these steps.
                follow(own, personal, config.learning_rate * decay * config.proximal_lambda)

        loss = fit(
            self.model, optimizer, epoch, self.in_precision(self._objective(task, personal, own)), epochs=1
        )
        check_finite_weights(self.model, "the personal model's weights", option="personal-learning-rate")
        metrics = {"train-loss": loss, **self.local_metrics(config.batch_size)}
        self.state.save(self.model.state_dict())
        with torch.no_grad():
            for parameter, value in zip(personal, own, strict=True):
                parameter.copy_(value)
        return Answer(arrays=self.arrays(task.names), num_examples=len(self.train_batches), metrics=metrics)

    def _objective(self, task: Task[PFedMeConfig], personal: list[Tensor], own: list[Tensor]) -> Objective:
        """Return cross-entropy plus λ/2 · ‖θ - w_i‖²."""
        weight = task.config.proximal_lambda
        return lambda x, y: label_loss(self.model(x), y) + proximal_term(personal, own, weight)
