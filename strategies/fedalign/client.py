"""FedAlign's client half: cross-entropy, and the alignment of the model's last block with its slim part."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flwr_kd.client.client import KDClient, Objective
from flwr_kd.client.task import Task
from flwr_kd.inputs import one_tensor
from flwr_kd.learning.loop import make_optimizer
from flwr_kd.learning.scores import label_loss
from flwr_kd.registry import needs_one_tensor

from .block import find_block
from .config import FedAlignConfig
from .functional import alignment_loss, largest_singular_values, lipschitz_difference


class FedAlignClient(KDClient[FedAlignConfig]):
    """Aligns the Lipschitz constant of the last block's slim part with that of the whole block.

    The layers of the block become slimmable ones that share its weights; names, shapes and outputs of the full
    network do not change. For parameters see :class:`flwr_kd.KDClient`.

    Raises
    ------
    ConfigError
        If the model has no last block of convolutions or ``Linear`` layers, or it does not run with fewer channels.
    """

    config_class = FedAlignConfig
    takes_multi_label = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        x = one_tensor(self.train_batches.example(), partial(needs_one_tensor, "fedalign")).to(self.device)
        # An even number of samples, which a view of fewer channels might turn into fewer samples.
        self.block = find_block(self.model, x.repeat(4, *[1] * (x.dim() - 1)))

    def objective(self, task: Task[FedAlignConfig]) -> Objective:
        """Return cross-entropy plus μ times the alignment, whose gradient reaches the last block only."""
        config, block, model = task.config, self.block, self.model
        if config.align_mu == 0:
            return super().objective(task)

        def loss(x: Tensor, y: Tensor) -> Tensor:
            with block.watched() as passed:
                logits = model.classify(model.features(x))
            whole = passed()
            narrow = block.narrow(whole.inputs, config.align_width)
            data_loss = label_loss(logits, y)
            with self._unrounded():
                student, teacher = (
                    largest_singular_values(*maps) for maps in (narrow, (whole.inputs, whole.outputs))
                )
                difference = lipschitz_difference(student, teacher)
                return alignment_loss(data_loss, difference, config.align_mu)

        return loss

    def optimizer(self, task: Task[FedAlignConfig]) -> torch.optim.Optimizer:
        """Return a fresh optimiser that clips the gradients of each step, all together, before it takes it."""
        config = task.config
        rate = config.learning_rate_at(task.server_round)
        optimizer = make_optimizer(self.model, config, rate, nesterov=config.nesterov)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]

        def clip(*_: Any) -> None:
            torch.nn.utils.clip_grad_norm_(parameters, config.clip_norm)

        optimizer.register_step_pre_hook(clip)
        return optimizer

    def _unrounded(self) -> AbstractContextManager[Any]:
        """Compute in full precision within: in bfloat16, ten products would leave little of a singular value."""
        if self.precision == "float32":
            return nullcontext()
        return torch.autocast(self.device.type, enabled=False)
