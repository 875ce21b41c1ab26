"""FedGKT's server half: a large predictor, trained on all clients' features."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from logging import WARNING
from typing import Any, ClassVar, Generic

import numpy as np
import torch
from flwr.app import ArrayRecord
from flwr.common.logger import log
from torch import Tensor, nn

from flwr_kd.checks import ConfigError
from flwr_kd.learning.batches import into_batches
from flwr_kd.learning.controls import controlled
from flwr_kd.learning.cores import Copies, Cores, draws_at_random
from flwr_kd.learning.device import resolve_device
from flwr_kd.learning.loop import fit, make_optimizer
from flwr_kd.learning.losses import soft_targets
from flwr_kd.learning.passes import pass_size
from flwr_kd.learning.weights import by_prefix, check_finite_weights, get_weights, load_weights, with_prefix
from flwr_kd.models import build_predictor, count_parameters
from flwr_kd.models.given import check_dtypes, floating_dtype, plain_model
from flwr_kd.seeding import derive_seed, forked_global_rng, numpy_generator, torch_generator
from flwr_kd.server.records import NDArray, Node, Outgoing, Reply
from flwr_kd.server.strategy import KDStrategy
from flwr_kd.text import first_line
from flwr_kd.transport.payload import LIMIT, Payload, PayloadError, magnitude
from flwr_kd.transport.template import ArrayTemplate

from .config import FedGKTConfig, FedGKTConfigT
from .functional import FeatureRows, in_sample_order, transfer_loss
from .messages import ClientFeatures, ServerLogits, features_size, unpack_logits
from .robust import LeftOut

_LARGEST_DEFAULT = 2**17


class FedGKT(KDStrategy[FedGKTConfigT, ClientFeatures], Generic[FedGKTConfigT]):
    """FedGKT (He et al., NeurIPS 2020): clients send features and logits, the server trains a large predictor.

    No weights are exchanged: ``initial_arrays`` may be empty and is not sent. Clients may have heterogeneous models
    whose features have one shape. There is no global model; the server's predictor works on features only.

    Parameters
    ----------
    config : FedGKTConfig, optional
        The hyper-parameters.
    server_model : nn.Module, optional
        Maps features ``[B, ...]`` to logits ``[B, C]``; if None, :func:`flwr_kd.models.build_predictor` makes one
        for the clients' features, of the kind that ``predictor`` names.
    device : str or torch.device
        Where it is trained; ``"auto"``: CUDA, else MPS, else CPU.
    **options
        See :class:`flwr_kd.KDStrategy`.

    Attributes
    ----------
    server_model : nn.Module or None
        None before the first replies, if none was given.
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
    sends_weights = False
    averages_knowledge = True

    def __init__(
        self,
        config: FedGKTConfigT | None = None,
        *,
        server_model: nn.Module | None = None,
        device: str | torch.device = "auto",
        **options: Any,
    ) -> None:
        super().__init__(config, **options)
        self.device = resolve_device(device)
        try:
            self.server_model = plain_model(server_model)
            if self.server_model is not None:
                check_dtypes(self.server_model.state_dict())
            self._given = None if self.server_model is None else get_weights(self.server_model)
        except (TypeError, ValueError, RuntimeError) as error:  # lazy layers, reduced precision
            raise ConfigError(f"server_model cannot be used: {error}") from None
        self._restored: dict[str, NDArray] = {}
        self._tried: dict[tuple[tuple[int, ...], int], str] = {}
        self._trained = False
        self.logits: dict[int, NDArray] = {}
        self._left_out = LeftOut([], 0)

    # ------------------------------------------------------------------ hooks

    def targets(self, logits: Tensor) -> Tensor:
        """Return the server's targets from a client's logits ``[N, C]``: their softmax."""
        return soft_targets(logits, 1.0)

    def accept_node(self, node: Node) -> str | None:
        """Refuse a client whose features or classes differ from the others' or from the predictor's."""
        shape, classes = self.common(
            lambda other: (other.feature_shape, other.num_classes),
            node,
            shown=lambda sizes: f"{sizes[1]} classes and features {list(sizes[0])}",
        )
        if (node.feature_shape, node.num_classes) != (shape, classes):
            return (
                f"{node.num_classes} classes and features {list(node.feature_shape)}, "
                f"expected {classes} and {list(shape)}"
            )
        if classes < 2 or not node.num_examples:
            return f"{classes} classes and {node.num_examples} samples, expected at least 2 and 1"
        size = self._features_size(node)
        if size > self.max_payload_bytes:
            rows = f"{node.num_examples} samples, {node.feature_dim} features, {classes} classes"
            limit = f"max_payload_bytes is {self.max_payload_bytes:,}; {ClientFeatures.hint}"
            return f"its messages would have {size:,} bytes ({rows}), {limit}"
        if self._given is None and max(node.feature_dim, classes) > _LARGEST_DEFAULT:
            return f"{node.feature_dim} features and {classes} classes need a server_model of your own"
        if (shape, classes) not in self._tried:
            self._tried[shape, classes] = self._try(shape, classes)
        return self._tried[shape, classes] or None

    def configure_phase(
        self, phase: str, server_round: int, nodes: list[Node], arrays: ArrayRecord | None
    ) -> Iterable[Outgoing]:
        """Send each client the server's logits for its own samples, if there are any."""
        outgoing = []
        for node in nodes:
            logits = self.logits.get(node.key)
            if logits is None or logits.shape != (node.num_examples, node.num_classes):
                outgoing.append(Outgoing(node))
                continue
            outgoing.append(Outgoing(node, payload=ServerLogits(self._taught(node, server_round, logits))))
        return outgoing

    def payload_dims(self, phase: str, node: Node) -> Mapping[str, int]:
        """Return N, C and D from the client's handshake."""
        return {"N": node.num_examples, "C": node.num_classes, "D": node.feature_dim}

    def payload_limit(self, phase: str, node: Node) -> int:
        """Return the size of all rows that the client may send."""
        return min(self._features_size(node), self.max_payload_bytes)

    def check_reply(self, phase: str, reply: Reply[ClientFeatures]) -> None:
        """Refuse another number of rows than of samples, and test rows that were not requested."""
        rows, test = len(reply.payload.index), len(reply.payload.test_labels)
        if reply.num_examples != rows:
            raise PayloadError(f"{rows} rows of features from a client with {reply.num_examples} samples")
        allowed = reply.node.num_test_examples if self.config.send_test_features else 0
        if test > allowed:
            raise PayloadError(f"{test} test rows, expected at most {allowed}")

    def aggregate_phase(
        self,
        phase: str,
        server_round: int,
        replies: Iterable[Reply[ClientFeatures]],
        arrays: ArrayRecord | None,
    ) -> ArrayRecord | None:
        """Train the predictor on the replies and compute each client's new logits, in one of two orders.

        Client by client (FedDKC's algorithm 1, steps 1.4 to 1.6): train on one client's rows, compute its logits,
        then go to the next; the order is drawn anew each round. Pooled (FedGKT): train on all rows shuffled
        together, then compute all logits.
        """
        replies = list(replies)
        self._left_out = LeftOut([] if self.knowledge_rule.is_mean else replies, server_round)
        model = self.predictor_for(replies[0].node)
        seed = derive_seed(self.seed, "server", server_round)
        order = numpy_generator(seed, "clients").permutation(len(replies))
        groups = (
            [[replies[i]] for i in order] if self.config.server_order == "client-by-client" else [replies]
        )
        with forked_global_rng(seed, model, self.device):
            for number, group in enumerate(groups):
                self._train_on(group, model, server_round, torch_generator(seed, "rows", number))
        self._trained = True
        self.stats.server_accuracy = self._accuracy(replies, model)
        return None

    def held_parameters(self) -> int:
        """Return the predictor's parameters."""
        return 0 if self.server_model is None else count_parameters(self.server_model)

    def state_arrays(self) -> dict[str, NDArray]:
        """Return the predictor's weights and the clients' logits; nothing before the first replies."""
        if not self._trained:
            return {}
        weights = self._restored
        if not weights and self.server_model is not None:
            weights = get_weights(self.server_model)
        logits = {str(key): value for key, value in self.logits.items()}
        return with_prefix("server", weights) | with_prefix("logits", logits)

    def reset(self) -> None:
        """Start anew: no logits, and the predictor as it was given, or a new one."""
        self.logits, self._restored, self._trained, self._tried = {}, {}, False, {}
        if self._given is None or self.server_model is None:
            self.server_model = None
        else:
            load_weights(self.server_model, self._given)

    def load_state_arrays(self, state: Mapping[str, NDArray]) -> None:
        """Restore weights and logits."""
        self.reset()
        if not state:
            return
        parts = by_prefix(state)
        if unknown := sorted(parts.keys() - {"server", "logits"}):
            raise ValueError(f"{type(self).__name__} has no state named {unknown[0]!r}")
        self.logits = {int(key): logits for key, logits in parts.get("logits", {}).items()}
        self._restored, self._trained = parts.get("server", {}), True
        if self._given is None or self.server_model is None:
            return
        given = ArrayTemplate.of_ndarrays(self._given)
        difference = given.difference(ArrayTemplate.of_ndarrays(self._restored))
        if difference is not None:
            raise ConfigError(f"the checkpoint's predictor is not server_model: {difference}")
        load_weights(self.server_model, self._restored)
        self._restored = {}

    # ------------------------------------------------------------------ controls

    def _taught(self, node: Node, server_round: int, logits: NDArray) -> NDArray:
        """Return what a client learns from: its logits ``[N, C]``, or what replaces them as a control."""
        draw = torch_generator(self.seed, "client-knowledge", server_round, node.key)
        taught: NDArray = controlled(
            torch.from_numpy(logits), self.config.client_knowledge, draw, uniform=0.0
        ).numpy()
        return taught

    def _learned(self, reply: Reply[ClientFeatures], server_round: int) -> Tensor:
        """Return what the server learns from: a client's knowledge ``[N, C]``, or what replaces it as a control."""
        targets = self._left_out.without_contradictions(self.targets(unpack_logits(reply.payload)), reply)
        draw = torch_generator(self.seed, "server-knowledge", server_round, reply.node.key)
        uniform = 1 / targets.shape[1]
        return controlled(targets, self.config.server_knowledge, draw, uniform=uniform)

    # ------------------------------------------------------------------ the server's model

    def predictor_for(self, node: Node) -> nn.Module:
        """Return the predictor, on the device: the caller's, or one made for the clients' features."""
        if self.server_model is None:
            self.server_model = build_predictor(
                node.feature_shape,
                num_classes=node.num_classes,
                seed=derive_seed(self.seed, "server-model"),
                kind=self.config.predictor,
            )
        if self._restored:
            load_weights(self.server_model, self._restored)
            self._restored = {}
        return self.server_model.to(self.device)

    @torch.no_grad()
    def _try(self, shape: tuple[int, ...], classes: int) -> str:
        """Return why the predictor cannot be used for these features; an empty text if it can."""
        if self._given is None or self.server_model is None:
            if self._restored:
                made = build_predictor(shape, num_classes=classes, seed=0, kind=self.config.predictor)
                template = ArrayTemplate.of_ndarrays(get_weights(made))
                difference = template.difference(ArrayTemplate.of_ndarrays(self._restored))
                if difference is not None:
                    return f"the checkpoint's predictor is not for features {list(shape)}: {difference}"
            return ""
        device = next((p.device for p in self.server_model.parameters()), torch.device("cpu"))
        try:
            dtype = floating_dtype(self.server_model)
            output = list(self.server_model.eval()(torch.zeros(2, *shape, device=device, dtype=dtype)).shape)
        except Exception as error:  # A user's module may raise anything on a shape that it does not take.
            return f"server_model does not take features {list(shape)}: {first_line(error)}"
        if output != [2, classes]:
            return f"server_model returns {output} for 2 rows, expected [2, {classes}]"
        return ""

    def _features_size(self, node: Node) -> int:
        return features_size(
            node.num_examples,
            node.num_test_examples if self.config.send_test_features else 0,
            feature_dim=node.feature_dim,
            num_classes=node.num_classes,
            dtype=self.config.feature_dtype,
        )

    def _train_on(
        self,
        group: Sequence[Reply[ClientFeatures]],
        model: nn.Module,
        server_round: int,
        generator: torch.Generator,
    ) -> None:
        """Train on some clients' rows and compute their new logits.

        If the result is not finite, the training is undone and repeated without the client whose features are the
        largest; that client has no further part in the round.
        """
        usable = list(group)
        while usable:
            before = {name: value.clone() for name, value in model.state_dict().items()}
            training = [kept for reply in usable if (kept := self._left_out.of(reply)) is not None]
            if not training:
                return
            try:
                self.train_predictor(training, model, server_round, generator)
                predictions = [self._predict(model, reply.payload.features, reply.node) for reply in usable]
            except FloatingPointError as error:
                model.load_state_dict(before)
                largest = max(usable, key=lambda reply: magnitude(reply.payload.features))
                usable.remove(largest)
                self.stats.failures += 1
                log(WARNING, "the server's training on %s is undone: %s", largest.node, error)
                continue
            for reply, logits in zip(usable, predictions, strict=True):
                self.logits[reply.node.key] = in_sample_order(logits, reply.payload.index)
            return

    def train_predictor(
        self,
        replies: Sequence[Reply[ClientFeatures]],
        model: nn.Module,
        server_round: int,
        generator: torch.Generator,
    ) -> None:
        """Train the predictor on the features of clients of equal shape, by :func:`transfer_loss`.

        Raises
        ------
        FloatingPointError
            If the loss or a weight is no longer finite.
        """
        config, dtype = self.config, floating_dtype(model)
        rows = FeatureRows(
            [reply.payload.features for reply in replies],
            [torch.from_numpy(reply.payload.labels.copy()) for reply in replies],
            [self._learned(reply, server_round) for reply in replies],
            shape=replies[0].node.feature_shape,
        )

        def epoch() -> Iterator[tuple[Tensor, ...]]:
            order = torch.randperm(len(rows), generator=generator)
            for chunk in into_batches(order, config.batch_size):
                yield tuple(part.to(self.device) for part in rows.take(chunk))

        def loss(features: Tensor, labels: Tensor, teacher: Tensor) -> Tensor:
            return transfer_loss(model(features.to(dtype=dtype)), labels, teacher, config.beta)

        optimizer = make_optimizer(model, config, config.learning_rate_at(server_round))
        fit(model, optimizer, epoch, loss, epochs=config.server_epochs)
        check_finite_weights(model)

    def _predict(self, model: nn.Module, features: NDArray, node: Node) -> NDArray:
        """Return the predictor's logits ``[N, C]`` of features ``[N, D]``, in eval mode.

        Raises
        ------
        FloatingPointError
            If a logit is not finite or too large for a client to learn from.
        """
        size = pass_size(self.device, self.config.batch_size)
        dtype, shape = floating_dtype(model), (-1, *node.feature_shape)

        def rows_from(start: int) -> Tensor:
            rows = torch.from_numpy(features[start : start + size].astype(np.float32))
            return rows.reshape(shape).to(self.device, dtype)

        with Cores(self.cores if self.device.type == "cpu" else 1) as cores:
            if cores.count > 1 and draws_at_random(model, rows_from(0)[:1]):
                cores = Cores(1)
            copies = Copies(model.eval(), cores, parts=-(-len(features) // size), shared=True)

            @torch.no_grad()
            def predict(start: int) -> Tensor:
                with copies.taken() as taken:
                    output: Tensor = taken(rows_from(start)).float()
                return output

            outputs = list(cores.stream(predict, range(0, len(features), size)))
        logits: NDArray = torch.cat(outputs).cpu().numpy()
        largest = magnitude(logits)
        if not largest <= LIMIT:
            raise FloatingPointError(f"logits up to {largest:g}, beyond ±{LIMIT:g}")
        return logits

    def _accuracy(self, replies: Sequence[Reply[ClientFeatures]], model: nn.Module) -> float | None:
        """Return the mean over clients of the predictor's accuracy on their test features, if they sent any."""
        accuracies = []
        for reply in replies:
            message = reply.payload
            if not len(message.test_labels):
                continue
            try:
                predicted = self._predict(model, message.test_features, reply.node).argmax(axis=1)
            except FloatingPointError as error:
                text = "the server's accuracy on the test rows of %s is left out: %s"
                log(WARNING, text, reply.node, error)
                continue
            accuracies.append(float((predicted == message.test_labels).mean()))
        return float(np.mean(accuracies)) if accuracies else None
