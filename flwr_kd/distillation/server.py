"""Distillation at the server: clients' models are the teachers, public or synthetic data are the samples."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import ExitStack
from logging import INFO, WARNING
from typing import Any, ClassVar, NamedTuple, cast

import numpy.typing as npt
import torch
from flwr.common.logger import log
from torch import nn
from torch.utils.data import DataLoader, Dataset

from flwr_kd.checks import ConfigError
from flwr_kd.config import DistillationConfig
from flwr_kd.distillation.samples import batches_on, check_all_came, check_samples, read_samples, try_model
from flwr_kd.distillation.student import distil_student, mean_without
from flwr_kd.distillation.teachers import Matching, Teachers, mixed_means, soft_labels
from flwr_kd.learning.batches import Batches
from flwr_kd.learning.device import resolve_device
from flwr_kd.learning.weights import get_weights
from flwr_kd.models import as_feature_model
from flwr_kd.seeding import derive_seed, forked_global_rng
from flwr_kd.server.aggregation import weighted_mean
from flwr_kd.server.records import Node
from flwr_kd.server.strategy import KDStrategy
from flwr_kd.transport.template import ArrayTemplate

__all__ = ["DistillingStrategy", "Group", "ServerDistiller", "distil_groups"]

NDArray = npt.NDArray[Any]


class ServerDistiller:
    """A server's own distillation: clients' models are the teachers, public data are the samples.

    Parameters
    ----------
    model : nn.Module or (extractor, head)
        Of the clients' architecture, logits ``[B, C]``; only its structure matters. A copy is used.
    public_set : Dataset or DataLoader
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
        public_set: Dataset[Any] | DataLoader[Any],
        *,
        device: str | torch.device = "auto",
        input_key: str | None = None,
        what: str = "public_set",
        called: str = "model",
    ) -> None:
        self.device, self.what, self.called = resolve_device(device), what, called
        self.model = self._copy_of(model)
        self.use(public_set, input_key=input_key)
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

    def use(self, public_set: Dataset[Any] | DataLoader[Any], *, input_key: str | None = None) -> None:
        """Take other samples from now on, for a method that makes its own; the arguments are the class's."""
        self.samples = Batches(public_set, num_classes=0, input_key=input_key, labelled=False)
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
    inputs = batches_on(first.samples, config, first.device)
    found: list[list[NDArray] | None] = []
    with ExitStack() as stack:
        for group in groups:
            stack.enter_context(forked_global_rng(seed, group.distiller.model, group.distiller.device))
        try:
            targets, left_out = mixed_means([group.teachers() for group in groups], inputs, matching)
        except FloatingPointError as error:
            log(WARNING, "round %d: the server's distillation is left out: %s", server_round, error)
            return [weighted_mean(group.models, group.weights) for group in groups]
        check_all_came(targets, first.samples)
        distilled = 0
        for group, bad in zip(groups, left_out, strict=True):
            if len(bad) == len(group.models):
                found.append(None)
                continue
            model, names = group.distiller.model, group.template.names
            student = mean_without(group.models, group.weights, bad)
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
    public_set : Dataset or DataLoader
        Map-style, of inputs as the clients' are, of pairs or of dicts; labels are not looked at.
    device : str or torch.device
        Where the server distils; ``"auto"``: CUDA, else MPS, else CPU.
    input_key : str, optional
        Key of the inputs in dict items, where it cannot be guessed.
    **options
        See :class:`flwr_kd.KDStrategy`.

    Raises
    ------
    ConfigError, DatasetError
        If an option or a hyper-parameter is not allowed, or the public data is not what the model takes.
    """

    config_class = DistillationConfig
    samples_are: ClassVar[str] = "public_set"
    """What errors call the samples."""

    def __init__(
        self,
        config: DistillationConfig | None = None,
        *,
        model: nn.Module | tuple[nn.Module, nn.Module],
        public_set: Dataset[Any] | DataLoader[Any],
        device: str | torch.device = "auto",
        input_key: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(config, **options)
        self.distiller = ServerDistiller(
            model, public_set, device=device, input_key=input_key, what=self.samples_are
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
