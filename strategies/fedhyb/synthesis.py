"""FedHyb*'s proxy data: a conditional generator, trained without data against the ensemble of client models.

The paper refers to FedFTG (Zhang et al., CVPR 2022) and gives no losses. These are the usual ones of data-free
distillation: confident predictions of the given class and balanced predictions over a batch (DAFL, Chen et al.,
ICCV 2019), diverse samples (FedFTG), and BatchNorm statistics (DeepInversion, Yin et al., CVPR 2020).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flwr_kd.learning.cores import Copies, Cores, draws_at_random
from flwr_kd.learning.loop import batchnorm_frozen
from flwr_kd.learning.passes import pass_size
from flwr_kd.learning.weights import check_finite_weights, load_weights
from flwr_kd.models import ConditionalGenerator
from flwr_kd.models.given import floating_dtype

__all__ = [
    "balance_loss",
    "batchnorm_loss",
    "confidence_loss",
    "diversity_loss",
    "synthesise",
    "train_generator",
]

Weights = Mapping[str, npt.NDArray[Any]]
_SMALLEST = 1e-12


def confidence_loss(predictions: Tensor, labels: Tensor) -> Tensor:
    """Return the cross-entropy of an ensemble's probabilities ``[B, C]`` against the given classes ``[B]``.

    The logarithm is of p + 1e-12, whose gradient does not vanish at p = 0.

    >>> confidence_loss(torch.tensor([[1.0, 0.0]]), torch.tensor([0]))
    tensor(0.)
    """
    return F.nll_loss((predictions + _SMALLEST).log(), labels)


def balance_loss(predictions: Tensor) -> Tensor:
    r"""Return :math:`\log C - H(\bar p)` of the batch's mean prediction, which is 0 if that is balanced.

    >>> balance_loss(torch.eye(4)), balance_loss(torch.tensor([[1.0, 0.0]]))
    (tensor(0.), tensor(0.6931))
    """
    mean = predictions.mean(dim=0)
    return (mean * (mean.clamp_min(_SMALLEST) * len(mean)).log()).sum()


def diversity_loss(samples: Tensor, noise: Tensor, labels: Tensor) -> Tensor:
    r"""Return :math:`\exp(-\overline{d(x_i, x_j)\, d(z_i, z_j)})` over pairs of one class, in (0, 1].

    d is the mean absolute difference, so that different noise must lead to different samples.

    Parameters
    ----------
    samples, noise : Tensor
        ``[B, ...]`` and ``[B, Z]``.
    labels : Tensor
        ``[B]``. Without a pair of one class the loss is 1, with gradient 0.
    """
    pairs = (labels[:, None] == labels) & ~torch.eye(len(labels), dtype=torch.bool, device=labels.device)
    if not bool(pairs.any()):
        return samples.sum() * 0 + 1
    of_samples, of_noise = (torch.cdist(x, x, p=1) / x.shape[1] for x in (samples.flatten(1), noise))
    return torch.exp(-(of_samples * of_noise)[pairs].mean())


@contextmanager
def batchnorm_loss(model: nn.Module) -> Iterator[list[Tensor]]:
    """Collect the distances between a batch's statistics and the running ones, for each BatchNorm.

    Yields a list to which each forward pass appends scalars: the mean over channels of the squared differences of
    means and variances. Layers without running statistics are ignored.
    """
    distances: list[Tensor] = []

    def record(layer: nn.Module, args: tuple[Tensor, ...]) -> None:
        x = args[0].transpose(0, 1).flatten(1)
        mean, variance = x.mean(dim=1), x.var(dim=1, unbiased=False)
        distances.append(F.mse_loss(mean, layer.running_mean) + F.mse_loss(variance, layer.running_var))  # type: ignore[arg-type]

    layers = [
        m
        for m in model.modules()
        if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.running_mean is not None
    ]
    handles = [layer.register_forward_pre_hook(record) for layer in layers]
    try:
        yield distances
    finally:
        for handle in handles:
            handle.remove()


def train_generator(
    generator: ConditionalGenerator,
    model: nn.Module,
    teachers: Sequence[Weights],
    *,
    steps: int,
    batch_size: int,
    learning_rate: float,
    balance_weight: float,
    diversity_weight: float,
    batchnorm_weight: float,
    draw: torch.Generator,
    device: torch.device,
    cores: int | None = 1,
) -> float:
    """Train a generator against the plain mean of the teachers' probabilities; it ends in eval mode.

    Each teacher is loaded into the model, or into a copy of it, in eval mode, and the gradient of the ensemble's
    loss is propagated through it, so that there are no more modules than cores. Teachers' running statistics and
    weights do not change.

    Parameters
    ----------
    generator : ConditionalGenerator
        On the device.
    model : nn.Module
        Logits ``[B, C]``; left in eval mode, perhaps with the weights of one of the teachers.
    teachers : sequence of mapping
        Named arrays. A teacher whose outputs, statistics or gradient are not finite is left out of the step.
    steps, batch_size : int
        Classes take turns: their frequencies differ by at most one, in each batch and over all batches.
    learning_rate : float
        Of a fresh Adam.
    balance_weight, diversity_weight, batchnorm_weight : float
        At least 0; the confidence loss has weight 1.
    draw : torch.Generator
        Of the noise, on the CPU.
    device : torch.device
        Of the model and the generator.
    cores : int, optional
        Number of teachers that compute at the same time; as many as PyTorch uses threads if None. The result does
        not depend on it.

    Returns
    -------
    float
        The last step's loss.

    Raises
    ------
    FloatingPointError
        If no teacher has finite outputs, or the loss or the generator's weights are no longer finite.
    """
    optimizer = torch.optim.Adam(generator.parameters(), lr=learning_rate)
    model.eval()
    value = 0.0
    with Cores(cores) as running:
        ensemble = Ensemble(model, teachers, running)
        for step in range(steps):
            labels = _balanced(batch_size, generator.num_classes, start=step * batch_size).to(device)
            z = torch.randn(batch_size, generator.latent_dim, generator=draw).to(device)
            generator.train()
            with batchnorm_frozen(generator, when=batch_size == 1):
                x = generator(z, labels)
            _check_samples(x)
            of_ensemble, gradient = ensemble.loss_and_gradient(
                x.detach().requires_grad_(),
                labels,
                balance_weight=balance_weight,
                batchnorm_weight=batchnorm_weight,
            )
            of_samples = diversity_weight * diversity_loss(x, z, labels)
            value = of_ensemble + of_samples.item()
            if not math.isfinite(value):
                raise FloatingPointError(
                    f"the generator's loss is {value}: try a smaller generator-learning-rate"
                )
            optimizer.zero_grad(set_to_none=True)
            # The gradient of this product with respect to x is that of the ensemble's loss.
            ((x * gradient).sum() + of_samples).backward()
            optimizer.step()
    generator.eval()
    check_finite_weights(generator, "the generator's weights", option="generator-learning-rate")
    return value


class Ensemble:
    """Teachers of one architecture, whose gradients for samples are computed on several cores.

    Parameters
    ----------
    model : nn.Module
        In eval mode. It holds one teacher after the other, as do its copies.
    teachers : sequence of mapping
        Named arrays.
    cores : Cores, optional
        Where the teachers compute; one core if None.
    """

    def __init__(self, model: nn.Module, teachers: Sequence[Weights], cores: Cores | None = None) -> None:
        self._teachers, self._cores = teachers, Cores(1) if cores is None else cores
        self._draws: bool | None = None
        self._copies, self._dtype = Copies(model, self._cores, parts=len(teachers)), floating_dtype(model)

    def loss_and_gradient(
        self, x: Tensor, labels: Tensor, *, balance_weight: float, batchnorm_weight: float
    ) -> tuple[float, Tensor]:
        """Return the loss of the teachers' mean prediction, and its gradient for the samples ``[B, ...]``.

        Raises
        ------
        FloatingPointError
            If no teacher has finite outputs.
        """
        cores = self._cores_for(x)
        usable, total = [], torch.zeros((), device=x.device)
        for teacher, predictions in zip(
            self._teachers,
            cores.stream(lambda teacher: self._predictions(teacher, x), self._teachers),
            strict=True,
        ):
            if predictions is not None:
                usable.append(teacher)
                total = total + predictions
        if not usable:
            raise FloatingPointError("no teacher has finite outputs")
        mean = (total / len(usable)).requires_grad_()
        loss = confidence_loss(mean, labels) + balance_weight * balance_loss(mean)
        (of_mean,) = torch.autograd.grad(loss, mean)
        value, gradient = loss.item(), torch.zeros_like(x)
        parts = cores.stream(lambda teacher: self._gradient(teacher, x, of_mean, batchnorm_weight), usable)
        for distance, of_teacher in parts:
            if bool(torch.isfinite(of_teacher).all()):
                value += distance / len(usable)
                gradient += of_teacher / len(usable)
        return value, gradient

    def _cores_for(self, x: Tensor) -> Cores:
        if self._cores.count == 1:
            return self._cores
        if self._draws is None:
            with self._copies.taken() as model:
                self._draws = draws_at_random(model, x[:1].to(dtype=self._dtype))
        return Cores(1) if self._draws else self._cores

    @torch.no_grad()
    def _predictions(self, teacher: Weights, x: Tensor) -> Tensor | None:
        """Return a teacher's probabilities ``[B, C]``; None if they or its statistics are not finite."""
        with self._copies.taken() as model:
            load_weights(model, teacher)
            with batchnorm_loss(model) as statistics:
                predictions = F.softmax(model(x.to(dtype=self._dtype)), dim=1)
        fine = all(bool(torch.isfinite(part).all()) for part in (predictions, *statistics))
        return predictions if fine else None

    def _gradient(
        self, teacher: Weights, x: Tensor, of_mean: Tensor, batchnorm_weight: float
    ) -> tuple[float, Tensor]:
        """Return the weighted distance of a teacher's statistics, and its part of the gradient."""
        with self._copies.taken() as model:
            load_weights(model, teacher)
            with batchnorm_loss(model) as statistics:
                part = (F.softmax(model(x.to(dtype=self._dtype)), dim=1) * of_mean).sum()
            distance = torch.zeros(())
            if statistics and batchnorm_weight > 0:
                distance = batchnorm_weight * torch.stack(statistics).mean()
                part = part + distance
            (of_teacher,) = torch.autograd.grad(part, x)
        return distance.item(), of_teacher


@torch.no_grad()
def synthesise(
    generator: ConditionalGenerator, count: int, *, draw: torch.Generator, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return samples ``[N, ...]`` and their classes ``[N]``, on the CPU; class frequencies differ by at most one.

    The generator is in eval mode.

    Raises
    ------
    FloatingPointError
        If a sample is not finite.
    """
    labels = _balanced(count, generator.num_classes)
    z = torch.randn(count, generator.latent_dim, generator=draw)
    generator.eval()
    parts = zip(*(torch.split(part, pass_size(device)) for part in (z, labels)), strict=True)
    samples = torch.cat([generator(a.to(device), b.to(device)).cpu() for a, b in parts])
    _check_samples(samples)
    return samples, labels


def _check_samples(samples: Tensor) -> None:
    if not bool(torch.isfinite(samples).all()):
        raise FloatingPointError(
            "the generator's samples are no longer finite: try a smaller generator-learning-rate"
        )


def _balanced(count: int, num_classes: int, start: int = 0) -> Tensor:
    return torch.arange(start, start + count) % num_classes
