"""FedGen's server half: the mean of the models, and a generator that is trained against every client's head."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from logging import INFO, WARNING
from typing import Any, ClassVar, NamedTuple

import torch
from flwr.app import ArrayRecord
from flwr.common.logger import log
from torch import Tensor, nn
from torch.func import functional_call

from flwr_kd.checks import ConfigError
from flwr_kd.learning.device import resolve_device
from flwr_kd.learning.weights import by_prefix, get_weights, with_prefix
from flwr_kd.models import count_parameters
from flwr_kd.models.feature import find_head
from flwr_kd.models.given import floating_dtype
from flwr_kd.seeding import derive_seed, torch_generator
from flwr_kd.server.given_model import own_copy
from flwr_kd.server.records import NDArray, Node, Outgoing, Reply
from flwr_kd.server.strategy import KDStrategy
from flwr_kd.server.trained_module import TrainedModule
from flwr_kd.transport.payload import LIMIT, Payload, PayloadError
from flwr_kd.transport.template import ArrayTemplate

from .config import FedGenConfig
from .functional import (
    FeatureGenerator,
    build_feature_generator,
    diversity_loss,
    ensemble_loss,
    label_weights,
)
from .messages import LabelCounts, pack

_GENERATOR, _LABELS, _HEAD = "generator", "labels", "head"


class Teacher(NamedTuple):
    """A client's head, as arrays by the head's own names, and its number of samples of each class ``[C]``."""

    name: str
    head: Mapping[str, NDArray]
    counts: Tensor


class FedGen(KDStrategy[FedGenConfig, LabelCounts]):
    """FedGen (Zhu et al., ICML 2021): weights are averaged, and a generator of features guides the clients.

    In each round, before the models are averaged, the generator is trained against the heads that the round's
    clients have sent, each weighted by its share of a class. Clients have it from the next round on.

    Parameters
    ----------
    config : FedGenConfig, optional
        The hyper-parameters.
    model : nn.Module or (extractor, head)
        Of the architecture of ``initial_arrays``; only its structure matters.
    device : str or torch.device
        Where the generator is trained; ``"auto"``: CUDA, else MPS, else CPU.
    **options
        See :class:`flwr_kd.KDStrategy`.

    Attributes
    ----------
    trained : TrainedModule
        The generator with its optimiser.
    labels : Tensor
        ``[C]``, bool: the classes of which any client has reported samples.

    Raises
    ------
    ConfigError
        If an option or a hyper-parameter is not allowed, or the model has no head that is a module.
    """

    config_class = FedGenConfig
    reply_payloads: ClassVar[Mapping[str, type[Payload]]] = {"train": LabelCounts}
    averages = False

    def __init__(
        self,
        config: FedGenConfig | None = None,
        *,
        model: nn.Module | tuple[nn.Module, nn.Module],
        device: str | torch.device = "auto",
        **options: Any,
    ) -> None:
        super().__init__(config, **options)
        self.device = resolve_device(device)
        self._model: Any = own_copy(model, self.device)
        self._model.eval().requires_grad_(False)
        head = find_head(self._model)
        if head is None:
            raise ConfigError(
                f"model must have a head, a module, which {type(self._model).__name__} has not: give a pair "
                "(extractor, head)"
            )
        self.head = head
        self._dtype = floating_dtype(head) or torch.float32
        shape = getattr(self._model, "feature_shape", None) or (self._model.feature_dim,)
        self.num_classes: int = self._model.num_classes
        generator = build_feature_generator(
            shape,
            num_classes=self.num_classes,
            hidden=self.config.generator_hidden,
            seed=derive_seed(self.seed, "feature-generator"),
        )
        self.trained = TrainedModule(
            generator.to(self.device), self._make_optimizer, seed=self.seed, purpose=_GENERATOR
        )
        own = {id(tensor): name for name, tensor in head.state_dict(keep_vars=True).items()}
        whole = self._model.state_dict(keep_vars=True)
        self._head_names = {name: own[id(value)] for name, value in whole.items() if id(value) in own}
        self.labels, self._seen = torch.zeros(self.num_classes, dtype=torch.bool), False

    def _make_optimizer(self, generator: FeatureGenerator) -> torch.optim.Optimizer:
        config = self.config
        return torch.optim.Adam(
            generator.parameters(),
            lr=config.generator_learning_rate,
            weight_decay=config.generator_weight_decay,
        )

    # ------------------------------------------------------------------ clients

    def begin(self, nodes: list[Node]) -> None:
        """Refuse a model of another architecture than the clients'."""
        difference = self.template.difference(ArrayTemplate.of_ndarrays(get_weights(self._model)))
        if difference is not None:
            raise ConfigError(f"model is not what initial_arrays are of: {difference}")
        super().begin(nodes)

    def accept_node(self, node: Node) -> str | None:
        """Refuse a client whose model, number of classes or number of features differs from the server's."""
        refusal, features = super().accept_node(node), self.trained.module.noise_dim
        if refusal is None and (node.num_classes, node.feature_dim) != (self.num_classes, features):
            return (
                f"{node.num_classes} classes and {node.feature_dim} features, expected {self.num_classes} and "
                f"{features}"
            )
        return refusal

    def configure_phase(
        self, phase: str, server_round: int, nodes: list[Node], arrays: ArrayRecord | None
    ) -> Iterable[Outgoing]:
        """Send all clients the global weights and, once it was trained, the generator."""
        payload = pack(self.trained.module, self.labels) if bool(self.labels.any()) else None
        return [Outgoing(node, arrays, payload) for node in nodes]

    def check_reply(self, phase: str, reply: Reply[LabelCounts]) -> None:
        """Refuse counts of more samples than the client reported."""
        total = sum(reply.payload.counts.tolist())
        if total > reply.num_examples:
            raise PayloadError(f"counts of {total} samples from a client with {reply.num_examples}")

    # ------------------------------------------------------------------ the generator

    def aggregate_phase(
        self,
        phase: str,
        server_round: int,
        replies: Iterable[Reply[LabelCounts]],
        arrays: ArrayRecord | None,
    ) -> ArrayRecord | None:
        """Average the weights by sample counts, and train the generator against the clients' own heads."""
        teachers: list[Teacher] = []

        def keeping_heads() -> Iterator[Reply[LabelCounts]]:
            for reply in replies:
                counts = torch.tensor(reply.payload.counts).clamp(max=self.max_examples)
                teachers.append(Teacher(str(reply.node), self.head_in(reply.arrays), counts))
                yield reply
                # Drop the reference, so that only one reply is in memory, and of the others the head.
                del reply

        mean = self.averaged(keeping_heads())
        self._train_generator(teachers, server_round)
        self._seen = True
        return mean

    def averaged(self, replies: Iterable[Reply[LabelCounts]]) -> ArrayRecord | None:
        """Return the new global arrays; replies are gone through once."""
        return super().aggregate_phase("train", 0, replies, None)

    def head_in(self, arrays: Sequence[NDArray]) -> dict[str, NDArray]:
        """Return the head's arrays of a client's model, by the names that they have in the head."""
        names = self._head_names
        named = zip(self.template.names, arrays, strict=True)
        return {names[name]: value for name, value in named if name in names}

    def _train_generator(self, teachers: Sequence[Teacher], server_round: int) -> None:
        """Take a round's steps; a generator or an optimiser that would no longer be finite stays as it was."""
        held = torch.stack([teacher.counts for teacher in teachers]).sum(dim=0) > 0
        if not bool(held.any()):
            log(WARNING, "round %d: no client has samples; the generator does not change", server_round)
            return
        before = self.trained.state_arrays()
        try:
            loss = self._steps(teachers, torch.nonzero(held).flatten(), server_round)
            self.trained.check_finite("the generator's weights", option="generator-learning-rate")
            log(INFO, "trained the generator for %d steps, loss %.4f", self.config.generator_epochs, loss)
        except FloatingPointError as error:
            log(WARNING, "round %d: the generator does not change: %s", server_round, error)
            self.trained.load_state_arrays(before)
        self.trained.scale_rates(self.config.generator_lr_decay)
        self.labels = self.labels | held

    def _steps(self, teachers: Sequence[Teacher], held: Tensor, server_round: int) -> float:
        """Train the generator on labels that the round's clients hold, ``held`` ``[K]``; return the last loss."""
        config, generator = self.config, self.trained.module
        draw = torch_generator(self.seed, "generated-features", server_round)
        heads = [self._on_device(teacher.head) for teacher in teachers]
        usable = list(range(len(teachers)))
        value = torch.zeros(())
        for _ in range(config.generator_epochs):
            labels = held[torch.randint(len(held), (config.generator_batch,), generator=draw)]
            noise = torch.randn(config.generator_batch, generator.noise_dim, generator=draw).to(self.device)
            generator.train()
            features = generator(noise, labels.to(self.device))
            logits = [functional_call(self.head, heads[u], (features.to(self._dtype),)) for u in usable]
            # False for NaN as well. A larger finite output would spoil the moments of the optimiser.
            finite = torch.stack([each.detach().abs().max() <= LIMIT for each in logits]).tolist()
            for u, fine in zip(usable, finite, strict=True):
                if not fine:
                    text = "round %d: the head of %s has outputs beyond ±%g, and does not teach"
                    log(WARNING, text, server_round, teachers[u].name, LIMIT)
            logits = [each for each, fine in zip(logits, finite, strict=True) if fine]
            usable = [u for u, fine in zip(usable, finite, strict=True) if fine]
            if not usable:
                raise FloatingPointError("no head has usable outputs")
            weights = label_weights(torch.stack([teachers[u].counts for u in usable]), labels)
            value = config.ensemble_weight * ensemble_loss(
                logits, labels.to(self.device), weights.to(self.device)
            ) + config.diversity_weight * diversity_loss(noise, features)
            self.trained.optimizer.zero_grad(set_to_none=True)
            value.backward()  # type: ignore[no-untyped-call]
            self.trained.optimizer.step()
        generator.eval()
        loss = value.item()
        if not math.isfinite(loss):
            raise FloatingPointError(f"the loss is {loss}")
        return loss

    def _on_device(self, head: Mapping[str, NDArray]) -> dict[str, Tensor]:
        return {name: torch.tensor(value).to(self.device) for name, value in head.items()}

    # ------------------------------------------------------------------ state

    def held_parameters(self) -> int:
        """Return the parameters of the global model, if there is one, and of the generator."""
        return super().held_parameters() + count_parameters(self.trained.module)

    def state_arrays(self) -> dict[str, NDArray]:
        """Return the generator with its optimiser, and the known labels; nothing before the first replies."""
        if not self._seen:
            return {}
        return {
            **with_prefix(_GENERATOR, self.trained.state_arrays()),
            _LABELS: self.labels.numpy().copy(),
        }

    def reset(self) -> None:
        """Start anew with an untrained generator."""
        self.trained.reset()
        self.labels, self._seen = torch.zeros(self.num_classes, dtype=torch.bool), False

    def load_state_arrays(self, state: Mapping[str, NDArray]) -> None:
        """Restore the generator.

        Raises
        ------
        ValueError
            If the state is not that of such a generator.
        """
        self.reset()
        if not state:
            return
        parts = by_prefix(state)
        if {*parts} != {_GENERATOR, _LABELS} or state[_LABELS].shape != (self.num_classes,):
            raise ValueError(
                f"{type(self).__name__} has a generator and labels as state, got {sorted(parts)}"
            )
        self.trained.load_state_arrays(parts[_GENERATOR])
        self.labels, self._seen = torch.tensor(state[_LABELS]).bool(), True


