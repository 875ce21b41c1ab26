"""Distillation at the server: clients' models are the teachers, public or synthetic data are the samples."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from logging import INFO, WARNING
from typing import Any, ClassVar, Generic, NamedTuple

import numpy.typing as npt
import torch
from flwr.common.logger import log
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from flwr_kd.checks import ConfigError
from flwr_kd.distillation.config import DistillationConfig, DistillationConfigT
from flwr_kd.distillation.samples import batches_on, check_all_present, check_samples, read_samples, try_model
from flwr_kd.distillation.student import Distillation, distil_student, mean_without
from flwr_kd.distillation.teachers import Matching, Teachers, by_rule, mixed_means
from flwr_kd.learning.batches import Batches
from flwr_kd.learning.device import resolve_device
from flwr_kd.learning.weights import get_weights
from flwr_kd.models.given import check_outputs, floating_dtype
from flwr_kd.seeding import derive_seed, forked_global_rng
from flwr_kd.server.aggregation import Average, weighted_mean
from flwr_kd.server.given_model import own_copy
from flwr_kd.server.records import Node, Reply
from flwr_kd.server.strategy import KDStrategy
from flwr_kd.transport.template import ArrayTemplate

__all__ = ["DistillingStrategy", "Group", "ServerDistiller", "distil_groups"]

NDArray = npt.NDArray[Any]


class ServerDistiller:
    """A server's model of one architecture, its device, and the samples that it distils on.

    Parameters
    ----------
    model : nn.Module or (extractor, head)
        Of the clients' architecture, logits ``[B, C]``; only its structure matters. A copy is used.
    public_set : Dataset or DataLoader
        Map-style, of inputs alone, of pairs or of dicts; labels are ignored. It is read once, to check it.
    device : str or torch.device
        ``"auto"``: CUDA, else MPS, else CPU.
    input_key : str or sequence of str, optional
        Key of the inputs in dict items, where it cannot be guessed; several for a model that takes several.
    what, called : str
        Names of the samples and of the model in errors.
    hint : callable, optional
        Returns what the error adds if the model does not take the samples.

    Raises
    ------
    ConfigError
        If the device is not available, or the model does not take the public data.
    DatasetError
        If the public data has no length, no index, no samples, a sampler without fixed rows, samples that do
        not fit into one batch, or values that are not finite.
    """

    def __init__(
        self,
        model: nn.Module | tuple[nn.Module, nn.Module],
        public_set: Dataset[Any] | DataLoader[Any],
        *,
        device: str | torch.device = "auto",
        input_key: str | Sequence[str] | None = None,
        what: str = "public_set",
        called: str = "model",
        hint: Callable[[], str] | None = None,
    ) -> None:
        self.device, self.what, self.called = resolve_device(device), what, called
        self._hint = hint
        self.model = own_copy(model, self.device, called=called)
        self.use(public_set, input_key=input_key)
        self.num_classes = self._try()

    def beside(self, model: nn.Module | tuple[nn.Module, nn.Module], called: str) -> ServerDistiller:
        """Return a distiller for another architecture, with the same samples.

        Raises
        ------
        ConfigError
            If the model does not take them.
        """
        other = copy.copy(self)
        other.called = called
        other.model = own_copy(model, self.device, called=called)
        other.samples = copy.copy(self.samples)
        other.samples.dtype = floating_dtype(other.model)
        other.num_classes = other._try()
        return other

    def use(
        self, public_set: Dataset[Any] | DataLoader[Any], *, input_key: str | Sequence[str] | None = None
    ) -> None:
        """Replace the samples, for a method that makes its own; the arguments are the class's."""
        dtype = floating_dtype(self.model)
        self.samples = Batches(public_set, num_classes=0, input_key=input_key, labelled=False, dtype=dtype)
        check_samples(self.samples, self.what)
        for _ in read_samples(self.samples, self.what):
            pass

    def check(self, template: ArrayTemplate) -> None:
        """Refuse a global model of another architecture.

        Raises
        ------
        ConfigError
            With the first difference.
        """
        difference = template.difference(ArrayTemplate.of_ndarrays(get_weights(self.model)))
        if difference is not None:
            raise ConfigError(f"model is not what initial_arrays are of: {difference}")

    def _try(self) -> int:
        count = try_model(
            self.model, self.samples, self.device, what=self.what, called=self.called, hint=self._hint
        )
        try:
            check_outputs(count)
        except ValueError as error:
            raise ConfigError(f"{self.called} cannot be used: {error}") from None
        return count


