"""FedAMP's server half: a model per client, and a mixture of all of them for each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from logging import INFO
from typing import Any

from flwr.app import ArrayRecord
from flwr.common.logger import log

from flwr_kd.server.model_per_client import ModelPerClient
from flwr_kd.server.model_store import ModelStore
from flwr_kd.server.records import Node, Outgoing, Reply

from .config import FedAMPConfig
from .functional import Attention, cosine_attention, distance_attention
from .messages import HAS_MODEL


class FedAMP(ModelPerClient[FedAMPConfig]):
    r"""FedAMP (Huang et al., AAAI 2021): the server mixes the clients' models, for each client in another way.

    Client i is sent :math:`u_i = \sum_j \xi_{ij} w_j`, and returns its model :math:`w_i` after training. A client
    that was not drawn counts with its last model, before its first with ``initial_arrays``. Without
    ``initial_arrays`` it does not count until it has replied. Parameters are mixed; running statistics stay the
    client's own. There is no global model.

    Parameters
    ----------
    config : FedAMPConfig, optional
        The hyper-parameters.
    **options
        See :class:`flwr_kd.server.model_per_client.ModelPerClient`.

    Attributes
    ----------
    attention : Attention or None
        The last round's weights of all clients' mixtures; None before there are any.
    clients : list of int
        The keys of its rows.

    Raises
    ------
    ConfigError
        If an option or a hyper-parameter is not allowed.
    """

    config_class = FedAMPConfig

    def __init__(self, config: FedAMPConfig | None = None, **options: Any) -> None:
        super().__init__(config, **options)
        self.attention: Attention | None = None
        self.clients: list[int] = []
        self._connected: list[int] = []

    def begin(self, nodes: list[Node]) -> None:
        """Note the clients, which count with the initial model until they reply."""
        super().begin(nodes)
        self._connected = [node.key for node in nodes]

    def configure_phase(
        self, phase: str, server_round: int, nodes: list[Node], arrays: ArrayRecord | None
    ) -> Iterable[Outgoing]:
        """Send each client its mixture; nothing where no model is known yet."""
        known = self._known(nodes, arrays)
        if not len(known):
            return [Outgoing(node) for node in nodes]
        self.clients = known.keys
        self.attention = attention = self._attention(known, self.clients)
        if attention.scaled.any():
            log(
                INFO,
                "round %d: the weights of others were scaled to sum 1 for %d of %d clients",
                server_round,
                attention.scaled.sum(),
                len(self.clients),
            )
        rows = dict(zip(self.clients, attention.weights, strict=True))
        asked = [node for node in nodes if node.key in known]
        mixtures = known.mixed(
            {node.key: rows[node.key] for node in asked}, self.clients, parameters_only=True
        )
        return [Outgoing(node, mixtures.record(node.key) if node.key in known else None) for node in nodes]

    def configure_measurement(self, nodes: list[Node], arrays: ArrayRecord) -> Iterable[Outgoing]:
        """Send each client its own last model; the initial one before its first."""
        return [
            Outgoing(node, self.first(node, arrays), config={HAS_MODEL: node.key in self.models})
            for node in nodes
        ]

    def aggregate_phase(
        self, phase: str, server_round: int, replies: Iterable[Reply], arrays: ArrayRecord | None
    ) -> ArrayRecord | None:
        """Keep the models."""
        models = self.models.copy()
        for reply in replies:
            models.put(reply.node.key, reply.arrays)
            # Drop the reference, so that only one reply is in memory.
            del reply
        self.models = models
        return None

    def reset(self) -> None:
        """Begin without models."""
        super().reset()
        self.attention, self.clients = None, []

    def _known(self, nodes: Sequence[Node], arrays: ArrayRecord | None) -> ModelStore:
        """Return all clients' models, the initial one for those that have none yet."""
        known = self.models.copy()
        if arrays:
            missing = sorted({*self._connected, *(node.key for node in nodes)} - set(known.keys))
            for key in missing[:1]:
                known.put(key, [arrays[name].numpy() for name in self.architecture.names])
            for key in missing[1:]:
                known.share(key, missing[0])
        return known

    def _attention(self, known: ModelStore, clients: Sequence[int]) -> Attention:
        if self.config.attention == "cosine":
            return cosine_attention(known.cosines(clients), self.config.cosine_scale)
        return distance_attention(known.squared_distances(clients), self.config.attention_alpha)
