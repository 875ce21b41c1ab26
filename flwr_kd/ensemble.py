"""Distilling an ensemble of models into one: the teachers' outputs, and the loop with early stopping.

Used by leaders on their own data (FedHEAD) and by servers on public or synthetic data (FedDF, FedHEAD+, FedHyb).
The teachers may be of several architectures: each group's outputs are made with its own model, then mixed.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from logging import INFO, WARNING
from typing import Any, ClassVar, NamedTuple, cast

import numpy.typing as npt
import torch
from flwr.common.logger import log
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from .aggregation import shares, weighted_mean
from .batches import Batches, DatasetError
from .client import resolve_device
from .config import ConfigError, DistillationConfig, first_line
from .distillation import cross_entropy_soft
from .models import as_feature_model
from .seeding import derive_seed, forked_global_rng, torch_generator
from .strategy import KDStrategy, Node
from .training import fit, make_optimizer
from .weights import get_weights, has_finite_weights, load_weights
from .wire import ArrayTemplate

__all__ = [
    "AVERAGES",
    "Distilled",
    "DistillingStrategy",
    "Group",
    "Matching",
    "ServerDistiller",
    "Teachers",
    "check_samples",
    "distil_ensemble",
    "distil_groups",
    "distil_student",
    "ensemble_means",
    "ensemble_targets",
    "hold_out",
    "mixed_means",
    "read_samples",
    "soft_labels",
    "try_model",
]

NDArray = npt.NDArray[Any]
Weights = Mapping[str, NDArray]
AVERAGES = ("logits", "probabilities")
_BLOCK_BYTES = 256 * 1024**2


class Distilled(NamedTuple):
    """What a distillation did: epochs, the last one's mean loss, the lowest validation loss, teachers left out."""

    epochs: int
    loss: float
    validation_loss: float | None
    left_out: tuple[int, ...] = ()


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
        model, teachers, of_teachers, _inputs(samples, config, device), matching
    )
    _check_all_came(targets, samples)
    if student is None:
        names = list(teachers[0])
        models = [[teacher[name] for name in names] for teacher in teachers]
        student = dict(zip(names, _mean_without(models, weights, left_out), strict=True))
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


def _inputs(
    samples: Batches, config: DistillationConfig, device: torch.device
) -> Callable[[], Iterator[Tensor]]:
    return lambda: (x.to(device) for x, _ in samples.ordered(_size(config)))


def _check_all_came(targets: tuple[Tensor, ...], samples: Batches) -> None:
    if len(targets[0]) != len(samples):
        raise DatasetError(f"collate_fn returned {len(targets[0])} samples of {len(samples)}")


def _size(config: DistillationConfig) -> int:
    """Return how many samples pass at once where nothing is learnt."""
    return max(config.batch_size, 256)


def _mean_without(
    models: Sequence[Sequence[NDArray]], weights: Sequence[float], left_out: Sequence[int]
) -> list[NDArray]:
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
    matching, size = soft_labels() if matching is None else matching, _size(config)
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


def check_samples(samples: Batches, what: str) -> None:
    """Refuse samples that cannot be distilled on.

    Raises
    ------
    DatasetError
        If there are none, or a loader's own sampler decides which there are.
    """
    if not len(samples):
        raise DatasetError(f"{what} is empty: distillation needs at least one sample")
    if samples.has_own_sampler:
        raise DatasetError(
            f"{what} must not be a loader with a sampler of its own: each sample's targets are made once"
        )


def read_samples(samples: Batches, what: str) -> Iterator[Tensor]:
    """Yield all samples in batches ``[B, ...]``, in their order, and refuse what cannot be used.

    Raises
    ------
    DatasetError
        If samples do not go into batches, have values that are not finite, or are more or fewer than there should
        be. The text begins with ``what``.
    """
    count = 0
    try:
        for x, _ in samples.ordered(256):
            count += len(x)
            if not bool(torch.isfinite(x).all()):
                raise DatasetError(f"{what} has values that are not finite")
            yield x
    except (TypeError, RuntimeError) as error:  # what torch raises where items make no batch
        raise DatasetError(f"{what} does not go into batches: {first_line(error)}") from None
    if count != len(samples):
        raise DatasetError(f"{what}'s collate_fn returned {count} samples of {len(samples)}")


