"""The teachers of an ensemble: the outputs of each model, and their weighted mean.

Teachers may have different architectures: each group runs in a model of its own, and the means are combined.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flwr_kd.distillation.config import AVERAGES
from flwr_kd.inputs import Inputs
from flwr_kd.learning.cores import Copies, Cores, draws_at_random
from flwr_kd.learning.weights import load_weights
from flwr_kd.server.aggregation import MEAN, Rule, knowledge_rule, robust_average, shares

__all__ = ["Matching", "Teachers", "by_rule", "ensemble_means", "mixed_means", "soft_labels"]

NDArray = npt.NDArray[Any]
Weights = Mapping[str, NDArray]
Outputs = tuple[Tensor, ...]
_BLOCK_BYTES = 256 * 1024**2
_RUN = 4
"""Batches that a teacher computes in one part, after its weights are loaded."""


@dataclass(frozen=True)
class Matching:
    """What a student learns from an ensemble: the outputs that are averaged, and the loss against their mean.

    Attributes
    ----------
    outputs : callable
        ``outputs(model, x)``: a tuple of tensors ``[B, ...]``, of teachers and of the student.
    loss : callable
        ``loss(targets, outputs)`` of two such tuples: the mean over the batch, a scalar.
    shared : callable
        Maps a teacher's outputs, in float64, to what is averaged over the teachers.
    targets : callable
        Maps the means to the student's targets ``[N, ...]``.
    training : bool
        Whether the student is in training mode, without dropout if not. The mode of its BatchNorm layers is the
        config's ``distill-batchnorm``. Where both are in eval mode, the gradient is zero for a student that equals
        its only teacher.
    rule : Rule
        In place of the weighted mean over the teachers, ``median`` or ``trimmed-mean`` of each number: then all
        teachers weigh the same, since sample counts are claims. Of several architectures each group has its own,
        and the groups are averaged.
    """

    outputs: Callable[[nn.Module, Any], Outputs]
    loss: Callable[[Outputs, Outputs], Tensor]
    shared: Callable[[Outputs], Outputs] = lambda outputs: outputs
    targets: Callable[[Outputs], Outputs] = lambda means: means
    training: bool = True
    rule: Rule = MEAN


def soft_labels(average: str = "probabilities") -> Matching:
    r"""Return cross-entropy against the ensemble's probabilities :math:`\sum_k p_k f(x; w_k)`.

    :math:`p_k` are the teachers' weights over their sum. With ``average="probabilities"`` f is the softmax output
    (FedHEAD, section 3.1). With ``average="logits"`` f are the logits, and the softmax of their mean is the target
    (FedDF, Lin et al., NeurIPS 2020, algorithm 1).

    Raises
    ------
    ValueError
        If the average is unknown.

    Examples
    --------
    >>> import numpy as np
    >>> model = nn.Linear(1, 2, bias=False)
    >>> teachers = [{"weight": np.float32([[5], [-5]])}, {"weight": np.float32([[0], [0]])}]
    >>> (targets,), _ = ensemble_means(model, teachers, [1, 3], lambda: [torch.ones(1, 1)], soft_labels())
    >>> [round(p, 3) for p in targets[0].tolist()]
    [0.625, 0.375]
    """
    if average not in AVERAGES:
        raise ValueError(f"average must be one of {', '.join(AVERAGES)}, got {average!r}")

    def probabilities(logits: Outputs) -> Outputs:
        return tuple(F.softmax(z, dim=1) for z in logits)

    def loss(targets: Outputs, outputs: Outputs) -> Tensor:
        return F.cross_entropy(outputs[0], targets[0])

    def outputs(model: nn.Module, x: Inputs) -> Outputs:
        return (model(x),)

    if average == "logits":
        return Matching(outputs, loss, targets=probabilities)
    return Matching(outputs, loss, shared=probabilities)


def by_rule(matching: Matching, rule: object) -> Matching:
    """Return a matching whose teachers are averaged by a rule: ``mean``, ``median`` or ``trimmed-mean:SHARE``.

    Raises
    ------
    ConfigError
        If it is another rule.
    """
    return replace(matching, rule=knowledge_rule(rule))


def ensemble_means(
    model: nn.Module,
    teachers: Sequence[Weights],
    weights: Sequence[float],
    inputs: Callable[[], Iterable[Inputs]],
    matching: Matching,
    cores: Cores | None = None,
) -> tuple[Outputs, tuple[int, ...]]:
    """Return the student's targets, from the weighted means of the teachers' outputs.

    Each teacher is loaded into the model, or into a copy of it, and sees each sample once, in eval mode. A teacher
    with an output that is not finite is left out of the ensemble.

    Parameters
    ----------
    model : nn.Module
        It is left in eval mode, and may be left with the weights of one of the teachers.
    teachers : sequence of mapping
        Named arrays, at least one.
    weights : sequence of float
        One per teacher, at least 0; if all are 0, they count as equal.
    inputs : callable
        Returns the batches ``[B, ...]`` on the model's device, the same each time. Called once, and again if a
        teacher is left out.
    matching : Matching
        Which outputs are averaged, and what the targets are.
    cores : Cores, optional
        Where the teachers compute; one core if None. The result does not depend on it.

    Returns
    -------
    targets : tuple of Tensor
        ``[N, ...]`` each, float32, on the CPU; empty without samples.
    left_out : tuple of int
        Positions of the teachers that are left out.

    Raises
    ------
    ValueError
        If there are no teachers, the number of weights differs, or a weight is negative.
    FloatingPointError
        If all teachers are left out.
    """
    targets, (left_out,) = mixed_means([Teachers(model, teachers, weights)], inputs, matching, cores)
    return targets, left_out


class Teachers(NamedTuple):
    """Teachers of one architecture: a model that holds one after the other, their arrays, and their weights."""

    model: nn.Module
    arrays: Sequence[Weights]
    weights: Sequence[float]


def mixed_means(
    groups: Sequence[Teachers],
    inputs: Callable[[], Iterable[Inputs]],
    matching: Matching,
    cores: Cores | None = None,
) -> tuple[Outputs, tuple[tuple[int, ...], ...]]:
    r"""Return the student's targets, from teachers of several architectures.

    The mean over all teachers is that of the groups' means, weighted by the sums of their teachers' weights:
    :math:`\sum_g \frac{W_g}{W} \sum_{k \in g} \frac{p_k}{W_g} f_g(x; w_k)`. Teachers that are left out count in
    no sum.

    Source: FedDF (Lin et al., NeurIPS 2020), its algorithm for heterogeneous models.

    Parameters
    ----------
    groups : sequence of Teachers
        At least one, each with at least one teacher. Weights as in :func:`ensemble_means`; they count as equal if
        those of all groups are 0.
    inputs : callable
        As in :func:`ensemble_means`; called for each group.
    matching : Matching
        As in :func:`ensemble_means`; its outputs have the same shapes in all groups.
    cores : Cores, optional
        As in :func:`ensemble_means`.

    Returns
    -------
    targets : tuple of Tensor
        ``[N, ...]`` each, float32, on the CPU; empty without samples.
    left_out : tuple of tuple of int
        By group, positions of the teachers that are left out.

    Raises
    ------
    ValueError
        If there are no groups, a group has no teachers or another number of weights, or a weight is negative.
    FloatingPointError
        If all teachers of all groups are left out.

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
    group_means: list[Outputs] = []
    group_weights: list[list[float]] = []
    left_out = []
    for group in groups:
        means, bad = _means_of(group, inputs, matching, Cores(1) if cores is None else cores)
        left_out.append(bad)
        if means is not None:
            group_means.append(means)
            group_weights.append([weight for k, weight in enumerate(group.weights) if k not in bad])
    if not group_means:
        raise FloatingPointError("no teacher has finite outputs")
    sums = [sum(weights) for weights in group_weights]
    portions = shares(sums if any(sums) else [len(weights) for weights in group_weights])
    # A single group's share is 1, which changes no bit of its means.
    total = _add(None, portions[0], group_means[0])
    for portion, means in zip(portions[1:], group_means[1:], strict=True):
        total = _add(total, portion, means)
    return tuple(target.float() for target in matching.targets(total)), tuple(left_out)


