"""KT-pFL's server half: the knowledge coefficient matrix, the weights with which clients learn from each other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord
from torch import Tensor

from flwr_kd.learning.weights import by_prefix, with_prefix
from flwr_kd.public_data.messages import SoftPredictions
from flwr_kd.public_data.server import PublicKnowledgeStrategy
from flwr_kd.server.aggregation import shares
from flwr_kd.server.records import NDArray, Node, Outgoing, Reply
from flwr_kd.server.strategy import KDStrategy
from flwr_kd.transport.template import VARIANCE, ArrayTemplate

from .config import KTpFLConfig, KTpFLWeightsConfig
from .functional import (
    as_distributions,
    coefficient_gradient,
    cosine_coefficients,
    distance_gradient,
    distance_scale,
    extend,
    gram,
    of_participants,
    personal_models,
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
            return personal_targets(weights, predictions)
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
        return as_distributions(targets) if config.normalize == "none" else targets

    def state_arrays(self) -> dict[str, NDArray]:
        """Return ``coefficients`` ``[N, N]`` and ``clients`` ``[N]``; nothing before the first replies."""
        return self.matrix.to_state()

    def reset(self) -> None:
        """Begin with an empty matrix."""
        self.matrix = CoefficientMatrix()

    def load_state_arrays(self, state: Mapping[str, NDArray]) -> None:
        """Restore the matrix."""
        self.matrix = CoefficientMatrix.from_state(state)


class KTpFLWeights(KDStrategy[KTpFLWeightsConfig]):
    """KT-pFL, homogeneous (its appendix C): personal global models instead of personalised predictions.

    Clients send their models. Client n's personal global model is the mixture of all by row n of the knowledge
    coefficient matrix; the client takes steps towards it (equation 10), and the matrix takes a step of gradient
    descent (equation 11). Models must have one architecture; each client keeps its own. There is no global model.

    Parameters
    ----------
    config : KTpFLWeightsConfig, optional
        The hyper-parameters.
    **options
        See :class:`flwr_kd.KDStrategy`. ``initial_arrays`` of :meth:`start` are sent to each client before its
        first training; if they are empty, each client starts from its model as built, which should be the same.

    Attributes
    ----------
    matrix : CoefficientMatrix
        Empty before the first answers.
    models : dict
        By client, the personal global model of the last round in which it took part. A client that lost its own
        model, for example in a restart, continues from it.
    architecture : ArrayTemplate
        The names and shapes that all clients' models have; empty before a run.

    Raises
    ------
    ConfigError
        If an option or a hyper-parameter is not allowed.
    """

    config_class = KTpFLWeightsConfig
    phases = ("train", "distill")
    reply_arrays = frozenset({"train"})
    sends_weights = False
    uses_initial_arrays = True

    def __init__(self, config: KTpFLWeightsConfig | None = None, **options: Any) -> None:
        super().__init__(config, **options)
        self.matrix = CoefficientMatrix()
        self.models: dict[int, list[NDArray]] = {}
        self.architecture = ArrayTemplate()
        self._holders: dict[int, int] = {}

    def begin(self, nodes: list[Node]) -> None:
        """Fix the architecture, and note the clients, which are added to the matrix with the first replies."""
        super().begin(nodes)
        expected = self._expected(nodes[0])
        common = self.template if self.template.names else self.common(lambda node: node.template, nodes[0])
        if not expected.difference(common):
            # A checkpoint has its arrays in another order, which would change the rounding of sums over them.
            order = [expected.names.index(name) for name in common.names] if self.models else []
            self.models = {key: [model[i] for i in order] for key, model in self.models.items()}
            # A checkpoint has no constants, such as the -inf of a mask.
            expected = common
        self.architecture, self._holders = expected, {}
        self.matrix.expect(nodes)

    def template_of(self, node: Node) -> ArrayTemplate:
        """Return the common architecture."""
        return self.architecture

    def accept_node(self, node: Node) -> str | None:
        """Refuse a client whose model differs from the others'."""
        return self._expected(node).difference(node.template)

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
                else Outgoing(node, self._first(node, arrays))
                for node in nodes
            ]
        return [Outgoing(node, self.architecture.record(self.models[node.key])) for node in nodes]

    def configure_measurement(self, nodes: list[Node], arrays: ArrayRecord) -> Iterable[Outgoing]:
        """Send each client the model that it would be sent if it had none of its own, which it prefers."""
        return [Outgoing(node, self._first(node, arrays)) for node in nodes]

    def aggregate_phase(
        self, phase: str, server_round: int, replies: Iterable[Reply], arrays: ArrayRecord | None
    ) -> ArrayRecord | None:
        """Compute the personal global models, and update the matrix (equation 11)."""
        replies = list(replies)
        self._holders |= {reply.node.key: reply.node.node_id for reply in replies}
        if phase != "train":
            return None
        config, clients = self.config, [reply.node.key for reply in replies]
        self.matrix.admit(clients)
        models = [self.architecture.finite(reply.arrays) for reply in replies]
        weights = self.matrix.of(clients)
        mixed = personal_models(weights, models)
        self.models |= {
            client: self._with_valid_variances(model) for client, model in zip(clients, mixed, strict=True)
        }
        gradient = distance_gradient(
            weights,
            gram(models),
            _shares(replies),
            weight=config.distill_weight,
            rho=config.rho,
            scale=distance_scale(models[0], config.reduction),
        )
        weights = step(weights, gradient, config.coefficient_learning_rate, config.normalize)
        self.matrix.update(clients, weights)
        return None

    def state_arrays(self) -> dict[str, NDArray]:
        """Return the matrix and the personal global models; nothing before the first replies."""
        models: dict[str, NDArray] = {}
        for client, model in self.models.items():
            models |= with_prefix(str(client), dict(zip(self.architecture.names, model, strict=True)))
        return self.matrix.to_state() | with_prefix("models", models)

    def reset(self) -> None:
        """Begin with an empty matrix, and without personal global models."""
        self.matrix, self.models, self._shape = CoefficientMatrix(), {}, ArrayTemplate()

    def load_state_arrays(self, state: Mapping[str, NDArray]) -> None:
        """Restore the matrix and the models."""
        self.matrix = CoefficientMatrix.from_state(
            {name: value for name, value in state.items() if not name.startswith("models/")}
        )
        models = by_prefix(by_prefix(state).get("models", {}))
        templates = {ArrayTemplate.of_ndarrays(model) for model in models.values()}
        if len(templates) > 1:
            raise ValueError("the personal global models of the state are not of one architecture")
        self.models = {int(client): list(model.values()) for client, model in models.items()}
        self.architecture = templates.pop() if templates else ArrayTemplate()

    def _expected(self, node: Node) -> ArrayTemplate:
        """Return the architecture: of the restored models, of ``initial_arrays``, or of most clients."""
        if self.models or not self.template.names:
            return (
                self.architecture
                if self.architecture.names
                else self.common(lambda other: other.template, node, shown=_described)
            )
        return self.template

    def _first(self, node: Node, arrays: ArrayRecord | None) -> ArrayRecord | None:
        known = self.models.get(node.key)
        if known is not None:
            return self.architecture.record(known)
        return ArrayRecord({name: arrays[name] for name in self.architecture.names}) if arrays else None

    def _with_valid_variances(self, model: list[NDArray]) -> list[NDArray]:
        """Clip variances at 0: rows that are not normalised can have negative coefficients."""
        named = zip(self.architecture.names, model, strict=True)
        return [np.maximum(array, 0) if name.endswith(VARIANCE) else array for name, array in named]


def _described(template: ArrayTemplate) -> str:
    sizes = dict(zip(template.names, template.shapes, strict=True))
    return f"{len(sizes)} arrays, the last {list(sizes.items())[-1:]}"


def _shares(replies: list[Reply[Any]]) -> Tensor:
    return torch.from_numpy(shares([reply.num_examples for reply in replies]))
