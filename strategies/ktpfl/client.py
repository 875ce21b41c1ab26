"""KT-pFL's client halves: a model of its own, and steps towards what the server mixed for it."""

from __future__ import annotations

from typing import cast

from flwr_kd.client import Answer, KDClient, Task
from flwr_kd.public import PublicKnowledgeClient
from flwr_kd.state import StateError
from flwr_kd.weights import load_weights

from .config import KTpFLConfig, KTpFLWeightsConfig
from .functional import distance_scale, transferred


class KTpFLClient(PublicKnowledgeClient):
    """Trains on its own data, predicts public samples, and learns its personalised soft predictions.

    For parameters see :class:`flwr_kd.public.PublicKnowledgeClient`.
    """

    config_class = KTpFLConfig


class KTpFLWeightsClient(KDClient):
    """Trains its model, sends it, and takes steps towards its personal global model (equations 9 and 10).

    The model stays at the client, too. For parameters see :class:`flwr_kd.client.KDClient`.
    """

    config_class = KTpFLWeightsConfig
    personal = True

    def load(self, task: Task) -> None:
        """Take the server's model where it sent one, else the client's own."""
        if task.arrays:
            load_weights(self.model, self.named(task, task.arrays))
        else:
            super().load(task)

    def phase_train(self, task: Task) -> Answer:
        """Train on the local data (equation 9), and return the model."""
        self.load(task)
        loss = self.train(task, self.objective(task))
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
        StateError
            If the model of this round's training is not there.
        """
        config = cast(KTpFLWeightsConfig, task.config)
        if self.state.load() is None:
            raise StateError("no model of this round's training is kept here: it was lost, or never trained")
        target = self.named(task, task.arrays)
        super().load(task)
        names = list(target)
        own = self.arrays(names)
        found = transferred(
            own,
            [target[name] for name in names],
            learning_rate=config.distill_learning_rate
            * config.decay_at(task.server_round)
            * config.distill_weight,
            steps=config.distill_steps,
            scale=distance_scale(own, config.reduction),
        )
        load_weights(self.model, dict(zip(names, found, strict=True)))
        self.keep()
        return Answer(num_examples=len(self.train_batches), metrics=self.local_metrics(config.batch_size))
