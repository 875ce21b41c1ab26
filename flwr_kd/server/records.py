"""What a run works with: clients, what they are sent, their replies, and the statistics of a round."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from logging import INFO
from typing import Any, Generic

import numpy.typing as npt
from flwr.app import ArrayRecord
from flwr.common.logger import log
from flwr.serverapp.strategy import Result

from flwr_kd.checks import whole_number
from flwr_kd.text import plain
from flwr_kd.transport.flower_records import CLASS_COUNTS, CLIENT_API, MESSAGE_API, REFUSAL
from flwr_kd.transport.payload import Payload, PayloadError, PayloadT
from flwr_kd.transport.template import ArrayTemplate

__all__ = [
    "HandshakeError",
    "KDResult",
    "Node",
    "Outgoing",
    "Reply",
    "RoundStats",
    "VoidRoundsError",
    "shared_histogram",
]

NDArray = npt.NDArray[Any]
# The default of a field whose type says that a payload is there, for phases in which there is none.
_NONE: Any = None
_LONGEST_SECTOR, _LONGEST_DIGEST = 100, 128


class HandshakeError(RuntimeError):
    """Too few clients fit the method; the text names each that was refused, and why."""


class VoidRoundsError(RuntimeError):
    """Too many rounds in a row, or all rounds of a run, had too few usable replies.

    Attributes
    ----------
    result : KDResult or None
        What there is of the run, where all its rounds were void.
    """

    def __init__(self, text: str, result: KDResult | None = None) -> None:
        super().__init__(text)
        self.result = result

    @classmethod
    def of_all(cls, result: KDResult, least: int) -> VoidRoundsError:
        """Return the error of a run whose rounds were all void; ``least`` is ``min_train_nodes``."""
        count, last = len(result.rounds), result.rounds[-1]
        return cls(
            f"every round was void ({count} of {count}), so nothing was learned: the last, round "
            f"{last.server_round}, had {last.participants} usable replies and {last.failures} failures, "
            f"min_train_nodes is {least}; the warnings before say what failed",
            result,
        )


@dataclass(frozen=True)
class Node:
    """A client as it described itself in the handshake.

    Attributes
    ----------
    node_id : int
        Flower's id: random, and new after a restart.
    partition_id : int or None
        From the client's node config. Sampling and summation use this order where there is one.
    num_examples : int
        Training samples.
    num_classes : int
        C of the client's model.
    num_parameters, num_held : int
        Parameters that the client trains, and those that it needs in memory while it trains; 0 if it names none.
    feature_shape : tuple of int
        Shape of one sample's features.
    template : ArrayTemplate
        Names and shapes of the client's model.
    num_test_examples, num_common_examples : int
        Samples of the client's own test data, and of the common test set at the client; 0 without.
    num_public : int
        Samples of the client's public data.
    num_partitions : int
        Number of parts into which the data set is divided, as the client's node config says; 0 if it does not.
    sector, public_digest : str
        Empty where the client has none.
    class_counts : tuple of int
        Training samples of each class; empty unless the client shares them.
    message_api : bool
        Whether it is a client of Flower's Message API (:func:`flwr_kd.client_app`) and not a ``NumPyClient``.
    refusal : str
        Why the client itself says that it cannot take part; empty if it can.
    """

    node_id: int
    partition_id: int | None = None
    num_examples: int = 0
    num_classes: int = 0
    feature_shape: tuple[int, ...] = ()
    template: ArrayTemplate = field(default_factory=ArrayTemplate)
    num_test_examples: int = 0
    num_common_examples: int = 0
    num_parameters: int = 0
    num_held: int = 0
    num_public: int = 0
    num_partitions: int = 0
    sector: str = ""
    public_digest: str = ""
    class_counts: tuple[int, ...] = ()
    message_api: bool = False
    refusal: str = ""

    @property
    def feature_dim(self) -> int:
        """D, the numbers in one sample's features; 0 where they are not known."""
        return math.prod(self.feature_shape) if self.feature_shape else 0

    @property
    def key(self) -> int:
        """The partition id where there is one, else the node id: the key of what is kept for a client."""
        return self.node_id if self.partition_id is None else self.partition_id

    @property
    def order(self) -> tuple[bool, int, int]:
        """Sorting key: by partition id where there is one, else by node id."""
        return (self.partition_id is None, self.partition_id or 0, self.node_id)

    def unknown_values(self, known: Collection[str]) -> str | None:
        """Refuse a model with an array that is not finite, unless the server has one; None if all are known.

        Parameters
        ----------
        known : collection of str
            Names of the server's arrays that are not finite.
        """
        unknown = sorted(set(self.template.not_finite) - set(known))
        if not unknown:
            return None
        return (
            f"array {unknown[0]!r} of its model has values that are not finite, and initial_arrays do not have "
            "them: register such a buffer with persistent=False"
        )

    def __str__(self) -> str:
        partition = "" if self.partition_id is None else f" (partition {self.partition_id})"
        return f"node {self.node_id}{partition}"

    @classmethod
    def from_properties(cls, node_id: int, properties: Mapping[str, Any]) -> Node:
        """Read a handshake's reply.

        Raises
        ------
        PayloadError
            If a property is missing or of the wrong kind.
        """

        def whole(name: str) -> int:
            return whole_number(f"property {name!r}", properties.get(name), 0, 2**53 - 1, error=PayloadError)

        def optional(name: str) -> int:
            return whole(name) if name in properties else 0

        return cls(
            node_id=node_id,
            partition_id=whole("partition-id") if "partition-id" in properties else None,
            num_examples=whole("num-examples"),
            num_classes=whole("num-classes"),
            feature_shape=_shape(properties.get("feature-shape")),
            template=ArrayTemplate.from_json(properties.get("arrays")),
            num_test_examples=optional("num-test-examples"),
            num_common_examples=optional("num-common-examples"),
            num_parameters=optional("num-parameters"),
            num_held=optional("num-held-parameters"),
            num_partitions=optional("num-partitions"),
            num_public=optional("num-public-examples"),
            sector=_sector(properties.get("sector", "")),
            public_digest=_digest(properties.get("public-digest", "")),
            class_counts=_class_counts(properties, whole("num-classes"), whole("num-examples")),
            message_api=_message_api(properties),
            refusal=plain(str(properties.get(REFUSAL, ""))),
        )


