"""The server half of methods that exchange soft predictions on public data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Generic

import numpy as np
import torch
from flwr.app import ArrayRecord
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from flwr_kd.checks import ConfigError
from flwr_kd.distillation.samples import check_samples, digest_of
from flwr_kd.inputs import joined
from flwr_kd.learning.batches import Batches, DatasetError
from flwr_kd.public_data.config import PublicConfigT, PublicKnowledgeConfig
from flwr_kd.public_data.messages import (
    SMALLER,
    Drawn,
    PublicRows,
    PublicSamples,
    SoftPredictions,
    count_of,
    pack_named,
    pack_predictions,
    unpack_predictions,
    with_targets,
)
from flwr_kd.seeding import numpy_generator
from flwr_kd.server.records import Node, Outgoing, Reply
from flwr_kd.server.strategy import KDStrategy
from flwr_kd.text import first_line
from flwr_kd.transport.payload import Payload, PayloadError

__all__ = ["PublicKnowledgeStrategy"]


class PublicKnowledgeStrategy(KDStrategy[PublicConfigT, SoftPredictions], Generic[PublicConfigT]):
    """Base of methods whose clients exchange soft predictions on public data.

    No weights are exchanged: ``initial_arrays`` may be empty and is not sent. There is no global model.

    Parameters
    ----------
    config : PublicKnowledgeConfig, optional
        The hyper-parameters.
    public_set : Dataset or DataLoader, optional
        The public data, map-style; labels are ignored. Needed with ``public-at=server``. Otherwise the clients have
        it, and must have this set; if it is not given here, the set that most of them have.
    input_key : str or sequence of str, optional
        Key of the inputs in dict items, where it cannot be guessed; several for a model that takes several.
    **options
        See :class:`flwr_kd.KDStrategy`.

    Raises
    ------
    ConfigError
        If an option or a hyper-parameter is not allowed.
    DatasetError
        If the public data is empty, comes from a loader with a sampler, or does not fit into batches.
    """

    config_class = PublicKnowledgeConfig
    phases = ("train", "distill")
    reply_payloads: ClassVar[Mapping[str, type[Payload]]] = {"train": SoftPredictions}
    sends_weights = False

    def __init__(
        self,
        config: PublicConfigT | None = None,
        *,
        public_set: Dataset[Any] | DataLoader[Any] | None = None,
        input_key: str | Sequence[str] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(config, **options)
        self._samples: Batches | None = None
        self._digest = ""
        if public_set is not None:
            self._samples = Batches(public_set, num_classes=0, input_key=input_key, labelled=False)
            check_samples(self._samples, "public_set")
            self._digest = digest_of(self._samples)
        elif self.config.public_at == "server":
            raise ConfigError("public-at=server needs public_set, got none")
        self._sample_bytes = 8
        if self._samples is not None and self.config.public_at == "server":
            self._sample_bytes = self._samples.example().nbytes
        self._drawn: Drawn = PublicRows(np.empty(0, dtype=np.int64))
        self._targets: dict[int, Tensor] = {}

    # ------------------------------------------------------------------ hooks for a method's author

    def targets(
        self, server_round: int, replies: list[Reply[SoftPredictions]], predictions: Tensor
    ) -> Tensor:
        """Return each client's targets for the round's public samples.

        Parameters
        ----------
        server_round : int
            From 1.
        replies : list of Reply
            In the order of partition ids.
        predictions : Tensor
            ``[N, K, C]``, float32: the clients' soft predictions of these samples.

        Returns
        -------
        Tensor
            ``[N, K, C]``, distributions.
        """
        raise NotImplementedError

    def accept_node(self, node: Node) -> str | None:
        """Refuse a client with another number of classes or other public data."""
        classes = self.common(lambda other: other.num_classes, node, shown=lambda count: f"{count} classes")
        if node.num_classes != classes or classes < 2:
            return f"{node.num_classes} classes, expected {max(classes, 2)}"
        if self.config.public_at == "clients":
            if not node.num_public or not node.public_digest:
                return "it has no public data: give its client public_set, or set public-at=server"
            digest, count = self._public_set(node)
            if (node.public_digest, node.num_public) != (digest, count):
                return (
                    f"its public data differs: {node.num_public} samples with digest {node.public_digest[:12]}, "
                    f"expected {count} with {digest[:12]}; samples, order and transforms must be the same"
                )
        row = classes * np.dtype(self.config.precision).itemsize + self._sample_bytes
        size = self._number_drawn(node) * row
        if size > self.max_payload_bytes:
            return (
                f"its messages have {size:,} bytes, max_payload_bytes is {self.max_payload_bytes:,}; "
                f"use {SMALLER}"
            )
        return None

    def configure_phase(
        self, phase: str, server_round: int, nodes: list[Node], arrays: ArrayRecord | None
    ) -> Iterable[Outgoing]:
        """Send the public samples to predict, and in the second phase each client its own targets."""
        if phase == self.phases[0]:
            self._drawn = self._draw_samples(server_round, nodes[0])
            return [Outgoing(node, payload=self._drawn) for node in nodes]
        targets = (pack_predictions(self._targets[node.key], self.config.precision) for node in nodes)
        return [
            Outgoing(node, payload=with_targets(self._drawn, packed))
            for node, packed in zip(nodes, targets, strict=True)
        ]

    def payload_dims(self, phase: str, node: Node) -> Mapping[str, int]:
        """Return K, the number of drawn samples, and C."""
        return {"K": count_of(self._drawn), "C": node.num_classes}

    def check_reply(self, phase: str, reply: Reply[SoftPredictions]) -> None:
        """Refuse another precision than the config's."""
        if phase not in self.reply_payloads:
            return
        got = reply.payload.predictions.dtype.name
        if got != self.config.precision:
            raise PayloadError(f"soft predictions have dtype {got}, expected {self.config.precision}")

    def aggregate_phase(
        self,
        phase: str,
        server_round: int,
        replies: Iterable[Reply[SoftPredictions]],
        arrays: ArrayRecord | None,
    ) -> ArrayRecord | None:
        """Compute the targets of the clients that predicted."""
        if phase != self.phases[0]:
            self._targets = {}
            return None
        replies = list(replies)
        predictions = torch.stack([unpack_predictions(reply.payload.predictions) for reply in replies])
        targets = self.targets(server_round, replies, predictions)
        self._targets = {reply.node.key: target for reply, target in zip(replies, targets, strict=True)}
        return None

    # ------------------------------------------------------------------ the public data

    def _public_set(self, node: Node) -> tuple[str, int]:
        """Return digest and size of the public data: the server's own, else the one that most clients have."""
        if self._samples is not None:
            return self._digest, len(self._samples)
        return self.common(
            lambda other: (other.public_digest, other.num_public),
            node,
            among=lambda other: bool(other.public_digest and other.num_public),
            shown=lambda public: f"{public[1]} public samples with digest {public[0][:12]}",
        )

    def _number_drawn(self, node: Node) -> int:
        return min(self.config.public_samples, self._public_set(node)[1])

    def _draw_samples(self, server_round: int, node: Node) -> Drawn:
        digest, count = self._public_set(node)
        rng = numpy_generator(self.seed, "public", server_round)
        rows = np.sort(rng.choice(count, size=self._number_drawn(node), replace=False)).astype(np.int64)
        if self._samples is None or self.config.public_at == "clients":
            return PublicRows(rows, digest)
        chosen = [x for x, _ in self._samples.ordered(256, torch.from_numpy(rows))]
        try:
            samples = joined(chosen)
        except RuntimeError as error:
            raise DatasetError(
                f"public_set: samples that are sent must have one shape ({first_line(error)}): pad all of them to "
                "the same length"
            ) from None
        return PublicSamples(samples.numpy()) if isinstance(samples, Tensor) else pack_named(samples)
