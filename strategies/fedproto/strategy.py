"""FedProto's server half: the mean prototype of each class."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar

import torch
from flwr.app import ArrayRecord

from flwr_kd.server.records import NDArray, Node, Outgoing, Reply
from flwr_kd.server.strategy import KDStrategy
from flwr_kd.transport.payload import Payload, PayloadError

from .config import FedProtoConfig
from .functional import ClassMeans, aggregate_means
from .messages import Prototypes, check_counts, pack, unpack


class FedProto(KDStrategy[FedProtoConfig, Prototypes]):
    """FedProto (Tan et al., AAAI 2022): class prototypes are exchanged, and no weights.

    Clients may have heterogeneous models with the same feature size. There is no global model. For parameters, see
    :class:`flwr_kd.KDStrategy`; ``initial_arrays`` may be empty and is not sent.
    """

    config_class = FedProtoConfig
    reply_payloads: ClassVar[Mapping[str, type[Payload]]] = {"train": Prototypes}
    sends_weights = False
    averages_knowledge = True

    prototypes: ClassMeans | None = None
    """The global prototypes; None before the first replies."""

    def accept_node(self, node: Node) -> str | None:
        """Refuse a client whose number of classes or features differs from the others'."""
        return self.unlike(node)

    def configure_phase(
        self, phase: str, server_round: int, nodes: list[Node], arrays: ArrayRecord | None
    ) -> Iterable[Outgoing]:
        """Send all clients the global prototypes, once there are any."""
        payload = None if self.prototypes is None else pack(self.prototypes)
        return [Outgoing(node, payload=payload) for node in nodes]

    def check_reply(self, phase: str, reply: Reply[Prototypes]) -> None:
        """Refuse another number of classes, and prototypes of more samples than the client reported."""
        message = reply.payload
        if message.num_classes != reply.node.num_classes:
            raise PayloadError(f"{message.num_classes} classes, expected {reply.node.num_classes}")
        check_counts(message.counts, reply.num_examples)

    def aggregate_phase(
        self, phase: str, server_round: int, replies: Iterable[Reply[Prototypes]], arrays: ArrayRecord | None
    ) -> ArrayRecord | None:
        """Average the prototypes, weighted by class counts; a class in no reply has none."""
        local = [unpack(reply.payload) for reply in replies]
        counts = [means.counts.clamp(max=self.max_examples) for means in local]
        self.prototypes = aggregate_means([means.means for means in local], counts, self.knowledge_rule)
        return None

    def state_arrays(self) -> dict[str, NDArray]:
        """Return the global prototypes."""
        if self.prototypes is None:
            return {}
        return {"means": self.prototypes.means.numpy(), "counts": self.prototypes.counts.numpy()}

    def reset(self) -> None:
        """Forget the global prototypes."""
        self.prototypes = None

    def load_state_arrays(self, state: Mapping[str, NDArray]) -> None:
        """Restore the global prototypes."""
        self.reset()
        if state:
            self.prototypes = ClassMeans(torch.tensor(state["means"]), torch.tensor(state["counts"]))
