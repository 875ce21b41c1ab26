"""The only place that knows Flower's record keys.

There are two kinds of clients, whose messages have different records, see :class:`Layout`: a ``NumPyClient`` in
``ClientApp(client_fn=...)`` (``flwr/compat/common/recorddict_compat.py`` is the reference), and a client of
Flower's Message API, :func:`flwr_kd.client_app`. The handshake says which kind a client is.
What comes from a client is untrusted: every reader here raises :class:`PayloadError` and nothing else. What a
client makes of the server's messages stands in :mod:`flwr_kd.transport.client_records`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy.typing as npt
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict

from flwr_kd.checks import whole_number
from flwr_kd.text import shown
from flwr_kd.transport.npy import read_array
from flwr_kd.transport.payload import PayloadError
from flwr_kd.transport.records import entries
from flwr_kd.transport.template import EMPTY
from flwr_kd.transport.wire_version import VERSION, WIRE_VERSION, version_mismatch

__all__ = [
    "EVALUATE",
    "MESSAGES",
    "TRAIN",
    "EvaluateReply",
    "Layout",
    "TrainReply",
    "evaluate_message",
    "forget",
    "handshake_type",
    "knowledge_nbytes",
    "layout_of",
    "nbytes",
    "properties_message",
    "read_evaluate_reply",
    "read_properties",
    "read_train_reply",
    "train_message",
]

NDArray = npt.NDArray[Any]
(
    PAYLOAD,
    PHASE,
    ROUND,
    SEED,
    NAMES,
    MAX_BYTES,
    RUN,
    TRAINED,
    KNOWN,
    SAVED,
    WHOLE,
    STEPS,
    STATE_LOST,
    UNCOVERED,
    REFUSAL,
    CLASS_COUNTS,
    MEASURE_COMMON,
) = (
    "payload",
    "phase",
    "server-round",
    "seed",
    "array-names",
    "max-payload-bytes",
    "run-key",
    "trained-round",
    "known-round",
    "saved-round",
    "whole-round",
    "steps-before",
    "state-lost",
    "payload-uncovered",
    "refusal",
    "class-counts",
    "measure-common",
)
SET_BY_RUN = frozenset({PAYLOAD, PHASE, ROUND, SEED, NAMES, MAX_BYTES, RUN, TRAINED, KNOWN, SAVED, STEPS})
"""What the run sets in each message's config, whatever a user's scalars are."""
MEASURE = "measure"
"""The phase that an evaluate message names if the client is to measure its own model, as after its training."""
PERSONALIZE = "personalize"
"""The phase in which a client also fine-tunes a copy of the global model, and measures it before and after."""
STORED = "stored-model"
"""Metric of such a reply: 1 if the model is the client's personal one of this run, 0 if it is what it received."""
CLIENT_API, MESSAGE_API = "client-api", "message"
"""Property of the handshake by which a client says that it is one of the Message API."""
QUESTION = "getpropertiesins.config"
PROPERTIES = "getpropertiesres.properties"
GET_PROPERTIES, QUERY = "get_properties", "query"
"""Types of the handshake's message: both kinds of clients answer to the first one, those of the Message API also to
the second one."""
_MAX_EXAMPLES = 2**53
_LARGEST = 1e300
"""Largest accepted metric, so that sums over clients stay finite."""


@dataclass(frozen=True)
class Layout:
    """Names of the records in the messages of one kind of client.

    Attributes
    ----------
    arrays, config : str
        Records of the server's message.
    sent_arrays : str
        Record of the reply's arrays.
    metrics, knowledge : str
        Records of the reply's numbers, and of its payload.
    count, loss : (str, str)
        Where the number of samples and the loss of an evaluation are: the record, and the key in it.
    """

    arrays: str
    config: str
    sent_arrays: str
    metrics: str
    knowledge: str
    count: tuple[str, str]
    loss: tuple[str, str]

    @property
    def named(self) -> bool:
        """Whether arrays have the names of the model's ``state_dict``; else their positions count."""
        return self is MESSAGES

    def records_of_metrics(self, content: RecordDict) -> Mapping[str, Any]:
        """Return the records of a reply among which the one with its numbers is."""
        return content.metric_records if self.named else content.config_records


