"""One model trained on an ensemble's outputs, with early stopping.

Leaders use it on their own data (FedHEAD), servers on public or synthetic data (FedDF, FedHEAD+, FedHyb).
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy.typing as npt
import torch
from torch import Tensor, nn

from flwr_kd.config import rows_to_train_on
from flwr_kd.distillation.config import DistillationConfig
from flwr_kd.distillation.samples import batches_on, check_all_present, check_samples
from flwr_kd.distillation.teachers import Matching, Weights, ensemble_means, soft_labels
from flwr_kd.inputs import Inputs
from flwr_kd.learning.batches import Batches
from flwr_kd.learning.cores import Copies, Cores, draws_at_random
from flwr_kd.learning.device import placed
from flwr_kd.learning.divided import DividedLoss, is_divisible
from flwr_kd.learning.held_out import hold_out
from flwr_kd.learning.loop import BatchNorms, falling_rate, fit, make_optimizer
from flwr_kd.learning.passes import pass_size
from flwr_kd.learning.weights import check_finite_weights, load_weights
from flwr_kd.seeding import torch_generator
from flwr_kd.server.aggregation import Average, weighted_mean

__all__ = [
    "Distillation",
    "Distilled",
    "EarlyStopping",
    "distil_ensemble",
    "distil_student",
    "mean_without",
]

NDArray = npt.NDArray[Any]


@dataclass(frozen=True)
class Distillation:
    """How one distillation is run; all functions of this package share it.

    Attributes
    ----------
    config : DistillationConfig
        Batch size, optimiser, patience, share of held-out samples, which weights are kept, and the mode of
        BatchNorm.
    epochs : int
        Maximum number of passes over the samples.
    learning_rate : float
        Of a fresh optimiser.
    seed : int
        Decides which samples are held out, and the order of the batches.
    matching : Matching
        What the student learns; by default the ensemble's probabilities, by cross-entropy.
    cores : int, optional
        Number of cores that compute; see :meth:`on_cores`.
    steps_before : int
        Steps of the run before it, where the learning rate falls with them.
    """

    config: DistillationConfig
    epochs: int
    learning_rate: float
    seed: int
    matching: Matching = field(default_factory=soft_labels)
    cores: int | None = None
    steps_before: int = 0

    @classmethod
    def in_round(
        cls,
        config: DistillationConfig,
        server_round: int,
        *,
        epochs: int,
        seed: int,
        matching: Matching | None = None,
        learning_rate: float | None = None,
        cores: int | None = None,
        steps_before: int = 0,
    ) -> Distillation:
        """Return a round's distillation, counted from 1; by default with the config's learning rate in it."""
        rate = config.learning_rate_at(server_round) if learning_rate is None else learning_rate
        matching = soft_labels() if matching is None else matching
        return cls(config, epochs, rate, seed, matching, cores, steps_before)

    def planned_steps(self, samples: int) -> int:
        """Return the number of steps with all epochs, those on which nothing is held out."""
        return self.epochs * self.config.batches(rows_to_train_on(samples, self.config.validation_share))

    def on_cores(self, device: torch.device) -> Cores:
        """Return the cores for models on a device.

        On the CPU there are :attr:`cores`, or if None, as many as PyTorch uses threads in the calling thread. The
        numbers do not depend on them. Beside another device there is one.
        """
        return Cores(self.cores if device.type == "cpu" else 1)


class Distilled(NamedTuple):
    """What a distillation did.

    Attributes
    ----------
    epochs : int
        Epochs that were run.
    loss : float
        Mean training loss of the last epoch.
    validation_loss : float or None
        The lowest one; None if no samples were held out.
    left_out : tuple of int
        Positions of the teachers whose outputs were not finite.
    """

    epochs: int
    loss: float
    validation_loss: float | None
    left_out: tuple[int, ...] = ()


class EarlyStopping:
    """Stops a training after a number of epochs in a row without a lower validation loss.

    Parameters
    ----------
    patience : int
        Number of such epochs, at least 1.
    initial : float
        Validation loss before the first epoch, which the first epochs must improve on as well. One that is not
        finite counts as infinity.

    Attributes
    ----------
    lowest : float
        Lowest loss so far.
    waited : int
        Epochs since then.

    Examples
    --------
    >>> stopping = EarlyStopping(patience=2, initial=1.0)
    >>> [(stopping.improves(loss), stopping.stopped) for loss in (0.5, 0.7, 0.5)]
    [(True, False), (False, False), (False, True)]
    """

    def __init__(self, patience: int, initial: float = math.inf) -> None:
        self.patience = patience
        self.lowest = initial if math.isfinite(initial) else math.inf
        self.waited = 0

    @property
    def stopped(self) -> bool:
        """Whether the loss has not fallen for ``patience`` epochs."""
        return self.waited >= self.patience

    def improves(self, loss: float) -> bool:
        """Record an epoch's validation loss, and say whether it is the lowest so far; NaN is not."""
        if loss < self.lowest:
            self.lowest, self.waited = loss, 0
            return True
        self.waited += 1
        return False


