"""One model trained on an ensemble's outputs, with early stopping.

Used by leaders on their own data (FedHEAD) and by servers on public or synthetic data (FedDF, FedHEAD+, FedHyb).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy.typing as npt
import torch
from torch import Tensor, nn

from flwr_kd.config import DistillationConfig
from flwr_kd.distillation.samples import batches_on, check_all_came, check_samples, pass_size
from flwr_kd.distillation.teachers import Matching, Weights, ensemble_means, soft_labels
from flwr_kd.learning.batches import Batches
from flwr_kd.learning.loop import fit, make_optimizer
from flwr_kd.learning.weights import has_finite_weights, load_weights
from flwr_kd.seeding import torch_generator
from flwr_kd.server.aggregation import weighted_mean

__all__ = ["Distilled", "distil_ensemble", "distil_student", "hold_out", "mean_without"]

NDArray = npt.NDArray[Any]


class Distilled(NamedTuple):
    """What a distillation did: epochs, the last one's mean loss, the lowest validation loss, teachers left out."""

    epochs: int
    loss: float
    validation_loss: float | None
    left_out: tuple[int, ...] = ()


def hold_out(count: int, share: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw the rows to train on and, apart from them, the rows of the validation loss; both ascending.

    The latter are the share rounded to the nearest number: none of a few samples.

    >>> train, validation = hold_out(20, 0.1, torch.Generator().manual_seed(0))
    >>> len(train), len(validation), sorted([*train.tolist(), *validation.tolist()]) == list(range(20))
    (18, 2, True)
    """
    order = torch.randperm(count, generator=generator)
    size = min(int(count * share + 0.5), max(count - 1, 0))
    return order[size:].sort().values, order[:size].sort().values


def distil_ensemble(
    model: nn.Module,
    student: Weights | None,
    teachers: Sequence[Weights],
    weights: Sequence[float],
    samples: Batches,
    config: DistillationConfig,
    *,
    epochs: int,
    learning_rate: float,
    seed: int,
    device: torch.device,
    matching: Matching | None = None,
    teacher_weights: Sequence[float] | None = None,
) -> Distilled:
    """Train a student on an ensemble's outputs; the model ends as the student, in eval mode.

    The targets, :func:`ensemble_means`, are made once; then it is :func:`distil_student`.

    Parameters
    ----------
    model : nn.Module
        Logits ``[B, C]``; holds one teacher after the other and then the student.
    student : mapping or None
        Named arrays to begin with; the weighted mean of the teachers that have a part if None.
    teachers, weights
        See :func:`ensemble_means`. The weights are also those of the student's mean.
    samples : Batches
        At least one. Labels are not looked at.
    config : DistillationConfig
        Batch size, optimiser, patience, held-out share, which weights are kept.
    epochs : int
        At most so many.
    learning_rate : float
        Of a fresh optimiser.
    seed : int
        Of what is held out, and of the order of the batches.
    device : torch.device
        The model's.
    matching : Matching, optional
        What the student learns; the ensemble's probabilities, by cross-entropy, if None.
    teacher_weights : sequence of float, optional
        Of the ensemble, where they are not the weights of the student's mean.

    Raises
    ------
    FloatingPointError
        If the loss or the student's weights are no longer finite, or no teacher has finite outputs.
    DatasetError
        If there are no samples, they come from a loader with a sampler of its own, or its ``collate_fn`` returns
        more or fewer than it was given.
    """
    check_samples(samples, "samples")
    matching = soft_labels() if matching is None else matching
    of_teachers = weights if teacher_weights is None else teacher_weights
    targets, left_out = ensemble_means(
        model, teachers, of_teachers, batches_on(samples, config, device), matching
    )
    check_all_came(targets, samples)
    if student is None:
        names = list(teachers[0])
        models = [[teacher[name] for name in names] for teacher in teachers]
        student = dict(zip(names, mean_without(models, weights, left_out), strict=True))
    done = distil_student(
        model,
        student,
        targets,
        samples,
        config,
        epochs=epochs,
        learning_rate=learning_rate,
        seed=seed,
        device=device,
        matching=matching,
    )
    return done._replace(left_out=left_out)


def mean_without(
    models: Sequence[Sequence[NDArray]], weights: Sequence[float], left_out: Sequence[int]
) -> list[NDArray]:
    """Return the weighted mean of the models that are not left out."""
    used = [k for k in range(len(models)) if k not in left_out]
    return weighted_mean([models[k] for k in used], [weights[k] for k in used])


def distil_student(
    model: nn.Module,
    student: Weights,
    targets: tuple[Tensor, ...],
    samples: Batches,
    config: DistillationConfig,
    *,
    epochs: int,
    learning_rate: float,
    seed: int,
    device: torch.device,
    matching: Matching | None = None,
) -> Distilled:
    """Train a student on targets that are there; the model ends as the student, in eval mode.

    After each epoch the loss is taken of the held-out samples, too, in eval mode; it ends early after
    ``config.patience`` epochs in turn that did not lower it, the student's own before the first epoch included.
    With nothing held out (no sample or a share that rounds to none) all epochs are run, and the last weights
    kept.

    Parameters
    ----------
    model : nn.Module
        Of the student's architecture; its outputs have the targets' shapes.
    student : mapping
        Named arrays to begin with.
    targets : tuple of Tensor
        ``[N, ...]`` each, on the CPU: row i is sample i's, in the order of ``samples``; see :func:`mixed_means`.
    samples, config, epochs, learning_rate, seed, device, matching
        See :func:`distil_ensemble`.

    Raises
    ------
    ValueError
        If the targets have another number of rows than there are samples.
    FloatingPointError
        If the loss or the student's weights are no longer finite.
    DatasetError
        If there are no samples, or they come from a loader with a sampler of its own.
    """
    check_samples(samples, "samples")
    if any(len(target) != len(samples) for target in targets):
        raise ValueError(
            f"targets must have {len(samples)} rows, one per sample, got {[len(each) for each in targets]}"
        )
    matching, size = soft_labels() if matching is None else matching, pass_size(config)
    load_weights(model, student)
    rows, held_out = hold_out(len(samples), config.validation_share, torch_generator(seed, "hold-out"))
    order = torch_generator(seed, "order")
    optimizer = make_optimizer(model, config, learning_rate)

    def epoch() -> Iterator[tuple[Tensor, ...]]:
        for x, _, chunk in samples.indexed(config.batch_size, order, rows):
            yield (x.to(device), *(target[chunk].to(device) for target in targets))

    def loss(x: Tensor, *target: Tensor) -> Tensor:
        return matching.loss(target, matching.outputs(model, x))

    @torch.no_grad()
    def validate() -> float:
        model.eval()
        total = 0.0
        chunks = torch.split(held_out, size)
        for (x, _), chunk in zip(samples.ordered(size, held_out), chunks, strict=True):
            total += float(loss(x.to(device), *(target[chunk].to(device) for target in targets))) * len(chunk)
        return total / len(held_out)

    lowest = validate() if len(held_out) else None
    if lowest is not None and not math.isfinite(lowest):
        lowest = math.inf
    best: dict[str, Tensor] | None = None
    if lowest is not None and config.keep == "best":
        best = copy.deepcopy(model.state_dict())
    mean, done, waited = 0.0, 0, 0
    while done < epochs and waited < config.patience:
        mean = fit(model, optimizer, epoch, loss, epochs=1, training=matching.training)
        done += 1
        if lowest is None:
            continue
        found = validate()
        waited += 1
        if found < lowest:
            lowest, waited = found, 0
            best = None if best is None else copy.deepcopy(model.state_dict())
    if best is not None:
        model.load_state_dict(best)
    if not has_finite_weights(model):
        raise FloatingPointError("the student's weights are no longer finite: try a smaller learning-rate")
    model.eval()
    return Distilled(done, mean, lowest)