def _of_numpy_clients(ins: str, res: str) -> Layout:
    metrics, count = f"{res}.metrics", (f"{res}.num_examples", "num_examples")
    return Layout(
        f"{ins}.parameters",
        f"{ins}.config",
        f"{res}.parameters",
        metrics,
        metrics,
        count,
        (f"{res}.loss", "loss"),
    )


TRAIN = _of_numpy_clients("fitins", "fitres")
"""Train messages of a ``NumPyClient`` and their replies."""
EVALUATE = _of_numpy_clients("evaluateins", "evaluateres")
"""Evaluate messages of a ``NumPyClient`` and their replies."""
MESSAGES = Layout(
    arrays="arrays",
    config="config",
    sent_arrays="arrays",
    metrics="metrics",
    knowledge="knowledge",
    count=("metrics", "num-examples"),
    loss=("metrics", "loss"),
)
"""All messages of a client of the Message API: the keys that Flower's own strategies use, and ``knowledge``."""


def layout_of(content: RecordDict) -> Layout:
    """Return the layout of a train message that the server sent, or of an honest reply to it."""
    return MESSAGES if MESSAGES.arrays in content or MESSAGES.metrics in content else TRAIN


@dataclass(frozen=True)
class TrainReply:
    """A reply to a train message, read but not yet checked against a template.

    ``names`` are those of the arrays, where they travel by name; None where they are in the server's order.
    """

    arrays: list[NDArray] = field(default_factory=list)
    num_examples: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    payload: bytes | None = None
    nbytes: int = 0
    knowledge_nbytes: int = 0
    names: tuple[str, ...] | None = None


@dataclass(frozen=True)
class EvaluateReply:
    """A reply to an evaluate message."""

    loss: float = 0.0
    num_examples: int = 0
    metrics: dict[str, float] = field(default_factory=dict)


def train_message(
    node_id: int,
    *,
    arrays: ArrayRecord | None,
    config: Mapping[str, Any],
    payload: bytes | None = None,
    ttl: float | None = None,
    group_id: str = "",
    message_api: bool = False,
) -> Message:
    """Return one train message. A config that is a record is the message's: no other may have it."""
    layout = MESSAGES if message_api else TRAIN
    return _instruction(layout, "train", node_id, arrays, config, payload, ttl, group_id)


def evaluate_message(
    node_id: int,
    *,
    arrays: ArrayRecord | None,
    config: Mapping[str, Any],
    ttl: float | None = None,
    group_id: str = "",
    message_api: bool = False,
) -> Message:
    """Return one evaluate message."""
    layout = MESSAGES if message_api else EVALUATE
    return _instruction(layout, "evaluate", node_id, arrays, config, None, ttl, group_id)


def properties_message(node_id: int, *, config: Mapping[str, Any], ttl: float | None = None) -> Message:
    """Return the handshake's question, which names the wire's version."""
    content = RecordDict({QUESTION: ConfigRecord({**config, VERSION: WIRE_VERSION})})
    return Message(content, dst_node_id=node_id, message_type=handshake_type(), ttl=ttl)


@functools.cache
def handshake_type() -> str:
    """Return the type of the handshake's message: one that a ``NumPyClient`` knows, as long as Flower has it."""
    try:
        Message(RecordDict(), dst_node_id=0, message_type=GET_PROPERTIES)
    except ValueError:
        return QUERY
    return GET_PROPERTIES


def read_train_reply(message: Message, *, message_api: bool = False) -> TrainReply:
    """Read a train reply of a client of the Message API, or of a ``NumPyClient``.

    Raises
    ------
    PayloadError
        If records are missing, of the wrong kind, or hold values that cannot be.
    """
    layout, content = MESSAGES if message_api else TRAIN, _content(message)
    record = _record(content.array_records, layout.sent_arrays)
    named = {name: read_array(name, value) for name, value in record.items() if name != EMPTY}
    payload = _knowledge(content, layout).get(PAYLOAD)
    if payload is not None and not isinstance(payload, bytes):
        raise PayloadError(f"metric 'payload' must be bytes, got {type(payload).__name__}")
    return TrainReply(
        list(named.values()),
        _num_examples(content, layout),
        _metrics(content, layout),
        payload,
        nbytes(content),
        knowledge_nbytes(content),
        tuple(named) if layout.named else None,
    )


