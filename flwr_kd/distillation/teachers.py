"""The teachers of an ensemble: what is taken from each model, and the weighted mean over all of them.

The teachers may be of several architectures: each group's outputs are made with its own model, then mixed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flwr_kd.config import AVERAGES
from flwr_kd.learning.losses import cross_entropy_soft
from flwr_kd.learning.weights import load_weights
from flwr_kd.server.aggregation import shares

__all__ = [
    "AVERAGES",
    "Matching",
    "Teachers",
    "ensemble_means",
    "ensemble_targets",
    "mixed_means",
    "soft_labels",
]

NDArray = npt.NDArray[Any]
Weights = Mapping[str, NDArray]
_BLOCK_BYTES = 256 * 1024**2


@dataclass(frozen=True)
class Matching:
    """What a student learns from an ensemble: what is averaged over the teachers, and the loss against it.

    Attributes
    ----------
    outputs : callable
        ``outputs(model, x)``: a tuple of tensors ``[B, ...]``, of teachers and of the student.
    shared : callable
        Takes a teacher's outputs, in float64, and returns what is averaged.
    targets : callable
        Takes the means, returns the student's targets ``[N, ...]``.
    loss : callable
        Takes the targets and the student's outputs, each a tuple; returns the mean over the batch.
    training : bool
        Whether the student is in training mode. Without it BatchNorm uses its running statistics and leaves
        them alone, and a student that equals its only teacher has nothing to learn.
    """

    outputs: Callable[[nn.Module, Tensor], tuple[Tensor, ...]]
    loss: Callable[[tuple[Tensor, ...], tuple[Tensor, ...]], Tensor]
    shared: Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]] = lambda outputs: outputs
    targets: Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]] = lambda means: means
    training: bool = True


def soft_labels(average: str = "probabilities") -> Matching:
    """Return cross-entropy against the ensemble's probabilities, see :func:`ensemble_targets`.

    Raises
    ------
    ValueError
        If the average is unknown.
    """
    if average not in AVERAGES:
        raise ValueError(f"average must be one of {', '.join(AVERAGES)}, got {average!r}")

    def probabilities(found: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(F.softmax(logits, dim=1) for logits in found)

    def loss(targets: tuple[Tensor, ...], outputs: tuple[Tensor, ...]) -> Tensor:
        return cross_entropy_soft(targets[0], outputs[0])

    def outputs(model: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
        return (model(x),)

    if average == "logits":
        return Matching(outputs, loss, targets=probabilities)
    return Matching(outputs, loss, shared=probabilities)


def ensemble_targets(
    model: nn.Module,
    teachers: Sequence[Weights],
    weights: Sequence[float],
    inputs: Callable[[], Iterable[Tensor]],
    *,
    average: str = "probabilities",
) -> tuple[Tensor, tuple[int, ...]]:
    r"""Return the probabilities of an ensemble, :math:`\sum_k p_k f(x; w_k)` with :math:`p_k` the weights' shares.

    Source: FedHEAD, section 3.1, where f is the softmax output. With ``average="logits"`` f is the logits, and
    the softmax is taken of their mean: FedDF (Lin et al., NeurIPS 2020), algorithm 1.

    Parameters
    ----------
    model, teachers, weights, inputs
        See :func:`ensemble_means`.
    average : str
        ``"probabilities"`` or ``"logits"``.

    Returns
    -------
    targets : Tensor
        ``[N, C]``, on the CPU; rows sum to 1.
    left_out : tuple of int
        Positions of the teachers that had no part.

    Raises
    ------
    ValueError
        If there are no teachers, another number of weights, a negative weight, or an unknown average.
    FloatingPointError
        If no teacher is left.

    Examples
    --------
    >>> import numpy as np
    >>> model = nn.Linear(1, 2, bias=False)
    >>> teachers = [{"weight": np.float32([[5], [-5]])}, {"weight": np.float32([[0], [0]])}]
    >>> targets, _ = ensemble_targets(model, teachers, [1, 3], lambda: [torch.ones(1, 1)])
    >>> [round(p, 3) for p in targets[0].tolist()]
    [0.625, 0.375]
    """
    means, left_out = ensemble_means(model, teachers, weights, inputs, soft_labels(average))
    return means[0] if means else torch.zeros(0, 0), left_out


def ensemble_means(
    model: nn.Module,
    teachers: Sequence[Weights],
    weights: Sequence[float],
    inputs: Callable[[], Iterable[Tensor]],
    matching: Matching,
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """Return what a student is to match: the targets of the teachers' weighted means.

    Each teacher in turn is loaded into the one model and sees each sample once, in eval mode. A teacher with
    an output that is not finite has no part in the ensemble.

    Parameters
    ----------
    model : nn.Module
        It is left in eval mode, with some teacher's weights.
    teachers : sequence of mapping
        Named arrays, at least one.
    weights : sequence of float
        At least 0, one per teacher; all alike if all are 0.
    inputs : callable
        Returns the batches ``[B, ...]`` that have the model's device, each time the same. Called once, unless
        a teacher is left out.
    matching : Matching
        What is taken from the teachers, and averaged.

    Returns
    -------
    targets : tuple of Tensor
        ``[N, ...]`` each, float32, on the CPU; none without samples.
    left_out : tuple of int
        Positions of the teachers that had no part.

    Raises
    ------
    ValueError
        If there are no teachers, another number of weights, or a negative weight.
    FloatingPointError
        If no teacher is left.
    """
    targets, (left_out,) = mixed_means([Teachers(model, teachers, weights)], inputs, matching)
    return targets, left_out


class Teachers(NamedTuple):
    """Teachers of one architecture: the model that holds one after the other, their arrays, their weights."""

    model: nn.Module
    arrays: Sequence[Weights]
    weights: Sequence[float]


def mixed_means(
    groups: Sequence[Teachers], inputs: Callable[[], Iterable[Tensor]], matching: Matching
) -> tuple[tuple[Tensor, ...], tuple[tuple[int, ...], ...]]:
    r"""Return what a student is to match where the teachers are of several architectures.

    The mean over all teachers is that of the groups' means, weighted by the sums of their teachers' weights:
    :math:`\sum_g \frac{W_g}{W} \sum_{k \in g} \frac{p_k}{W_g} f_g(x; w_k)`. Who is left out counts in neither.

    Source: FedDF (Lin et al., NeurIPS 2020), its algorithm for models of several kinds.

    Parameters
    ----------
    groups : sequence of Teachers
        At least one, with a teacher each. Weights as in :func:`ensemble_means`: all alike if those of all groups
        are 0.
    inputs : callable
        Returns the batches ``[B, ...]`` that have the models' device, each time the same. Called once per group,
        and again where a teacher is left out.
    matching : Matching
        What is taken from the teachers, and averaged; its outputs have the same shapes in all groups.

    Returns
    -------
    targets : tuple of Tensor
        ``[N, ...]`` each, float32, on the CPU; none without samples.
    left_out : tuple of tuple of int
        By group, positions of the teachers that had no part.

    Raises
    ------
    ValueError
        If there are no groups, one has no teachers or another number of weights, or a weight is negative.
    FloatingPointError
        If no teacher is left in any group.

    Examples
    --------
    >>> import numpy as np
    >>> wide, narrow = nn.Linear(1, 2), nn.Linear(1, 2, bias=False)
    >>> one = Teachers(wide, [{"weight": np.float32([[5], [-5]]), "bias": np.float32([0, 0])}], [1])
    >>> other = Teachers(narrow, [{"weight": np.float32([[0], [0]])}] * 2, [2, 1])
    >>> targets, _ = mixed_means([one, other], lambda: [torch.ones(1, 1)], soft_labels())
    >>> [round(p, 3) for p in targets[0][0].tolist()]
    [0.625, 0.375]
    """
    if not groups:
        raise ValueError("a group of teachers at least expected, got none")
    found: list[tuple[Tensor, ...]] = []
    used: list[list[float]] = []
    left_out = []
    for group in groups:
        means, bad = _means_of(group, inputs, matching)
        left_out.append(bad)
        if means is not None:
            found.append(means)
            used.append([weight for k, weight in enumerate(group.weights) if k not in bad])
    if not found:
        raise FloatingPointError("no teacher has finite outputs")
    sums = [sum(weights) for weights in used]
    total: tuple[Tensor, ...] | None = None
    # One group's share is 1, which changes no bit of its means.
    for p, means in zip(shares(sums if any(sums) else [len(each) for each in used]), found, strict=True):
        total = _add(total, p, means)
    targets = tuple(target.float() for target in matching.targets(cast(tuple[Tensor, ...], total)))
    return targets, tuple(left_out)


@torch.no_grad()
def _means_of(
    group: Teachers, inputs: Callable[[], Iterable[Tensor]], matching: Matching
) -> tuple[tuple[Tensor, ...] | None, tuple[int, ...]]:
    """Return one group's means, in float64, and the teachers without part; None if no teacher is left."""
    model, teachers, weights = group
    if not teachers or len(teachers) != len(weights):
        raise ValueError(
            f"a weight per teacher and at least one expected, got {len(teachers)}, {len(weights)}"
        )
    left = list(range(len(teachers)))
    while left:
        share = shares([weights[k] for k in left])
        parts: list[tuple[Tensor, ...]] = []
        bad: set[int] = set()
        for block in _blocks(inputs()):
            total: tuple[Tensor, ...] | None = None
            for k, p in zip(left, share, strict=True):
                load_weights(model, teachers[k])
                model.eval()
                raw = [matching.outputs(model, x) for x in block]
                found = tuple(
                    torch.cat([part.cpu().double() for part in column]) for column in zip(*raw, strict=True)
                )
                if not all(bool(torch.isfinite(part).all()) for part in found):
                    bad.add(k)
                    continue
                total = _add(total, p, matching.shared(found))
            if bad:
                break
            parts.append(cast(tuple[Tensor, ...], total))
        if not bad:
            means = tuple(torch.cat(column) for column in zip(*parts, strict=True))
            return means, tuple(k for k in range(len(teachers)) if k not in left)
        left = [k for k in left if k not in bad]
    return None, tuple(range(len(teachers)))


def _add(total: tuple[Tensor, ...] | None, share: float, found: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    scaled = tuple(share * part for part in found)
    return scaled if total is None else tuple(a + b for a, b in zip(total, scaled, strict=True))


def _blocks(batches: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Gather batches, so that each teacher is loaded once for many and no data set need be in memory."""
    block: list[Tensor] = []
    size = 0
    for x in batches:
        block.append(x)
        size += x.numel() * x.element_size()
        if size >= _BLOCK_BYTES:
            yield block
            block, size = [], 0
    if block:
        yield block
