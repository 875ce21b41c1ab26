"""KT-pFL's server half: the knowledge coefficient matrix, the weights with which clients learn from each other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord
from torch import Tensor

from flwr_kd.public_data.messages import SoftPredictions
from flwr_kd.public_data.server import PublicKnowledgeStrategy
from flwr_kd.server.aggregation import robust_average, shares
from flwr_kd.server.model_per_client import ModelPerClient
from flwr_kd.server.records import NDArray, Node, Outgoing, Reply

from .config import KTpFLConfig, KTpFLWeightsConfig
from .functional import (
    as_distributions,
    coefficient_gradient,
    cosine_coefficients,
    distance_gradient,
    distance_scale,
    extend,
    of_participants,
    personal_targets,
    step,
    with_participants,
)
from .messages import HAS_MODEL


class CoefficientMatrix:
    """The knowledge coefficient matrix c of all clients that ever replied, by the keys of their nodes.

    Attributes
    ----------
    clients : list of int
        Keys of rows and columns, ascending.
    values : Tensor
        ``[N, N]``, float64: row n holds client n's weights over all clients, initially 1/N.
    expected : list of int
        Keys of clients that are added together with the first that are admitted.
    """

    def __init__(self, clients: Iterable[int] = (), values: Tensor | None = None) -> None:
        self.clients = sorted(clients)
        empty = torch.zeros(0, 0, dtype=torch.float64)
        self.values = extend(empty, len(self.clients)) if values is None else values
        self.expected: list[int] = []

    def expect(self, nodes: Iterable[Node]) -> None:
        """Note the clients of a run's start, which are added together; a resumed run has them already."""
        self.expected = [] if self.clients else [node.key for node in nodes]

    def admit(self, clients: Iterable[int]) -> None:
        """Add new clients; see :func:`~flwr_kd.strategies.ktpfl.functional.extend`."""
        new = sorted({*self.expected, *clients} - set(self.clients))
        if new:
            joined = [*self.clients, *new]
            order = torch.tensor(sorted(range(len(joined)), key=joined.__getitem__))
            self.values = extend(self.values, len(new))[order[:, None], order]
            self.clients = sorted(joined)

    def positions(self, clients: Sequence[int]) -> Tensor:
        """Return the rows of clients, ``[P]``."""
        where = {client: row for row, client in enumerate(self.clients)}
        return torch.tensor([where[client] for client in clients], dtype=torch.int64)

    def of(self, clients: Sequence[int]) -> Tensor:
        """Return the participants' weights ``[P, P]``, renormalised over the participants."""
        return of_participants(self.values, self.positions(clients))

    def update(self, clients: Sequence[int], weights: Tensor) -> None:
        """Set the participants' weights ``[P, P]``; the counterpart of :meth:`of`."""
        self.values = with_participants(self.values, self.positions(clients), weights)

    def replace(self, clients: Sequence[int], weights: Tensor) -> None:
        """Replace the participants' rows by weights ``[P, P]``, with 0 for absent clients."""
        rows = self.positions(clients)
        self.values[rows] = 0.0
        self.values[rows[:, None], rows] = weights.double()

    def to_state(self) -> dict[str, NDArray]:
        """Return the matrix and its clients as named arrays; nothing without clients."""
        if not self.clients:
            return {}
        # Keys are partition ids or Flower's node ids, which need all 64 bits.
        clients = np.array(self.clients, dtype=np.uint64)
        return {"coefficients": self.values.numpy().copy(), "clients": clients}

    @classmethod
    def from_state(cls, state: Mapping[str, NDArray]) -> CoefficientMatrix:
        """Restore :meth:`to_state`.

        Raises
        ------
        ValueError
            If the arrays are not such a state.
        """
        if not state:
            return cls()
        if set(state) != {"coefficients", "clients"}:
            raise ValueError(f"the state must be coefficients and clients, got {sorted(state)}")
        if state["clients"].dtype.kind not in "iu" or state["clients"].ndim != 1:
            raise ValueError(f"clients must be whole numbers [N], got {state['clients'].dtype}")
        clients, values = state["clients"].tolist(), state["coefficients"]
        if values.shape != (len(clients), len(clients)) or sorted(set(clients)) != clients:
            raise ValueError(f"coefficients must be [N, N] of N = {len(clients)} clients, got {values.shape}")
        if values.dtype.kind != "f" or not np.isfinite(values).all():
            raise ValueError("coefficients must be finite floats")
        return cls(clients, torch.from_numpy(values.astype(np.float64)))