def read_evaluate_reply(message: Message, *, message_api: bool = False) -> EvaluateReply:
    """Read an evaluate reply.

    Raises
    ------
    PayloadError
        As :func:`read_train_reply`.
    """
    layout, content = MESSAGES if message_api else EVALUATE, _content(message)
    record, key = layout.loss
    loss = _record(content.metric_records, record).get(key)
    if not isinstance(loss, int | float) or not _finite(loss):
        raise PayloadError(f"loss must be a finite number within ±{_LARGEST:g}, got {shown(loss)}")
    metrics = _metrics(content, layout)
    metrics.pop(key, None)
    return EvaluateReply(float(loss), _num_examples(content, layout), metrics)


def read_properties(message: Message) -> dict[str, Any]:
    """Read the handshake's reply.

    Raises
    ------
    PayloadError
        If the record is missing, or the client has another version of the wire.
    """
    properties = dict(_record(_content(message).config_records, PROPERTIES))
    mismatch = version_mismatch(properties.get(VERSION), theirs="client", ours="server")
    if mismatch is not None:
        raise PayloadError(mismatch)
    return properties


def forget(message: Message) -> None:
    """Empty a message that has been read.

    Flower's records refer to themselves: without this their bytes stay until the garbage collector runs, and
    what was decoded from them is a second copy.
    """
    if message.has_content():
        for records in (message.content.array_records, message.content.config_records):
            for record in records.values():
                record.clear()


def nbytes(content: RecordDict) -> int:
    """Return the size of a message's arrays and byte values.

    The scalars beside them are not counted; with Flower's envelope they are a few kilobytes per message.
    """
    arrays = (record for record in entries(content).values() if isinstance(record, ArrayRecord))
    of_arrays = sum(len(array.data) for record in arrays for array in entries(record).values())
    return of_arrays + knowledge_nbytes(content)


def knowledge_nbytes(content: RecordDict) -> int:
    """Return the size of a message's byte values alone, which hold the payloads."""
    records = (record for record in entries(content).values() if isinstance(record, ConfigRecord))
    return sum(
        len(value) for record in records for value in entries(record).values() if isinstance(value, bytes)
    )


def _instruction(
    layout: Layout,
    message_type: str,
    node_id: int,
    arrays: ArrayRecord | None,
    config: Mapping[str, Any],
    payload: bytes | None,
    ttl: float | None,
    group_id: str,
) -> Message:
    record = config if isinstance(config, ConfigRecord) else ConfigRecord(dict(config))
    if payload is not None:
        record[PAYLOAD] = payload
    content = RecordDict({layout.arrays: ArrayRecord() if arrays is None else arrays, layout.config: record})
    return Message(content, dst_node_id=node_id, message_type=message_type, ttl=ttl, group_id=group_id)


def _content(message: Message) -> RecordDict:
    if not message.has_content():
        raise PayloadError("the reply has no content")
    return message.content


def _record(records: Mapping[str, Any], key: str) -> Any:
    if key not in records:
        names = [name[:40] for name in sorted(records)[:5]]
        raise PayloadError(f"record {key!r} is missing, the reply has {names}")
    return records[key]


def _knowledge(content: RecordDict, layout: Layout) -> Any:
    """Return the record that has the payload; empty if a client of the Message API sends none."""
    if layout.knowledge == layout.metrics or layout.knowledge in content:
        return _record(content.config_records, layout.knowledge)
    return {}


def _num_examples(content: RecordDict, layout: Layout) -> int:
    record, key = layout.count
    value = _record(content.metric_records, record).get(key)
    return whole_number(key, value, 0, _MAX_EXAMPLES, error=PayloadError)


def _metrics(content: RecordDict, layout: Layout) -> dict[str, float]:
    record = _record(layout.records_of_metrics(content), layout.metrics)
    other = layout.count[1] if layout.named else None
    numbers = {
        k: v
        for k, v in record.items()
        if isinstance(v, int | float) and not isinstance(v, bool) and k != other
    }
    for name, value in numbers.items():
        if not _finite(value):
            raise PayloadError(
                f"metric {name[:80]!r} must be finite and within ±{_LARGEST:g}, got {shown(value)}"
            )
    return {name: float(value) for name, value in numbers.items()}


def _finite(value: float) -> bool:
    try:
        return math.isfinite(value) and abs(value) <= _LARGEST
    except OverflowError:  # a whole number beyond float's range
        return False