@torch.no_grad()
def _means_of(
    group: Teachers, inputs: Callable[[], Iterable[Inputs]], matching: Matching, cores: Cores
) -> tuple[Outputs | None, tuple[int, ...]]:
    """Return a group's means, in float64, and the teachers that are left out; None if all of them are."""
    model, teachers, weights = group
    if not teachers or len(teachers) != len(weights):
        raise ValueError(
            f"a weight per teacher and at least one expected, got {len(teachers)}, {len(weights)}"
        )
    usable = list(range(len(teachers)))
    while usable:
        portions = dict(zip(usable, shares([weights[k] for k in usable]), strict=True))
        blocks: list[Outputs] = []
        bad: set[int] = set()
        for block in _blocks(inputs()):
            total: Outputs | None = None
            robust: list[Outputs] = []
            for k, outputs in _outputs_of(model, {k: teachers[k] for k in usable}, block, matching, cores):
                if not all(bool(torch.isfinite(part).all()) for part in outputs):
                    bad.add(k)
                elif not matching.rule.is_mean:
                    robust.append(matching.shared(outputs))
                else:
                    total = _add(total, portions[k], matching.shared(outputs))
            if robust and not bad:
                total = _robust(robust, matching.rule)
            if bad or total is None:
                break
            blocks.append(total)
        if not bad:
            means = tuple(torch.cat(column) for column in zip(*blocks, strict=True))
            return means, tuple(k for k in range(len(teachers)) if k not in usable)
        usable = [k for k in usable if k not in bad]
    return None, tuple(range(len(teachers)))