class KTpFL(PublicKnowledgeStrategy[KTpFLConfig]):
    """KT-pFL (Zhang et al., NeurIPS 2021), heterogeneous: personalised soft predictions (algorithm 1).

    Client n's targets are the mixture of all clients' soft predictions by row n of the knowledge coefficient
    matrix. Then the matrix takes a step of gradient descent (equation 7), which leaves rows and columns of absent
    clients unchanged. With ``coefficients=cosine`` (Sim-pFL) or ``top-k`` (TopK-pFL) a participant's row is
    computed from the similarity of the round's predictions instead.

    For parameters see :class:`flwr_kd.public_data.server.PublicKnowledgeStrategy`.

    Attributes
    ----------
    matrix : CoefficientMatrix
        Empty before the first answers.

    Raises
    ------
    ConfigError, DatasetError
        If an option or a hyper-parameter is not allowed, or the public data cannot be used.
    """

    config_class = KTpFLConfig
    averages_knowledge = True

    def __init__(self, config: KTpFLConfig | None = None, **options: Any) -> None:
        super().__init__(config, **options)
        self.matrix = CoefficientMatrix()

    def begin(self, nodes: list[Node]) -> None:
        """Note the clients, which are added to the matrix with the first replies."""
        super().begin(nodes)
        self.matrix.expect(nodes)

    def targets(
        self, server_round: int, replies: list[Reply[SoftPredictions]], predictions: Tensor
    ) -> Tensor:
        """Return personalised soft predictions (equation 2), and update the matrix (equation 7)."""
        config, clients = self.config, [reply.node.key for reply in replies]
        self.matrix.admit(clients)
        if config.coefficients != "learned":
            weights = cosine_coefficients(
                predictions, config.top_k if config.coefficients == "top-k" else None
            )
            self.matrix.replace(clients, weights)
            return self._sent(weights, predictions, personal_targets(weights, predictions))
        weights = self.matrix.of(clients)
        targets = personal_targets(weights, predictions)
        gradient = coefficient_gradient(
            weights,
            predictions,
            _shares(replies),
            weight=config.distill_weight,
            rho=config.rho,
            reduction=config.reduction,
            targets=targets,
        )
        self.matrix.update(
            clients, step(weights, gradient, config.coefficient_learning_rate, config.normalize)
        )
        targets = as_distributions(targets) if config.normalize == "none" else targets
        return self._sent(weights, predictions, targets)

    def _sent(self, weights: Tensor, predictions: Tensor, targets: Tensor) -> Tensor:
        """Return the targets, or by a robust rule the weighted median or trimmed mean by each client's row."""
        if self.knowledge_rule.is_mean:
            return targets
        rows = weights.clamp(min=0)[:, :, None, None]
        robust = [robust_average(predictions, self.knowledge_rule, row) for row in rows]
        return torch.stack(robust).to(predictions.dtype)

    def state_arrays(self) -> dict[str, NDArray]:
        """Return ``coefficients`` ``[N, N]`` and ``clients`` ``[N]``; nothing before the first replies."""
        return self.matrix.to_state()

    def reset(self) -> None:
        """Begin with an empty matrix."""
        self.matrix = CoefficientMatrix()

    def load_state_arrays(self, state: Mapping[str, NDArray]) -> None:
        """Restore the matrix."""
        self.matrix = CoefficientMatrix.from_state(state)


