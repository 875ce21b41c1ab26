"""Training steps whose batch is divided, so that several cores compute the gradient."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.conv import _ConvNd

from flwr_kd.inputs import Inputs
from flwr_kd.learning.cores import Copies, Cores, draws_at_random
from flwr_kd.seeding import may_draw_from_global_rng

__all__ = ["DividedLoss", "is_divisible"]

_LEAST_PART, _MOST_PARTS = 32, 8
"""Samples in a part of a batch, and parts in a batch: all parts' gradients are in memory at the same time."""
_LEAST_WORK, _LEAST_REUSE = 2**18, 6
"""Multiplications per sample, and per parameter and sample, from which a step is divided.

Each part has costs that do not depend on its samples: PyTorch's calls, and a gradient of the model's size that is
written and added. With less work than this they would make a step on one core slower.
"""


def is_divisible(model: nn.Module, x: Inputs, *, training: bool, batchnorm: bool | None = None) -> bool:
    """Return whether the gradient of a mean loss is that of the batch's parts, and is worth the division.

    It is not where a sample's outputs depend on the rest of the batch, or on a random generator: BatchNorm and
    dropout in training mode. In training mode this is not known of a user's own layers either. The answer does not
    depend on the number of cores.

    Parameters
    ----------
    model : nn.Module
        It does not change.
    x : Tensor or NamedInputs
        A sample's input, ``[1, ...]``. A model on another device than the CPU is not divided, and neither is one
        that takes several inputs.
    training : bool
        Whether the model is trained in training mode.
    batchnorm : bool, optional
        Whether its BatchNorm layers are; as the model if None.

    Examples
    --------
    >>> image, layer = torch.zeros(1, 1, 28, 28), nn.Conv2d(1, 32, 5)
    >>> is_divisible(layer, image, training=True), is_divisible(nn.Linear(28, 9000), image, training=True)
    (True, False)
    >>> normed = nn.Sequential(layer, nn.BatchNorm2d(32))
    >>> is_divisible(normed, image, training=True), is_divisible(normed, image, training=False)
    (False, True)
    """
    if not isinstance(x, Tensor) or x.device.type != "cpu":
        return False
    if not any(isinstance(module, _ConvNd) for module in model.modules()):
        return False
    norms = [module for module in model.modules() if isinstance(module, _NormBase)]
    if any(norm.running_mean is None for norm in norms):
        return False
    modes = [
        training if batchnorm is None or not isinstance(norm, _BatchNorm) else batchnorm for norm in norms
    ]
    if any(modes) or (training and may_draw_from_global_rng(model)):
        return False
    work = _multiplications(model, x)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return work >= max(_LEAST_WORK, _LEAST_REUSE * parameters)


@torch.no_grad()
def _multiplications(model: nn.Module, x: Tensor) -> int:
    """Return the number of multiplications in the convolutions and linear layers for one sample.

    It is 0 if it is not known, or the model draws at random even in eval mode.
    """
    total = 0

    def count(layer: nn.Module, args: Any, output: Tensor) -> None:
        nonlocal total
        weight: Any = layer.weight
        total += output.numel() * (weight.numel() // len(weight))

    try:
        # The user's hooks on the model must not see this pass.
        counted = copy.deepcopy(model)
        if draws_at_random(counted, x):
            return 0
        for layer in counted.modules():
            if isinstance(layer, _ConvNd | nn.Linear):
                layer.register_forward_hook(count)
        counted(x)
    except (
        Exception
    ):  # A user's module may raise anything. What is wrong with it is said where it is trained.
        return 0
    return total


class DividedLoss:
    """A mean loss over a batch, whose gradient is computed part by part, on several cores.

    The division depends on the size of the batch only: parts of 32 samples, or an eighth of a larger batch. The
    parts' gradients are added in their order, so the result does not depend on the number of cores.

    Parameters
    ----------
    model : nn.Module
        As :func:`is_divisible` asks for.
    loss : callable
        ``loss(model, *batch)``: a scalar, the mean over the batch's samples.
    cores : Cores
        Where the parts are computed.
    training : bool
        Whether the model is in training mode in each call.

    Examples
    --------
    >>> model, x = nn.Linear(1, 1, bias=False), torch.arange(64.0)[:, None]
    >>> loss = DividedLoss(model, lambda model, x: model(x).mean(), Cores(2), training=True)
    >>> loss(x).backward()
    >>> model.weight.grad
    tensor([[31.5000]])
    """

    def __init__(
        self, model: nn.Module, loss: Callable[..., Tensor], cores: Cores, *, training: bool
    ) -> None:
        self._loss, self._cores, self._training = loss, cores, training
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._copies = Copies(model.train(training), cores, parts=_MOST_PARTS, shared=True)

    def __call__(self, *batch: Tensor) -> Tensor:
        """Return the loss; its ``backward()`` sets the gradients, which are computed here."""
        count = len(batch[0])
        size = max(_LEAST_PART, -(-count // _MOST_PARTS))
        parts = list(zip(*(torch.split(tensor, size) for tensor in batch), strict=True))

        def gradients(part: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor | None, ...]]:
            with self._copies.taken() as model:
                value = self._loss(model, *part) * (len(part[0]) / count)
                return value.detach(), torch.autograd.grad(value, self._parameters, allow_unused=True)

        values, columns = zip(*self._cores.map(gradients, parts), strict=True)
        summed = [_sum(column) for column in zip(*columns, strict=True)]
        result: Tensor = _Computed.apply(sum(values[1:], values[0]), summed, *self._parameters)
        return result


def _sum(parts: Sequence[Tensor | None]) -> Tensor | None:
    """Return the sum in the parts' order; None if no part has a gradient."""
    total: Tensor | None = None
    for part in parts:
        if part is not None:
            total = part if total is None else total.add_(part)
    return total


class _Computed(torch.autograd.Function):
    """A value whose gradients are known."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, gradients: list[Tensor | None], *parameters: Tensor) -> Tensor:
        ctx.gradients = gradients
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        (factor,) = outer
        return None, None, *(None if part is None else part * factor for part in ctx.gradients)
