"""FedHyb's client half: local training with self-distillation into slim sub-networks."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from flwr_kd.checks import ConfigError
from flwr_kd.client.client import KDClient, Objective
from flwr_kd.client.task import Task
from flwr_kd.data import random_affine
from flwr_kd.inputs import one_tensor
from flwr_kd.learning.loop import BatchNorms
from flwr_kd.models import make_slimmable, slimmed
from flwr_kd.models.views import ADVICE
from flwr_kd.registry import needs_one_tensor
from flwr_kd.text import first_line

from .config import FedHybConfig
from .functional import self_distillation_loss

# A view may fit one of them by chance.
_TRIED_WIDTHS = (0.5, 0.25, 0.75)


class FedHybClient(KDClient[FedHybConfig]):
    """A client of FedHyb, of its ablations and of FedHyb* (section 3.1, algorithm 2).

    The model's convolutions, ``Linear`` and BatchNorm layers become slimmable ones that share its weights; names,
    shapes and outputs of the full network do not change.

    Parameters
    ----------
    model, train_set, test_set, **options
        See :class:`flwr_kd.KDClient`. Views are rotated and scaled images; inputs other than images
        ``[B, K, H, W]`` are used without a change.

    Raises
    ------
    ConfigError
        If a layer of the model cannot be made slim, or its code does not run with fewer channels.
    DatasetError
        If a data set does not give what training needs.
    """

    config_class = FedHybConfig

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._try_narrow()

    def wrap(self, model: nn.Module | tuple[nn.Module, nn.Module]) -> nn.Module:
        """Make the model slimmable."""
        wrapped = super().wrap(model)
        try:
            return make_slimmable(wrapped)
        except ValueError as error:
            raise ConfigError(f"model cannot be used: {error}") from None

    @torch.no_grad()
    def _try_narrow(self) -> None:
        """Refuse a model whose code does not run with fewer channels, or mixes samples then."""
        x = one_tensor(self.train_batches.example(), partial(needs_one_tensor, "fedhyb")).to(self.device)
        # An even number of samples, which a view of fewer channels might turn into fewer samples.
        x = x.repeat(4, *[1] * (x.dim() - 1))
        expected = [len(x), self.num_classes]
        self.model.eval()
        reason = ""
        try:
            for width in _TRIED_WIDTHS:
                with slimmed(self.model, width):
                    shape = list(self.model(x).shape)
                if shape != expected:
                    reason = f"it returns {shape}, not {expected}"
                    break
        except (
            Exception
        ) as error:  # A user's module may raise anything if its code fixes numbers of channels.
            reason = first_line(error)
        if reason:
            raise ConfigError(
                f"model cannot be used: its code does not run with fewer channels ({reason}); {ADVICE}"
            )

    def objective(self, task: Task[FedHybConfig]) -> Objective:
        """Return equation 5; the cross-entropy alone without self-distillation (FedHyb³)."""
        config = task.config
        widths, views = task.generator("widths"), task.generator("views")
        scale, batchnorms = (config.min_scale, config.max_scale), BatchNorms(self.model)

        def sub_network(x: Tensor) -> Tensor:
            width = 1 - (1 - config.min_width) * float(torch.rand((), generator=widths, dtype=torch.float64))
            view = random_affine(x, views, degrees=config.degrees, scale=scale)
            # With width 1 this is the full network, whose running statistics must not include views.
            with batchnorms.statistics_kept(), slimmed(self.model, width):
                logits: Tensor = self.model(view)
            return logits

        def loss(x: Tensor, y: Tensor) -> Tensor:
            logits = self.model(x)
            count = config.sub_networks if config.self_weight > 0 else 0
            return self_distillation_loss(
                logits,
                y,
                [sub_network(x) for _ in range(count)],
                weight=config.self_weight,
                dynamic_weighting=config.dynamic_weighting,
                detach_target=config.detach_target,
                detach_weight=config.detach_weight,
            )

        return loss
