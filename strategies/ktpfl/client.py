"""KT-pFL's client halves: a model of its own, and steps towards what the server mixed for it."""

from __future__ import annotations

from typing import cast

import torch

from flwr_kd.checks import ConfigError
from flwr_kd.client.client import KDClient
from flwr_kd.client.personal_state import StateError
from flwr_kd.client.task import Answer, Task
from flwr_kd.learning.weights import check_finite_weights, load_weights
from flwr_kd.public_data.client import PublicKnowledgeClient

from .config import KTpFLConfig, KTpFLWeightsConfig
from .functional import distance_scale, transferred
from .messages import HAS_MODEL


class KTpFLClient(PublicKnowledgeClient):
    """Trains on its own data, predicts public samples, and learns its personalised soft predictions.

    For parameters see :class:`flwr_kd.public_data.client.PublicKnowledgeClient`.
    """

    config_class = KTpFLConfig


class KTpFLWeightsClient(KDClient):
    """Trains its model, sends it, and takes steps towards its personal global model (equations 9 and 10).

    The model stays at the client, too. For parameters see :class:`flwr_kd.KDClient`.
    """

    config_class = KTpFLWeightsConfig
    personal = True

    def load(self, task: Task) -> None:
        """Take the client's own model of this run, else the one that the server sent, else the one as it was built.

        Raises
        ------
        StateError
            If the server goes by a model of an earlier round that is not here.
        """
        if self.load_own():
            return
        if task.arrays:
            load_weights(self.model, self.named(task, task.arrays))
        elif task.extra.get(HAS_MODEL):
            raise StateError(
                "no model of an earlier round is kept here: it was lost; the server sends one anew"
            )

    def phase_train(self, task: Task) -> Answer:
        """Train on the local data (equation 9), and return the model.

        Raises
        ------
        FloatingPointError
            If training leads beyond all numbers. The model of before is kept.
        """
        self.load(task)
        loss = self.train(task, self.objective(task))
        check_finite_weights(self.model)
        self.keep()
        return Answer(
            arrays=self.arrays(task.names),
            num_examples=len(self.train_batches),
            metrics={"train-loss": loss},
        )

    def phase_distill(self, task: Task) -> Answer:
        """Take R steps towards the personal global model (equation 10), and measure.

        Raises
        ------
        ConfigError
            If a step would go beyond the target.
        StateError
            If the model of this round's training is not there.
        FloatingPointError
            If the new model's outputs are not finite. The model of before is kept.
        """
        config = cast(KTpFLWeightsConfig, task.config)
        self.load_trained()
        target = self.named(task, task.arrays)
        names = list(target)
        own = self.arrays(names)
        scale = distance_scale(own, config.reduction)
        rate = config.distill_learning_rate * config.decay_at(task.server_round) * config.distill_weight
        if 2 * rate * scale > 1:
            raise ConfigError(
                f"distill-learning-rate times distill-weight must be <= {0.5 / scale:g} for this model with "
                f"reduction={config.reduction}, or a step goes beyond the target; got {rate:g}"
            )
        found = transferred(
            own,
            [target[name] for name in names],
            learning_rate=rate,
            steps=config.distill_steps,
            scale=scale,
        )
        load_weights(self.model, dict(zip(names, found, strict=True)))
        with torch.no_grad():
            outputs = self.model.eval()(self.train_batches.example().to(self.device))
        if not bool(torch.isfinite(outputs).all()):
            raise FloatingPointError(
                "the personal global model leads to outputs that are not finite; not taken"
            )
        self.keep()
        return Answer(num_examples=len(self.train_batches), metrics=self.local_metrics(config.batch_size))