@dataclass(frozen=True)
class Outgoing:
    """What one node is sent in a phase.

    Attributes
    ----------
    node : Node
        The receiver.
    arrays : ArrayRecord or None
        Models; None sends no arrays.
    payload : Payload or None
        Knowledge. Every node may get its own.
    config : mapping
        Further scalars, in kebab-case.
    """

    node: Node
    arrays: ArrayRecord | None = None
    payload: Payload | None = None
    config: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Reply(Generic[PayloadT]):
    """A checked reply; what a client's :class:`~flwr_kd.client.task.Answer` became.

    Attributes
    ----------
    node : Node
        The sender.
    arrays : list of ndarray
        In the template's order, dtypes and shapes; empty where the phase returns no arrays.
    num_examples : int
        Samples that the client trained on.
    metrics : dict
        Numbers such as ``train-loss`` and ``local-accuracy``.
    payload : PayloadT
        What ``reply_payloads`` names for the phase; None in a phase for which it names nothing.
    """

    node: Node
    arrays: list[NDArray]
    num_examples: int
    metrics: dict[str, float]
    payload: PayloadT = _NONE


@dataclass
class RoundStats:
    """Statistics of one round. Bytes are those of arrays and payloads, over all clients and phases."""

    server_round: int
    local_accuracy: float | None = None
    local_top5: float | None = None
    trained_accuracy: float | None = None
    """Mean over clients of their own models' accuracy before they distil, in methods that train and then distil."""
    trained_top5: float | None = None
    local_auroc: float | None = None
    """AUROC, here and below, is measured where samples have several labels each."""
    trained_auroc: float | None = None
    common_auroc: float | None = None
    global_auroc: float | None = None
    global_on_clients_auroc: float | None = None
    common_accuracy: float | None = None
    """Mean over clients of their own models' accuracy on the common test set."""
    common_top5: float | None = None
    global_accuracy: float | None = None
    global_top5: float | None = None
    global_on_clients: float | None = None
    """Mean over clients of the aggregated model's accuracy on their own test data."""
    global_on_clients_top5: float | None = None
    server_accuracy: float | None = None
    """Accuracy of a server's model that is not the clients' model, such as FedGKT's predictor."""
    train_loss: float | None = None
    bytes_up: int = 0
    bytes_down: int = 0
    bytes_knowledge: int = 0
    """Of both together, those of payloads (soft predictions, prototypes, features, public samples); the rest are
    models."""
    round_trips: int | None = None
    """Messages to single clients that had a usable reply, over all phases; a method may count in another way."""
    seconds: float = 0.0
    participants: int = 0
    available: int = 0
    """Number of clients that were connected when the round began; ``participants`` are of them."""
    failures: int = 0
    void: bool = False
    """Whether there were too few usable replies, so that the round changed nothing."""
    bytes_by_partition: dict[int, tuple[int, int]] = field(default_factory=dict)
    """(down, up) per partition id, or per node id where a node has no partition id."""
    clients: dict[int, dict[str, float]] = field(default_factory=dict)
    """``local-accuracy``, ``local-top5`` and what else was measured of each client, by the same key. After the last
    round also of those that did not take part in it: these are in ``stored`` or ``received`` as well. Where clients
    adapted the last global model, also ``local-accuracy-before``."""
    stored: list[int] = field(default_factory=list)
    """Clients that were measured after the last round with the personal model that they keep."""
    accuracy_before: float | None = None
    """Mean over clients of the global model's accuracy on their own test data, before they adapted it."""
    received: list[int] = field(default_factory=list)
    """Clients that were measured after the last round with the model that they would receive."""
    measured: bool = False
    """Whether clients' models are also measured on the common test set, and the aggregated model on the clients'
    test data: see the strategy's ``measure``."""

    def count(self, node: Node, *, down: int = 0, up: int = 0, knowledge: int = 0) -> None:
        """Add bytes to the round's and the node's totals; ``knowledge`` says how many of them are payloads."""
        self.bytes_knowledge += knowledge
        before = self.bytes_by_partition.get(node.key, (0, 0))
        self.bytes_by_partition[node.key] = (before[0] + down, before[1] + up)
        self.bytes_down += down
        self.bytes_up += up


