"""FedFomo's server half: it keeps the clients' models, and says who is sent whose."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from flwr.app import ArrayRecord

from flwr_kd.learning.weights import with_prefix
from flwr_kd.seeding import numpy_generator
from flwr_kd.server.model_per_client import ModelPerClient
from flwr_kd.server.records import NDArray, Node, Outgoing, Reply
from flwr_kd.transport.payload import Payload

from .config import FedFomoConfig
from .functional import draw_models
from .messages import CANDIDATES, Affinities


class AffinityMatrix:
    """The matrix P of all clients that ever replied, by the keys of their nodes; zero at the start.

    Attributes
    ----------
    clients : list of int
        Keys of rows and columns, ascending.
    values : ndarray
        ``[N, N]``, float64: row i has client i's affinities to the others' models.
    """

    def __init__(self, clients: Sequence[int] = (), values: npt.NDArray[np.float64] | None = None) -> None:
        self.clients = list(clients)
        self.values = np.zeros((len(self.clients),) * 2) if values is None else values

    def admit(self, clients: Iterable[int]) -> None:
        """Add clients, with affinities of 0."""
        joined = sorted({*self.clients, *clients})
        values = np.zeros((len(joined), len(joined)))
        places = [joined.index(client) for client in self.clients]
        values[np.ix_(places, places)] = self.values
        self.clients, self.values = joined, values

    def of(self, client: int, others: Sequence[int]) -> npt.NDArray[np.float64]:
        """Return a client's affinities to others, ``[K]``."""
        row: npt.NDArray[np.float64] = self.values[self._places([client])[0], self._places(others)]
        return row

    def add(self, client: int, others: Sequence[int], deltas: npt.NDArray[Any]) -> None:
        """Add how much others' models helped a client, ``[K]``: signed, over the sum of their magnitudes.

        Nothing changes if all are 0.
        """
        values = np.asarray(deltas, dtype=np.float64)
        total = np.abs(values).sum()
        if total > 0:
            self.values[self._places([client])[0], self._places(others)] += values / total

    def _places(self, clients: Sequence[int]) -> list[int]:
        where = {client: place for place, client in enumerate(self.clients)}
        return [where[client] for client in clients]


class FedFomo(ModelPerClient[FedFomoConfig, Affinities]):
    """FedFomo (Zhang et al., ICLR 2021): each client is sent the models that help it most, and mixes them itself.

    **Clients get other clients' models as they are.** Models are kept when their clients are not drawn. A client
    that has never replied is sent ``initial_arrays``. There is no global model.

    Parameters
    ----------
    config : FedFomoConfig, optional
        The hyper-parameters.
    **options
        See :class:`flwr_kd.server.model_per_client.ModelPerClient`.

    Attributes
    ----------
    affinities : AffinityMatrix
        Empty before the first replies.
    sent : dict of int to list of int
        By client, whose models it was sent in its last message, in their order.

    Raises
    ------
    ConfigError
        If an option or a hyper-parameter is not allowed.
    """

    config_class = FedFomoConfig
    reply_payloads: ClassVar[Mapping[str, type[Payload]]] = {"train": Affinities}

    def __init__(self, config: FedFomoConfig | None = None, **options: Any) -> None:
        super().__init__(config, **options)
        self.affinities = AffinityMatrix()
        self.sent: dict[int, list[int]] = {}

    def configure_phase(
        self, phase: str, server_round: int, nodes: list[Node], arrays: ArrayRecord | None
    ) -> Iterable[Outgoing]:
        """Send each client some others' models by its affinities (ε-greedy); before its first reply none."""
        epsilon, outgoing = self.config.epsilon_at(server_round), []
        records: dict[int, ArrayRecord] = {}
        for node in nodes:
            others = [key for key in self.models.keys if key != node.key]
            if node.key not in self.models or not others:
                self.sent[node.key] = []
                first = None if node.key in self.models else self.first(node, arrays)
                outgoing.append(Outgoing(node, first))
                continue
            rng = numpy_generator(self.seed, "fedfomo", server_round, node.key)
            drawn = draw_models(self.affinities.of(node.key, others), self.config.models, epsilon, rng)
            self.sent[node.key] = chosen = [others[place] for place in drawn]
            models: dict[str, Any] = {}
            for place, key in enumerate(chosen):
                # Several clients may be sent the same model, whose bytes they share.
                if key not in records:
                    records[key] = self.models.record(key)
                models |= with_prefix(str(place), records[key])
            outgoing.append(Outgoing(node, ArrayRecord(models), config={CANDIDATES: len(chosen)}))
        return outgoing

    def configure_measurement(self, nodes: list[Node], arrays: ArrayRecord) -> Iterable[Outgoing]:
        """Send each client its last model, in case that it has lost its own, which it prefers; else the first."""
        return [Outgoing(node, self.first(node, arrays)) for node in nodes]

    def payload_dims(self, phase: str, node: Node) -> Mapping[str, int]:
        """Return M, the number of models that the client was sent."""
        return {"M": len(self.sent.get(node.key, []))}

    def aggregate_phase(
        self,
        phase: str,
        server_round: int,
        replies: Iterable[Reply[Affinities]],
        arrays: ArrayRecord | None,
    ) -> ArrayRecord | None:
        """Keep the models, and add to the affinities."""
        models, helped = self.models.copy(), {}
        for reply in replies:
            models.put(reply.node.key, reply.arrays)
            helped[reply.node.key] = reply.payload.values
            # Drop the reference, so that only one reply is in memory.
            del reply
        self.models = models
        self.affinities.admit(models.keys)
        for key, deltas in helped.items():
            self.affinities.add(key, self.sent.get(key, []), deltas)
        return None

    def state_arrays(self) -> dict[str, NDArray]:
        """Return the models and the affinities; nothing before the first replies."""
        models = super().state_arrays()
        return models | {"affinities": self.affinities.values.copy()} if models else {}

    def reset(self) -> None:
        """Begin without models and affinities."""
        super().reset()
        self.affinities, self.sent = AffinityMatrix(), {}

    def load_state_arrays(self, state: Mapping[str, NDArray]) -> None:
        """Restore the models and the affinities."""
        rest = {name: value for name, value in state.items() if not self.is_model(name)}
        if rest and set(rest) != {"affinities"}:
            raise ValueError(f"the state must be models and affinities, got {sorted(rest)}")
        super().load_state_arrays({name: value for name, value in state.items() if self.is_model(name)})
        clients = self.models.keys
        values = np.array(rest.get("affinities", np.zeros((0, 0))), dtype=np.float64)
        if values.shape != (len(clients), len(clients)) or not np.isfinite(values).all():
            raise ValueError(f"affinities must be finite, [N, N] of N = {len(clients)}, got {values.shape}")
        self.affinities, self.sent = AffinityMatrix(clients, values), {}
