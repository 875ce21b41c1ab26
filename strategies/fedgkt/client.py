"""FedGKT's client half: a small personal model, trained on the server's logits for the client's samples."""

from __future__ import annotations

from typing import Any, Generic

import torch
from torch import Tensor, nn

from flwr_kd.client.client import KDClient, Objective
from flwr_kd.client.task import Task
from flwr_kd.learning.batches import DatasetError
from flwr_kd.learning.losses import soft_targets
from flwr_kd.models import SplitModel, as_feature_model

from .config import FedGKTConfig, FedGKTConfigT
from .functional import transfer_loss
from .messages import ClientFeatures, ServerLogits, pack, unpack_logits


class FedGKTClient(KDClient[FedGKTConfigT], Generic[FedGKTConfigT]):
    """Trains on cross-entropy and the server's logits (equation 1), then sends features, logits and labels.

    The model stays at the client. It is a pair ``(extractor, predictor)`` or a
    :class:`~flwr_kd.models.SplitModel`, whose features may have any shape; any other model is split before its
    last ``Linear``. All clients' features must have the shape that the server's predictor takes. For parameters
    see :class:`flwr_kd.KDClient`; ``knowledge_set`` must have the samples of ``train_set`` in its order.

    Raises
    ------
    DatasetError
        If ``knowledge_set`` has another length than ``train_set``; while training, if it has other labels.
    """

    config_class = FedGKTConfig
    personal = True
    indexed = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if len(self.knowledge_batches) != len(self.train_batches):
            raise DatasetError(
                f"knowledge_set must have the samples of train_set, got {len(self.knowledge_batches)} and "
                f"{len(self.train_batches)}"
            )
        # The labels seen in training, by sample, to detect a knowledge_set in another order.
        self._labels = torch.full((len(self.train_batches),), -1, device=self.device)

    def wrap(self, model: nn.Module | tuple[nn.Module, nn.Module]) -> nn.Module:
        """Return a split model unchanged, and a pair as a split model."""
        if isinstance(model, tuple) and len(model) == 2:
            return SplitModel(*model)
        return model if isinstance(model, SplitModel) else as_feature_model(model)

    def objective(self, task: Task[FedGKTConfigT]) -> Objective:
        """Return equation 1, with each sample's own logits; cross-entropy alone where there are none."""
        beta, teacher = task.config.beta, self.teacher(task)

        def loss(x: Tensor, y: Tensor, rows: Tensor) -> Tensor:
            self._labels[rows] = y
            return transfer_loss(self.model(x), y, None if teacher is None else teacher[rows], beta)

        return loss

    def knowledge(self, task: Task[FedGKTConfigT]) -> ClientFeatures:
        """Return one row per training sample, computed in eval mode and without augmentation."""
        config = task.config
        features, logits, labels = self.extract(config.batch_size)
        if len(labels) != len(self._labels):
            raise DatasetError(f"collate_fn returned {len(labels)} samples of {len(self._labels)}")
        seen = self._labels.cpu()
        wrong = torch.nonzero((seen >= 0) & (seen != labels)).flatten()
        if len(wrong):
            raise DatasetError(
                f"knowledge_set must have the samples of train_set in the same order; {len(wrong)} labels differ, "
                f"the first at {int(wrong[0])}"
            )
        if config.send_test_features and self.test_batches is not None and len(self.test_batches):
            test, _, test_labels = self.extract(config.batch_size, self.test_batches)
        else:
            test, test_labels = features[:0], labels[:0]
        return pack(features, logits, labels, test, test_labels, dtype=config.feature_dtype)

    def teacher(self, task: Task[FedGKTConfigT]) -> Tensor | None:
        """Return the server's probabilities ``[N, C]``, row i for sample i; None where there is no teacher."""
        count = len(self.train_batches)
        message = task.read(ServerLogits, N=count, C=self.num_classes)
        if message is not None:
            logits = unpack_logits(message)
        elif task.server_round == 1 and task.config.initial_logits == "zero":
            logits = torch.zeros(count, self.num_classes)
        else:
            return None
        return soft_targets(logits, 1.0).to(self.device)
