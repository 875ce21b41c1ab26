"""pFedHN's server half: the hypernetwork, which is trained on what the clients changed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from logging import INFO
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord
from flwr.common.logger import log
from torch import Tensor

from flwr_kd.checks import ConfigError
from flwr_kd.learning.device import resolve_device
from flwr_kd.learning.weights import by_prefix, check_finite_weights, with_prefix
from flwr_kd.models import count_parameters
from flwr_kd.server.aggregation import clip_factors
from flwr_kd.server.records import NDArray, Node, Outgoing, Reply
from flwr_kd.server.strategy import KDStrategy
from flwr_kd.server.trained_module import TrainedModule
from flwr_kd.transport.payload import check_magnitude
from flwr_kd.transport.template import ArrayTemplate
from flwr_kd.wording import assignment

from .config import PFedHNConfig
from .functional import embedding_size, gradient_norm_clipped, hypernetwork_size, vector_jacobian
from .hypernetwork import HyperNetwork
from .messages import PRODUCED

_EMBEDDING = "module/embeddings."
_BYTES = 16
"""Of a parameter: itself, its first value, its gradient and its momentum."""


class PFedHN(KDStrategy[PFedHNConfig]):
    """pFedHN (Shamsian et al., ICML 2021): a hypernetwork produces each client's parameters.

    A client receives θ = h(v; φ), made from its embedding v, trains it to θ̃, and sends Δ = θ - θ̃. The server moves
    φ and v down Jᵀ Δ: one step per reply, in the order of partitions, each with the Jacobian J and with θ at the φ
    that the step before has left. There is no global model; clients must have one architecture.

    Parameters
    ----------
    config : PFedHNConfig, optional
        The hyper-parameters.
    device : str or torch.device
        Where the hypernetwork is; ``"auto"``: CUDA, else MPS, else CPU.
    **options
        See :class:`flwr_kd.KDStrategy`. ``initial_arrays`` are not used.

    Attributes
    ----------
    target : ArrayTemplate
        Names and shapes of the arrays that are produced: what all clients train; empty before a run.
    hypernetwork : TrainedModule or None
        h with φ, the embeddings, and their optimiser; None before a run.

    Raises
    ------
    ConfigError
        If an option or a hyper-parameter is not allowed.
    """

    config_class = PFedHNConfig
    sends_weights = False
    reply_arrays = frozenset({"train"})
    averages_models = False
    bounds_updates = True
    reply_metrics = frozenset({PRODUCED})

    def __init__(
        self,
        config: PFedHNConfig | None = None,
        *,
        device: str | torch.device = "auto",
        **options: Any,
    ) -> None:
        super().__init__(config, **options)
        self.device = resolve_device(device)
        self.target = ArrayTemplate()
        self.hypernetwork: TrainedModule[HyperNetwork] | None = None
        self._stepped = False

    # ------------------------------------------------------------------ hooks

    def accept_node(self, node: Node) -> str | None:
        """Refuse a client that trains other arrays than the others, or none."""
        target = self._target(node)
        if not target.names:
            return "its model has no trained parameters that a hypernetwork could produce"
        return target.difference(node.template)

    def begin(self, nodes: list[Node]) -> None:
        """Make the hypernetwork for the clients that there are; a resumed run has it already.

        Raises
        ------
        ConfigError
            If it would be too large.
        """
        super().begin(nodes)
        if self.hypernetwork is not None:
            return
        self.target = self._target(nodes[0])
        clients = max(len(nodes), self.current_run.partitions)
        embedding = self.config.embedding_size or embedding_size(clients)
        self._check_size(embedding, clients)
        self.hypernetwork = self._made([node.key for node in nodes], embedding)

    def template_of(self, node: Node) -> ArrayTemplate:
        """Return the arrays that are produced."""
        return self.target

    def configure_phase(
        self, phase: str, server_round: int, nodes: list[Node], arrays: ArrayRecord | None
    ) -> Iterable[Outgoing]:
        """Send each client the parameters that are produced for it."""
        return [Outgoing(node, self._produced(node)) for node in nodes]

    def configure_measurement(self, nodes: list[Node], arrays: ArrayRecord) -> Iterable[Outgoing]:
        """Send each client the parameters with which it would begin its next training."""
        return [Outgoing(node, self._produced(node)) for node in nodes]

    def check_reply(self, phase: str, reply: Reply) -> None:
        """Refuse changes so large that their products with the Jacobian may overflow."""
        for name, delta in zip(self.target.names, reply.arrays, strict=True):
            check_magnitude(f"the change of array {name!r}", delta)

    def aggregate_phase(
        self, phase: str, server_round: int, replies: Iterable[Reply], arrays: ArrayRecord | None
    ) -> ArrayRecord | None:
        """Take the steps of the hypernetwork and of the clients' embeddings (algorithm 1).

        Raises
        ------
        FloatingPointError
            If its weights are no longer finite.
        """
        # Nothing changes before all are here: a round with too few of them is void.
        replies = list(replies)
        factors = self._factors(replies)
        received = {
            reply.node.key: self._received(reply, factor)
            for reply, factor in zip(replies, factors, strict=True)
        }
        trained = self._with_clients(list(received))
        together = (
            [received] if self.config.server_steps == "round" else [{k: v} for k, v in received.items()]
        )
        for some in together:
            self._step(trained, some)
        check_finite_weights(trained.module, "the hypernetwork's weights", option="server-learning-rate")
        self.hypernetwork, self._stepped = trained, True
        return None

    def held_parameters(self) -> int:
        """Return the parameters of the hypernetwork, the clients' embeddings included."""
        return 0 if self.hypernetwork is None else count_parameters(self.hypernetwork.module)

    def state_arrays(self) -> dict[str, NDArray]:
        """Return the hypernetwork, its optimiser, and what it produces; nothing before its first step."""
        if self.hypernetwork is None or not self._stepped:
            return {}
        target = np.frombuffer(self.target.to_json().encode(), dtype=np.uint8)
        # Keys are partition ids or Flower's node ids, which need all 64 bits. A file has arrays in another order.
        clients = np.array(self.hypernetwork.module.clients, dtype=np.uint64)
        state = with_prefix("hypernetwork", self.hypernetwork.state_arrays())
        return {**state, "target": target.copy(), "clients": clients}

    def reset(self) -> None:
        """Begin without a hypernetwork."""
        self.target, self.hypernetwork, self._stepped = ArrayTemplate(), None, False

    def load_state_arrays(self, state: Mapping[str, NDArray]) -> None:
        """Restore :meth:`state_arrays`.

        Raises
        ------
        ValueError
            If it is of another hypernetwork.
        """
        self.reset()
        if not state:
            return
        own = {"target", "clients"}
        parts = by_prefix({name: value for name, value in state.items() if name not in own})
        if set(parts) != {"hypernetwork"} or not own <= set(state):
            raise ValueError(
                f"the state must be hypernetwork, target and clients, got {sorted({*parts, *own & set(state)})}"
            )
        values = parts["hypernetwork"]
        sizes = [value.size for name, value in values.items() if name.startswith(_EMBEDDING)]
        if not sizes or state["clients"].dtype.kind not in "iu" or state["clients"].ndim != 1:
            raise ValueError("the state has no embeddings, or clients that are not whole numbers")
        self.target = ArrayTemplate.from_json(
            bytes(state["target"].astype(np.uint8)).decode(errors="replace")
        )
        self.hypernetwork = self._made(state["clients"].tolist(), sizes[0])
        self.hypernetwork.load_state_arrays(values)
        self._stepped = True

    # ------------------------------------------------------------------ the hypernetwork

    def _target(self, node: Node) -> ArrayTemplate:
        """Return what is produced: that of the run, else what most clients train."""
        if self.target.names:
            return self.target
        # By name, whatever their order and dtypes: what a client is sent is matched by name, and converted.
        arrays = self.common(_arrays_of, node, shown=_described)
        names, shapes = [name for name, _ in arrays], [shape for _, shape in arrays]
        return ArrayTemplate(tuple(names), ("float32",) * len(names), tuple(shapes))

    def _check_size(self, embedding: int, clients: int) -> None:
        config = self.config
        sizes = {"embedding": embedding, "hidden": config.hidden_size, "layers": config.hidden_layers}
        count = hypernetwork_size(self.target.shapes, **sizes) + embedding * clients
        produced = sum(map(math.prod, self.target.shapes))
        if count > config.max_parameters:
            raise ConfigError(
                f"{assignment('max_parameters', config.max_parameters)} does not allow the hypernetwork, which "
                f"would have {count:,} parameters ({_BYTES * count / 1e9:,.1f} GB in training) for "
                f"the {produced:,} that clients train: take a smaller model, freeze a part of it, or allow more"
            )
        log(INFO, "A hypernetwork of %d parameters produces %d for each client", count, produced)

    def _made(self, clients: Sequence[int], embedding: int) -> TrainedModule[HyperNetwork]:
        network = HyperNetwork(
            self.target.shapes,
            embedding=embedding,
            hidden=self.config.hidden_size,
            layers=self.config.hidden_layers,
            seed=self.seed,
        )
        network.add(clients)
        return TrainedModule(network.to(self.device), self._optimizer, seed=self.seed, purpose="hypernetwork")

    def _optimizer(self, network: HyperNetwork) -> torch.optim.Optimizer:
        config = self.config
        return torch.optim.SGD(
            network.parameters(),
            lr=config.server_learning_rate,
            momentum=config.server_momentum,
            weight_decay=config.server_weight_decay,
        )

    def _with_clients(self, clients: Sequence[int]) -> TrainedModule[HyperNetwork]:
        """Return the hypernetwork, with embeddings for clients that came after the run began."""
        trained = self.hypernetwork
        assert trained is not None
        known = trained.module.clients
        new = [client for client in clients if client not in known]
        if not new:
            return trained
        # Embeddings come last among the parameters: the optimiser's numbers of the others stay what they are.
        grown = self._made([*known, *new], len(trained.module.embeddings[str(known[0])]))
        grown.load_state_arrays({**grown.state_arrays(), **trained.state_arrays()})
        return grown

    def _factors(self, replies: Sequence[Reply]) -> Sequence[float]:
        """Return what each client's Δ is multiplied by: 1, or with ``norm-bound`` less for a long one."""
        if self.rule.is_mean:
            return [1.0] * len(replies)
        squares = [
            sum(float(np.square(delta, dtype=np.float64).sum()) for delta in reply.arrays)
            for reply in replies
        ]
        factors: list[float] = clip_factors(np.sqrt(squares), self.rule.factor).tolist()
        return factors

    @torch.no_grad()
    def _received(self, reply: Reply, factor: float) -> list[Tensor]:
        """Return a client's Δ on the device; with a step per reply its θ̃, for which Δ is taken anew in its turn."""
        deltas = [torch.from_numpy(delta.copy()).to(self.device) for delta in reply.arrays]
        if factor < 1:
            deltas = [delta * factor for delta in deltas]
        if self.config.server_steps != "reply":
            return deltas
        assert self.hypernetwork is not None
        sent = self.hypernetwork.module(reply.node.key)
        return [theta - delta for theta, delta in zip(sent, deltas, strict=True)]

    def _step(self, trained: TrainedModule[HyperNetwork], received: Mapping[int, Sequence[Tensor]]) -> None:
        """Take one step down the mean of Jᵀ Δ over some clients."""
        trained.optimizer.zero_grad()
        for client, tensors in received.items():
            produced = trained.module(client)
            deltas = tensors
            if self.config.server_steps == "reply":
                deltas = [theta.detach() - goal for theta, goal in zip(produced, tensors, strict=True)]
            vector_jacobian(produced, deltas, share=1 / len(received))
        gradient_norm_clipped(trained.module.parameters(), self.config.server_clip_norm)
        trained.optimizer.step()

    @torch.no_grad()
    def _produced(self, node: Node) -> ArrayRecord:
        """Return h(v; φ) for a client, copied from the device at once."""
        assert self.hypernetwork is not None
        flat = torch.cat([array.flatten() for array in self.hypernetwork.module(node.key)]).cpu()
        parts = flat.split([math.prod(shape) for shape in self.target.shapes])  # type: ignore[no-untyped-call]
        shaped = zip(parts, self.target.shapes, strict=True)
        return self.target.record([part.view(shape).numpy() for part, shape in shaped])


def _arrays_of(node: Node) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Return what a client trains, by name."""
    return tuple(sorted(dict(zip(node.template.names, node.template.shapes, strict=True)).items()))


def _described(arrays: Sequence[tuple[str, tuple[int, ...]]]) -> str:
    return f"{len(arrays)} trained arrays, the first {list(arrays[:1])}"