class FedGenHead(FedGen):
    """FedGen of which only the heads travel: extractors stay at the clients, and may differ.

    There is no global model. ``initial_arrays`` may be empty and are not sent. The first head is that of ``model``.

    Parameters
    ----------
    config : FedGenConfig, optional
        The hyper-parameters.
    model : nn.Module or (extractor, head)
        Has a head like the clients'; its extractor does not matter.
    device, **options
        See :class:`FedGen`.

    Attributes
    ----------
    head_arrays : list of ndarray
        The mean of the clients' heads.

    Raises
    ------
    ConfigError
        As of :class:`FedGen`.
    """

    sends_weights = False
    reply_arrays = frozenset({"train"})

    def __init__(
        self,
        config: FedGenConfig | None = None,
        *,
        model: nn.Module | tuple[nn.Module, nn.Module],
        device: str | torch.device = "auto",
        **options: Any,
    ) -> None:
        super().__init__(config, model=model, device=device, **options)
        self._first_head = get_weights(self.head)
        self._head_template = ArrayTemplate.of_ndarrays(self._first_head)
        self.head_arrays = list(self._first_head.values())

    def begin(self, nodes: list[Node]) -> None:
        """Begin; there are no initial arrays that the model could differ from."""

    def accept_node(self, node: Node) -> str | None:
        """Refuse a client with another number of classes or features, or without such a head."""
        refusal = super().accept_node(node)
        theirs = list(zip(node.template.names, node.template.shapes, strict=True))
        for name, shape in zip(self._head_template.names, self._head_template.shapes, strict=True):
            if refusal is None and not any(
                f".{other}".endswith(f".{name}") and size == shape for other, size in theirs
            ):
                return f"its model has no array {name!r} of shape {list(shape)}, as the server's head has"
        return refusal

    def template_of(self, node: Node) -> ArrayTemplate:
        """Return names and shapes of the head."""
        return self._head_template

    def configure_phase(
        self, phase: str, server_round: int, nodes: list[Node], arrays: ArrayRecord | None
    ) -> Iterable[Outgoing]:
        """Send all clients the mean head and, once it was trained, the generator."""
        return super().configure_phase(
            phase, server_round, nodes, self._head_template.record(self.head_arrays)
        )

    def head_in(self, arrays: Sequence[NDArray]) -> dict[str, NDArray]:
        """Return a client's arrays by name: they are the head's."""
        return dict(zip(self._head_template.names, arrays, strict=True))

    def averaged(self, replies: Iterable[Reply[LabelCounts]]) -> ArrayRecord | None:
        """Average the heads by sample counts; there are no global arrays."""
        mean = self.new_mean(self.head_arrays)
        for reply in replies:
            mean.add(reply.arrays, reply.num_examples)
            del reply
        self.head_arrays = mean.result()
        return None

    def held_parameters(self) -> int:
        """Return the parameters of the head and of the generator."""
        return super().held_parameters() + count_parameters(self.head)

    def state_arrays(self) -> dict[str, NDArray]:
        """Return the generator and the mean head; nothing before the first replies."""
        state = super().state_arrays()
        heads = dict(zip(self._head_template.names, self.head_arrays, strict=True))
        return {**state, **with_prefix(_HEAD, heads)} if state else {}

    def reset(self) -> None:
        """Start anew with the head of ``model``."""
        super().reset()
        self.head_arrays = list(self._first_head.values())

    def load_state_arrays(self, state: Mapping[str, NDArray]) -> None:
        """Restore the generator and the mean head.

        Raises
        ------
        ValueError
            If the state is not that of such a generator and head.
        """
        head = by_prefix(state).get(_HEAD, {})
        others = {name: value for name, value in state.items() if not name.startswith(f"{_HEAD}/")}
        super().load_state_arrays(others)
        if not state:
            return
        if (difference := self._head_template.difference(ArrayTemplate.of_ndarrays(head))) is not None:
            raise ValueError(f"the checkpoint's head is not the model's: {difference}")
        self.head_arrays = [head[name] for name in self._head_template.names]
