"""FD's server half: each client is sent the mean logits over the others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar

import numpy as np
import torch
from flwr.app import ArrayRecord

from flwr_kd import KDStrategy, Node, Outgoing, Payload, PayloadError, Reply

from .config import FDConfig
from .functional import means_of_others
from .messages import ClassLogits, pack, unpack


class FD(KDStrategy[FDConfig, ClassLogits]):
    """Federated distillation (Jeong et al. 2018), without the augmentation of FAug."""

    config_class = FDConfig
    reply_payloads: ClassVar[Mapping[str, type[Payload]]] = {"train": ClassLogits}
    reply_arrays: ClassVar[frozenset[str]] = frozenset()
    sends_weights = False

    def __init__(self, *args, **options) -> None:
        super().__init__(*args, **options)
        self.reset()

    def reset(self) -> None:
        """Forget the last round's logits."""
        # By the client's key, which does not depend on the node ids that Flower draws.
        self.means: dict[int, torch.Tensor] = {}
        self.known: dict[int, torch.Tensor] = {}

    def accept_node(self, node: Node) -> str | None:
        """Refuse a client whose number of classes differs from the others'."""
        classes = self.common(lambda each: each.num_classes, node)
        return None if node.num_classes == classes else f"{node.num_classes} classes, expected {classes}"

    def configure_phase(
        self, phase: str, server_round: int, nodes: list[Node], arrays: ArrayRecord | None
    ) -> Iterable[Outgoing]:
        """Send each client the mean logits over the others, once there are any."""
        if not self.means:
            return [Outgoing(node) for node in nodes]
        keys = sorted(self.means)
        means = torch.stack([self.means[key] for key in keys])
        known = torch.stack([self.known[key] for key in keys])
        of_others, others = means_of_others(means, known)
        # A client that was not there in the last round learns from all.
        everyone = known.sum(dim=0)
        mean = (means * known[..., None]).sum(dim=0) / everyone.clamp(min=1)[:, None]
        rows = {key: (of_others[i], others[i]) for i, key in enumerate(keys)}
        return [Outgoing(node, payload=pack(*rows.get(node.key, (mean, everyone)))) for node in nodes]

    def check_reply(self, phase: str, reply: Reply[ClassLogits]) -> None:
        """Refuse logits of more samples than the client reported."""
        total = int(reply.payload.counts.sum())
        if total > reply.num_examples:
            raise PayloadError(f"logits of {total} samples from a client with {reply.num_examples}")

    def aggregate_phase(
        self, phase: str, server_round: int, replies: Iterable[Reply[ClassLogits]], arrays: ArrayRecord | None
    ) -> None:
        """Keep each client's mean logits. All replies must be fetched before the state changes."""
        local = {reply.node.key: unpack(reply.payload) for reply in replies}
        self.means = {key: means for key, (means, _) in local.items()}
        self.known = {key: counts > 0 for key, (_, counts) in local.items()}

    def state_arrays(self) -> dict[str, np.ndarray]:
        """Return the clients' keys and mean logits; nothing before the first round."""
        if not self.means:
            return {}
        keys = sorted(self.means)
        return {
            "keys": np.array(keys, dtype=np.int64),
            "means": np.stack([self.means[key].numpy() for key in keys]),
            "known": np.stack([self.known[key].numpy() for key in keys]),
        }

    def load_state_arrays(self, state: Mapping[str, np.ndarray]) -> None:
        """Restore what :meth:`state_arrays` returned."""
        self.reset()
        for i, key in enumerate(state.get("keys", np.zeros(0, dtype=np.int64)).tolist()):
            self.means[key] = torch.tensor(state["means"][i])
            self.known[key] = torch.tensor(state["known"][i])
