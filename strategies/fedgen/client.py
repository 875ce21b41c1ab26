"""FedGen's client half: training that the server's generator guides, and label counts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from flwr_kd.checks import ConfigError
from flwr_kd.client.client import KDClient, Objective
from flwr_kd.client.task import Answer, Task
from flwr_kd.learning.loop import BatchNorms
from flwr_kd.learning.weights import get_weights
from flwr_kd.models import count_parameters
from flwr_kd.models.feature import find_head
from flwr_kd.transport.payload import PayloadError
from flwr_kd.transport.template import ArrayTemplate

from .config import FedGenConfig
from .functional import build_feature_generator, guidance_loss
from .messages import LARGEST_COUNT, LabelCounts, SharedGenerator, unpack


class FedGenClient(KDClient[FedGenConfig]):
    """Trains on cross-entropy and, once there is a generator, on features that it makes for labels.

    It also sends how many samples of each class it has. For parameters see :class:`flwr_kd.KDClient`.
    """

    config_class = FedGenConfig
    _counts: Tensor

    def held_parameters(self, config: FedGenConfig) -> int:
        """Return the parameters of the model and of the generator."""
        generator = build_feature_generator(
            self.feature_shape, num_classes=self.num_classes, hidden=config.generator_hidden, seed=0
        )
        return count_parameters(self.model) + count_parameters(generator)

    def objective(self, task: Task[FedGenConfig]) -> Objective:
        """Return cross-entropy, with the generator's two terms from the second round on."""
        plain, guidance = super().objective(task), self._guidance(task)
        classes = torch.arange(self.num_classes, device=self.device).unsqueeze(1)
        self._counts = torch.zeros(self.num_classes, dtype=torch.int64, device=self.device)
        counted, count = 0, len(self.train_batches)

        def loss(x: Tensor, y: Tensor) -> Tensor:
            nonlocal counted
            # A sampler may draw more in an epoch than there are samples.
            if self.local_epoch == 0 and counted + len(y) <= count:
                counted += len(y)
                self._counts += (y == classes).sum(dim=1)
            if guidance is None or self.local_epoch >= task.config.guided_epochs:
                return plain(x, y)
            return guidance(x, y)

        return loss

    def _guidance(self, task: Task[FedGenConfig]) -> Objective | None:
        """Return the loss with the generator's two terms; None if the server sent no generator."""
        config = task.config
        dims = {"D": self.feature_dim, "I": self.feature_dim + self.num_classes}
        message = task.read(SharedGenerator, **dims)
        if message is None:
            return None
        generator, labels = unpack(message, self.feature_shape)
        generator.to(self.device)
        draw, batchnorms = task.generator("generated-features"), BatchNorms(self.model)
        label_weight, prediction_weight = config.guidance_at(task.server_round)
        label_weight *= config.generator_batch / config.batch_size

        def loss(x: Tensor, y: Tensor) -> Tensor:
            features = self.model.features(x)
            logits = self.model.classify(features)
            drawn = labels[torch.randint(len(labels), (config.generator_batch,), generator=draw)]
            both = torch.cat([drawn.to(self.device), y])
            noise = torch.randn(len(both), generator.noise_dim, generator=draw).to(self.device)
            made = generator(noise, both).to(features.dtype)
            first, second = made[: len(drawn)], made[len(drawn) :]
            # Generated features are not training data: they must not change a BatchNorm in the head.
            with batchnorms.frozen():
                generated = self.model.classify(first)
                with torch.no_grad():
                    teacher = self.model.classify(second)
            return F.cross_entropy(logits, y) + guidance_loss(
                logits,
                teacher,
                generated,
                both[: len(drawn)],
                label_weight=label_weight,
                prediction_weight=prediction_weight,
            )

        return loss

    def knowledge(self, task: Task[FedGenConfig]) -> LabelCounts:
        """Return how many samples of each class were trained on in the round."""
        return LabelCounts(self._counts.cpu().clamp(max=LARGEST_COUNT).numpy())


class FedGenHeadClient(FedGenClient):
    """Sends and receives its model's head only; the extractor stays, and may be of any kind.

    Clients' features have one size. For parameters see :class:`flwr_kd.KDClient`.

    Raises
    ------
    ConfigError
        If the model has ``features`` and ``classify`` of its own, and no module named ``head``.
    """

    personal = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        head = find_head(self.model)
        if head is None:
            raise ConfigError(
                f"fedgen-head needs a model with a head, a module; {type(self.model).__name__} has none: give a "
                "pair (extractor, head)"
            )
        self.head = head

    def load(self, task: Task[FedGenConfig]) -> None:
        """Load the client's own model, and the server's head into it, if one was sent.

        Raises
        ------
        PayloadError
            If the head does not fit the client's.
        """
        super().load(task)
        if not task.arrays:
            return
        own = ArrayTemplate.of_ndarrays(get_weights(self.head))
        received = dict(zip(task.names, task.arrays, strict=len(task.names) == len(task.arrays)))
        difference = own.difference_in_shapes({name: value.shape for name, value in received.items()})
        if difference is not None or len(task.names) != len(task.arrays):
            raise PayloadError(f"the server's head does not fit this client's: {difference}")
        checked = own.check([received[name] for name in own.names])
        state = {name: torch.tensor(value) for name, value in zip(own.names, checked, strict=True)}
        self.head.load_state_dict(state)

    def phase_train(self, task: Task[FedGenConfig]) -> Answer:
        """Train, and return the head."""
        answer, weights = super().phase_train(task), get_weights(self.head)
        answer.arrays = [weights[name] for name in (task.names or weights)]
        return answer
