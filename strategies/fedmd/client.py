"""FedMD's client half: a personal model, which can be trained on labelled public data first."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from flwr_kd.checks import ConfigError
from flwr_kd.client.shared_model import SharedModelClient
from flwr_kd.client.task import Task
from flwr_kd.learning.batches import Batches
from flwr_kd.learning.loop import fit, make_optimizer
from flwr_kd.public_data.client import PublicKnowledgeClient

from .config import FedMDConfig


class FedMDClient(SharedModelClient[FedMDConfig], PublicKnowledgeClient[FedMDConfig]):
    """Trains on its own data, predicts public samples, and learns the mean of all predictions.

    With ``warmup-epochs`` it trains on the public data's labels before its first training in a run; these must then
    be among the model's classes. For parameters see :class:`flwr_kd.public_data.client.PublicKnowledgeClient`.
    """

    config_class = FedMDConfig

    def __init__(
        self, *args: Any, public_set: Dataset[Any] | DataLoader[Any] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, public_set=public_set, **kwargs)
        self._labelled = public_set

    def prepare(self, task: Task[FedMDConfig]) -> None:
        """Train on the labelled public data (FedMD's transfer learning).

        Raises
        ------
        ConfigError
            If this client has no public data.
        DatasetError
            If the public data has no labels, or labels outside 0..C-1.
        """
        config = task.config
        if not config.warmup_epochs:
            return
        if self._labelled is None:
            raise ConfigError(
                f"warmup-epochs={config.warmup_epochs} needs a public_set with labels, got none"
            )
        own = self.train_batches
        batches = Batches(
            self._labelled,
            num_classes=self.num_classes,
            classes=None if own.classes is None else list(own.classes),
            input_key=self.public_input_key,
            label_key=own.label_key,
            dtype=self.dtype,
        )
        order = task.generator("warm-up")

        def epoch() -> Iterator[tuple[Tensor, ...]]:
            for x, y in batches.shuffled(config.batch_size, order):
                yield self.to_device(x), self.to_device(y)

        optimizer = make_optimizer(self.model, config, config.learning_rate_at(task.server_round))
        objective = self.in_precision(self.objective(task))
        fit(self.model, optimizer, epoch, objective, epochs=config.warmup_epochs)
