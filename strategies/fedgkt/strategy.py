"""FedGKT's server half: a large predictor, trained on all clients' features."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from logging import WARNING
from typing import Any, ClassVar, cast

import numpy as np
import torch
from flwr.app import ArrayRecord
from flwr.common.logger import log
from torch import Tensor, nn

from flwr_kd.checks import ConfigError
from flwr_kd.learning.batches import into_batches
from flwr_kd.learning.device import resolve_device
from flwr_kd.learning.loop import fit, make_optimizer
from flwr_kd.learning.losses import soft_targets
from flwr_kd.learning.weights import check_finite_weights, get_weights, load_weights
from flwr_kd.models import build_predictor
from flwr_kd.seeding import derive_seed, forked_global_rng, numpy_generator, torch_generator
from flwr_kd.server.records import NDArray, Node, Outgoing, Reply
from flwr_kd.server.strategy import KDStrategy
from flwr_kd.text import first_line
from flwr_kd.transport.payload import LIMIT, Payload, PayloadError, magnitude
from flwr_kd.transport.template import ArrayTemplate

from .config import FedGKTConfig
from .functional import in_sample_order, transfer_loss
from .messages import ClientFeatures, ServerLogits

_LARGEST_DEFAULT = 2**17


class FedGKT(KDStrategy):
    """FedGKT (He et al., NeurIPS 2020): clients send features and logits, the server trains a large predictor.

    No weights are exchanged: ``initial_arrays`` may be empty and is not sent. Clients may have different models
    whose features have one shape. There is no global model; the server's predictor works on features only.

    Parameters
    ----------
    config : FedGKTConfig, optional
        The hyper-parameters.
    server_model : nn.Module, optional
        Maps features ``[B, ...]`` to logits ``[B, C]``; :func:`flwr_kd.models.build_predictor`'s for the clients'
        features if None.
    device : str or torch.device
        Where it is trained; ``"auto"``: CUDA, else MPS, else CPU.
    **options
        See :class:`flwr_kd.KDStrategy`.

    Attributes
    ----------
    server_model : nn.Module or None
        None before the first answers, where none was given.
    logits : dict
        The server's logits ``[N, C]`` by client, row i for its sample i; those of the last round in which the
        client took part.

    Raises
    ------
    ConfigError
        If an option or a hyper-parameter is not allowed.
    """

    config_class = FedGKTConfig
    reply_payloads: ClassVar[Mapping[str, type[Payload]]] = {"train": ClientFeatures}
    reply_arrays = frozenset()
    sends_weights = False

    def __init__(
        self,
        config: FedGKTConfig | None = None,
        *,
        server_model: nn.Module | None = None,
        device: str | torch.device = "auto",
        **options: Any,
    ) -> None:
        super().__init__(config, **options)
        self.device = resolve_device(device)
        self.server_model = server_model
        try:
            self._given = None if server_model is None else get_weights(server_model)
        except (TypeError, ValueError, RuntimeError) as error:  # lazy layers, bfloat16
            raise ConfigError(
                f"server_model must have initialised weights of numpy's types: {error}"
            ) from None
        self._restored: dict[str, NDArray] = {}
        self._tried: dict[tuple[tuple[int, ...], int], str] = {}
        self._trained = False
        self.logits: dict[int, NDArray] = {}

    # ------------------------------------------------------------------ hooks

    def targets(self, logits: Tensor) -> Tensor:
        """Return what the server learns from a client's logits ``[N, C]``: their softmax."""
        return soft_targets(logits, 1.0)

    def accept_node(self, node: Node) -> str | None:
        """Refuse a client whose features or classes are not the others', or not the predictor's."""
        shape, classes = self.common(lambda each: (each.feature_shape, each.num_classes), node)
        if (node.feature_shape, node.num_classes) != (shape, classes):
            return (
                f"{node.num_classes} classes and features {list(node.feature_shape)}, "
                f"expected {classes} and {list(shape)}"
            )
        if classes < 2 or not node.num_examples:
            return f"{classes} classes and {node.num_examples} samples, expected at least 2 and 1"
        size = self._payload_size(node)
        if size > self.max_payload_bytes:
            return (
                f"what it would send has {size:,} bytes ({node.num_examples} samples, {node.feature_dim} features, "
                f"{classes} classes), max_payload_bytes is {self.max_payload_bytes:,}; {ClientFeatures.hint}"
            )
        if self._given is None and max(node.feature_dim, classes) > _LARGEST_DEFAULT:
            return f"{node.feature_dim} features and {classes} classes need a server_model of yours"
        if (shape, classes) not in self._tried:
            self._tried[shape, classes] = self._try(shape, classes)
        return self._tried[shape, classes] or None

    def configure_phase(
        self, phase: str, server_round: int, nodes: list[Node], arrays: ArrayRecord | None
    ) -> Iterable[Outgoing]:
        """Send each client the server's logits for its own samples, where there are any."""
        outgoing = []
        for node in nodes:
            logits = self.logits.get(node.key)
            if logits is None or logits.shape != (node.num_examples, node.num_classes):
                outgoing.append(Outgoing(node))
                continue
            outgoing.append(Outgoing(node, payload=ServerLogits(logits)))
        return outgoing

    def payload_dims(self, phase: str, node: Node) -> Mapping[str, int]:
        """Return N, C and D as the client gave them in the handshake."""
        return {"N": node.num_examples, "C": node.num_classes, "D": node.feature_dim}

    def payload_limit(self, phase: str, node: Node) -> int:
        """Return the size of all rows that may come."""
        return min(self._payload_size(node), self.max_payload_bytes)

    def check_reply(self, phase: str, reply: Reply) -> None:
        """Refuse another number of rows than of samples, and test rows that were not asked for."""
        message, config = cast(ClientFeatures, reply.payload), cast(FedGKTConfig, self.config)
        rows, test = len(message.index), len(message.test_labels)
        if reply.num_examples != rows:
            raise PayloadError(f"{rows} rows of features from a client with {reply.num_examples} samples")
        allowed = reply.node.num_test_examples if config.send_test_features else 0
        if test > allowed:
            raise PayloadError(f"{test} test rows, expected at most {allowed}")

    def aggregate_phase(
        self, phase: str, server_round: int, replies: Iterable[Reply], arrays: ArrayRecord | None
    ) -> ArrayRecord | None:
        """Train the predictor on the answers and make each client's new logits, in one of two orders.

        Client by client (FedDKC's algorithm 1, steps 1.4 to 1.6): train on one client's rows, make its logits,
        go on to the next; the order is drawn anew each round. Pooled (FedGKT): train on all rows shuffled
        together, then make all logits.
        """
        replies = list(replies)
        model = self._model(replies[0].node)
        config = cast(FedGKTConfig, self.config)
        seed = derive_seed(self.seed, "server", server_round)
        order = numpy_generator(seed, "clients").permutation(len(replies))
        groups = [[replies[i]] for i in order] if config.server_order == "client-by-client" else [replies]
        with forked_global_rng(seed, model, self.device):
            for number, group in enumerate(groups):
                self._learn_from(group, server_round, torch_generator(seed, "rows", number))
        self._trained = True
        self.stats.server_accuracy = self._accuracy(replies)
        return None

    def state_arrays(self) -> dict[str, NDArray]:
        """Return the predictor's weights and the clients' logits; nothing before the first answers."""
        if not self._trained:
            return {}
        weights = self._restored or get_weights(cast(nn.Module, self.server_model))
        state = {f"server/{name}": value for name, value in weights.items()}
        return state | {f"logits/{key}": logits for key, logits in self.logits.items()}

    def load_state_arrays(self, state: Mapping[str, NDArray]) -> None:
        """Take weights and logits back; without any, begin anew."""
        parts: dict[str, dict[str, NDArray]] = {"server": {}, "logits": {}}
        for name, value in state.items():
            part, _, rest = name.partition("/")
            if part not in parts:
                raise ValueError(f"{type(self).__name__} has no state named {name!r}")
            parts[part][rest] = value
        self.logits = {int(key): logits for key, logits in parts["logits"].items()}
        self._restored, self._trained, self._tried = parts["server"], bool(state), {}
        if self._given is None:
            self.server_model = None
        else:
            weights = parts["server"] if state else self._given
            other = ArrayTemplate.of_ndarrays(self._given).difference(ArrayTemplate.of_ndarrays(weights))
            if other is not None:
                raise ConfigError(f"the checkpoint's predictor is not server_model: {other}")
            load_weights(cast(nn.Module, self.server_model), weights)
            self._restored = {}

    # ------------------------------------------------------------------ the server's model

    def _model(self, node: Node) -> nn.Module:
        """Return the predictor: the caller's, or one made for the clients' features."""
        if self.server_model is None:
            self.server_model = build_predictor(
                node.feature_shape, num_classes=node.num_classes, seed=derive_seed(self.seed, "server-model")
            )
        if self._restored:
            load_weights(self.server_model, self._restored)
            self._restored = {}
        return self.server_model.to(self.device)

    @torch.no_grad()
    def _try(self, shape: tuple[int, ...], classes: int) -> str:
        """Say why the predictor cannot be used for such features; nothing if it can."""
        if self._given is None:
            if self._restored:
                made = build_predictor(shape, num_classes=classes, seed=0)
                template = ArrayTemplate.of_ndarrays(get_weights(made))
                other = template.difference(ArrayTemplate.of_ndarrays(self._restored))
                if other is not None:
                    return f"the checkpoint's predictor is not for features {list(shape)}: {other}"
            return ""
        model = cast(nn.Module, self.server_model)
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        try:
            found = list(model.eval()(torch.zeros(2, *shape, device=device)).shape)
        except Exception as error:  # whatever a user's module raises on a shape that it does not take
            return f"server_model does not take features {list(shape)}: {first_line(error)}"
        if found != [2, classes]:
            return f"server_model makes {found} of 2 rows, expected [2, {classes}]"
        return ""

    def _payload_size(self, node: Node) -> int:
        config = cast(FedGKTConfig, self.config)
        row = node.feature_dim * np.dtype(config.feature_dtype).itemsize
        test = node.num_test_examples * (row + 8) if config.send_test_features else 0
        return node.num_examples * (row + 4 * node.num_classes + 16) + test

    def _learn_from(self, group: Sequence[Reply], server_round: int, generator: torch.Generator) -> None:
        """Train on some clients' rows and make their new logits.

        Where that leads beyond all numbers, it is taken back, and tried again without the client whose features
        are the largest; what it sent has no part in the round.
        """
        left = list(group)
        while left:
            before = {name: value.clone() for name, value in self._state().items()}
            try:
                self._train(left, server_round, generator)
                found = [self._predict(cast(ClientFeatures, r.payload).features, r.node) for r in left]
            except FloatingPointError as error:
                cast(nn.Module, self.server_model).load_state_dict(before)
                loudest = max(left, key=lambda r: magnitude(cast(ClientFeatures, r.payload).features))
                left.remove(loudest)
                self.stats.failures += 1
                log(WARNING, "the server's training on %s is taken back: %s", loudest.node, error)
                continue
            for reply, logits in zip(left, found, strict=True):
                index = cast(ClientFeatures, reply.payload).index
                self.logits[reply.node.key] = in_sample_order(logits, index)
            return

    def _train(self, replies: Sequence[Reply], server_round: int, generator: torch.Generator) -> None:
        model, config = cast(nn.Module, self.server_model), cast(FedGKTConfig, self.config)
        rows = _Rows(replies, [self.targets(torch.from_numpy(_logits(reply))) for reply in replies])

        def epoch() -> Iterator[tuple[Tensor, ...]]:
            order = torch.randperm(len(rows), generator=generator)
            for chunk in into_batches(order, config.batch_size):
                yield tuple(part.to(self.device) for part in rows.take(chunk))

        def loss(features: Tensor, labels: Tensor, teacher: Tensor) -> Tensor:
            return transfer_loss(model(features), labels, teacher, config.beta)

        optimizer = make_optimizer(model, config, config.learning_rate_at(server_round))
        fit(model, optimizer, epoch, loss, epochs=config.server_epochs)
        check_finite_weights(model)

    def _state(self) -> Mapping[str, Tensor]:
        return cast(nn.Module, self.server_model).state_dict()

    @torch.no_grad()
    def _predict(self, features: NDArray, node: Node) -> NDArray:
        """Return the predictor's logits ``[N, C]`` of features ``[N, D]``, in eval mode.

        Raises
        ------
        FloatingPointError
            If one is beyond all use; a client would be taught by it.
        """
        model = cast(nn.Module, self.server_model).eval()
        size = max(cast(FedGKTConfig, self.config).batch_size, 256)
        parts = [features[i : i + size].astype(np.float32) for i in range(0, len(features), size)]
        tensors = (torch.from_numpy(part).reshape(-1, *node.feature_shape).to(self.device) for part in parts)
        logits: NDArray = torch.cat([model(tensor).float().cpu() for tensor in tensors]).numpy()
        largest = magnitude(logits)
        if not largest <= LIMIT:
            raise FloatingPointError(f"logits up to {largest:g}, beyond ±{LIMIT:g}")
        return logits

    def _accuracy(self, replies: Sequence[Reply]) -> float | None:
        """Return the mean over clients of the predictor's accuracy on their test features, if they sent any."""
        found = []
        for reply in replies:
            message = cast(ClientFeatures, reply.payload)
            if not len(message.test_labels):
                continue
            try:
                predicted = self._predict(message.test_features, reply.node).argmax(axis=1)
            except FloatingPointError as error:
                log(
                    WARNING, "the server's accuracy on the test rows of %s is left out: %s", reply.node, error
                )
                continue
            found.append(float((predicted == message.test_labels).mean()))
        return float(np.mean(found)) if found else None


class _Rows:
    """The rows of some clients as one sequence, without a second copy of their features."""

    def __init__(self, replies: Sequence[Reply], teachers: Sequence[Tensor]) -> None:
        messages = [cast(ClientFeatures, reply.payload) for reply in replies]
        self.shape = replies[0].node.feature_shape
        self.features = [message.features for message in messages]
        self.starts = np.cumsum([0, *(len(part) for part in self.features)])
        self.labels = torch.cat([torch.from_numpy(message.labels.copy()) for message in messages])
        self.teachers = torch.cat(list(teachers))

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return features ``[B, ...]`` in float32, labels ``[B]`` and teachers ``[B, C]``."""
        chosen = rows.numpy()
        out = np.empty((len(chosen), self.features[0].shape[1]), dtype=np.float32)
        owner = np.searchsorted(self.starts, chosen, side="right") - 1
        for number in np.unique(owner):
            mine = owner == number
            out[mine] = self.features[number][chosen[mine] - self.starts[number]]
        return torch.from_numpy(out).reshape(-1, *self.shape), self.labels[rows], self.teachers[rows]


def _logits(reply: Reply) -> NDArray:
    return cast(ClientFeatures, reply.payload).logits.copy()