class Group(NamedTuple):
    """Models of one architecture at the server.

    Attributes
    ----------
    distiller : ServerDistiller
        Of this architecture.
    template : ArrayTemplate
        Names of the arrays, in the models' order.
    models : sequence of sequence of ndarray
        At least one.
    weights : sequence of float
        Of the models' mean, at least 0; they count as equal if all are 0.
    names : sequence of str
        Names of the models in warnings.
    teacher_weights : sequence of float, optional
        Weights of the ensemble, where they differ from those of the mean.
    average : callable
        Makes the models' mean of them and their weights.
    """

    distiller: ServerDistiller
    template: ArrayTemplate
    models: Sequence[Sequence[NDArray]]
    weights: Sequence[float]
    names: Sequence[str]
    teacher_weights: Sequence[float] | None = None
    average: Average = weighted_mean

    @classmethod
    def of_replies(
        cls, distiller: ServerDistiller, template: ArrayTemplate, replies: Sequence[Reply]
    ) -> Group:
        """Return the group of the clients' models, weighted by their sample counts and named by their nodes."""
        return cls(
            distiller,
            template,
            [reply.arrays for reply in replies],
            [reply.num_examples for reply in replies],
            [str(reply.node) for reply in replies],
        )

    def teachers(self) -> Teachers:
        """Return the models as teachers, with named arrays."""
        arrays = [dict(zip(self.template.names, model, strict=True)) for model in self.models]
        weights = self.weights if self.teacher_weights is None else self.teacher_weights
        return Teachers(self.distiller.model, arrays, weights)

    def mean(self) -> list[NDArray]:
        """Return the weighted mean of all models."""
        return self.average(self.models, self.weights)


def distil_groups(
    groups: Sequence[Group], how: Distillation, *, server_round: int
) -> list[list[NDArray] | None]:
    """Distil the ensemble of all groups' models into each group's weighted mean.

    Source: FedDF (Lin et al., NeurIPS 2020), its algorithm for heterogeneous models. The targets are computed once,
    and the same samples are held out in all groups.

    Parameters
    ----------
    groups : sequence of Group
        At least one. Their distillers share samples and device.
    how : Distillation
        How each group's distillation is run.
    server_round : int
        From 1, for warnings.

    Returns
    -------
    list of (list of ndarray or None)
        By group, the new model in the template's order and dtypes. A model with outputs that are not finite is
        left out of the ensemble and of its group's mean, with a warning. Where a distillation is not finite, the
        result is the mean of all the group's models, with a warning, since clients' models may be the cause; so it
        is in every group where no model at all is usable. None for a group without a usable model, if other groups
        have one.
    """
    first = groups[0].distiller
    inputs = batches_on(first.samples, how.config, first.device)
    results: list[list[NDArray] | None] = []
    with ExitStack() as stack:
        for group in groups:
            stack.enter_context(forked_global_rng(how.seed, group.distiller.model, group.distiller.device))
        try:
            with how.on_cores(first.device) as cores:
                targets, left_out = mixed_means(
                    [group.teachers() for group in groups], inputs, how.matching, cores
                )
        except FloatingPointError as error:
            log(WARNING, "round %d: the server's distillation is left out: %s", server_round, error)
            return [group.mean() for group in groups]
        check_all_present(targets, first.samples)
        succeeded = False
        for group, bad in zip(groups, left_out, strict=True):
            if len(bad) == len(group.models):
                results.append(None)
                continue
            try:
                results.append(_distil_group(group, bad, targets, how))
                succeeded = True
            except FloatingPointError as error:
                which = f" of {group.distiller.called}" if len(groups) > 1 else ""
                text = "round %d: the server's distillation%s is left out: %s"
                log(WARNING, text, server_round, which, error)
                results.append(group.mean())
    if succeeded:
        for name in (group.names[k] for group, bad in zip(groups, left_out, strict=True) for k in bad):
            text = "round %d: the model of %s has outputs that are not finite, and is left out"
            log(WARNING, text, server_round, name)
    return results


