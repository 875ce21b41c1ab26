"""The only place that knows Flower's record keys.

The server speaks Flower's Message API, the client is a ``NumPyClient``; both meet in the records that
``ClientApp(client_fn=...)`` understands (``flwr/compat/common/recorddict_compat.py`` is the reference).
What comes from a client is untrusted: every reader here raises :class:`PayloadError` and nothing else.
"""

from __future__ import annotations

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

__all__ = [
    "WIRE_VERSION",
    "EvaluateReply",
    "TrainReply",
    "evaluate_message",
    "forget",
    "knowledge_nbytes",
    "nbytes",
    "properties_message",
    "read_evaluate_reply",
    "read_properties",
    "read_train_reply",
    "train_message",
    "version_mismatch",
]

NDArray = npt.NDArray[Any]
WIRE_VERSION = 2
"""Version of what travels besides payloads, which have versions of their own: the keys of configs, properties and
metrics, and what they mean. flwr-kd 0.1 had version 1, and did not name it."""
VERSION = "wire-version"
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
ACCURACY, TOP5 = "accuracy", "top5"
"""Metrics of a reply about the model that the server sent."""
MEASURE = "measure"
"""The phase that an evaluate message names if the client is to measure its own model, as after its training."""
PERSONALIZE = "personalize"
"""The phase in which a client also fine-tunes a copy of the global model, and measures it before and after."""
STORED = "stored-model"
"""Metric of such a reply: 1 if the model is the client's personal one of this run, 0 if it is what it received."""
_MAX_EXAMPLES = 2**53
_LARGEST = 1e300
"""Largest accepted metric, so that sums over clients stay finite."""


@dataclass(frozen=True)
class TrainReply:
    """A reply to a train message, read but not yet checked against a template."""

    arrays: list[NDArray] = field(default_factory=list)
    num_examples: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    payload: bytes | None = None
    nbytes: int = 0
    knowledge_nbytes: int = 0


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
) -> Message:
    """Return one train message. A config that is a record is the message's: no other may have it."""
    return _instruction("fitins", "train", node_id, arrays, config, payload, ttl, group_id)


def evaluate_message(
    node_id: int,
    *,
    arrays: ArrayRecord | None,
    config: Mapping[str, Any],
    ttl: float | None = None,
    group_id: str = "",
) -> Message:
    """Return one evaluate message."""
    return _instruction("evaluateins", "evaluate", node_id, arrays, config, None, ttl, group_id)


def properties_message(node_id: int, *, config: Mapping[str, Any], ttl: float | None = None) -> Message:
    """Return the handshake's question, which names the wire's version."""
    content = RecordDict({"getpropertiesins.config": ConfigRecord({**config, VERSION: WIRE_VERSION})})
    return Message(content, dst_node_id=node_id, message_type="get_properties", ttl=ttl)


def read_train_reply(message: Message) -> TrainReply:
    """Read a train reply.

    Raises
    ------
    PayloadError
        If records are missing, of the wrong kind, or hold values that cannot be.
    """
    content = _content(message)
    record = _record(content.array_records, "fitres.parameters")
    arrays = [read_array(name, value) for name, value in record.items() if name != EMPTY]
    config = _record(content.config_records, "fitres.metrics")
    payload = config.get(PAYLOAD)
    if payload is not None and not isinstance(payload, bytes):
        raise PayloadError(f"metric 'payload' must be bytes, got {type(payload).__name__}")
    sizes = nbytes(content), knowledge_nbytes(content)
    return TrainReply(arrays, _num_examples(content, "fitres"), _metrics(config), payload, *sizes)


def read_evaluate_reply(message: Message) -> EvaluateReply:
    """Read an evaluate reply.

    Raises
    ------
    PayloadError
        As :func:`read_train_reply`.
    """
    content = _content(message)
    loss = _record(content.metric_records, "evaluateres.loss").get("loss")
    if not isinstance(loss, int | float) or not _finite(loss):
        raise PayloadError(f"loss must be a finite number within ±{_LARGEST:g}, got {shown(loss)}")
    config = _record(content.config_records, "evaluateres.metrics")
    return EvaluateReply(float(loss), _num_examples(content, "evaluateres"), _metrics(config))


def read_properties(message: Message) -> dict[str, Any]:
    """Read the handshake's reply.

    Raises
    ------
    PayloadError
        If the record is missing, or the client has another version of the wire.
    """
    properties = dict(_record(_content(message).config_records, "getpropertiesres.properties"))
    mismatch = version_mismatch(properties.get(VERSION), theirs="client", ours="server")
    if mismatch is not None:
        raise PayloadError(mismatch)
    return properties


def version_mismatch(version: object, *, theirs: str, ours: str) -> str | None:
    """Say why a peer's version of the wire does not fit, and what to do; None if it fits.

    Parameters
    ----------
    version : object
        What the peer named in the handshake; None if it named nothing.
    theirs, ours : str
        ``"client"`` and ``"server"``, or the other way round.

    Examples
    --------
    >>> print(version_mismatch(None, theirs="client", ours="server"))
    the client names no wire version, as flwr-kd before 0.2; the server's is 2: update flwr-kd at the client
    >>> print(version_mismatch(3, theirs="server", ours="client"))
    the server's wire version is 3, the client's is 2: install the same version of flwr-kd at both
    """
    if type(version) is int and version == WIRE_VERSION:
        return None
    if version is None:
        return (
            f"the {theirs} names no wire version, as flwr-kd before 0.2; the {ours}'s is {WIRE_VERSION}: "
            f"update flwr-kd at the {theirs}"
        )
    return (
        f"the {theirs}'s wire version is {shown(version)}, the {ours}'s is {WIRE_VERSION}: install the same "
        "version of flwr-kd at both"
    )


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
    ins: str,
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
    content = RecordDict(
        {f"{ins}.parameters": ArrayRecord() if arrays is None else arrays, f"{ins}.config": record}
    )
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


def _num_examples(content: RecordDict, res: str) -> int:
    value = _record(content.metric_records, f"{res}.num_examples").get("num_examples")
    return whole_number("num_examples", value, 0, _MAX_EXAMPLES, error=PayloadError)


def _metrics(config: Mapping[str, Any]) -> dict[str, float]:
    numbers = {k: v for k, v in config.items() if isinstance(v, int | float) and not isinstance(v, bool)}
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