@torch.no_grad()
def try_model(model: nn.Module, samples: Batches, device: torch.device, *, what: str, called: str) -> int:
    """Show a model the first sample, in eval mode, and return the number of its classes.

    Raises
    ------
    ConfigError
        If the model does not take it, or returns no logits ``[B, C]``. The text names both by ``called`` and
        ``what``.
    """
    x = samples.example().to(device)
    try:
        logits = model.eval()(x)
    except Exception as error:  # whatever a user's module raises on a shape that it does not take
        raise ConfigError(
            f"{called} does not take {what} of shape {list(x.shape[1:])}: {first_line(error)}"
        ) from None
    if not isinstance(logits, Tensor) or logits.ndim != 2 or len(logits) != 1:
        got = list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise ConfigError(f"{called} must return logits [B, C], got {got} of one sample")
    return int(logits.shape[1])


class ServerDistiller:
    """A server's own distillation: clients' models are the teachers, public data are the samples.

    Parameters
    ----------
    model : nn.Module or (extractor, head)
        Of the clients' architecture, logits ``[B, C]``; only its structure matters. A copy is used.
    public_data : Dataset or DataLoader
        Map-style, of inputs alone, of pairs or of dicts; labels are not looked at.
    device : str or torch.device
        ``"auto"``: CUDA, else MPS, else CPU.
    input_key : str, optional
        Key of the inputs in dict items, where it cannot be guessed.
    what, called : str
        What errors call the samples, and the model.

    Raises
    ------
    ConfigError
        If the device is not there, or the model does not take the public data.
    DatasetError
        If the public data has no length, no index, no samples, a sampler of its own, samples that do not go into
        one batch or values that are not finite. It is read once for that.
    """

    def __init__(
        self,
        model: nn.Module | tuple[nn.Module, nn.Module],
        public_data: Dataset[Any] | DataLoader[Any],
        *,
        device: str | torch.device = "auto",
        input_key: str | None = None,
        what: str = "public_data",
        called: str = "model",
    ) -> None:
        self.device, self.what, self.called = resolve_device(device), what, called
        self.model = self._copy_of(model)
        self.use(public_data, input_key=input_key)
        self.num_classes = self._try()

    def beside(self, model: nn.Module | tuple[nn.Module, nn.Module], called: str) -> ServerDistiller:
        """Return one for a model of another architecture, with the same samples.

        Raises
        ------
        ConfigError
            If the model does not take them.
        """
        other = copy.copy(self)
        other.called = called
        other.model = other._copy_of(model)
        other.num_classes = other._try()
        return other

    def _copy_of(self, model: nn.Module | tuple[nn.Module, nn.Module]) -> nn.Module:
        try:
            return as_feature_model(copy.deepcopy(model)).to(self.device)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{self.called} cannot be used: {error}") from None

    def use(self, public_data: Dataset[Any] | DataLoader[Any], *, input_key: str | None = None) -> None:
        """Take other samples from now on, for a method that makes its own; the arguments are the class's."""
        self.samples = Batches(public_data, num_classes=0, input_key=input_key, labelled=False)
        check_samples(self.samples, self.what)
        for _ in read_samples(self.samples, self.what):
            pass

    def _try(self) -> int:
        return try_model(self.model, self.samples, self.device, what=self.what, called=self.called)

    def check(self, template: ArrayTemplate) -> None:
        """Refuse a global model that is not of this architecture.

        Raises
        ------
        ConfigError
            With the first difference.
        """
        other = template.difference(ArrayTemplate.of_ndarrays(get_weights(self.model)))
        if other is not None:
            raise ConfigError(f"model is not what initial_arrays are of: {other}")

    def distil(
        self,
        template: ArrayTemplate,
        teachers: Sequence[Sequence[NDArray]],
        weights: Sequence[float],
        names: Sequence[str],
        config: DistillationConfig,
        *,
        epochs: int,
        server_round: int,
        seed: int,
        matching: Matching | None = None,
        teacher_weights: Sequence[float] | None = None,
        learning_rate: float | None = None,
    ) -> list[NDArray]:
        """Distil the teachers into their weighted mean, and return it; all arrays in the template's order.

        The learning rate is the config's in this round if None. A teacher with outputs that are not finite has no
        part in either, and is named in a warning by ``names``. Where distillation leads beyond all numbers the mean
        of all comes back, with a warning: what clients sent may be the cause.
        """
        (found,) = distil_groups(
            [Group(self, template, teachers, weights, names, teacher_weights)],
            config,
            epochs=epochs,
            server_round=server_round,
            seed=seed,
            matching=matching,
            learning_rate=learning_rate,
        )
        # Of a single group without a usable teacher the mean comes back.
        return cast(list[NDArray], found)