def distil_ensemble(
    model: nn.Module,
    student: Weights | None,
    teachers: Sequence[Weights],
    weights: Sequence[float],
    samples: Batches,
    how: Distillation,
    device: torch.device,
    *,
    teacher_weights: Sequence[float] | None = None,
) -> Distilled:
    """Train a student on an ensemble's outputs; the model ends as the student, in eval mode.

    The targets (:func:`~flwr_kd.distillation.teachers.ensemble_means`) are computed once, then
    :func:`distil_student` trains on them.

    Parameters
    ----------
    model : nn.Module
        Logits ``[B, C]``; holds one teacher after the other and then the student.
    student : mapping or None
        Named arrays to start from; if None, the weighted mean of the teachers whose outputs are finite.
    teachers, weights
        See :func:`~flwr_kd.distillation.teachers.ensemble_means`. The student's mean has the same weights.
    samples : Batches
        At least one. Labels are ignored.
    how : Distillation
        How it is run.
    device : torch.device
        The model's.
    teacher_weights : sequence of float, optional
        Weights of the ensemble, where they differ from those of the student's mean.

    Raises
    ------
    FloatingPointError
        If the loss or the student's weights are no longer finite, or no teacher has finite outputs.
    DatasetError
        If there are no samples, they come from a loader whose sampler has no fixed rows, or its ``collate_fn``
        returns another number of samples than it was given.
    """
    check_samples(samples, "samples")
    with how.on_cores(device) as cores:
        targets, left_out = ensemble_means(
            model,
            teachers,
            weights if teacher_weights is None else teacher_weights,
            batches_on(samples, how.config, device),
            how.matching,
            cores,
        )
    check_all_present(targets, samples)
    if student is None:
        names = list(teachers[0])
        models = [[teacher[name] for name in names] for teacher in teachers]
        student = dict(zip(names, mean_without(models, weights, left_out), strict=True))
    return distil_student(model, student, targets, samples, how, device)._replace(left_out=left_out)


def mean_without(
    models: Sequence[Sequence[NDArray]],
    weights: Sequence[float],
    left_out: Sequence[int],
    average: Average = weighted_mean,
) -> list[NDArray]:
    """Return the weighted mean of the models that are not left out, or what ``average`` makes of them."""
    used = [k for k in range(len(models)) if k not in left_out]
    return average([models[k] for k in used], [weights[k] for k in used])


