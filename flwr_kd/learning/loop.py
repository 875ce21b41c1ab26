"""The training loop, at clients and at the server."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor, nn

from flwr_kd.config import MethodConfig, StepDecayConfig
from flwr_kd.inputs import Inputs, is_finite
from flwr_kd.text import first_line

__all__ = ["BatchNorms", "batchnorm_frozen", "falling_rate", "fit", "make_optimizer"]

_FUSED = ("cpu", "cuda", "mps")
"""Devices with fused optimisers. Recent versions of PyTorch refuse others in the first step only."""


def fit(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    epoch: Callable[[], Iterable[tuple[Any, ...]]],
    loss: Callable[..., Tensor],
    *,
    epochs: int,
    training: bool = True,
    after_step: Callable[[], object] | None = None,
) -> float:
    """Minimise a loss; the model ends in eval mode.

    Parameters
    ----------
    model : nn.Module
        In training mode during the loss, unless ``training`` is False; BatchNorm is in eval mode for a batch of a
        single sample.
    optimizer : Optimizer
        Over the model's parameters.
    epoch : callable
        Returns the batches of one epoch, tuples of inputs and tensors on the model's device. The first is as long
        as there are samples.
    loss : callable
        Maps a batch's tensors to a scalar, the mean over its samples.
    epochs : int
        At least 0.
    training : bool
        False: in eval mode, for fine-tuning that does not change BatchNorm's running statistics.
    after_step : callable, optional
        Called after each step of the optimiser; see :func:`falling_rate`.

    Returns
    -------
    float
        Mean loss per sample during the last epoch; 0 without samples.

    Raises
    ------
    FloatingPointError
        If the loss is no longer finite.
    TypeError
        If the model cannot compute with the dtype of the inputs.
    """
    mean = 0.0
    for _ in range(epochs):
        # Fetched together at the end: a number per step would make a GPU wait for each of them.
        amounts: list[Tensor] = []
        sizes: list[int] = []
        model.train(training)
        for batch in epoch():
            size = len(batch[0])
            # A loss may put the model into eval mode. This looks at one module, and train() at all.
            if model.training is not training:
                model.train(training)
            with batchnorm_frozen(model, when=size == 1):
                value = _value(loss, batch)
                optimizer.zero_grad(set_to_none=True)
                value.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            if after_step is not None:
                after_step()
            amounts.append(value.detach().reshape(()))
            sizes.append(size)
        mean = _mean_loss(amounts, sizes, epoch)
    model.eval()
    return mean


def _mean_loss(
    amounts: list[Tensor], sizes: list[int], epoch: Callable[[], Iterable[tuple[Any, ...]]]
) -> float:
    """Return the mean per sample of the losses of an epoch's batches; refuse one that is not finite."""
    losses: list[float] = torch.stack(amounts).tolist() if amounts else []
    wrong = next((amount for amount in losses if not math.isfinite(amount)), None)
    if wrong is not None:
        raise FloatingPointError(_why_not_finite(wrong, epoch()))
    return sum(amount * size for amount, size in zip(losses, sizes, strict=True)) / max(sum(sizes), 1)


def _value(loss: Callable[..., Tensor], batch: tuple[Any, ...]) -> Tensor:
    try:
        return loss(*batch)
    except RuntimeError as error:
        # torch says no more than that two dtypes differ.
        if not isinstance(batch[0], Tensor) or batch[0].is_floating_point() or "type" not in str(error):
            raise
        raise TypeError(
            f"the model cannot compute with inputs of {batch[0].dtype} ({first_line(error)}): convert them in the "
            "data set, for example by x.float() / 255 for pictures"
        ) from error


def _why_not_finite(loss: float, batches: Iterable[tuple[Any, ...]]) -> str:
    if not all(is_finite(inputs) for inputs, *_ in batches):
        return f"the training loss is {loss}, because inputs are not finite: remove or fill in missing values"
    return f"the training loss is {loss}: try a smaller learning-rate"


