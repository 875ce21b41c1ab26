"""FedDF's server half: the ensemble of the clients' models is distilled into their mean; pFedDF's, by groups."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from logging import WARNING
from typing import Any

import torch
from flwr.app import ArrayRecord
from flwr.common.logger import log
from torch import nn
from torch.utils.data import DataLoader, Dataset

from flwr_kd.checks import ConfigError
from flwr_kd.distillation.server import DistillingStrategy, Group, ServerDistiller, distil_groups
from flwr_kd.distillation.student import Distillation
from flwr_kd.distillation.teachers import by_rule, soft_labels
from flwr_kd.learning.weights import by_prefix, get_weights, with_prefix
from flwr_kd.models import count_parameters
from flwr_kd.seeding import derive_seed
from flwr_kd.server.records import NDArray, Node, Outgoing, Reply
from flwr_kd.server.strategy import KDStrategy
from flwr_kd.transport.template import ArrayTemplate

from .config import FedDFConfig, PFedDFConfig

_STATE = "prototypes"


def teachers_of(
    config: FedDFConfig, distiller: ServerDistiller, template: ArrayTemplate, replies: Sequence[Reply]
) -> Group:
    """Return the group of the clients' models, whose mean is weighted by samples; their logits' mean is not."""
    group = Group.of_replies(distiller, template, replies)
    if config.average == "logits":
        return group._replace(teacher_weights=[1.0] * len(replies))
    return group


class FedDF(DistillingStrategy[FedDFConfig]):
    """FedDF (Lin et al., NeurIPS 2020): the server distils the clients' models on unlabelled public data.

    By default as FedHEAD's paper compares with it: the teacher is the mean of the clients' probabilities, weighted
    by samples. With ``average=logits`` it is FedDF's own, the softmax of the unweighted mean of their logits. In
    both the student starts from the mean of the models, weighted by samples.

    Parameters
    ----------
    config : FedDFConfig, optional
        The hyper-parameters.
    model, public_set, device, input_key, **options
        See :class:`flwr_kd.distillation.server.DistillingStrategy`.

    Attributes
    ----------
    round_trips : int
        Between clients and server in this run: one per client's reply (FedHEAD's Table 1).

    Raises
    ------
    ConfigError, DatasetError
        If an option or a hyper-parameter is not allowed, or the model does not take the public data.
    """

    config_class = FedDFConfig
    averages = False
    round_trips = 0

    def begin(self, nodes: list[Node]) -> None:
        """Check the server's model, and reset the counter."""
        super().begin(nodes)
        self.round_trips = 0

    def aggregate_phase(
        self, phase: str, server_round: int, replies: Iterable[Reply], arrays: ArrayRecord | None
    ) -> ArrayRecord | None:
        """Average the models, weighted by sample counts, and distil their ensemble into the mean."""
        group = teachers_of(self.config, self.distiller, self.template, list(replies))
        self.round_trips += len(group.models)
        distilled = self.distil(
            group,
            epochs=self.config.server_epochs,
            server_round=server_round,
            matching=soft_labels(self.config.average),
        )
        return self.template.record(distilled)