def distil_student(
    model: nn.Module,
    student: Weights,
    targets: tuple[Tensor, ...],
    samples: Batches,
    how: Distillation,
    device: torch.device,
) -> Distilled:
    """Train a student on given targets; the model ends as the student, in eval mode.

    The loss on the held-out samples is measured in eval mode, before the first epoch and after each, and
    :class:`EarlyStopping` acts on it. With nothing held out (no samples, or a share that rounds to none) all
    epochs are run, and the last weights are kept.

    BatchNorm normalises by the statistics that the config's ``distill-batchnorm`` names. ``train``: those of the
    batch, which also move the running ones. ``eval``: the student's running ones, which stay as they are; a mean of
    models has the mean of their statistics, which are not those of its own activations. ``re-estimated``: the same
    with running statistics that are estimated anew, with the weights with which the student starts, on the
    samples on which it is trained. They are estimated before the first step and not after the last, so that the
    function that is trained is the one that is kept.

    Parameters
    ----------
    model : nn.Module
        Of the student's architecture; its outputs have the targets' shapes.
    student : mapping
        Named arrays to start from.
    targets : tuple of Tensor
        ``[N, ...]`` each, on the CPU: row i is sample i's, in the order of ``samples``; see
        :func:`~flwr_kd.distillation.teachers.mixed_means`.
    samples, how, device
        See :func:`distil_ensemble`.

    Raises
    ------
    ValueError
        If the targets have another number of rows than there are samples.
    FloatingPointError
        If the loss or the student's weights are no longer finite.
    DatasetError
        If there are no samples, or they come from a loader whose sampler has no fixed rows.
    """
    config, matching = how.config, how.matching
    check_samples(samples, "samples")
    if any(len(target) != len(samples) for target in targets):
        raise ValueError(
            f"targets must have {len(samples)} rows, one per sample, got {[len(target) for target in targets]}"
        )
    load_weights(model, student)
    targets = placed(targets, device)
    rows, held_out = hold_out(len(samples), config.validation_share, torch_generator(how.seed, "hold-out"))
    order = torch_generator(how.seed, "order")
    optimizer = make_optimizer(model, config, how.learning_rate)
    falling = falling_rate(optimizer, config, how.steps_before)

    def batch(x: Inputs, chunk: Tensor) -> tuple[Any, ...]:
        return (x.to(device), *(target[chunk.to(target.device)].to(device) for target in targets))

    def epoch() -> Iterator[tuple[Any, ...]]:
        return (batch(x, chunk) for x, _, chunk in samples.indexed(config.batch_size, order, rows))

    def held_out_batches() -> Iterator[tuple[Any, ...]]:
        size = pass_size(device, config.batch_size)
        inputs = samples.ordered(size, held_out)
        return (batch(x, chunk) for (x, _), chunk in zip(inputs, torch.split(held_out, size), strict=True))

    def loss(model: nn.Module, x: Inputs, *target: Tensor) -> Tensor:
        return matching.loss(target, matching.outputs(model, x))

    batchnorm = config.distill_batchnorm == "train"
    if config.distill_batchnorm == "re-estimated":
        _estimate_statistics(model, samples, rows, how, device)
    trained = loss if batchnorm is matching.training else _with_batchnorm(loss, training=batchnorm)
    with how.on_cores(device) as cores:
        step: Callable[..., Tensor] = functools.partial(trained, model)
        modes = {"training": matching.training, "batchnorm": batchnorm}
        if device.type == "cpu" and is_divisible(model, samples.example(), **modes):
            step = DividedLoss(model, trained, cores, training=matching.training)
        stopping = None
        if len(held_out):
            stopping = EarlyStopping(config.patience, _mean_loss(model, loss, held_out_batches(), cores))
        best = copy.deepcopy(model.state_dict()) if stopping is not None and config.keep == "best" else None
        mean, epochs = 0.0, 0
        while epochs < how.epochs and not (stopping is not None and stopping.stopped):
            mean = fit(
                model, optimizer, epoch, step, epochs=1, training=matching.training, after_step=falling
            )
            epochs += 1
            improved = stopping is not None and stopping.improves(
                _mean_loss(model, loss, held_out_batches(), cores)
            )
            if improved and best is not None:
                best = copy.deepcopy(model.state_dict())
    if best is not None:
        model.load_state_dict(best)
    check_finite_weights(model, "the student's weights")
    model.eval()
    return Distilled(epochs, mean, None if stopping is None else stopping.lowest)


def _estimate_statistics(
    model: nn.Module, samples: Batches, rows: Tensor, how: Distillation, device: torch.device
) -> None:
    """Estimate BatchNorm's running statistics on some rows of the samples, in batches of the training's size."""
    order = torch_generator(how.seed, "statistics")
    inputs = (x.to(device) for x, _, _ in samples.indexed(how.config.batch_size, order, rows))
    BatchNorms(model.eval()).estimate(inputs, functools.partial(how.matching.outputs, model))


def _with_batchnorm(loss: Callable[..., Tensor], *, training: bool) -> Callable[..., Tensor]:
    """Return a loss that is computed with BatchNorm in a mode of its own; a single sample has no statistics."""

    def computed(model: nn.Module, x: Inputs, *target: Tensor) -> Tensor:
        with BatchNorms(model).in_mode(training=training and len(x) > 1):
            return loss(model, x, *target)

    return computed


def _mean_loss(
    model: nn.Module, loss: Callable[..., Tensor], batches: Iterator[tuple[Any, ...]], cores: Cores
) -> float:
    """Return the mean of a loss over samples, in eval mode."""
    first = next(batches)
    if cores.count > 1 and draws_at_random(model, first[0][:1]):
        cores = Cores(1)
    copies = Copies(model.eval(), cores, parts=cores.count, shared=True)

    @torch.no_grad()
    def mean_over(batch: tuple[Any, ...]) -> tuple[Tensor, int]:
        with copies.taken() as taken:
            return loss(taken, *batch), len(batch[0])

    means, counts = zip(*cores.stream(mean_over, itertools.chain([first], batches)), strict=True)
    # Fetched together: a GPU would be waited for with each number.
    sums = (mean * count for mean, count in zip(torch.stack(means).tolist(), counts, strict=True))
    return float(sum(sums) / sum(counts))