class Group(NamedTuple):
    """Models of one architecture that a server has, for :func:`distil_groups`.

    Attributes
    ----------
    distiller : ServerDistiller
        Of this architecture.
    template : ArrayTemplate
        Names of the arrays, in the models' order.
    models : sequence of sequence of ndarray
        At least one.
    weights : sequence of float
        Of the models' mean, at least 0; all alike if all are 0.
    names : sequence of str
        What warnings call the models.
    teacher_weights : sequence of float, optional
        Of the ensemble, where they are not the weights of the mean.
    """

    distiller: ServerDistiller
    template: ArrayTemplate
    models: Sequence[Sequence[NDArray]]
    weights: Sequence[float]
    names: Sequence[str]
    teacher_weights: Sequence[float] | None = None

    def teachers(self) -> Teachers:
        """Return the models as teachers, their arrays named."""
        arrays = [dict(zip(self.template.names, model, strict=True)) for model in self.models]
        weights = self.weights if self.teacher_weights is None else self.teacher_weights
        return Teachers(self.distiller.model, arrays, weights)


def distil_groups(
    groups: Sequence[Group],
    config: DistillationConfig,
    *,
    epochs: int,
    server_round: int,
    seed: int,
    matching: Matching | None = None,
    learning_rate: float | None = None,
) -> list[list[NDArray] | None]:
    """Distil the ensemble of all groups' models into each group's weighted mean.

    Source: FedDF (Lin et al., NeurIPS 2020), its algorithm for models of several kinds. The targets are made once,
    and the same samples are held out in all groups.

    Parameters
    ----------
    groups : sequence of Group
        At least one. Their distillers have the same samples and device.
    config : DistillationConfig
        See :func:`distil_student`.
    epochs : int
        At most so many, for each group.
    server_round : int
        From 1; decides the learning rate where none is given.
    seed : int
        See :func:`distil_student`.
    matching : Matching, optional
        What the students learn; the ensemble's probabilities, by cross-entropy, if None.
    learning_rate : float, optional
        The config's in this round if None.

    Returns
    -------
    list of (list of ndarray or None)
        By group, the new model in the template's order and dtypes. A model with outputs that are not finite has no
        part in the ensemble nor in its group's mean, and a warning names it. Where a distillation leads beyond all
        numbers the mean of all the group's models comes back, with a warning; so it does in each group where no
        model at all is usable. None for a group without a usable model where others have one.
    """
    matching = soft_labels() if matching is None else matching
    rate = config.learning_rate_at(server_round) if learning_rate is None else learning_rate
    first = groups[0].distiller
    inputs = _inputs(first.samples, config, first.device)
    found: list[list[NDArray] | None] = []
    with ExitStack() as stack:
        for group in groups:
            stack.enter_context(forked_global_rng(seed, group.distiller.model, group.distiller.device))
        try:
            targets, left_out = mixed_means([group.teachers() for group in groups], inputs, matching)
        except FloatingPointError as error:
            log(WARNING, "round %d: the server's distillation is left out: %s", server_round, error)
            return [weighted_mean(group.models, group.weights) for group in groups]
        _check_all_came(targets, first.samples)
        distilled = 0
        for group, bad in zip(groups, left_out, strict=True):
            if len(bad) == len(group.models):
                found.append(None)
                continue
            model, names = group.distiller.model, group.template.names
            student = _mean_without(group.models, group.weights, bad)
            try:
                done = distil_student(
                    model,
                    dict(zip(names, student, strict=True)),
                    targets,
                    first.samples,
                    config,
                    epochs=epochs,
                    learning_rate=rate,
                    seed=seed,
                    device=first.device,
                    matching=matching,
                )
            except FloatingPointError as error:
                which = f" of {group.distiller.called}" if len(groups) > 1 else ""
                log(
                    WARNING,
                    "round %d: the server's distillation%s is left out: %s",
                    server_round,
                    which,
                    error,
                )
                found.append(weighted_mean(group.models, group.weights))
                continue
            distilled += 1
            validation = "none" if done.validation_loss is None else f"{done.validation_loss:.4f}"
            log(INFO, "distilled in %d epochs, loss %.4f, validation %s", done.epochs, done.loss, validation)
            weights = get_weights(model)
            found.append(group.template.check([weights[name] for name in names]))
    if distilled:
        for group, bad in zip(groups, left_out, strict=True):
            for k in bad:
                log(
                    WARNING,
                    "round %d: the model of %s has outputs that are not finite, and is left out",
                    server_round,
                    group.names[k],
                )
    return found