class PFedDF(KDStrategy[PFedDFConfig]):
    """pFedDF (KT-pFL's paper, section 5.1): FedDF on groups of heterogeneous models, then local fine-tuning.

    There is a prototype per architecture, and no global model: ``initial_arrays`` may be empty and is not sent. A
    round is FedDF's (Lin et al., NeurIPS 2020, its algorithm for heterogeneous models): each client trains its
    group's prototype; the mean of a group's models is the student, the ensemble of all groups' models the teacher.
    After the last round all connected clients fine-tune their group's prototype, also those that were not drawn in
    it, and keep the result; they send only metrics.

    A group from which no model with finite outputs arrived keeps its prototype. If no round had a reply, nothing is
    fine-tuned.

    Parameters
    ----------
    config : PFedDFConfig, optional
        The hyper-parameters.
    models : sequence of (nn.Module or (extractor, head))
        One per architecture, at least one; logits ``[B, C]``, with the same C. The prototypes start from their
        weights. Models whose arrays have the same names and shapes are one group, which starts from the first.
    public_set, device, input_key, **options
        See :class:`flwr_kd.distillation.server.DistillingStrategy`.

    Attributes
    ----------
    prototypes : list of dict
        By group, in the order of ``models``, the prototype's arrays by name.

    Raises
    ------
    ConfigError, DatasetError
        If an option or a hyper-parameter is not allowed, or a model does not take the public data.
    """

    config_class = PFedDFConfig
    phases = ("train", "finetune")
    independent_phases = frozenset({"finetune"})
    averages_knowledge = True
    reply_metrics = frozenset({"finetune-loss"})
    sends_weights = False
    reply_arrays = frozenset({"train"})

    def __init__(
        self,
        config: PFedDFConfig | None = None,
        *,
        models: Sequence[nn.Module | tuple[nn.Module, nn.Module]],
        public_set: Dataset[Any] | DataLoader[Any],
        device: str | torch.device = "auto",
        input_key: str | Sequence[str] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(config, **options)
        if not isinstance(models, Sequence) or not models:
            got = "none" if isinstance(models, Sequence) else type(models).__name__
            raise ConfigError(f"models must be a list with a model per architecture, got {got}")
        self.distillers: list[ServerDistiller] = []
        self.templates: list[ArrayTemplate] = []
        self._given: list[dict[str, NDArray]] = []
        for number, model in enumerate(models):
            called = f"models[{number}]"
            if number:
                distiller = self.distillers[0].beside(model, called)
            else:
                distiller = ServerDistiller(
                    model, public_set, device=device, input_key=input_key, called=called
                )
            self._add_group(distiller)
        self.num_classes = self.distillers[0].num_classes
        self.prototypes: list[dict[str, NDArray]] = []
        self._receivers: set[int] = set()
        self.reset()

    def _add_group(self, distiller: ServerDistiller) -> None:
        """Add a model's group, unless there is one of its architecture."""
        called = distiller.called
        try:
            weights = get_weights(distiller.model)
        except (TypeError, RuntimeError) as error:  # A dtype that NumPy does not have, such as bfloat16.
            raise ConfigError(f"{called} must have weights of numpy's types: {error}") from None
        template = ArrayTemplate.of_ndarrays(weights)
        if not template.names:
            raise ConfigError(f"{called} has no weights")
        first = self.distillers[0] if self.distillers else distiller
        if distiller.num_classes != first.num_classes:
            raise ConfigError(
                f"models must have one number of classes, got {first.num_classes} ({first.called}) and "
                f"{distiller.num_classes} ({called})"
            )
        if self._group_of(template) is None:
            self.distillers.append(distiller)
            self.templates.append(template)
            self._given.append(weights)

    def _group_of(self, template: ArrayTemplate) -> int | None:
        """Return the group whose arrays have these names and shapes; None if there is none."""
        matches = (g for g, mine in enumerate(self.templates) if mine.difference(template) is None)
        return next(matches, None)

    def _group(self, node: Node) -> int:
        group = self._group_of(node.template)
        assert group is not None, "accept_node refuses nodes of other architectures"
        return group

    # ------------------------------------------------------------------ clients

    def accept_node(self, node: Node) -> str | None:
        """Refuse a client with another number of classes, or of an architecture without a prototype."""
        if node.num_classes != self.num_classes:
            return f"{node.num_classes} classes, expected {self.num_classes}"
        if self._group_of(node.template) is not None:
            return None
        nearest = min(range(len(self.templates)), key=lambda g: _distance(self.templates[g], node.template))
        difference = self.templates[nearest].difference(node.template)
        return f"its model is none of models, the nearest is {self.distillers[nearest].called}: {difference}"

    def template_of(self, node: Node) -> ArrayTemplate:
        """Return the template of the client's group."""
        return self.templates[self._group(node)]

    def select(self, phase: str, server_round: int, nodes: list[Node], answered: list[Node]) -> list[Node]:
        """Draw clients for training; all connected ones fine-tune, after the last round only."""
        if phase == "finetune":
            return nodes if server_round == self.num_rounds and self._trained else []
        return super().select(phase, server_round, nodes, answered)

    def configure_phase(
        self, phase: str, server_round: int, nodes: list[Node], arrays: ArrayRecord | None
    ) -> Iterable[Outgoing]:
        """Send each client its group's prototype."""
        self._receivers = {self._group(node) for node in nodes}
        return self._prototypes_for(nodes)

    def configure_measurement(self, nodes: list[Node], arrays: ArrayRecord) -> Iterable[Outgoing]:
        """Send each client its group's prototype."""
        return self._prototypes_for(nodes)

    def _prototypes_for(self, nodes: list[Node]) -> list[Outgoing]:
        groups = {self._group(node) for node in nodes}
        records = {g: self.templates[g].record(list(self.prototypes[g].values())) for g in groups}
        return [Outgoing(node, records[self._group(node)]) for node in nodes]

    # ------------------------------------------------------------------ prototypes

    def aggregate_phase(
        self, phase: str, server_round: int, replies: Iterable[Reply], arrays: ArrayRecord | None
    ) -> ArrayRecord | None:
        """Average each group's models, weighted by sample counts, and distil the ensemble of all into each mean."""
        if phase != "train":
            return None
        members: dict[int, list[Reply]] = {}
        for reply in replies:
            members.setdefault(self._group(reply.node), []).append(reply)
        how = Distillation.in_round(
            self.config,
            server_round,
            epochs=self.config.server_epochs,
            seed=derive_seed(self.seed, "server", server_round),
            matching=by_rule(soft_labels(self.config.average), self.knowledge_aggregation),
            cores=self.cores,
            steps_before=self.current_run.steps.taken,
        )
        planned = len(members) * how.planned_steps(len(self.distillers[0].samples))
        self.current_run.steps.add(self.config, planned)
        groups = [
            teachers_of(self.config, self.distillers[g], self.templates[g], members[g])
            for g in sorted(members)
        ]
        groups = [
            group._replace(average=self.averaging(list(self.prototypes[g].values())))
            for g, group in zip(sorted(members), groups, strict=True)
        ]
        distilled = distil_groups(groups, how, server_round=server_round)
        for g, arrays_of_group in zip(sorted(members), distilled, strict=True):
            if arrays_of_group is not None:
                self._receivers.discard(g)
                self.prototypes[g] = dict(zip(self.templates[g].names, arrays_of_group, strict=True))
        for g in sorted(self._receivers):
            text = "round %d: no usable model arrived for %s; its prototype does not change"
            log(WARNING, text, server_round, self.distillers[g].called)
        self._trained = True
        return None

    # ------------------------------------------------------------------ state

    def held_parameters(self) -> int:
        """Return the parameters of the prototypes."""
        return sum(count_parameters(distiller.model) for distiller in self.distillers)

    def state_arrays(self) -> dict[str, NDArray]:
        """Return the prototypes as ``prototypes/<group>/<array>``; nothing before the first replies."""
        if not self._trained:
            return {}
        groups = {
            key: value
            for g, prototype in enumerate(self.prototypes)
            for key, value in with_prefix(str(g), prototype).items()
        }
        return with_prefix(_STATE, groups)

    def reset(self) -> None:
        """Start anew from the given models' weights."""
        self._use(self._given)
        self._trained = False

    def load_state_arrays(self, state: Mapping[str, NDArray]) -> None:
        """Restore the prototypes.

        Raises
        ------
        ValueError
            If a name is not that of a prototype's array.
        ConfigError
            If the prototypes are not those of the given models, in their order.
        """
        self.reset()
        if state:
            self._use(self._prototypes_in(state))
            self._trained = True

    def _use(self, sources: Sequence[Mapping[str, NDArray]]) -> None:
        self.prototypes = [
            {name: source[name].copy() for name in template.names}
            for template, source in zip(self.templates, sources, strict=True)
        ]

    def _prototypes_in(self, state: Mapping[str, NDArray]) -> list[dict[str, NDArray]]:
        """Return a checkpoint's prototypes by group; see :meth:`load_state_arrays` for errors."""
        count = len(self.templates)
        groups = by_prefix(by_prefix(state).get(_STATE, {}))
        allowed = tuple(f"{_STATE}/{g}/" for g in range(count))
        if unknown := [name for name in state if not name.startswith(allowed)]:
            raise ValueError(
                f"{type(self).__name__} has prototypes of {count} groups as state, got {unknown[0]!r}"
            )
        prototypes = [groups.get(str(g), {}) for g in range(count)]
        for g, (template, prototype) in enumerate(zip(self.templates, prototypes, strict=True)):
            difference = template.difference(ArrayTemplate.of_ndarrays(prototype))
            if difference is not None:
                raise ConfigError(
                    f"the checkpoint's prototype {g} is not of {self.distillers[g].called}: {difference}"
                )
        return prototypes


def _distance(one: ArrayTemplate, other: ArrayTemplate) -> tuple[int, int]:
    """Return the number of arrays that only one of two models has, and of those with different shapes."""
    first, second = (dict(zip(model.names, model.shapes, strict=True)) for model in (one, other))
    different = sum(first[name] != second[name] for name in first.keys() & second.keys())
    return len(first.keys() ^ second.keys()), different
