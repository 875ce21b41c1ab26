"""A grid that notes the size of each message."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from flwr.app import Message
from flwr.common.serde import message_to_proto

from flwr_kd.experiments.message_sizes import sizes_of
from flwr_kd.transport import flower_records
from flwr_kd.transport.inline_grid import InlineGrid

__all__ = ["MeasuringGrid", "Note", "sizes_of"]


@dataclass(frozen=True)
class Note:
    """The size of one message.

    Attributes
    ----------
    round : int
        From 1; 0 for the handshake.
    phase : str
        ``handshake`` before the rounds.
    direction : str
        ``down`` or ``up``.
    client : int
        The client's partition.
    parts : mapping of str to int
        Bytes of ``weights`` and ``knowledge``, of those that there are.
    wire : int
        Bytes of the whole message as Flower serialises it, in one piece.
    arrays : int
        Number of arrays.
    """

    round: int
    phase: str
    direction: str
    client: int
    parts: Mapping[str, int] = field(default_factory=dict)
    wire: int = 0
    arrays: int = 0

    @property
    def counted(self) -> int:
        """Bytes of all parts."""
        return sum(self.parts.values())


class MeasuringGrid(InlineGrid):
    """An inline grid that notes the size of each message on its way, in ``notes``.

    Evaluate messages are left out: measuring models is no part of a method.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.notes: list[Note] = []
        self.phases: dict[str, str] = {}

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send messages."""
        sent = list(messages)
        ids = list(super().push_messages(sent))
        for message_id, message in zip(ids, sent, strict=True):
            if message.metadata.message_type == "evaluate":
                continue
            layout = flower_records.layout_of(message.content)
            config = message.content.config_records.get(layout.config)
            phase = "handshake" if config is None else str(config[flower_records.PHASE])
            self.phases[message_id] = phase
            self._note(message, phase, "down", message.metadata.dst_node_id)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Fetch replies.

        Raises
        ------
        RuntimeError
            If a client failed.
        """
        replies = list(super().pull_messages(message_ids))
        for message in replies:
            if message.has_error():
                raise RuntimeError(f"a client failed: {message.error.reason}")
            phase = self.phases.get(message.metadata.reply_to_message_id)
            if phase is not None:
                self._note(message, phase, "up", message.metadata.src_node_id)
        return replies

    def _note(self, message: Message, phase: str, direction: str, node_id: int) -> None:
        content = message.content
        arrays = [a for record in content.array_records.values() for a in record.values()]
        weights = sum(len(a.data) for a in arrays)
        parts = {"weights": weights, "knowledge": flower_records.nbytes(content) - weights}
        self.notes.append(
            Note(
                round=int(message.metadata.group_id or 0),
                phase=phase,
                direction=direction,
                client=int(str(self.contexts[node_id].node_config["partition-id"])),
                parts={name: nbytes for name, nbytes in parts.items() if nbytes},
                wire=message_to_proto(message).ByteSize(),
                arrays=len(arrays),
            )
        )
