"""DaFKD's client half: training beside a discriminator of the client's own, and a generator that travels."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Generic

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flwr_kd.checks import ConfigError
from flwr_kd.client.client import KDClient, Objective
from flwr_kd.client.task import Answer, Task
from flwr_kd.inputs import one_tensor
from flwr_kd.learning.loop import BatchNorms, batchnorm_frozen, make_optimizer
from flwr_kd.learning.weights import get_weights, load_weights, size_of
from flwr_kd.models import ConditionalGenerator, build_generator, count_parameters
from flwr_kd.registry import needs_one_tensor
from flwr_kd.seeding import derive_seed
from flwr_kd.transport import flower_records
from flwr_kd.transport.payload import Payload, PayloadError
from flwr_kd.transport.template import ArrayTemplate

from .config import DaFKDConfig, DaFKDConfigT
from .functional import (
    build_discriminator,
    discriminator_loss,
    gradient_penalty,
    sample_noise,
)
from .messages import SCORE, DiscriminatorScores, split

STATE = "discriminator"
"""Name of the set of tensors that the client keeps."""
_COUNTERS = ("participations", "trainings")


class DaFKDClient(KDClient[DaFKDConfigT], Generic[DaFKDConfigT]):
    """Trains on cross-entropy and, in its first participations, a discriminator and the generator.

    The discriminator stays at the client, as state. The server gets what it says of the round's generated samples.

    Parameters
    ----------
    model, train_set, test_set, **options
        See :class:`flwr_kd.KDClient`.

    Raises
    ------
    ConfigError
        If inputs are whole numbers, such as token ids, which a generator cannot make.
    """

    config_class = DaFKDConfig
    method: ClassVar[str] = "dafkd"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        example = one_tensor(self.train_batches.example(), partial(needs_one_tensor, self.method))
        if not example.is_floating_point():
            raise ConfigError(
                f"{self.method} generates inputs of floating point, got data of {example.dtype}: convert them in "
                "the data set, or use another method"
            )
        self._input_shape = tuple(example.shape[1:])
        self._generator: ConditionalGenerator | None = None
        self._first_generator: dict[str, npt.NDArray[Any]] = {}
        self._discriminator = build_discriminator(self.feature_shape, seed=0).to(self.device)
        self._counters = dict.fromkeys(_COUNTERS, 0)
        self._trains_discriminator = False

    # ------------------------------------------------------------------ what is sent and kept

    def load(self, task: Task[DaFKDConfigT]) -> None:
        """Load the global model and, where it was sent, the generator.

        Raises
        ------
        PayloadError
            If either does not fit.
        """
        names, model, generator = split(task.names, task.arrays)
        super().load(replace(task, names=names, arrays=model))
        if not generator:
            return
        self._generator = build_generator(
            self._input_shape, num_classes=0, latent_dim=task.config.noise_dim, seed=0
        ).to(self.device)
        template = ArrayTemplate.of_ndarrays(get_weights(self._generator))
        try:
            checked = template.check(generator)
        except PayloadError as error:
            raise PayloadError(f"the generator does not fit this client's samples: {error}") from None
        self._first_generator = dict(zip(template.names, checked, strict=True))
        load_weights(self._generator, self._first_generator)

    def arrays(self, names: Sequence[str]) -> list[npt.NDArray[Any]]:
        """Return the model's arrays in the server's order, and the generator's."""
        assert self._generator is not None
        own, _, _ = split(names, ())
        return [*super().arrays(own), *get_weights(self._generator).values()]

    def trained(self) -> nn.Module:
        """Return the model, with the discriminator while that is trained."""
        model = super().trained()
        return nn.ModuleList([model, self._discriminator]) if self._trains_discriminator else model

    def held_parameters(self, config: Any) -> int:
        """Return the parameters of the model, of the discriminator and of the generator."""
        generator = build_generator(self._input_shape, num_classes=0, latent_dim=config.noise_dim, seed=0)
        return sum(map(count_parameters, (self.model, self._discriminator, generator)))

    def kept_bytes(self) -> int:
        """Return the size of the discriminator and its counters."""
        return super().kept_bytes() + size_of(self._discriminator.state_dict()) + 8 * len(_COUNTERS)

    def keep(self) -> None:
        """Keep the discriminator, and count the participation."""
        super().keep()
        self._counters["participations"] += 1
        self._counters["trainings"] += self._trains_discriminator
        self._trains_discriminator = False
        counters = {name: torch.tensor(value) for name, value in self._counters.items()}
        self.state.save({**self._discriminator.state_dict(), **counters}, STATE)

    def _recall(self, task: Task[DaFKDConfigT]) -> None:
        """Load the discriminator that this client keeps; a new one, which only this client has, without one."""
        self._discriminator = build_discriminator(
            self.feature_shape, seed=derive_seed(task.client_seed, STATE)
        ).to(self.device)
        if self.dtype is not None:
            self._discriminator.to(self.dtype)
        self._counters = dict.fromkeys(_COUNTERS, 0)
        kept = self.kept(STATE)
        if kept is not None:
            self._counters = {name: int(kept.pop(name)) for name in _COUNTERS}
            self._discriminator.load_state_dict(kept)

    # ------------------------------------------------------------------ training

    def objective(self, task: Task[DaFKDConfigT]) -> Objective:
        """Return the loss of the method below, with the discriminator's terms and the generator's steps."""
        config, plain = task.config, super().objective(task)
        self._recall(task)
        epochs = min(config.adversarial_epochs, config.local_epochs)
        self._trains_discriminator = (
            epochs > 0 and self._counters["participations"] < config.discriminator_rounds
        )
        trains_generator = epochs > 0 and self._counters["participations"] < config.generator_rounds
        generator = self._generator
        if generator is None or not (self._trains_discriminator or trains_generator):
            return plain
        draw, batchnorms = task.generator("adversarial"), BatchNorms(self.model)
        optimizer = make_optimizer(generator, config, config.learning_rate_at(task.server_round))
        generator.train()

        def discriminate(x: Tensor) -> Tensor:
            # Each sample by itself, as the norm of its own gradient needs it.
            with batchnorms.frozen():
                return torch.sigmoid(self._discriminator(self.model.features(x)))

        def logits(x: Tensor) -> Tensor:
            # The running statistics are those of the data, and of one pass per batch.
            with batchnorms.statistics_kept():
                found: Tensor = self._discriminator(self.model.features(x))
            return found

        def adversarial(x: Tensor) -> Tensor:
            noise = torch.randn(len(x), config.noise_dim, generator=draw).to(self.device)
            with batchnorm_frozen(generator, when=len(x) == 1):
                made = generator(noise).to(x.dtype)
            if trains_generator:
                # Only the generator moves: the gradient of nothing else is kept.
                of_generator = F.softplus(-logits(made)).mean()
                parameters = [p for group in optimizer.param_groups for p in group["params"]]
                gradients = torch.autograd.grad(of_generator, parameters)
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    parameter.grad = gradient
                optimizer.step()
            if not self._trains_discriminator:
                return x.new_zeros(())
            fixed = made.detach()
            shares = torch.rand(len(x), generator=draw).to(self.device, x.dtype)
            penalty = gradient_penalty(discriminate, x, fixed, shares)
            return discriminator_loss(logits(x), logits(fixed)) + config.penalty_weight * penalty

        def loss(x: Tensor, y: Tensor) -> Tensor:
            total = plain(x, y)
            return total + adversarial(x) if self.local_epoch < epochs else total

        return loss

    # ------------------------------------------------------------------ scores

    def phase_score(self, task: Task[DaFKDConfigT]) -> Answer:
        """Score samples of the round's mean generator, by the model that this client has trained in the round."""
        self.load(task)
        self._recall(task)
        scores = DiscriminatorScores(self.scores(task))
        return Answer(payload=scores, num_examples=len(self.train_batches))

    def knowledge(self, task: Task[DaFKDConfigT]) -> Payload:
        """Return the discriminator's scores."""
        return DiscriminatorScores(self.scores(task))

    @torch.no_grad()
    def scores(self, task: Task[DaFKDConfigT]) -> npt.NDArray[np.float32]:
        """Return D(x) ``[Q]`` on samples of the generator that this message brought, by the trained trunk.

        Empty if the discriminator was never trained, or samples are scored in a later phase.
        """
        later = task.config.scores_later and task.phase != SCORE
        if later or not self._counters["trainings"] or self._generator is None:
            return np.zeros(0, np.float32)
        config, generator = task.config, copy.deepcopy(self._generator).eval()
        load_weights(generator, self._first_generator)
        self.model.eval()
        seed = int(task.extra.get(flower_records.SEED, 0))
        noise = sample_noise(seed, task.server_round, count=config.server_samples, size=config.noise_dim)
        parts = []
        for chunk in torch.split(noise, config.batch_size):
            x = self.to_device(generator(chunk.to(self.device)))
            features = self.model.features(x if self.dtype is None else x.to(self.dtype))
            parts.append(torch.sigmoid(self._discriminator(features)).float().cpu())
        return torch.cat(parts).numpy()
