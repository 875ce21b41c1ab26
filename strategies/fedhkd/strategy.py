"""FedHKD's server half: weighted means of weights and of hyper-knowledge."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch
from flwr.app import ArrayRecord

from flwr_kd.privacy import noise_std
from flwr_kd.seeding import torch_generator
from flwr_kd.server.records import NDArray, Node, Outgoing, Reply
from flwr_kd.server.strategy import KDStrategy
from flwr_kd.transport.payload import Payload
from flwr_kd.wording import assignment, warn_once

from ..fedproto.messages import check_counts
from .config import FedHKDConfig
from .functional import Knowledge, aggregate_knowledge, controlled_knowledge
from .messages import HyperKnowledge, pack, unpack

_DROWNING = 0.5
"""Standard deviation per element above which the noise causes a warning; the paper's setting has 0.16."""


class FedHKD(KDStrategy[FedHKDConfig, HyperKnowledge]):
    """FedHKD (Chen et al., ICLR 2023): weights and per-class hyper-knowledge are averaged.

    Algorithm 1, equations 1 and 9. The first round has no knowledge, so clients train on cross-entropy alone.
    ``gamma=0`` is the paper's FedHKD*. For parameters, see :class:`flwr_kd.KDStrategy`; the hyper-parameters are
    those of :class:`FedHKDConfig`.

    Attributes
    ----------
    knowledge : Knowledge or None
        The global hyper-knowledge; None before the first replies.
    """

    config_class = FedHKDConfig
    averages_knowledge = True
    reply_payloads: ClassVar[Mapping[str, type[Payload]]] = {"train": HyperKnowledge}

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.knowledge: Knowledge | None = None

    def accept_node(self, node: Node) -> str | None:
        """Refuse a client whose model, number of classes or number of features differs from the others'."""
        return super().accept_node(node) or self.unlike(node)

    def configure_phase(
        self, phase: str, server_round: int, nodes: list[Node], arrays: ArrayRecord | None
    ) -> Iterable[Outgoing]:
        """Send all clients the global weights and, from round 2 on, the global hyper-knowledge."""
        payload = None
        if self.knowledge is not None:
            draw = torch_generator(self.seed, "client-knowledge", server_round)
            payload = pack(controlled_knowledge(self.knowledge, self.config.client_knowledge, draw))
        return [Outgoing(node, arrays, payload) for node in nodes]

    def check_reply(self, phase: str, reply: Reply[HyperKnowledge]) -> None:
        """Refuse knowledge of more samples than the client reported."""
        check_counts(reply.payload.counts, reply.num_examples)

    def aggregate_phase(
        self,
        phase: str,
        server_round: int,
        replies: Iterable[Reply[HyperKnowledge]],
        arrays: ArrayRecord | None,
    ) -> ArrayRecord | None:
        """Average the knowledge by class counts (9) and the weights by sample counts (1)."""
        local: list[Knowledge] = []
        largest = 0

        def keeping_knowledge() -> Iterator[Reply[HyperKnowledge]]:
            nonlocal largest
            for reply in replies:
                largest = max(largest, reply.node.num_examples)
                knowledge = unpack(reply.payload, reply.node.num_classes)
                local.append(replace(knowledge, counts=knowledge.counts.clamp(max=self.max_examples)))
                yield reply
                # Drop the reference, so that only one reply is in memory.
                del reply

        mean = super().aggregate_phase(phase, server_round, keeping_knowledge(), arrays)
        self.knowledge = aggregate_knowledge(local, self.knowledge_rule)
        counts = torch.cat([knowledge.counts for knowledge in local])
        self._warn_of_nothing_shared(self.knowledge, largest)
        self._warn_of_noise(counts[counts > 0].numpy())
        return mean

    def state_arrays(self) -> dict[str, NDArray]:
        """Return the global hyper-knowledge."""
        if self.knowledge is None:
            return {}
        return {
            "representations": self.knowledge.representations.numpy(),
            "predictions": self.knowledge.predictions.numpy(),
            "counts": self.knowledge.counts.numpy(),
        }

    def reset(self) -> None:
        """Forget the global hyper-knowledge."""
        self.knowledge = None

    def load_state_arrays(self, state: Mapping[str, NDArray]) -> None:
        """Restore the global hyper-knowledge."""
        self.reset()
        if state:
            self.knowledge = Knowledge(
                torch.tensor(state["representations"]),
                torch.tensor(state["predictions"]),
                torch.tensor(state["counts"]),
            )

    def _warn_of_nothing_shared(self, knowledge: Knowledge, samples: int) -> None:
        """Warn if no client has enough samples of any class; ``samples`` are those of the largest client."""
        if knowledge.known.any():
            return
        classes = len(knowledge.counts)
        share = self.config.share_needed(classes)
        otherwise = (
            ""
            if self.config.threshold_scale == "relative"
            else f", or set it in units of an even share: {assignment('threshold_scale', 'relative')}"
        )
        # Nothing is shared only if the share is above 1/C, so that half of 1/C is always less.
        lower = assignment(
            "threshold", 0.5 if share != self.config.threshold else float(f"{0.5 / classes:.2g}")
        )
        warn_once(
            "no client shared the knowledge of any class in a round, which leaves FedHKD without knowledge: "
            "threshold=%g (%s) asks for %.3g %% of a client's samples in one class, for example %d of %d, and "
            "an even share of %d classes is %.3g %%; lower it, for example %s%s",
            self.config.threshold,
            self.config.threshold_scale,
            100 * share,
            math.ceil(share * samples - 1e-9),
            samples,
            classes,
            100 / classes,
            lower,
            otherwise,
        )

    def _warn_of_noise(self, counts: NDArray) -> None:
        if self.config.noise == "none" or not counts.size:
            return
        std = noise_std(counts.astype(np.float64), self.config.clip, self.config.sigma)
        if std.max() > _DROWNING:
            warn_once(
                "few samples per class: FedHKD's noise on the representations has a standard deviation of %.2f to "
                "%.2f per element (classes of %d to %d samples at a client), far above the 0.16 of the paper's "
                "setting, so they carry little knowledge; %s disables the noise",
                std.min(),
                std.max(),
                counts.max(),
                counts.min(),
                assignment("noise", "none"),
            )
