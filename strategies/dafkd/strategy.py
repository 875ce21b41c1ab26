"""DaFKD's server half: the mean of models and generators, distilled from an ensemble weighted by sample."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from logging import INFO, WARNING
from typing import Any, ClassVar, Generic

import numpy as np
import torch
from flwr.app import ArrayRecord
from flwr.common.logger import log
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from typing_extensions import TypeVar

from flwr_kd.checks import ConfigError
from flwr_kd.distillation.config import DistillationConfig
from flwr_kd.distillation.samples import batches_on
from flwr_kd.distillation.server import ServerDistiller
from flwr_kd.distillation.student import Distillation, distil_student, mean_without
from flwr_kd.distillation.teachers import Matching, ensemble_means
from flwr_kd.learning.weights import by_prefix, get_weights, load_weights, with_prefix
from flwr_kd.models import build_generator, count_parameters
from flwr_kd.registry import needs_one_tensor
from flwr_kd.seeding import derive_seed, forked_global_rng
from flwr_kd.server.records import NDArray, Node, Outgoing, Reply
from flwr_kd.server.strategy import KDStrategy
from flwr_kd.transport.payload import Payload
from flwr_kd.transport.template import ArrayTemplate

from .config import DaFKDConfig, DaFKDConfigT
from .functional import distillation_loss, domain_weights, sample_noise, teacher_logits
from .messages import PREFIX, SCORE, DiscriminatorScores, check_number_of_scores

_STATE = "generator"
ScoresT = TypeVar("ScoresT", bound=Payload, default=DiscriminatorScores, covariant=True)
"""A payload with scores."""


class DaFKD(KDStrategy[DaFKDConfigT, ScoresT], Generic[DaFKDConfigT, ScoresT]):
    """DaFKD (Wang et al., CVPR 2023): the averaged model is distilled on generated samples.

    Clients train a generator together, which is averaged as the model is. From the second round on the clients'
    models teach their mean on what it generates. A teacher's weight for a sample is what its own client's
    discriminator says of it. With ``scored_generator="round-mean"`` that is a second phase, with the generator that
    the round has trained. If no client replies to it, the round's result is the mean.

    Parameters
    ----------
    config : DaFKDConfig, optional
        The hyper-parameters.
    model : nn.Module or (extractor, head)
        Of the architecture of ``initial_arrays``; logits ``[B, C]``.
    input_shape : sequence of int
        Shape of one sample, of float32.
    device : str or torch.device
        Where the server distils; ``"auto"``: CUDA, else MPS, else CPU.
    **options
        See :class:`flwr_kd.KDStrategy`.

    Attributes
    ----------
    generator_arrays : list of ndarray
        The mean of the clients' generators.

    Raises
    ------
    ConfigError
        If an option or a hyper-parameter is not allowed, or the model does not take inputs of this shape, such as a
        model of token ids.
    """

    config_class = DaFKDConfig
    method: ClassVar[str] = "dafkd"
    reply_payloads: ClassVar[Mapping[str, type[Payload]]] = {
        "train": DiscriminatorScores,
        SCORE: DiscriminatorScores,
    }
    averages = False
    averages_knowledge = True

    def __init__(
        self,
        config: DaFKDConfigT | None = None,
        *,
        model: nn.Module | tuple[nn.Module, nn.Module],
        input_shape: Sequence[int],
        device: str | torch.device = "auto",
        **options: Any,
    ) -> None:
        super().__init__(config, **options)
        if self.config.scores_later:
            self.phases = (*self.phases, SCORE)
        try:
            shape = tuple(operator.index(size) for size in input_shape)
            empty = torch.zeros(1, *shape)
            self.generator = build_generator(
                shape,
                num_classes=0,
                latent_dim=self.config.noise_dim,
                seed=derive_seed(self.seed, "generator"),
            )
        except (TypeError, RuntimeError, ValueError):
            raise ConfigError(f"input_shape must be the sizes of a sample, got {input_shape!r}") from None
        # This first set only checks whether the model takes the shape; each round makes its own.
        self.distiller = ServerDistiller(
            model,
            TensorDataset(empty),
            device=device,
            what="samples of its own (float32)",
            hint=lambda: needs_one_tensor(self.method),
        )
        self.generator.to(self.distiller.device).eval()
        self._first = get_weights(self.generator)
        self._generator_template = ArrayTemplate.of_ndarrays(with_prefix(_STATE, self._first))
        assert all(name.startswith(PREFIX) for name in self._generator_template.names)
        self.generator_arrays, self._seen = list(self._first.values()), False
        self._unscored: dict[int, Reply[ScoresT]] = {}

    # ------------------------------------------------------------------ clients

    def begin(self, nodes: list[Node]) -> None:
        """Refuse a server's model of another architecture than the clients'."""
        self.distiller.check(self.template)
        super().begin(nodes)

    def template_of(self, node: Node) -> ArrayTemplate:
        """Return names and shapes of the model's arrays and, behind them, of the generator's."""
        model, generator = self.template, self._generator_template
        return ArrayTemplate(
            (*model.names, *generator.names),
            (*model.dtypes, *generator.dtypes),
            (*model.shapes, *generator.shapes),
            model.constants,
            model.not_finite,
        )

    def with_generator(self, arrays: ArrayRecord | None) -> ArrayRecord:
        """Return the global arrays and the generator's."""
        return ArrayRecord(
            {**dict(arrays or {}), **dict(self._generator_template.record(self.generator_arrays))}
        )

    def select(self, phase: str, server_round: int, nodes: list[Node], answered: list[Node]) -> list[Node]:
        """Return the clients that are drawn for the training; for the scores, those whose models wait for them."""
        if phase == SCORE:
            return [node for node in answered if node.key in self._unscored]
        return super().select(phase, server_round, nodes, answered)

    def configure_phase(
        self, phase: str, server_round: int, nodes: list[Node], arrays: ArrayRecord | None
    ) -> Iterable[Outgoing]:
        """Send all clients the global model and the generator; for the scores, each its own trained model."""
        if phase == SCORE:
            models = (self.template.record(self._model_of(self._unscored[node.key])) for node in nodes)
            return [
                Outgoing(node, self.with_generator(model)) for node, model in zip(nodes, models, strict=True)
            ]
        return super().configure_phase(phase, server_round, nodes, self.with_generator(arrays))

    def payload_limit(self, phase: str, node: Node) -> int:
        """Return the size of a payload with a score for each sample."""
        dims = {**self.payload_dims(phase, node), "Q": self.config.server_samples}
        needed = self.reply_payloads[phase].max_nbytes(dims, others=node.num_classes)
        assert needed is not None
        return min(needed, self.max_payload_bytes)

    def check_reply(self, phase: str, reply: Reply[ScoresT]) -> None:
        """Refuse another number of scores than of samples."""
        super().check_reply(phase, reply)
        check_number_of_scores(_scores_of(reply), self.config.server_samples)

    # ------------------------------------------------------------------ aggregation

    def aggregate_phase(
        self, phase: str, server_round: int, replies: Iterable[Reply[ScoresT]], arrays: ArrayRecord | None
    ) -> ArrayRecord | None:
        """Average models and generators by sample counts, and distil the models' ensemble into their mean."""
        received = list(replies)
        if phase == SCORE:
            return self._scored(received, server_round)
        weights, size = [reply.num_examples for reply in received], len(self.template.names)
        models = [reply.arrays[:size] for reply in received]
        generator = self.averaging(self.generator_arrays)(
            [reply.arrays[size:] for reply in received], weights
        )
        later, mean = self.config.scores_later, None
        # The first round's generator is untrained.
        if self._seen and later:
            self._unscored = {reply.node.key: reply for reply in received}
        elif self._seen:
            mean = self._distilled(received, server_round)
        self.generator_arrays, self._seen = generator, True
        return self.template.record(self.averaging()(models, weights) if mean is None else mean)

    def finish_round(self, server_round: int, arrays: ArrayRecord | None) -> ArrayRecord | None:
        """Drop the clients' models, with a warning if no scores came for them."""
        if self._unscored:
            log(WARNING, "round %d: no client scored the samples, and nothing is distilled", server_round)
        self._unscored = {}
        return super().finish_round(server_round, arrays)

    def _model_of(self, reply: Reply[ScoresT]) -> list[NDArray]:
        """Return a client's model, without the generator behind it."""
        return reply.arrays[: len(self.template.names)]

    def _scored(self, scored: Sequence[Reply[ScoresT]], server_round: int) -> ArrayRecord | None:
        """Distil the round's models with the scores that came for them; one without has not been scored."""
        payloads = {reply.node.key: reply.payload for reply in scored}
        # What came with the training has no scores.
        waiting = [
            replace(reply, payload=payloads.get(key, reply.payload)) for key, reply in self._unscored.items()
        ]
        self._unscored = {}
        mean = self._distilled(waiting, server_round)
        return None if mean is None else self.template.record(mean)

    def samples(self, server_round: int) -> Tensor:
        """Return a round's samples ``[Q, ...]``, of :attr:`generator_arrays` as they are, on the CPU."""
        config, device = self.config, self.distiller.device
        load_weights(self.generator, dict(zip(self._first, self.generator_arrays, strict=True)))
        noise = sample_noise(self.seed, server_round, count=config.server_samples, size=config.noise_dim)
        with torch.no_grad():
            return torch.cat(
                [self.generator(part.to(device)).cpu() for part in torch.split(noise, config.batch_size)]
            )

    def _distilled(self, replies: Sequence[Reply[ScoresT]], server_round: int) -> list[NDArray] | None:
        """Return the mean after distillation; None, with a warning, where that would not be finite."""
        distiller = self.distiller
        seed = derive_seed(self.seed, "server", server_round)
        try:
            samples = self.samples(server_round)
            if not bool(torch.isfinite(samples).all()):
                raise FloatingPointError("the generator's samples are not finite")
            distiller.use(TensorDataset(samples))
            with forked_global_rng(seed, distiller.model, distiller.device):
                return self._distil(replies, server_round, seed)
        except FloatingPointError as error:
            log(WARNING, "round %d: the server's distillation is left out: %s", server_round, error)
            return None

    def _distil(self, replies: Sequence[Reply[ScoresT]], server_round: int, seed: int) -> list[NDArray]:
        config, distiller, names = self.config, self.distiller, self.template.names
        models = [self._model_of(reply) for reply in replies]
        matching = domain_matching(config.server_temperature)
        # Of its own config: one pass over the batches, by Adam without weight decay, and nothing held out.
        how = Distillation(
            DistillationConfig(
                batch_size=config.batch_size,
                validation_share=0.0,
                weight_decay=0.0,
                distill_batchnorm=config.distill_batchnorm,
            ),
            epochs=1,
            learning_rate=config.server_learning_rate,
            seed=seed,
            matching=matching,
        )
        inputs = batches_on(distiller.samples, how.config, distiller.device)
        logits, usable = [], []
        for k, model in enumerate(models):
            named = dict(zip(names, model, strict=True))
            try:
                (own,), _ = ensemble_means(distiller.model, [named], [1.0], inputs, matching)
            except FloatingPointError:
                text = "round %d: the model of %s has outputs that are not finite, and is left out"
                log(WARNING, text, server_round, replies[k].node)
                continue
            logits.append(own)
            usable.append(k)
        if not usable:
            raise FloatingPointError("no teacher has finite outputs")
        scores = [torch.tensor(_scores_of(replies[k])) for k in usable]
        targets = teacher_logits(logits, domain_weights(scores, len(distiller.samples)), self.knowledge_rule)
        left_out = [k for k in range(len(models)) if k not in usable]
        mean = mean_without(models, [reply.num_examples for reply in replies], left_out, self.averaging())
        student = dict(zip(names, mean, strict=True))
        done = distil_student(distiller.model, student, (targets,), distiller.samples, how, distiller.device)
        log(INFO, "distilled on %d generated samples, loss %.4f", len(distiller.samples), done.loss)
        weights = get_weights(distiller.model)
        return self.template.check([weights[name] for name in names])

    # ------------------------------------------------------------------ state

    def held_parameters(self) -> int:
        """Return the parameters of the global model and of the generator."""
        return super().held_parameters() + count_parameters(self.generator)

    def state_arrays(self) -> dict[str, NDArray]:
        """Return the generator; nothing before the first replies."""
        if not self._seen:
            return {}
        named = zip(self._first, self.generator_arrays, strict=True)
        return with_prefix(_STATE, {name: value.copy() for name, value in named})

    def reset(self) -> None:
        """Start anew with an untrained generator."""
        self.generator_arrays, self._seen = list(self._first.values()), False
        self._unscored = {}

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
        arrays = by_prefix(state).get(_STATE, {})
        difference = ArrayTemplate.of_ndarrays(self._first).difference(ArrayTemplate.of_ndarrays(arrays))
        if difference is not None or len(arrays) != len(state):
            raise ValueError(f"the state is not this generator's: {difference or sorted(state)}")
        self.generator_arrays, self._seen = [arrays[name] for name in self._first], True


def _scores_of(reply: Reply[Any]) -> NDArray:
    scores: NDArray = np.asarray(reply.payload.scores)
    return scores


def domain_matching(temperature: float) -> Matching:
    """Return the matching of logits by :func:`distillation_loss`; the student is in training mode."""

    def loss(targets: tuple[Tensor, ...], outputs: tuple[Tensor, ...]) -> Tensor:
        return distillation_loss(targets[0], outputs[0], temperature)

    return Matching(lambda model, x: (model(x),), loss)