def make_optimizer(
    model: nn.Module, config: MethodConfig, learning_rate: float, *, nesterov: bool = False
) -> torch.optim.Optimizer:
    """Return the config's optimiser over the trainable parameters; raise ValueError if there are none.

    With ``nesterov``, the momentum of SGD is Nesterov's, where there is any.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise ValueError(
            "model has no parameter that requires a gradient: set requires_grad where it is trained"
        )
    kind: Callable[..., torch.optim.Optimizer] = torch.optim.Adam
    options: dict[str, Any] = {"lr": learning_rate, "weight_decay": config.weight_decay}
    if config.optimizer == "sgd":
        kind, options = torch.optim.SGD, {**options, "momentum": config.momentum}
        options["nesterov"] = nesterov and config.momentum > 0
    # The fused step, one kernel for all parameters, takes no sparse gradients.
    dense = not any(getattr(module, "sparse", False) for module in model.modules())
    if dense and all(p.device.type in _FUSED for p in parameters):
        # PyTorch refuses it where it has no kernel, in old versions for some of these devices and dtypes.
        with suppress(RuntimeError):
            return kind(parameters, fused=True, **options)
    return kind(parameters, **options)


def falling_rate(
    optimizer: torch.optim.Optimizer, config: MethodConfig, steps_before: int
) -> Callable[[], None] | None:
    """Let an optimiser's learning rates fall with each step; None for a config whose rates do not.

    Returns
    -------
    callable or None
        To be called after each step. The rates are those of the next step, the first being number ``steps_before``,
        from 0; see :class:`flwr_kd.config.StepDecayConfig`.
    """
    if not isinstance(config, StepDecayConfig) or not config.step_decay:
        return None
    factor = config.step_factor
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: factor(steps_before + step)).step


class BatchNorms:
    """The BatchNorm layers of a model, looked up once, for a loss that is computed in each step.

    Parameters
    ----------
    model : nn.Module
        Its modules must not be replaced afterwards.
    """

    def __init__(self, model: nn.Module) -> None:
        self._layers = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]

    def frozen(self) -> AbstractContextManager[None]:
        """Let them use their running statistics, without a change to them, inside the block."""
        return self.in_mode(training=False)

    @contextmanager
    def in_mode(self, *, training: bool) -> Iterator[None]:
        """Let them be in training mode, or in eval mode, inside the block, whatever the model is in."""
        layers = [layer for layer in self._layers if layer.training is not training]
        for layer in layers:
            layer.train(training)
        try:
            yield
        finally:
            for layer in layers:
                layer.train(not training)

    @torch.no_grad()
    def estimate(self, batches: Iterable[Inputs], forward: Callable[[Any], object]) -> None:
        """Replace the running statistics by those of the batches, with the weights as they are.

        The mean over batches weights them by their sizes. Means and variances of a layer are those of its inputs
        while the layers before it normalise each batch by its own statistics, as in training.

        Parameters
        ----------
        batches : iterable of Tensor or NamedInputs
            ``[B, ...]`` each. Those of a single sample, which have no variance, are left out; without any other
            the statistics do not change.
        forward : callable
            A forward pass. All other layers stay in the mode in which they are.
        """
        layers = [layer for layer in self._layers if layer.running_mean is not None]
        before = [layer.momentum for layer in layers]
        seen = 0
        try:
            for x in batches:
                if not layers or len(x) < 2:
                    continue
                seen += len(x)
                for layer in layers:
                    if seen == len(x):
                        layer.reset_running_stats()
                    layer.momentum = len(x) / seen
                with self.in_mode(training=True):
                    forward(x)
        finally:
            for layer, momentum in zip(layers, before, strict=True):
                layer.momentum = momentum

    @contextmanager
    def statistics_kept(self) -> Iterator[None]:
        """Let those in training mode use a batch's statistics, without a change to the running ones."""
        layers = [layer for layer in self._layers if layer.training and layer.track_running_stats]
        for layer in layers:
            layer.track_running_stats = False
        try:
            yield
        finally:
            for layer in layers:
                layer.track_running_stats = True


def batchnorm_frozen(model: nn.Module, *, when: bool = True) -> AbstractContextManager[None]:
    """Let BatchNorm use its running statistics, without a change to them, inside the block.

    For a batch of a single sample, on which BatchNorm cannot train, and for inputs that are not training data.
    """
    return BatchNorms(model).frozen() if when else nullcontext()
