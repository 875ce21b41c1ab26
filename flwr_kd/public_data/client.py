"""The client half of methods that exchange soft predictions on public data."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from flwr.app import ConfigRecord
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from flwr_kd.client.client import KDClient
from flwr_kd.client.task import Answer, Task
from flwr_kd.distillation.samples import check_samples, digest_of, try_model
from flwr_kd.learning.batches import Batches
from flwr_kd.learning.loop import fit, make_optimizer
from flwr_kd.learning.losses import kl_divergence, soft_targets
from flwr_kd.learning.weights import check_finite_weights
from flwr_kd.public_data.config import PublicKnowledgeConfig
from flwr_kd.public_data.messages import (
    PublicRows,
    PublicRowsTargets,
    PublicSamples,
    PublicSamplesTargets,
    SoftPredictions,
    pack_predictions,
    unpack_predictions,
)
from flwr_kd.transport.payload import Payload, PayloadError

__all__ = ["PublicKnowledgeClient"]

_STATE_KEY = "flwr-kd.public"


class PublicKnowledgeClient(KDClient):
    """Base of the clients of :class:`PublicKnowledgeStrategy`; complete as it is.

    The model stays at the client. For the other parameters see :class:`flwr_kd.KDClient`.

    Parameters
    ----------
    public_set : Dataset or DataLoader, optional
        The public data, map-style, the same in the same order at every client; labels are not looked at. Not
        needed with ``public-at=server``.
    public_input_key : str, optional
        Key of the inputs in its dict items, where it cannot be guessed; ``input_key`` if None.

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
        public_input_key: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.public_input_key = public_input_key or self.train_batches.input_key
        self.public_batches: Batches | None = None
        if public_set is not None:
            self.public_batches = self._public(public_set)
            check_samples(self.public_batches, "public_set")

    def properties(self) -> dict[str, bool | int | float | str | bytes]:
        """Return size and digest of the public data."""
        if self.public_batches is None:
            return {}
        return {"num-public-examples": len(self.public_batches), "public-digest": self._digest()}

    def prepare(self, task: Task) -> None:
        """Do what comes before a client's first training in a run; nothing by default."""

    def phase_train(self, task: Task) -> Answer:
        """Train on the local data, and predict the public samples that the server names.

        Raises
        ------
        ConfigError
            If the model does not take them; before any training.
        """
        samples, rows, _ = self._asked(task, PublicRows, PublicSamples)
        try_model(self.model, samples, self.device, what="public data", called="model")
        if not self.load_own():
            self.prepare(task)
        metrics = {"train-loss": self.train(task, self.objective(task))}
        config = cast(PublicKnowledgeConfig, task.config)
        payload = SoftPredictions(pack_predictions(self.predict(samples, rows, config), config.precision))
        # Only now: a model without finite predictions must not be the next round's.
        self.keep()
        return Answer(payload=payload, num_examples=len(self.train_batches), metrics=metrics)

    def phase_distill(self, task: Task) -> Answer:
        """Learn the targets for the public samples, and measure.

        Raises
        ------
        StateError
            If the model of this round's training is not there.
        FloatingPointError
            If the distillation leads beyond all numbers. The model of before is kept.
        """
        samples, rows, message = self._asked(task, PublicRowsTargets, PublicSamplesTargets)
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
        batches = samples.ordered(config.public_batch_size, rows)
        found = [soft_targets(self.model(x.to(self.device)), config.temperature).cpu() for x, _ in batches]
        return torch.cat(found)

    def distil(self, task: Task, samples: Batches, rows: Tensor, targets: Tensor) -> None:
        """Minimise the divergence KL(target ‖ prediction) on public samples (KT-pFL, equation 6).

        In eval mode: BatchNorm's running statistics are those of the client's own data, and stay; a client whose
        target is its own prediction has nothing to learn.

        Parameters
        ----------
        task : Task
            Its config and generators.
        samples : Batches
            The public data.
        rows : Tensor
            ``[K]``, ascending positions in it.
        targets : Tensor
            ``[K, C]``, a distribution for each.
        """
        config = cast(PublicKnowledgeConfig, task.config)
        rate = config.distill_learning_rate * config.decay_at(task.server_round)
        optimizer = make_optimizer(self.model, config, rate)
        order = task.generator("public-order")

        def epoch() -> Iterator[tuple[Tensor, ...]]:
            for x, _, chunk in samples.indexed(config.public_batch_size, order, rows):
                yield x.to(self.device), targets[torch.searchsorted(rows, chunk)].to(self.device)

        def loss(x: Tensor, target: Tensor) -> Tensor:
            mean = kl_divergence(target, self.model(x), config.temperature)
            return config.distill_weight * mean * (len(x) if config.reduction == "sum" else 1)

        try:
            fit(self.model, optimizer, epoch, loss, epochs=config.distill_epochs, training=False)
        except FloatingPointError:
            raise FloatingPointError(
                "the distillation's loss is not finite: try a smaller distill-learning-rate"
            ) from None

    # ------------------------------------------------------------------ the public data

    def _public(self, source: Dataset[Any] | DataLoader[Any]) -> Batches:
        key = self.public_input_key
        return Batches(source, num_classes=self.num_classes, input_key=key, labelled=False)

    def _asked(
        self, task: Task, by_rows: type[Payload], by_samples: type[Payload]
    ) -> tuple[Batches, Tensor, Any]:
        """Return the samples that the server means, their rows, and the whole message.

        Raises
        ------
        PayloadError
            If there is no message, or the client's public data is not the server's.
        """
        server = cast(PublicKnowledgeConfig, task.config).public_at == "server"
        message: Any = task.read(by_samples if server else by_rows, C=self.num_classes)
        if message is None:
            raise PayloadError(f"phase {task.phase!r} came without its payload")
        if server:
            samples = self._public(TensorDataset(torch.from_numpy(message.samples.copy())))
            return samples, torch.arange(len(samples)), message
        if self.public_batches is None:
            raise PayloadError("the server names public samples, but this client has no public_set")
        if isinstance(message, PublicRows) and message.digest != self._digest():
            raise PayloadError(
                f"this client's public data is another: digest {self._digest()[:12]}, the server's is "
                f"{message.digest[:12]}"
            )
        rows, last = torch.from_numpy(message.rows.copy()), len(self.public_batches) - 1
        if len(rows) and int(rows[-1]) > last:
            raise PayloadError(f"rows must be within 0..{last}, got {int(rows[-1])}")
        return self.public_batches, rows, message

    def _digest(self) -> str:
        """Return the public data's digest, made once in a run: a client is built anew for every message."""
        known = self.context.state.config_records.get(_STATE_KEY)
        if known is None:
            digest = digest_of(cast(Batches, self.public_batches))
            self.context.state[_STATE_KEY] = ConfigRecord({"digest": digest})
            return digest
        return str(known["digest"])
