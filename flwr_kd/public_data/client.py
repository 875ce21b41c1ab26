"""The client half of methods that exchange soft predictions on public data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Generic, TypeVar

import torch
from flwr.app import ConfigRecord
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from flwr_kd.client.client import KDClient
from flwr_kd.client.task import Answer, Task, metrics_of
from flwr_kd.distillation.samples import check_samples, digest_of, try_model
from flwr_kd.inputs import Inputs, NamedDataset, NamedInputs
from flwr_kd.learning.batches import Batches
from flwr_kd.learning.fetched import Fetched
from flwr_kd.learning.loop import fit, make_optimizer
from flwr_kd.learning.losses import kl_divergence, soft_targets
from flwr_kd.learning.passes import pass_size
from flwr_kd.learning.weights import check_finite_weights
from flwr_kd.public_data.config import PublicConfigT, PublicKnowledgeConfig
from flwr_kd.public_data.messages import (
    Drawn,
    DrawnTargets,
    PublicNamedSamples,
    PublicNamedSamplesTargets,
    PublicRows,
    PublicRowsTargets,
    PublicSamples,
    PublicSamplesTargets,
    SoftPredictions,
    pack_predictions,
    unpack_named,
    unpack_predictions,
)
from flwr_kd.seeding import torch_generator
from flwr_kd.transport.payload import PayloadError

__all__ = ["PublicKnowledgeClient"]

_STATE_KEY = "flwr-kd.public"
RowsT = TypeVar("RowsT", bound=PublicRows | PublicRowsTargets)
SamplesT = TypeVar("SamplesT", bound=PublicSamples | PublicSamplesTargets)
NamedT = TypeVar("NamedT", bound=PublicNamedSamples | PublicNamedSamplesTargets)


class PublicKnowledgeClient(KDClient[PublicConfigT], Generic[PublicConfigT]):
    """Base of the client halves of methods that exchange soft predictions; it can be used without a subclass.

    The model stays at the client. For the other parameters see :class:`flwr_kd.KDClient`.

    Parameters
    ----------
    public_set : Dataset or DataLoader, optional
        The public data, map-style, the same in the same order at every client; labels are ignored. Not needed with
        ``public-at=server``.
    public_input_key : str or sequence of str, optional
        Key of the inputs in dict items, where it cannot be guessed, or several; ``input_key`` if None.

    Raises
    ------
    DatasetError
        If a data set does not give what training needs.
    """

    config_class = PublicKnowledgeConfig
    personal = True

    def __init__(
        self,
        *args: Any,
        public_set: Dataset[Any] | DataLoader[Any] | None = None,
        public_input_key: str | Sequence[str] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.public_input_key = public_input_key or self.train_batches.input_key
        self.public_batches: Batches | None = None
        if public_set is not None:
            self.public_batches = self._unlabelled(public_set)
            check_samples(self.public_batches, "public_set")

    def properties(self) -> dict[str, bool | int | float | str | bytes]:
        """Return size and digest of the public data."""
        if self.public_batches is None:
            return {}
        digest = self._digest(self.public_batches)
        return {"num-public-examples": len(self.public_batches), "public-digest": digest}

    def prepare(self, task: Task[PublicConfigT]) -> None:
        """Prepare a model that was not trained in this run; nothing by default."""

    def phase_train(self, task: Task[PublicConfigT]) -> Answer:
        """Train on the local data, and predict the public samples that the server has drawn.

        Raises
        ------
        ConfigError
            If the model does not take them; before any training.
        """
        samples, rows = self._drawn(self._read(task, PublicRows, PublicSamples, PublicNamedSamples))
        try_model(self.model, samples, self.device, what="public data", called="model")
        if not self.load_own():
            self.prepare(task)
        metrics = {"train-loss": self.train(task, self.objective(task))}
        metrics |= metrics_of(trained=self.measure(task.config.batch_size))
        predictions = self.predict(samples, rows, task.config)
        payload = SoftPredictions(pack_predictions(predictions, task.config.precision))
        # Not before the predictions: a model without finite ones must not be kept for the next round.
        self.keep()
        return Answer(payload=payload, num_examples=len(self.train_batches), metrics=metrics)

    def phase_distill(self, task: Task[PublicConfigT]) -> Answer:
        """Train on the targets for the public samples, and measure.

        Raises
        ------
        StateError
            If the model of this round's training is missing.
        FloatingPointError
            If the loss or the weights are no longer finite. The model stays what it was before the phase.
        """
        message = self._read(task, PublicRowsTargets, PublicSamplesTargets, PublicNamedSamplesTargets)
        samples, rows = self._drawn(message)
        self.load_trained()
        self.distil(task, samples, rows, unpack_predictions(message.targets))
        check_finite_weights(self.model, option="distill-learning-rate")
        self.keep()
        return Answer(
            num_examples=len(self.train_batches), metrics=self.local_metrics(task.config.batch_size)
        )

    @torch.no_grad()
    def predict(self, samples: Batches, rows: Tensor, config: PublicKnowledgeConfig) -> Tensor:
        """Return soft predictions ``[K, C]`` at the config's temperature, in eval mode, on the CPU."""
        self.model.eval()
        generator = torch_generator(self._seed, "public-items")
        size = pass_size(self.device, config.public_batch_size)
        batches = samples.ordered(size, rows, generator=generator)
        fetched = Fetched()
        for x, _ in batches:
            fetched.add(soft_targets(self.model(self.to_device(x)), config.temperature))
        (predictions,) = fetched.tensors()
        return predictions

    def distil(self, task: Task[PublicConfigT], samples: Batches, rows: Tensor, targets: Tensor) -> None:
        """Minimise the divergence KL(target ‖ prediction) on public samples (KT-pFL, equation 6).

        The model is in eval mode: BatchNorm's running statistics stay those of the client's own data, and a target
        that equals the client's own prediction has no gradient.

        Parameters
        ----------
        task : Task
            With the config and the random generators.
        samples : Batches
            The public data.
        rows : Tensor
            ``[K]``, ascending positions in it.
        targets : Tensor
            ``[K, C]``, a distribution for each.
        """
        config = task.config
        rate = config.distill_learning_rate * config.decay_at(task.server_round)
        optimizer = make_optimizer(self.model, config, rate)
        order, targets = task.generator("public-order"), targets.to(self.device)

        def epoch() -> Iterator[tuple[Any, ...]]:
            here = rows
            for x, _, chunk in samples.indexed(config.public_batch_size, order, rows):
                # Beside the samples; in the first step alone this is a copy.
                here = here.to(chunk.device)
                yield self.to_device(x), targets[self.to_device(torch.searchsorted(here, chunk))]

        def loss(x: Inputs, target: Tensor) -> Tensor:
            mean = kl_divergence(target, self.model(x), config.temperature)
            return config.distill_weight * mean * (len(x) if config.reduction == "sum" else 1)

        try:
            loss = self.in_precision(loss)
            fit(self.model, optimizer, epoch, loss, epochs=config.distill_epochs, training=False)
        except FloatingPointError:
            raise FloatingPointError(
                "the distillation's loss is not finite: try a smaller distill-learning-rate"
            ) from None

    def close(self) -> None:
        """End the workers that loaders have kept."""
        super().close()
        if self.public_batches is not None:
            self.public_batches.close()

    # ------------------------------------------------------------------ the public data

    def _unlabelled(self, source: Dataset[Any] | DataLoader[Any]) -> Batches:
        key = self.public_input_key
        return Batches(source, num_classes=self.num_classes, input_key=key, labelled=False, dtype=self.dtype)

    def _read(
        self,
        task: Task[PublicConfigT],
        by_rows: type[RowsT],
        by_samples: type[SamplesT],
        by_named: type[NamedT],
    ) -> RowsT | SamplesT | NamedT:
        """Return the server's message, with samples if they are at the server; PayloadError without one."""
        message: RowsT | SamplesT | NamedT | None
        if task.config.public_at != "server":
            message = task.read(by_rows, C=self.num_classes)
        elif isinstance(self.train_batches.example(), NamedInputs):
            message = task.read(by_named, C=self.num_classes)
        else:
            message = task.read(by_samples, C=self.num_classes)
        if message is None:
            raise PayloadError(f"the message of phase {task.phase!r} has no payload")
        return message

    def _drawn(self, message: Drawn | DrawnTargets) -> tuple[Batches, Tensor]:
        """Return the public data, and the rows of the samples that the server has drawn from it.

        Raises
        ------
        PayloadError
            If the client has no public data, another set than the server's, or a model with other inputs.
        """
        if isinstance(message, PublicSamples | PublicSamplesTargets):
            samples = self._unlabelled(TensorDataset(torch.from_numpy(message.samples.copy())))
            return samples, torch.arange(len(samples))
        if isinstance(message, PublicNamedSamples | PublicNamedSamplesTargets):
            like = self.train_batches.example()
            assert isinstance(like, NamedInputs)
            named = unpack_named(message, like)
            samples = self._unlabelled(NamedDataset({name: named[name] for name in named.keys()}))  # noqa: SIM118
            return samples, torch.arange(len(samples))
        if self.public_batches is None:
            raise PayloadError("the server names public samples, but this client has no public_set")
        if isinstance(message, PublicRows) and message.digest != (
            digest := self._digest(self.public_batches)
        ):
            raise PayloadError(
                f"this client's public data differs: digest {digest[:12]}, the server's is {message.digest[:12]}"
            )
        rows, last = torch.from_numpy(message.rows.copy()), len(self.public_batches) - 1
        if len(rows) and int(rows[-1]) > last:
            raise PayloadError(f"rows must be within 0..{last}, got {int(rows[-1])}")
        return self.public_batches, rows

    def _digest(self, samples: Batches) -> str:
        """Return the public data's digest, computed once in a run, since each message has a client of its own."""
        known = self.context.state.config_records.get(_STATE_KEY)
        if known is None:
            digest = digest_of(samples)
            self.context.state[_STATE_KEY] = ConfigRecord({"digest": digest})
            return digest
        return str(known["digest"])
