"""The server half of methods that exchange soft predictions on public data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, cast

import numpy as np
import torch
from flwr.app import ArrayRecord
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from flwr_kd.checks import ConfigError
from flwr_kd.distillation.samples import check_samples, digest_of
from flwr_kd.learning.batches import Batches
from flwr_kd.public_data.config import PublicKnowledgeConfig
from flwr_kd.public_data.messages import (
    SMALLER,
    PublicRows,
    PublicRowsTargets,
    PublicSamples,
    PublicSamplesTargets,
    SoftPredictions,
    pack_predictions,
    unpack_predictions,
)
from flwr_kd.seeding import numpy_generator
from flwr_kd.server.records import Node, Outgoing, Reply
from flwr_kd.server.strategy import KDStrategy
from flwr_kd.transport.payload import Payload, PayloadError

__all__ = ["PublicKnowledgeStrategy"]


class PublicKnowledgeStrategy(KDStrategy):
    """Base of methods whose clients exchange soft predictions on public data.

    No weights are exchanged: ``initial_arrays`` may be empty and is not sent. There is no global model.

    Parameters
    ----------
    config : PublicKnowledgeConfig, optional
        The hyper-parameters.
    public_set : Dataset or DataLoader, optional
        The public data, map-style; labels are not looked at. Needed with ``public-at=server``. Else it lies at
        the clients: given here too, it decides which set that must be; not given, the set that most of them have.
    input_key : str, optional
        Key of the inputs in dict items, where it cannot be guessed.
    **options
        See :class:`flwr_kd.KDStrategy`.

    Raises
    ------
    ConfigError
        If an option or a hyper-parameter is not allowed.
    DatasetError
        If the public data is empty, has no order of its own, or does not go into batches.
    """

    config_class = PublicKnowledgeConfig
    phases = ("train", "distill")
    reply_payloads: ClassVar[Mapping[str, type[Payload]]] = {"train": SoftPredictions}
    reply_arrays = frozenset()
    sends_weights = False

    def __init__(
        self,
        config: PublicKnowledgeConfig | None = None,
        *,
        public_set: Dataset[Any] | DataLoader[Any] | None = None,
        input_key: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(config, **options)
        self._samples: Batches | None = None
        self._own = ("", 0)
        if public_set is not None:
            self._samples = Batches(public_set, num_classes=0, input_key=input_key, labelled=False)
            check_samples(self._samples, "public_set")
            self._own = (digest_of(self._samples), len(self._samples))
        elif self.public.public_at == "server":
            raise ConfigError("public-at=server needs public_set, got none")
        self._sample_bytes = 8
        if self._samples is not None and self.public.public_at == "server":
            first = self._samples.example()
            self._sample_bytes = first.numel() * first.element_size()
        self._round: dict[str, Any] = {}
        self._targets: dict[int, Tensor] = {}

    @property
    def public(self) -> PublicKnowledgeConfig:
        """The hyper-parameters."""
        return cast(PublicKnowledgeConfig, self.config)

    # ------------------------------------------------------------------ hooks for a method's author

    def targets(self, server_round: int, replies: list[Reply], predictions: Tensor) -> Tensor:
        """Return what each client is to learn.

        Parameters
        ----------
        server_round : int
            From 1.
        replies : list of Reply
            In the order of partition ids; their payloads have been read.
        predictions : Tensor
            ``[N, K, C]``, float32: their soft predictions of the round's public samples.

        Returns
        -------
        Tensor
            ``[N, K, C]``, distributions.
        """
        raise NotImplementedError

    def accept_node(self, node: Node) -> str | None:
        """Refuse a client with another number of classes or other public data."""
        classes = self.common(lambda each: each.num_classes, node)
        if node.num_classes != classes or classes < 2:
            return f"{node.num_classes} classes, expected {max(classes, 2)}"
        if self.public.public_at == "clients":
            if not node.num_public or not node.public_digest:
                return "it has no public data: give its client public_set, or set public-at=server"
            digest, count = self._public_set(node)
            if (node.public_digest, node.num_public) != (digest, count):
                return (
                    f"its public data is another: {node.num_public} samples with digest {node.public_digest[:12]}, "
                    f"expected {count} with {digest[:12]}; samples, order and transforms must be the same"
                )
        size = self._drawn(node) * (classes * np.dtype(self.public.precision).itemsize + self._sample_bytes)
        if size > self.max_payload_bytes:
            return (
                f"what it is sent has {size:,} bytes, max_payload_bytes is {self.max_payload_bytes:,}; "
                f"use {SMALLER}"
            )
        return None

    def configure_phase(
        self, phase: str, server_round: int, nodes: list[Node], arrays: ArrayRecord | None
    ) -> Iterable[Outgoing]:
        """Send which public samples to predict, and in the second phase each client its own targets."""
        if phase == self.phases[0]:
            self._draw_samples(server_round, nodes[0])
            payload = (PublicRows if "rows" in self._round else PublicSamples)(**self._round)
            return [Outgoing(node, payload=payload) for node in nodes]
        kind = PublicRowsTargets if "rows" in self._round else PublicSamplesTargets
        shared = {name: value for name, value in self._round.items() if name != "digest"}
        return [
            Outgoing(
                node,
                payload=kind(
                    **shared, targets=pack_predictions(self._targets[node.key], self.public.precision)
                ),
            )
            for node in nodes
        ]

    def payload_dims(self, phase: str, node: Node) -> Mapping[str, int]:
        """Return K, as many as were drawn, and C."""
        return {"K": len(next(iter(self._round.values()))), "C": node.num_classes}

    def check_reply(self, phase: str, reply: Reply) -> None:
        """Refuse another precision than the one asked for."""
        if reply.payload is None:
            return
        got = cast(SoftPredictions, reply.payload).predictions.dtype.name
        if got != self.public.precision:
            raise PayloadError(f"soft predictions came as {got}, asked for was {self.public.precision}")

    def aggregate_phase(
        self, phase: str, server_round: int, replies: Iterable[Reply], arrays: ArrayRecord | None
    ) -> ArrayRecord | None:
        """Make the targets of those who predicted."""
        if phase != self.phases[0]:
            self._targets = {}
            return None
        replies = list(replies)
        packed = (cast(SoftPredictions, reply.payload).predictions for reply in replies)
        predictions = torch.stack([unpack_predictions(each) for each in packed])
        found = self.targets(server_round, replies, predictions)
        self._targets = {reply.node.key: each for reply, each in zip(replies, found, strict=True)}
        return None

    # ------------------------------------------------------------------ the public data

    def _public_set(self, node: Node) -> tuple[str, int]:
        """Return digest and size of the public data that is used."""
        if self._samples is not None:
            return self._own
        return self.common(
            lambda each: (each.public_digest, each.num_public),
            node,
            among=lambda each: bool(each.public_digest and each.num_public),
        )

    def _drawn(self, node: Node) -> int:
        return min(self.public.public_samples, self._public_set(node)[1])

    def _draw_samples(self, server_round: int, node: Node) -> None:
        digest, count = self._public_set(node)
        rng = numpy_generator(self.seed, "public", server_round)
        rows = np.sort(rng.choice(count, size=self._drawn(node), replace=False)).astype(np.int64)
        if self.public.public_at == "clients":
            self._round = {"rows": rows, "digest": digest}
            return
        chosen = cast(Batches, self._samples).ordered(256, torch.from_numpy(rows))
        self._round = {"samples": torch.cat([x for x, _ in chosen]).numpy()}
