"""The client's side of :mod:`flwr_kd.transport.flower_records`, for clients of Flower's Message API.

It reads the server's messages, and makes the replies. For a ``NumPyClient`` Flower does both.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy.typing as npt
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from flwr_kd.transport import flower_records
from flwr_kd.transport.flower_records import MESSAGES
from flwr_kd.transport.npy import as_record_array, read_array
from flwr_kd.transport.payload import PayloadError
from flwr_kd.transport.records import entries
from flwr_kd.transport.template import EMPTY

__all__ = ["evaluate_reply", "properties_reply", "read_instruction", "read_question", "train_reply"]

NDArray = npt.NDArray[Any]
Scalars = Mapping[str, bool | int | float | str | bytes]


def read_instruction(message: Message) -> tuple[list[NDArray], dict[str, Any]]:
    """Return the arrays, in the server's order, and the config of a train or evaluate message.

    The arrays cannot be written to.

    Raises
    ------
    PayloadError
        If a record is missing, or an array is none.
    """
    arrays, config = message.content.array_records, message.content.config_records
    if MESSAGES.arrays not in arrays or MESSAGES.config not in config:
        raise PayloadError(
            f"the server's message must have an ArrayRecord {MESSAGES.arrays!r} and a ConfigRecord "
            f"{MESSAGES.config!r}, it has the records {sorted(message.content)[:5]}"
        )
    received = [(name, value) for name, value in arrays[MESSAGES.arrays].items() if name != EMPTY]
    return [read_array(name, value) for name, value in received], dict(config[MESSAGES.config])


def train_reply(message: Message, arrays: Sequence[NDArray], num_examples: int, metrics: Scalars) -> Message:
    """Return the reply to a train message.

    Parameters
    ----------
    message : Message
        The server's.
    arrays : sequence of ndarray
        In the server's order; they get the names that the message has for them.
    num_examples : int
        Samples that the client trained on.
    metrics : mapping
        Numbers are sent in the reply's only MetricRecord; bytes, such as the payload, texts and truth values in a
        ConfigRecord, if there are any.
    """
    names = _names(message, len(arrays))
    named = {name: as_record_array(array) for name, array in zip(names, arrays, strict=True)}
    content = RecordDict({MESSAGES.sent_arrays: ArrayRecord(named)})
    _add_metrics(content, {MESSAGES.count[1]: num_examples, **metrics})
    return Message(content, reply_to=message)


def evaluate_reply(message: Message, loss: float, num_examples: int, metrics: Scalars) -> Message:
    """Return the reply to an evaluate message."""
    content = RecordDict()
    _add_metrics(content, {MESSAGES.loss[1]: float(loss), MESSAGES.count[1]: num_examples, **metrics})
    return Message(content, reply_to=message)


def read_question(message: Message) -> dict[str, Any]:
    """Return the config of the handshake's question.

    Raises
    ------
    PayloadError
        If it is another message.
    """
    record = message.content.config_records.get(flower_records.QUESTION)
    if record is None:
        raise PayloadError(
            f"the handshake of flwr-kd has a ConfigRecord {flower_records.QUESTION!r}, the message has the records "
            f"{sorted(message.content)[:5]}"
        )
    return dict(record)


def properties_reply(message: Message, properties: Scalars) -> Message:
    """Return the reply to the handshake, which says that the client is one of the Message API."""
    told: dict[str, Any] = {**properties, flower_records.CLIENT_API: flower_records.MESSAGE_API}
    return Message(RecordDict({flower_records.PROPERTIES: ConfigRecord(told)}), reply_to=message)


def _names(message: Message, count: int) -> Sequence[str]:
    """Return the names of ``count`` arrays: those that the server lists, else those it sent, else positions."""
    config = message.content.config_records[MESSAGES.config]
    listed: list[str] = json.loads(str(config.get(flower_records.NAMES, "[]")))
    sent = [name for name in entries(message.content.array_records[MESSAGES.arrays]) if name != EMPTY]
    return next((names for names in (listed, sent) if len(names) == count), [str(i) for i in range(count)])


def _add_metrics(content: RecordDict, metrics: Scalars) -> None:
    numbers, others = MetricRecord(), ConfigRecord()
    for name, value in metrics.items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            numbers[name] = value
        else:
            others[name] = value
    content[MESSAGES.metrics] = numbers
    if others:
        content[MESSAGES.knowledge] = others
