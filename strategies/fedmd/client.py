"""FedMD's client half: a personal model, which can be trained on labelled public data first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from flwr_kd.checks import ConfigError
from flwr_kd.client.shared_model import SharedModelClient
from flwr_kd.client.task import Task
from flwr_kd.learning.batches import Batches
from flwr_kd.learning.loop import fit, make_optimizer
from flwr_kd.models.initialisation import DrawFrom
from flwr_kd.public_data.client import PublicKnowledgeClient

from .config import FedMDConfig

_MOST_CLASSES = 100_000
"""Classes of public data for which a head is built."""


class FedMDClient(SharedModelClient[FedMDConfig], PublicKnowledgeClient[FedMDConfig]):
    """Trains on its own data, predicts public samples, and learns the mean of all predictions.

    With ``warmup-epochs`` it trains on the public data's labels before its first training in a run; these must then
    be among the model's classes, unless ``warmup-head=own``. For parameters see
    :class:`flwr_kd.public_data.client.PublicKnowledgeClient`.
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
            If the public data has no labels, or labels outside 0..C-1; with a head of its own, labels that are no
            whole numbers from 0, or are too many.
        """
        config = task.config
        if not config.warmup_epochs:
            return
        if self._labelled is None:
            raise ConfigError(
                f"warmup-epochs={config.warmup_epochs} needs a public_set with labels, got none"
            )
        own_head = config.warmup_head == "own"
        batches = self._batches_of(self._labelled, own_head)
        objective, trained = self.objective(task), self.model
        if own_head:
            classes = 1 + max(int(y.max()) for _, y in batches.ordered(config.batch_size))
            with DrawFrom(task.generator("warm-up-head")):
                head = nn.Linear(self.model.feature_dim, classes).to(self.device, self.dtype)
            objective, trained = _over(self.model, head), nn.ModuleList([self.model, head])
        order = task.generator("warm-up")

        def epoch() -> Iterator[tuple[Any, ...]]:
            for x, y in batches.shuffled(config.batch_size, order):
                yield self.to_device(x), self.to_device(y)

        optimizer = make_optimizer(trained, config, config.learning_rate_at(task.server_round))
        fit(trained, optimizer, epoch, self.in_precision(objective), epochs=config.warmup_epochs)

    def _batches_of(self, labelled: Dataset[Any] | DataLoader[Any], any_labels: bool) -> Batches:
        own = self.train_batches
        return Batches(
            labelled,
            num_classes=_MOST_CLASSES if any_labels else self.num_classes,
            classes=None if any_labels or own.classes is None else list(own.classes),
            input_key=self.public_input_key,
            label_key=own.label_key,
            dtype=self.dtype,
        )


def _over(model: Any, head: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the cross-entropy of another head over a model's features."""
    return lambda x, y: F.cross_entropy(head(model.features(x)), y)
