"""FedHEAD's server half: sectors, their leaders, and the means before and after the leaders' distillation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from logging import WARNING
from typing import Any

import numpy as np
from flwr.app import ArrayRecord
from flwr.common.logger import log

from flwr_kd.checks import ConfigError
from flwr_kd.distillation.server import DistillingStrategy, Group
from flwr_kd.seeding import numpy_generator
from flwr_kd.server.aggregation import shares
from flwr_kd.server.records import NDArray, Node, Outgoing, Reply
from flwr_kd.server.strategy import KDStrategy

from .config import FedHEADConfig
from .functional import assign_sectors, draw_leader, strays
from .messages import KNOWLEDGE, pack


class FedHEAD(KDStrategy[FedHEADConfig]):
    """FedHEAD (Chowdhury et al.), algorithm 1: each sector's leader distils its sector's models on its own data.

    Flower is a star: messages that stay inside a sector in the paper pass the SuperLink here, so the server sends a
    leader its sector's models. Leaders are drawn, after local training, among the clients that replied.

    A leader that fails is replaced once, by another client of its sector that is drawn in the same way. If that one
    fails as well, the mean of the sector's models replaces the distilled model. A sector without a reply is left
    out of the round, as is one from which no client is drawn with ``fraction_train`` below 1.

    Parameters
    ----------
    config : FedHEADConfig, optional
        The hyper-parameters.
    **options
        See :class:`flwr_kd.KDStrategy`.

    Attributes
    ----------
    sectors : dict
        Sector of each client, by the client's key: a number, or the text in its node config.
    leaders : dict
        Nodes that distilled in the last round, by sector.
    round_trips : int
        Between sectors and server in this run (Table 1): two per sector and round, one if no leader distilled.
    trained : bool
        Whether there were replies in this run, or in the one that is resumed.

    Raises
    ------
    ConfigError
        If an option or a hyper-parameter is not allowed, or there could be more random sectors than clients:
        ``min_available_nodes`` must be at least ``sectors``.
    """

    config_class = FedHEADConfig
    averages_knowledge = True
    phases = ("train", "distill", "distill-again")
    reply_arrays = frozenset(phases)
    reply_metrics = frozenset({"distill-epochs", "distill-loss", "distill-left-out"})

    def __init__(self, config: FedHEADConfig | None = None, **options: Any) -> None:
        super().__init__(config, **options)
        if self.config.assignment == "random" and self.min_available_nodes < self.config.sectors:
            raise ConfigError(
                f"min_available_nodes must be at least the number of sectors, got {self.min_available_nodes} "
                f"clients for {self.config.sectors} sectors"
            )
        self.sectors: dict[int, int | str] = {}
        self.leaders: dict[int | str, Node] = {}
        self.round_trips = 0
        self.trained = False
        self._forget_round()

    # ------------------------------------------------------------------ sectors and leaders

    def accept_node(self, node: Node) -> str | None:
        """Refuse a client whose node config must name its sector and does not."""
        if self.config.assignment == "client" and not node.sector:
            return "its node config names no sector, which assignment=client needs"
        return super().accept_node(node)

    def begin(self, nodes: list[Node]) -> None:
        """Reset the counter, and assign the sectors; clients that connect later are assigned at a round's start."""
        self.round_trips = 0
        self._assign(nodes)

    def select(self, phase: str, server_round: int, nodes: list[Node], answered: list[Node]) -> list[Node]:
        """Return the clients that are drawn for training, then the leaders, then replacements of failed leaders."""
        if phase == "train":
            self._forget_round()
            self._assign(nodes)
            connected = {self.sectors[node.key] for node in nodes}
            for sector in sorted(set(self.sectors.values()) - connected, key=str):
                log(WARNING, "round %d: sector %s has no clients", server_round, sector)
            drawn = super().select(phase, server_round, nodes, answered)
            self._drawn |= {self.sectors[node.key] for node in drawn}
            return drawn
        chosen = {}
        for sector, replies in self._replies.items():
            candidates = [reply for reply in replies if reply.node not in self._asked.get(sector, [])]
            if candidates and sector not in self._distilled:
                rng = numpy_generator(self.seed, phase, server_round, sector)
                counts = [reply.num_examples for reply in candidates]
                leader = candidates[draw_leader(counts, rng, leader=self.config.leader)].node
                chosen[sector] = leader
                self._asked.setdefault(sector, []).append(leader)
                if phase == "distill-again":
                    failed = self._asked[sector][0]
                    log(WARNING, "sector %s: %s leads in place of %s", sector, leader, failed)
        return list(chosen.values())

    # ------------------------------------------------------------------ phases

    def configure_phase(
        self, phase: str, server_round: int, nodes: list[Node], arrays: ArrayRecord | None
    ) -> Iterable[Outgoing]:
        """Send the global model; to a leader, z, its sector's models and their weights."""
        if phase == "train" or arrays is None:
            return super().configure_phase(phase, server_round, nodes, arrays)
        outgoing = []
        for node in nodes:
            replies = self._replies[self.sectors[node.key]]
            models = [self.template.record(reply.arrays) for reply in replies]
            weights = shares([reply.num_examples for reply in replies])
            record, ensemble = pack(arrays, models, weights)
            rule = {} if self.knowledge_rule.is_mean else {KNOWLEDGE: self.knowledge_aggregation}
            outgoing.append(Outgoing(node, record, ensemble, rule))
        return outgoing

    def aggregate_phase(
        self, phase: str, server_round: int, replies: Iterable[Reply], arrays: ArrayRecord | None
    ) -> ArrayRecord | None:
        """Average within the sectors and over them to z (steps 10 and 13), or keep what the leaders distilled."""
        if phase != "train":
            for reply in replies:
                sector = self.sectors[reply.node.key]
                if self._strays(reply, sector):
                    log(
                        WARNING,
                        "sector %s: the model of its leader %s is far off, and left out",
                        sector,
                        reply.node,
                    )
                    continue
                self._distilled[sector] = reply.arrays
                self.leaders[sector] = reply.node
            return None
        replies, average = list(replies), self.averaging()
        self.trained = True
        for sector in sorted(self._drawn, key=str):
            members = [reply for reply in replies if self.sectors[reply.node.key] == sector]
            if not members:
                log(WARNING, "round %d: sector %s has no replies and is left out", server_round, sector)
                continue
            counts = [reply.num_examples for reply in members]
            self._replies[sector] = members
            self._means[sector] = average([reply.arrays for reply in members], counts)
            self._counts[sector] = sum(counts)
        self._count_round_trips(len(self._means))
        return self.template.record(average(list(self._means.values()), list(self._counts.values())))

    def _strays(self, reply: Reply, sector: int | str) -> bool:
        """Say whether a leader's model is left out, as it is with a robust rule if it is far from the sector's."""
        members = [member.arrays for member in self._replies[sector]]
        return not self.rule.is_mean and strays(reply.arrays, self._means[sector], members)

    def _count_round_trips(self, count: int) -> None:
        """Count those between sectors and server, as the paper's Table 1 does."""
        self.round_trips += count
        self.stats.round_trips = (self.stats.round_trips or 0) + count

    def finish_round(self, server_round: int, arrays: ArrayRecord | None) -> ArrayRecord | None:
        """Average the distilled models (step 20); where leaders failed, the sector's mean replaces the model."""
        for sector in self._means.keys() - self._distilled.keys():
            log(
                WARNING,
                "round %d: no leader distilled in sector %s; the mean of its models is used",
                server_round,
                sector,
            )
        self._count_round_trips(len(self._distilled))
        models = {sector: self._distilled.get(sector, mean) for sector, mean in self._means.items()}
        weights = list(self._counts.values())
        self._forget_round(keep_leaders=True)
        return self.template.record(self.merge(models, weights, server_round))

    def merge(
        self, models: Mapping[int | str, list[NDArray]], weights: list[int], server_round: int
    ) -> list[NDArray]:
        """Return the new global model: the mean of the sectors' models."""
        return self.averaging()(list(models.values()), weights)

    # ------------------------------------------------------------------ state

    def state_arrays(self) -> dict[str, NDArray]:
        """Return the clients' sectors if the server assigned them; nothing before the first replies."""
        if not self.trained or self.config.assignment == "client":
            return {}
        return {
            "clients": np.array(list(self.sectors), dtype=np.uint64),
            "sectors": np.array(list(self.sectors.values()), dtype=np.int64),
        }

    def reset(self) -> None:
        """Forget the sectors; they are drawn anew."""
        self.sectors, self.trained = {}, False
        self._forget_round()

    def load_state_arrays(self, state: Mapping[str, NDArray]) -> None:
        """Restore the sectors."""
        self.reset()
        if state and state.keys() != {"clients", "sectors"}:
            raise ValueError(f"{type(self).__name__} has clients and sectors as state, got {sorted(state)}")
        keys, numbers = state.get("clients", np.array([])), state.get("sectors", np.array([]))
        self.sectors = {int(key): int(number) for key, number in zip(keys, numbers, strict=True)}
        self.trained = bool(state)

    def _assign(self, nodes: list[Node]) -> None:
        count = self.config.sectors
        if self.config.assignment == "client":
            self.sectors |= {node.key: node.sector for node in nodes}
            return
        rng = numpy_generator(self.seed, "sectors", len(self.sectors))
        known = {key: int(sector) for key, sector in self.sectors.items()}
        if known and len(set(known.values())) != count:
            raise ConfigError(
                f"sectors is {count}, the checkpoint's clients are in {len(set(known.values()))}"
            )
        self.sectors = dict(assign_sectors([node.key for node in nodes], count, rng, known))

    def _forget_round(self, *, keep_leaders: bool = False) -> None:
        self._drawn: set[int | str] = set()
        self._replies: dict[int | str, list[Reply]] = {}
        self._means: dict[int | str, list[NDArray]] = {}
        self._counts: dict[int | str, int] = {}
        self._distilled: dict[int | str, list[NDArray]] = {}
        self._asked: dict[int | str, list[Node]] = {}
        if not keep_leaders:
            self.leaders = {}


class FedHEADPlus(DistillingStrategy[FedHEADConfig], FedHEAD):
    """FedHEAD+ (section 3.3): FedHEAD whose server distils the leaders' models on unlabelled public data.

    Parameters
    ----------
    config : FedHEADConfig, optional
        The hyper-parameters.
    model, public_set, device, input_key, **options
        See :class:`flwr_kd.distillation.server.DistillingStrategy`; the public data is the paper's reference set.

    Raises
    ------
    ConfigError, DatasetError
        As FedHEAD; also if the model does not take the public data.
    """

    config_class = FedHEADConfig

    def merge(
        self, models: Mapping[int | str, list[NDArray]], weights: list[int], server_round: int
    ) -> list[NDArray]:
        """Average the sectors' models, and distil their ensemble into the mean."""
        names = [f"sector {sector}" for sector in models]
        group = Group(self.distiller, self.template, list(models.values()), weights, names)
        return self.distil(group, epochs=self.config.server_epochs, server_round=server_round)