@dataclass(repr=False)  # Flower's repr gives the arrays' size; a dataclass's would print all their bytes
class KDResult(Result):
    """Flower's ``Result``, and the statistics of each round in ``rounds``."""

    rounds: list[RoundStats] = field(default_factory=list)


def _sector(value: object) -> str:
    text = str(value).strip()
    known = isinstance(value, str | int) and not isinstance(value, bool)
    if not known or len(text) > _LONGEST_SECTOR or not text.isprintable():
        raise PayloadError(
            f"property 'sector' must be a text of at most {_LONGEST_SECTOR} printable characters or a whole "
            f"number, got {str(value)[:40]!r}"
        )
    return text


def shared_histogram(nodes: Iterable[Node]) -> list[list[int]]:
    """Return the clients' samples of each class ``[clients][classes]``; empty, with a line, if one has none.

    The clients are in the order of their partition ids.
    """
    ordered = sorted(nodes, key=lambda node: node.order)
    silent = [node for node in ordered if not node.class_counts]
    if silent:
        log(
            INFO,
            "the result has no histogram of the clients' classes: %d of %d clients do not share it "
            "(share-histogram=true in a node config)",
            len(silent),
            len(ordered),
        )
        return []
    return [list(node.class_counts) for node in ordered]


def _class_counts(properties: Mapping[str, Any], classes: int, samples: int) -> tuple[int, ...]:
    if CLASS_COUNTS not in properties:
        return ()
    try:
        counts = json.loads(properties[CLASS_COUNTS])
    except (TypeError, ValueError, RecursionError):
        counts = None
    whole = isinstance(counts, list) and all(type(count) is int and 0 <= count < 2**53 for count in counts)
    if not whole or len(counts) != classes or sum(counts) > samples:
        raise PayloadError(
            f"property {CLASS_COUNTS!r} must be a JSON list of {classes} whole numbers, {samples} samples at most, "
            f"got {str(properties[CLASS_COUNTS])[:80]!r}"
        )
    return tuple(counts)


def _message_api(properties: Mapping[str, Any]) -> bool:
    if CLIENT_API not in properties:
        return False
    if properties[CLIENT_API] != MESSAGE_API:
        raise PayloadError(
            f"property {CLIENT_API!r} must be {MESSAGE_API!r} or left out, got {str(properties[CLIENT_API])[:40]!r}"
        )
    return True


def _digest(value: object) -> str:
    if not isinstance(value, str) or len(value) > _LONGEST_DIGEST or (value and not value.isalnum()):
        raise PayloadError(
            f"property 'public-digest' must be at most {_LONGEST_DIGEST} letters and digits, "
            f"got {str(value)[:40]!r}"
        )
    return value


def _shape(text: object) -> tuple[int, ...]:
    try:
        sizes = json.loads(text)  # type: ignore[arg-type]
    except (TypeError, ValueError, RecursionError):
        sizes = None
    whole = isinstance(sizes, list) and all(type(size) is int and 0 < size < 2**40 for size in sizes)
    if not whole or not 0 < len(sizes) <= 8:
        raise PayloadError(f"property 'feature-shape' must be a JSON list of sizes, got {str(text)[:80]!r}")
    return tuple(sizes)
