"""Distilling an ensemble of models into one: the teachers' outputs, and the loop with early stopping.

Used by leaders on their own data (FedHEAD) and by servers on public or synthetic data (FedDF, FedHEAD+, FedHyb).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from .weights import get_weights, load_weights
from .wire import ArrayTemplate

__all__ = [
    "AVERAGES",
    "Distilled",
    "DistillingStrategy",
    "Matching",
    "ServerDistiller",
    "check_samples",
    "distil_ensemble",
    "ensemble_means",
    "ensemble_targets",
    "hold_out",
    "soft_labels",
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


@torch.no_grad()
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
                scaled = tuple(p * part for part in matching.shared(found))
                total = scaled if total is None else tuple(a + b for a, b in zip(total, scaled, strict=True))
            if bad:
                break
            parts.append(cast(tuple[Tensor, ...], total))
        if not bad:
            means = tuple(torch.cat(column) for column in zip(*parts, strict=True))
            targets = tuple(target.float() for target in matching.targets(means))
            return targets, tuple(k for k in range(len(teachers)) if k not in left)
        left = [k for k in left if k not in bad]
    raise FloatingPointError("no teacher has finite outputs")


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

    The targets, :func:`ensemble_means`, are made once. After each epoch the loss is taken of the held-out
    samples, too, in eval mode; it ends early after ``config.patience`` epochs in turn that did not lower it, the
    student's own before the first epoch included. With nothing held out (no sample or a share that rounds to
    none) all epochs are run, and the last weights kept.

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
    size = max(config.batch_size, 256)

    def inputs() -> Iterator[Tensor]:
        return (x.to(device) for x, _ in samples.ordered(size))

    matching = soft_labels() if matching is None else matching
    of_teachers = weights if teacher_weights is None else teacher_weights
    targets, left_out = ensemble_means(model, teachers, of_teachers, inputs, matching)
    if len(targets[0]) != len(samples):
        raise DatasetError(f"collate_fn returned {len(targets[0])} samples of {len(samples)}")
    if student is None:
        used = [k for k in range(len(teachers)) if k not in left_out]
        names = list(teachers[used[0]])
        models = [[teachers[k][name] for name in names] for k in used]
        student = dict(zip(names, weighted_mean(models, [weights[k] for k in used]), strict=True))
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
    if not all(bool(torch.isfinite(value).all()) for value in model.state_dict().values()):
        raise FloatingPointError("the student's weights are no longer finite: try a smaller learning-rate")
    model.eval()
    return Distilled(done, mean, lowest, left_out)


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
    what : str
        What errors call the samples.

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
    ) -> None:
        self.device, self.what = resolve_device(device), what
        try:
            self.model: nn.Module = as_feature_model(copy.deepcopy(model)).to(self.device)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"model cannot be used: {error}") from None
        self.use(public_data, input_key=input_key)
        self.num_classes = self._try()

    def use(self, public_data: Dataset[Any] | DataLoader[Any], *, input_key: str | None = None) -> None:
        """Take other samples from now on, for a method that makes its own; the arguments are the class's."""
        self.samples = Batches(public_data, num_classes=0, input_key=input_key, labelled=False)
        check_samples(self.samples, self.what)
        self._read()

    def _read(self) -> None:
        count = 0
        try:
            for x, _ in self.samples.ordered(256):
                count += len(x)
                if not bool(torch.isfinite(x).all()):
                    raise DatasetError(f"{self.what} has values that are not finite")
        except (TypeError, RuntimeError) as error:  # what torch raises where items make no batch
            raise DatasetError(f"{self.what} does not go into batches: {first_line(error)}") from None
        if count != len(self.samples):
            raise DatasetError(f"{self.what}'s collate_fn returned {count} samples of {len(self.samples)}")

    @torch.no_grad()
    def _try(self) -> int:
        x = self.samples.example().to(self.device)
        try:
            logits = self.model.eval()(x)
        except Exception as error:  # whatever a user's module raises on a shape that it does not take
            raise ConfigError(
                f"model does not take {self.what} of shape {list(x.shape[1:])}: {first_line(error)}"
            ) from None
        if not isinstance(logits, Tensor) or logits.ndim != 2 or len(logits) != 1:
            got = list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
            raise ConfigError(f"model must return logits [B, C], got {got} of one sample")
        return int(logits.shape[1])

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

        def named(arrays: Sequence[NDArray]) -> dict[str, NDArray]:
            return dict(zip(template.names, arrays, strict=True))

        try:
            with forked_global_rng(seed, self.model, self.device):
                done = distil_ensemble(
                    self.model,
                    None,
                    [named(teacher) for teacher in teachers],
                    weights,
                    self.samples,
                    config,
                    epochs=epochs,
                    learning_rate=config.learning_rate_at(server_round)
                    if learning_rate is None
                    else learning_rate,
                    seed=seed,
                    device=self.device,
                    matching=matching,
                    teacher_weights=teacher_weights,
                )
        except FloatingPointError as error:
            log(WARNING, "round %d: the server's distillation is left out: %s", server_round, error)
            return weighted_mean(teachers, weights)
        for k in done.left_out:
            log(
                WARNING,
                "round %d: the model of %s has outputs that are not finite, and is left out",
                server_round,
                names[k],
            )
        validation = "none" if done.validation_loss is None else f"{done.validation_loss:.4f}"
        log(INFO, "distilled in %d epochs, loss %.4f, validation %s", done.epochs, done.loss, validation)
        found = get_weights(self.model)
        return template.check([found[name] for name in template.names])


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