def _distil_group(
    group: Group, left_out: Sequence[int], targets: tuple[Tensor, ...], how: Distillation
) -> list[NDArray]:
    """Distil targets into the mean of a group's usable models; raise FloatingPointError if it is not finite."""
    distiller, names = group.distiller, group.template.names
    student = dict(
        zip(names, mean_without(group.models, group.weights, left_out, group.average), strict=True)
    )
    done = distil_student(distiller.model, student, targets, distiller.samples, how, distiller.device)
    validation = "none" if done.validation_loss is None else f"{done.validation_loss:.4f}"
    log(INFO, "distilled in %d epochs, loss %.4f, validation %s", done.epochs, done.loss, validation)
    weights = get_weights(distiller.model)
    return group.template.check([weights[name] for name in names])


class DistillingStrategy(KDStrategy[DistillationConfigT], Generic[DistillationConfigT]):
    """Base of methods whose server distils models into their mean, on unlabelled public data.

    It stands before another method's strategy in the list of bases, where a method adds it to that one (FedHEAD+).

    Parameters
    ----------
    config : DistillationConfig, optional
        The hyper-parameters.
    model : nn.Module or (extractor, head)
        Of the architecture of ``initial_arrays``; logits ``[B, C]``.
    public_set : Dataset or DataLoader
        Map-style, of inputs as the clients' are, of pairs or of dicts; labels are ignored.
    device : str or torch.device
        Where the server distils; ``"auto"``: CUDA, else MPS, else CPU.
    input_key : str or sequence of str, optional
        Key of the inputs in dict items, where it cannot be guessed; several for a model that takes several.
    **options
        See :class:`flwr_kd.KDStrategy`.

    Raises
    ------
    ConfigError, DatasetError
        If an option or a hyper-parameter is not allowed, or the model does not take the public data.
    """

    config_class = DistillationConfig
    averages_knowledge = True
    samples_are: ClassVar[str] = "public_set"
    """Name of the samples in errors."""

    def __init__(
        self,
        config: DistillationConfigT | None = None,
        *,
        model: nn.Module | tuple[nn.Module, nn.Module],
        public_set: Dataset[Any] | DataLoader[Any],
        device: str | torch.device = "auto",
        input_key: str | Sequence[str] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(config, **options)
        self.distiller = ServerDistiller(
            model,
            public_set,
            device=device,
            input_key=input_key,
            what=self.samples_are,
            hint=self.samples_hint,
        )

    def samples_hint(self) -> str:
        """Return what an error adds if the model does not take the samples; nothing by default."""
        return ""

    def begin(self, nodes: list[Node]) -> None:
        """Refuse a server's model of another architecture than the clients'."""
        self.distiller.check(self.template)
        super().begin(nodes)

    def distil(
        self,
        group: Group,
        *,
        epochs: int,
        server_round: int,
        matching: Matching | None = None,
        learning_rate: float | None = None,
    ) -> list[NDArray]:
        """Return the group's weighted mean after distillation of all its models into it.

        The learning rate is the config's in this round if None. See :func:`distil_groups`.
        """
        how = Distillation.in_round(
            self.config,
            server_round,
            epochs=epochs,
            seed=derive_seed(self.seed, "server", server_round),
            matching=matching,
            learning_rate=learning_rate,
            cores=self.cores,
            steps_before=self.current_run.steps.taken,
        )
        group = group._replace(average=self.averaging())
        how = replace(how, matching=by_rule(how.matching, self.knowledge_aggregation))
        self.current_run.steps.add(self.config, how.planned_steps(len(group.distiller.samples)))
        (result,) = distil_groups([group], how, server_round=server_round)
        # None is only possible beside another group.
        return group.mean() if result is None else result