def _outputs_of(
    model: nn.Module, teachers: Mapping[int, Weights], block: list[Inputs], matching: Matching, cores: Cores
) -> Iterator[tuple[int, Outputs]]:
    """Yield each teacher's outputs for all batches of a block, in float64, on the CPU, in the teachers' order.

    As many teachers compute at the same time as there are cores, so that the outputs of no more are in memory.
    """
    if cores.count > 1 and draws_at_random(model, block[0][:1]):
        cores = Cores(1)
    runs = [block[i : i + _RUN] for i in range(0, len(block), _RUN)]
    copies = Copies(model, cores, parts=len(teachers) * len(runs))

    @torch.no_grad()
    def outputs_of(part: tuple[int, list[Inputs]]) -> list[Outputs]:
        k, run = part
        with copies.taken() as taken:
            load_weights(taken, teachers[k])
            taken.eval()
            return [matching.outputs(taken, x) for x in run]

    keys = list(teachers)
    for i in range(0, len(keys), cores.count):
        together = keys[i : i + cores.count]
        done = iter(cores.map(outputs_of, [(k, run) for k in together for run in runs]))
        for k in together:
            batches = [outputs for _ in runs for outputs in next(done)]
            yield (
                k,
                tuple(torch.cat(column).cpu().double() for column in zip(*batches, strict=True)),
            )


def _add(total: Outputs | None, portion: float, outputs: Outputs) -> Outputs:
    scaled = tuple(portion * part for part in outputs)
    return scaled if total is None else tuple(a + b for a, b in zip(total, scaled, strict=True))


def _robust(outputs: Sequence[Outputs], rule: Rule) -> Outputs:
    """Return the robust average over teachers of each part ``[B, ...]``."""
    return tuple(robust_average(torch.stack(column), rule) for column in zip(*outputs, strict=True))


def _blocks(batches: Iterable[Inputs]) -> Iterator[list[Inputs]]:
    """Group batches, so that each teacher is loaded once per block and the data set need not fit in memory."""
    block: list[Inputs] = []
    size = 0
    for x in batches:
        block.append(x)
        size += x.nbytes
        if size >= _BLOCK_BYTES:
            yield block
            block, size = [], 0
    if block:
        yield block
