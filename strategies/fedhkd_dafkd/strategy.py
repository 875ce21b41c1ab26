"""The server half of FedHKD+DaFKD: FedHKD's means of knowledge, and DaFKD's distillation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from flwr.app import ArrayRecord

from flwr_kd.learning.weights import by_prefix, with_prefix
from flwr_kd.server.records import NDArray, Node, Outgoing, Reply
from flwr_kd.transport.payload import Payload

from ..dafkd.messages import SCORE, DiscriminatorScores
from ..dafkd.strategy import DaFKD
from ..fedhkd.strategy import FedHKD
from .config import FedHKDDaFKDConfig
from .messages import ScoredKnowledge

_KNOWLEDGE = "knowledge"


class FedHKDDaFKD(FedHKD, DaFKD[FedHKDDaFKDConfig, ScoredKnowledge]):
    """FedHKD at the clients, DaFKD's distillation at the server (FedHyb's comparison, "FedHKD+DaFKD").

    For parameters and attributes see :class:`~flwr_kd.strategies.dafkd.DaFKD` and
    :class:`~flwr_kd.strategies.fedhkd.FedHKD`.
    """

    config_class = FedHKDDaFKDConfig
    method = "fedhkd-dafkd"
    reply_payloads: ClassVar[Mapping[str, type[Payload]]] = {
        "train": ScoredKnowledge,
        SCORE: DiscriminatorScores,
    }

    def configure_phase(
        self, phase: str, server_round: int, nodes: list[Node], arrays: ArrayRecord | None
    ) -> Iterable[Outgoing]:
        """Send all clients the global model, the generator and, from round 2 on, the hyper-knowledge."""
        if phase == SCORE:
            return DaFKD.configure_phase(self, phase, server_round, nodes, arrays)
        return FedHKD.configure_phase(self, phase, server_round, nodes, self.with_generator(arrays))

    def check_reply(self, phase: str, reply: Reply[Any]) -> None:
        """Refuse what either method refuses."""
        if phase != SCORE:
            FedHKD.check_reply(self, phase, reply)
        DaFKD.check_reply(self, phase, reply)

    def aggregate_phase(
        self, phase: str, server_round: int, replies: Iterable[Reply[Any]], arrays: ArrayRecord | None
    ) -> ArrayRecord | None:
        """Average knowledge, models and generators, and distil; scores that come later have no knowledge."""
        base: Any = DaFKD if phase == SCORE else FedHKD
        mean: ArrayRecord | None = base.aggregate_phase(self, phase, server_round, replies, arrays)
        return mean

    def state_arrays(self) -> dict[str, NDArray]:
        """Return the generator and the hyper-knowledge."""
        return {**with_prefix(_KNOWLEDGE, FedHKD.state_arrays(self)), **DaFKD.state_arrays(self)}

    def reset(self) -> None:
        """Forget both."""
        FedHKD.reset(self)
        DaFKD.reset(self)

    def load_state_arrays(self, state: Mapping[str, NDArray]) -> None:
        """Restore both.

        Raises
        ------
        ValueError
            If the state is not this method's.
        """
        prefix = f"{_KNOWLEDGE}/"
        FedHKD.load_state_arrays(self, by_prefix(state).get(_KNOWLEDGE, {}))
        # Each of the two begins with reset(), which is that of both.
        knowledge = self.knowledge
        DaFKD.load_state_arrays(self, {k: v for k, v in state.items() if not k.startswith(prefix)})
        self.knowledge = knowledge
