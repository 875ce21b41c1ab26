"""FedHKD's client half: the loss of equation 11, and the client's own hyper-knowledge."""

from __future__ import annotations

import math

from torch import Tensor
from torch.nn import functional as F

from flwr_kd.client.client import KDClient, Objective
from flwr_kd.client.task import Task
from flwr_kd.learning.loop import BatchNorms

from .config import FedHKDConfig
from .functional import add_noise, classifier_loss, feature_loss, local_knowledge, noise_predictions
from .messages import HyperKnowledge, pack, unpack


class FedHKDClient(KDClient[FedHKDConfig]):
    """Trains on cross-entropy plus the two regularisers, then shares its hyper-knowledge.

    The noise is secret unless the client has ``reproducible_noise``. For parameters see :class:`flwr_kd.KDClient`.
    """

    config_class = FedHKDConfig

    def objective(self, task: Task[FedHKDConfig]) -> Objective:
        """Return equation 11; cross-entropy alone while there is no global knowledge."""
        config = task.config
        message = task.read(HyperKnowledge, D=self.feature_dim, C=self.num_classes)
        if message is None:
            return super().objective(task)
        knowledge = unpack(message, self.num_classes)
        known_representations = knowledge.representations.to(self.device, self.dtype)
        predictions, known = knowledge.predictions.to(self.device), knowledge.known.to(self.device)
        batchnorms = BatchNorms(self.model)

        def loss(x: Tensor, y: Tensor) -> Tensor:
            features = self.model.features(x)
            # A model of several dtypes has one for its features.
            representations = known_representations.to(self.dtype or features.dtype)
            total = F.cross_entropy(self.model.classify(features), y)
            if config.classifier_weight:
                # The global representations are not training data: they must not change a BatchNorm in the head.
                with batchnorms.frozen():
                    logits = self.model.classify(representations)
                term = classifier_loss(logits, predictions, known, config.temperature)
                total = total + config.classifier_weight * term
            if config.gamma:
                total = total + config.gamma * feature_loss(features, y, representations, known)
            return total

        return loss

    def knowledge(self, task: Task[FedHKDConfig]) -> HyperKnowledge:
        """Return the hyper-knowledge of the classes that the client may share (4), with noise (7)."""
        config = task.config
        features, logits, labels = self.extract(config.batch_size)
        knowledge = local_knowledge(
            features,
            logits,
            labels,
            num_classes=self.num_classes,
            threshold=config.share_needed(self.num_classes),
            temperature=config.temperature,
            # The noise needs the bound; without noise, clipping would only distort.
            clip=config.clip if config.noise != "none" else math.inf,
        )
        if config.noise != "none":
            generator = task.generator("noise") if self.reproducible_noise else None
            knowledge = add_noise(knowledge, sigma=config.sigma, clip=config.clip, generator=generator)
            if config.noise == "all":
                knowledge = noise_predictions(knowledge, sigma=config.sigma, generator=generator)
        return pack(knowledge)
