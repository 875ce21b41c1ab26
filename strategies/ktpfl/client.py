"""KT-pFL's client halves: a personal model, trained towards the mixture that the server makes for the client."""

from __future__ import annotations

import torch

from flwr_kd.checks import ConfigError
from flwr_kd.client.client import KDClient
from flwr_kd.client.personal_state import StateError
from flwr_kd.client.private_update import LAST
from flwr_kd.client.task import Answer, Task, metrics_of
from flwr_kd.learning.weights import check_finite_weights, load_weights
from flwr_kd.models import count_parameters
from flwr_kd.public_data.client import PublicKnowledgeClient
from flwr_kd.transport.template import ArrayTemplate

from .config import KTpFLConfig, KTpFLWeightsConfig
from .functional import distance_scale, transferred
from .messages import HAS_MODEL


class KTpFLClient(PublicKnowledgeClient[KTpFLConfig]):
    """Trains on its own data, predicts public samples, and learns its personalised soft predictions.

    For parameters see :class:`flwr_kd.public_data.client.PublicKnowledgeClient`.
    """

    config_class = KTpFLConfig


class KTpFLWeightsClient(KDClient[KTpFLWeightsConfig]):
    """Trains its model, sends it, and takes steps towards its personal global model (equations 9 and 10).

    The client also keeps the model. For parameters see :class:`flwr_kd.KDClient`.
    """

    config_class = KTpFLWeightsConfig
    takes_multi_label = True
    dp_sgd = True
    personal = True
    update_from = LAST

    def load(self, task: Task[KTpFLWeightsConfig]) -> None:
        """Load the client's own model of this run, else the server's, else keep the model as it was built.

        Raises
        ------
        StateError
            If the server expects a model of an earlier round that is missing.
        """
        if self.load_own():
            return
        if task.arrays:
            load_weights(self.model, self.named(task, task.arrays))
        elif task.extra.get(HAS_MODEL):
            raise StateError(
                "no model of an earlier round is kept here; the server sends one in the next round"
            )

    def held_parameters(self, config: KTpFLWeightsConfig) -> int:
        """Return the parameters of the model and of the personal global model."""
        return 2 * count_parameters(self.model)

    def phase_train(self, task: Task[KTpFLWeightsConfig]) -> Answer:
        """Train on the local data (equation 9), and return the model.

        Raises
        ------
        FloatingPointError
            If the loss or the weights are no longer finite. The model stays what it was before the phase.
        """
        self.load(task)
        loss = self.train(task, self.objective(task))
        check_finite_weights(self.model)
        self.keep()
        return Answer(
            arrays=self.arrays(task.names),
            num_examples=len(self.train_batches),
            metrics={"train-loss": loss, **metrics_of(trained=self.measure(task.config.batch_size))},
        )

    def phase_distill(self, task: Task[KTpFLWeightsConfig]) -> Answer:
        """Take R steps towards the personal global model (equation 10), and measure.

        Raises
        ------
        ConfigError
            If a step would overshoot the target.
        StateError
            If the model of this round's training is missing.
        FloatingPointError
            If the new model's outputs are not finite. The model stays what it was before the phase.
        """
        config = task.config
        self.load_trained()
        target = self.named(task, task.arrays)
        names = list(target)
        own = self.arrays(names)
        template = ArrayTemplate.of_ndarrays(dict(zip(names, own, strict=True)))
        own = template.finite(own)
        scale = distance_scale(own, config.reduction)
        rate = config.distill_learning_rate * config.decay_at(task.server_round) * config.distill_weight
        if 2 * rate * scale > 1:
            raise ConfigError(
                f"distill-learning-rate times distill-weight must be <= {0.5 / scale:g} for this model with "
                f"reduction={config.reduction}, or a step goes beyond the target; got {rate:g}"
            )
        moved = transferred(
            own,
            template.finite([target[name] for name in names]),
            learning_rate=rate,
            steps=config.distill_steps,
            scale=scale,
        )
        load_weights(self.model, dict(zip(names, template.restored(moved), strict=True)))
        with torch.no_grad():
            outputs = self.model.eval()(self.train_batches.example().to(self.device))
        if not bool(torch.isfinite(outputs).all()):
            raise FloatingPointError(
                "the personal global model has outputs that are not finite; the model does not change"
            )
        self.keep()
        return Answer(num_examples=len(self.train_batches), metrics=self.local_metrics(config.batch_size))
