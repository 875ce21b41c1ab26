"""MOON's client half: cross-entropy and the contrastive term, which needs the client's previous models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from flwr_kd.checks import ConfigError
from flwr_kd.client.client import KDClient, Objective
from flwr_kd.client.own_model import LentModel
from flwr_kd.client.task import Answer, Task
from flwr_kd.learning.scores import label_loss
from flwr_kd.learning.weights import by_prefix, check_finite_weights, size_of, with_prefix
from flwr_kd.models import count_parameters
from flwr_kd.models.given import private_copy

from .config import MOONConfig
from .functional import contrastive_loss

_PREVIOUS = "previous"


class MOONClient(KDClient[MOONConfig]):
    """Adds μ times the contrastive term to the loss; keeps its own last models, however old.

    In a client's first round there is no previous model, and therefore no contrastive term.

    Raises
    ------
    ConfigError
        If the model cannot be copied: the global and the previous models are frozen copies.
    """

    config_class = MOONConfig
    takes_multi_label = True

    def __init__(self, model: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(model, *args, **kwargs)
        if not isinstance(model, LentModel):
            self._frozen(None)

    def objective(self, task: Task[MOONConfig]) -> Objective:
        """Return cross-entropy, plus the contrastive term once there is a previous model."""
        config = task.config
        earlier = _models(self.kept(_PREVIOUS))[: config.previous_models]
        if not earlier or config.contrastive_mu == 0:
            return super().objective(task)
        received, *previous = [self._frozen(weights) for weights in (None, *earlier)]

        def loss(x: Tensor, y: Tensor) -> Tensor:
            features = self.model.features(x)
            with torch.no_grad():
                z_global, *z_previous = [model.features(x).flatten(1) for model in (received, *previous)]
            term = contrastive_loss(features.flatten(1), z_global, z_previous, config.temperature)
            return label_loss(self.model.classify(features), y) + config.contrastive_mu * term

        return loss

    def held_parameters(self, config: MOONConfig) -> int:
        """Return the parameters of the model, of the received one and of the previous ones."""
        return (2 + config.previous_models if config.contrastive_mu else 1) * count_parameters(self.model)

    def phase_train(self, task: Task[MOONConfig]) -> Answer:
        """Train on the local data, measure, keep the model as the latest previous one, and return it.

        Raises
        ------
        StateError
            If the previous models cannot be kept.
        FloatingPointError
            If the loss or the weights are no longer finite. What was kept earlier stays.
        """
        count = task.config.previous_models
        if count > 1:
            self.state.check(count * self.kept_bytes())
        answer = super().phase_train(task)
        check_finite_weights(self.model)
        earlier = _models(self.state.load(_PREVIOUS))[: count - 1] if count > 1 else []
        models = enumerate([self.model.state_dict(), *earlier])
        self.state.save(
            {
                name: value
                for age, weights in models
                for name, value in with_prefix(str(age), weights).items()
            },
            _PREVIOUS,
        )
        return answer

    def kept_bytes(self) -> int:
        """Return the size of one previous model; how many there are is known when training begins."""
        return size_of(self.model.state_dict())

    def _frozen(self, weights: Mapping[str, Tensor] | None) -> Any:
        """Return a copy of the model, or of it with other weights, that is not trained, in eval mode."""
        try:
            model: nn.Module = private_copy(self.model)
        except TypeError as error:
            raise ConfigError(f"{error}. MOON computes with frozen copies of the model") from None
        if weights is not None:
            model.load_state_dict(weights)
        return model.eval().requires_grad_(False)


def _models(kept: Mapping[str, Tensor] | None) -> list[dict[str, Tensor]]:
    """Return the models in a set of the client's state, the latest first."""
    by_age = by_prefix(kept or {})
    return [by_age[age] for age in sorted(by_age, key=int)]