class KTpFLWeights(ModelPerClient[KTpFLWeightsConfig]):
    """KT-pFL, homogeneous (its appendix C): personal global models instead of personalised predictions.

    Clients send their models. Client n's personal global model is the mixture of all by row n of the knowledge
    coefficient matrix; the client takes steps towards it (equation 10), and the matrix takes a step of gradient
    descent (equation 11). Models must have one architecture; each client keeps its own. There is no global model.

    Parameters
    ----------
    config : KTpFLWeightsConfig, optional
        The hyper-parameters.
    **options
        See :class:`flwr_kd.server.model_per_client.ModelPerClient`. ``initial_arrays`` of :meth:`start` are sent to
        each client before its first training; if they are empty, each client starts from its model as built, which
        should be the same.

    Attributes
    ----------
    matrix : CoefficientMatrix
        Empty before the first answers.
    models : ModelStore
        By client, the personal global model of the last round in which it took part. A client that lost its own
        model, for example in a restart, continues from it.

    Raises
    ------
    ConfigError
        If an option or a hyper-parameter is not allowed.
    """

    config_class = KTpFLWeightsConfig
    phases = ("train", "distill")

    def __init__(self, config: KTpFLWeightsConfig | None = None, **options: Any) -> None:
        super().__init__(config, **options)
        self.matrix = CoefficientMatrix()
        self._holders: dict[int, int] = {}

    def begin(self, nodes: list[Node]) -> None:
        """Fix the architecture, and note the clients, which are added to the matrix with the first replies."""
        super().begin(nodes)
        self._holders = {}
        self.matrix.expect(nodes)

    def configure_phase(
        self, phase: str, server_round: int, nodes: list[Node], arrays: ArrayRecord | None
    ) -> Iterable[Outgoing]:
        """Send a model to clients without one of this run; in the second phase, each its personal global model."""
        # A client that fails, for whatever reason, is sent a model in the next round; it prefers its own, if any.
        held = {node.key for node in nodes if self._holders.pop(node.key, None) == node.node_id}
        if phase == "train":
            return [
                Outgoing(node, config={HAS_MODEL: True})
                if node.key in held
                else Outgoing(node, self.first(node, arrays))
                for node in nodes
            ]
        return [Outgoing(node, self.models.record(node.key)) for node in nodes]

    def configure_measurement(self, nodes: list[Node], arrays: ArrayRecord) -> Iterable[Outgoing]:
        """Send each client the model that it would be sent if it had none of its own, which it prefers."""
        return [Outgoing(node, self.first(node, arrays)) for node in nodes]

    def aggregate_phase(
        self, phase: str, server_round: int, replies: Iterable[Reply], arrays: ArrayRecord | None
    ) -> ArrayRecord | None:
        """Compute the personal global models, and update the matrix (equation 11)."""
        received, used = self.models.empty(), []
        for reply in replies:
            if phase == "train":
                received.put(reply.node.key, reply.arrays)
            used.append((reply.node, reply.num_examples))
            # Drop the reference, so that only one reply is in memory.
            del reply
        self._holders |= {node.key: node.node_id for node, _ in used}
        if phase != "train":
            return None
        config, clients = self.config, [node.key for node, _ in used]
        self.matrix.admit(clients)
        weights = self.matrix.of(clients)
        self.models = self.models.copy()
        self.models.merge(received.mixed(dict(zip(clients, weights.double().numpy(), strict=True)), clients))
        gradient = distance_gradient(
            weights,
            torch.from_numpy(received.products(clients)),
            torch.from_numpy(shares([count for _, count in used])),
            weight=config.distill_weight,
            rho=config.rho,
            scale=distance_scale(received.get(clients[0]), config.reduction),
        )
        weights = step(weights, gradient, config.coefficient_learning_rate, config.normalize)
        self.matrix.update(clients, weights)
        return None

    def state_arrays(self) -> dict[str, NDArray]:
        """Return the matrix and the personal global models; nothing before the first replies."""
        return self.matrix.to_state() | super().state_arrays()

    def reset(self) -> None:
        """Begin with an empty matrix, and without personal global models."""
        super().reset()
        self.matrix = CoefficientMatrix()

    def load_state_arrays(self, state: Mapping[str, NDArray]) -> None:
        """Restore the matrix and the models."""
        matrix = CoefficientMatrix.from_state({n: v for n, v in state.items() if not self.is_model(n)})
        super().load_state_arrays({name: value for name, value in state.items() if self.is_model(name)})
        self.matrix = matrix


def _shares(replies: list[Reply[Any]]) -> Tensor:
    return torch.from_numpy(shares([reply.num_examples for reply in replies]))
