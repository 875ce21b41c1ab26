"""FedHyb's server half: the models' mean, fine-tuned by distillation of their predictions and features."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from logging import INFO, WARNING
from typing import Any

import torch
from flwr.app import ArrayRecord
from flwr.common.logger import log
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from flwr_kd.checks import ConfigError
from flwr_kd.distillation.server import DistillingStrategy, Group
from flwr_kd.distillation.teachers import Matching
from flwr_kd.learning.weights import get_weights, load_weights
from flwr_kd.models import ConditionalGenerator, build_generator, count_parameters
from flwr_kd.registry import needs_one_tensor
from flwr_kd.seeding import derive_seed, torch_generator
from flwr_kd.server.records import NDArray, Reply
from flwr_kd.server.strategy import KDStrategy

from .config import FedHybConfig
from .functional import ensemble_distillation_loss
from .synthesis import synthesise, train_generator

_SHOWN = 8
_GENERATOR = "generator."
_SAMPLES = "synthetic"


class FedHybSelf(KDStrategy[FedHybConfig]):
    """The ablations FedHyb¹ and FedHyb² (section 4.3): clients distil themselves, the server only averages.

    Parameters
    ----------
    config : FedHybConfig, optional
        The hyper-parameters, of which those of the server's distillation have no effect.
        ``dynamic_weighting=False`` is FedHyb¹.
    **options
        See :class:`flwr_kd.KDStrategy`.

    Raises
    ------
    ConfigError
        If an option or a hyper-parameter is not allowed.
    """

    config_class = FedHybConfig


class FedHyb(DistillingStrategy[FedHybConfig]):
    """FedHyb (Liu et al.): self-distillation at the clients, and the server's ensemble distillation (algorithm 1).

    Parameters
    ----------
    config : FedHybConfig, optional
        The hyper-parameters. ``self_weight=0`` is the ablation FedHyb³.
    model, public_set, device, input_key, **options
        See :class:`flwr_kd.distillation.server.DistillingStrategy`; the public data is the paper's class-balanced,
        unlabelled proxy set.

    Raises
    ------
    ConfigError, DatasetError
        If an option or a hyper-parameter is not allowed, or the model does not take the public data.
    """

    config_class = FedHybConfig
    averages = False

    def aggregate_phase(
        self, phase: str, server_round: int, replies: Iterable[Reply], arrays: ArrayRecord | None
    ) -> ArrayRecord | None:
        """Average the models by sample counts (equation 2), and fine-tune the mean on the proxy set (8)."""
        config = self.config
        group = Group.of_replies(self.distiller, self.template, list(replies))
        self.renew_proxy(group.models, server_round)
        distilled = self.distil(
            group._replace(teacher_weights=[1.0] * len(group.models)),
            epochs=config.server_epochs,
            server_round=server_round,
            matching=predictions_and_features(config),
            learning_rate=config.server_learning_rate_at(server_round),
        )
        return self.template.record(distilled)

    def renew_proxy(self, models: Sequence[Sequence[NDArray]], server_round: int) -> None:
        """Replace the proxy set before a round's distillation; FedHyb's does not change."""


def predictions_and_features(config: FedHybConfig) -> Matching:
    """Return the matching of the clients' mean predictions and mean features, which are plain means.

    The global model is in eval mode, and by default its BatchNorm layers as well: running statistics stay those of
    the clients' data, and with one client the gradient is zero.
    """

    def outputs(model: Any, x: Tensor) -> tuple[Tensor, ...]:
        features = model.features(x)
        return features, model.classify(features)

    def shared(outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        features, logits = outputs
        return features, F.softmax(logits, dim=1)

    def loss(targets: tuple[Tensor, ...], outputs: tuple[Tensor, ...]) -> Tensor:
        features, logits = outputs
        target_features, target_predictions = targets
        return ensemble_distillation_loss(
            logits,
            features,
            target_predictions,
            target_features,
            logits_weight=config.logits_weight,
            feature_weight=config.feature_weight,
        )

    return Matching(outputs, loss, shared=shared, training=False)


class FedHybStar(FedHyb):
    """FedHyb*: the proxy set is made at the server, by a generator that is trained without data.

    Before each distillation the generator is trained for a few steps against the clients' models
    (:func:`~flwr_kd.strategies.fedhyb.synthesis.train_generator`) and makes a new, class-balanced proxy set.

    Parameters
    ----------
    config : FedHybConfig, optional
        The hyper-parameters.
    model : nn.Module or (extractor, head)
        Of the architecture of ``initial_arrays``; logits ``[B, C]``.
    input_shape : sequence of int
        Shape of one sample, of float32.
    device : str or torch.device
        Where the server trains; ``"auto"``: CUDA, else MPS, else CPU.
    **options
        See :class:`flwr_kd.KDStrategy`.

    Raises
    ------
    ConfigError
        If an option or a hyper-parameter is not allowed, or the model does not take inputs of this shape, such as a
        model of token ids.
    """

    samples_are = "samples of its own (float32)"

    def __init__(
        self,
        config: FedHybConfig | None = None,
        *,
        model: nn.Module | tuple[nn.Module, nn.Module],
        input_shape: Sequence[int],
        device: str | torch.device = "auto",
        **options: Any,
    ) -> None:
        try:
            self.input_shape = tuple(operator.index(size) for size in input_shape)
            empty = torch.zeros(1, *self.input_shape)
        except (TypeError, RuntimeError):
            raise ConfigError(f"input_shape must be the sizes of a sample, got {input_shape!r}") from None
        # This first proxy set only checks whether the model takes the shape; each round makes its own.
        super().__init__(config, model=model, public_set=TensorDataset(empty), device=device, **options)
        self.reset()

    def samples_hint(self) -> str:
        """Return why each sample is one tensor."""
        return needs_one_tensor("fedhyb-star")

    def _new_generator(self) -> ConditionalGenerator:
        try:
            generator = build_generator(
                self.input_shape,
                num_classes=self.distiller.num_classes,
                latent_dim=self.config.latent_dim,
                seed=derive_seed(self.seed, "generator"),
            )
        except ValueError as error:
            raise ConfigError(f"no generator for this model: {error}") from None
        return generator.to(self.distiller.device).eval()

    def renew_proxy(self, models: Sequence[Sequence[NDArray]], server_round: int) -> None:
        """Train the generator against the clients' models, and make a new proxy set."""
        config, device = self.config, self.distiller.device
        before = {name: value.clone() for name, value in self.generator.state_dict().items()}
        try:
            loss = train_generator(
                self.generator,
                self.distiller.model,
                [dict(zip(self.template.names, model, strict=True)) for model in models],
                steps=config.generator_steps,
                batch_size=config.batch_size,
                learning_rate=config.generator_learning_rate,
                balance_weight=config.balance_weight,
                diversity_weight=config.diversity_weight,
                batchnorm_weight=config.batchnorm_weight,
                draw=torch_generator(self.seed, "synthesis", server_round),
                device=device,
                cores=self.cores if device.type == "cpu" else 1,
            )
            samples = self.proxy_samples(server_round)
            log(INFO, "trained the generator for %d steps, loss %.4f", config.generator_steps, loss)
            self.trained = True
        except FloatingPointError as error:
            log(WARNING, "round %d: the generator does not change: %s", server_round, error)
            self.generator.load_state_dict(before)
            samples = self.proxy_samples(server_round)
        self.distiller.use(TensorDataset(samples))

    def proxy_samples(self, server_round: int) -> Tensor:
        """Return a round's proxy set ``[N, ...]``, with classes in turn, from the generator as it is."""
        samples, _ = synthesise(
            self.generator,
            self.config.synthetic_samples,
            draw=torch_generator(self.seed, "proxy", server_round),
            device=self.distiller.device,
        )
        return samples

    def samples(self, per_class: int = _SHOWN) -> Tensor:
        """Return samples for a picture, ``[C * per_class, ...]`` in the order of classes, with one noise for all.

        The noise does not depend on the round, so that pictures show the generator's progress.
        """
        z = torch.randn(per_class, self.generator.latent_dim, generator=torch_generator(self.seed, "samples"))
        classes = self.distiller.num_classes
        labels = torch.arange(classes).repeat_interleave(per_class)
        device = self.distiller.device
        with torch.no_grad():
            self.generator.eval()
            samples: Tensor = self.generator(z.repeat(classes, 1).to(device), labels.to(device)).cpu()
        return samples

    def held_parameters(self) -> int:
        """Return the parameters of the global model and of the generator."""
        return super().held_parameters() + count_parameters(self.generator)

    def state_arrays(self) -> dict[str, NDArray]:
        """Return the generator's weights and, for images, :meth:`samples`; nothing before it is trained."""
        if not self.trained:
            return {}
        state = {_GENERATOR + name: value for name, value in get_weights(self.generator).items()}
        if len(self.input_shape) == 3:
            state[_SAMPLES] = self.samples().numpy()
        return state

    def reset(self) -> None:
        """Start anew with an untrained generator."""
        self.generator, self.trained = self._new_generator(), False

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
        weights = {
            name.removeprefix(_GENERATOR): value
            for name, value in state.items()
            if name.startswith(_GENERATOR)
        }
        try:
            load_weights(self.generator, weights)
        except RuntimeError as error:
            raise ValueError(f"the state is not this generator's: {error}") from None
        self.trained = True