class DistillingStrategy(KDStrategy):
    """Base of methods whose server distils models into their mean, on unlabelled public data.

    Comes before another method's strategy in the list of bases, where a method adds this to it (FedHEAD+).

    Parameters
    ----------
    config : DistillationConfig, optional
        The hyper-parameters.
    model : nn.Module or (extractor, head)
        Of the architecture of ``initial_arrays``; logits ``[B, C]``.
    public_data : Dataset or DataLoader
        Map-style, of inputs as the clients' are, of pairs or of dicts; labels are not looked at.
    device : str or torch.device
        Where the server distils; ``"auto"``: CUDA, else MPS, else CPU.
    input_key : str, optional
        Key of the inputs in dict items, where it cannot be guessed.
    **options
        See :class:`flwr_kd.strategy.KDStrategy`.

    Raises
    ------
    ConfigError, DatasetError
        If an option or a hyper-parameter is not allowed, or the public data is not what the model takes.
    """

    config_class = DistillationConfig
    samples_are: ClassVar[str] = "public_data"
    """What errors call the samples."""

    def __init__(
        self,
        config: DistillationConfig | None = None,
        *,
        model: nn.Module | tuple[nn.Module, nn.Module],
        public_data: Dataset[Any] | DataLoader[Any],
        device: str | torch.device = "auto",
        input_key: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(config, **options)
        self.distiller = ServerDistiller(
            model, public_data, device=device, input_key=input_key, what=self.samples_are
        )

    def begin(self, nodes: list[Node]) -> None:
        """Refuse a server's model that is not the clients'."""
        self.distiller.check(self.template)
        super().begin(nodes)

    def distil(
        self,
        models: Sequence[Sequence[NDArray]],
        weights: Sequence[float],
        names: Sequence[str],
        *,
        epochs: int,
        server_round: int,
        matching: Matching | None = None,
        teacher_weights: Sequence[float] | None = None,
        learning_rate: float | None = None,
    ) -> list[NDArray]:
        """Return the models' weighted mean after distillation of all of them; see :class:`ServerDistiller`."""
        return self.distiller.distil(
            self.template,
            models,
            weights,
            names,
            cast(DistillationConfig, self.config),
            epochs=epochs,
            server_round=server_round,
            seed=derive_seed(self.seed, "server", server_round),
            matching=matching,
            teacher_weights=teacher_weights,
            learning_rate=learning_rate,
        )
