"""A grid between the server and clients of which some attack."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy.typing as npt
from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid

from flwr_kd.experiments.attacks.attack import Attack, Crowd
from flwr_kd.experiments.attacks.malicious_client import ATTACKER, attacking, generator
from flwr_kd.experiments.errors import AttackError
from flwr_kd.transport import flower_records
from flwr_kd.transport.delivery import BoundedGrid, reason_of
from flwr_kd.transport.flower_records import layout_of
from flwr_kd.transport.npy import as_record_array, read_array
from flwr_kd.transport.payload import PayloadError
from flwr_kd.transport.template import EMPTY

__all__ = ["AttackedGrid"]

NDArray = npt.NDArray[Any]


@dataclass
class _Phase:
    """The train messages that were sent together, and what has come back."""

    asked: dict[str, Message]
    answers: dict[str, Message] = field(default_factory=dict)
    honest: list[tuple[list[NDArray], bytes | None]] = field(default_factory=list)
    attackers: dict[str, Message] = field(default_factory=dict)

    @property
    def open(self) -> list[str]:
        return [message_id for message_id in self.asked if message_id not in self.answers]


class AttackedGrid(Grid):
    """A grid with malicious clients: it notices an attack that fails, and shows the honest replies to some attacks.

    If the attack colludes, its clients see what the honest ones send in a phase, before they send anything. This
    stands for clients that talk to each other: an attacker's reply is held back until those of all other clients
    of the phase are there, then corrupted, and given out. If a client does not reply, the attackers do not either.
    Everything else passes. The honest replies of one phase stay in memory until it ends.

    Parameters
    ----------
    grid : Grid
        The one that reaches the clients, among them :class:`MaliciousClient` with the same attack.
    attack : Attack
        The attack.

    Attributes
    ----------
    failure : AttackError or None
        The first error of the attack. A server takes it for a reply that is broken, so that it shows only here.
    """

    def __init__(self, grid: Grid, attack: Attack) -> None:
        self._grid, self._attack = grid, attack
        self._phases: dict[str, _Phase] = {}
        self.failure: AttackError | None = None

    def set_run(self, *args: Any, **options: Any) -> None:
        """Pass it on."""
        self._grid.set_run(*args, **options)

    @property
    def run(self) -> Any:
        """The grid's run."""
        return self._grid.run

    @property
    def complete(self) -> bool:
        """Whether all nodes are connected, if the grid knows."""
        return bool(getattr(self._grid, "complete", False))

    def check(self) -> None:
        """Raise what the attack has raised.

        Raises
        ------
        AttackError
            If it failed.
        """
        if self.failure is not None:
            raise self.failure

    def bound(self, seconds: float) -> None:
        """Set how long a node may work on each message, where the grid bounds that."""
        if isinstance(self._grid, BoundedGrid):
            self._grid.bound(seconds)

    def create_message(self, *args: Any, **options: Any) -> Message:
        """Pass it on."""
        return self._grid.create_message(*args, **options)

    def get_node_ids(self) -> Iterable[int]:
        """Return the grid's nodes."""
        return self._grid.get_node_ids()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send messages; those to train are a phase.

        Raises
        ------
        AttackError
            If the attack has failed.
        """
        self.check()
        messages = list(messages)
        ids = list(self._grid.push_messages(messages))
        asked = {
            message_id: message
            for message_id, message in zip(ids, messages, strict=True)
            if message_id and message.metadata.message_type == "train" and self._attack.colludes
        }
        phase = _Phase(asked)
        self._phases = dict.fromkeys(asked, phase) if asked else self._phases
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies that are there, those of attackers once all of their phase are."""
        wanted = list(message_ids)
        plain = [message_id for message_id in wanted if message_id not in self._phases]
        replies = list(self._grid.pull_messages(plain)) if plain else []
        self._note_failure(replies)
        for message_id in wanted:
            phase = self._phases.get(message_id)
            if phase is not None:
                replies += self._pull(phase, message_id)
        return replies

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Not available: strategies of this package push and pull."""
        raise NotImplementedError(f"{type(self).__name__} pushes and pulls messages")

    def _pull(self, phase: _Phase, message_id: str) -> Sequence[Message]:
        # One after the other: one that cannot be decoded concerns the client that sent it only.
        if message_id not in phase.answers:
            self._fetch(phase, message_id)
        if message_id in phase.attackers:
            for other in phase.open:
                self._fetch(phase, other, quiet=True)
            if phase.open:
                return []
            self.check()
            try:
                with attacking():
                    self._corrupt(phase)
            except AttackError as error:
                self.failure = error
                raise
        answer = phase.answers.get(message_id)
        return [] if answer is None else [answer]

    def _fetch(self, phase: _Phase, message_id: str, *, quiet: bool = False) -> None:
        try:
            replies = list(self._grid.pull_messages([message_id]))
        except Exception:
            if not quiet:
                raise
            return
        self._note_failure(replies)
        for reply in replies:
            if reply.metadata.reply_to_message_id != message_id:
                continue
            phase.answers[message_id] = reply
            if reply.has_content():
                if ATTACKER in _metrics(reply):
                    phase.attackers[message_id] = reply
                else:
                    phase.honest += _honest(reply)

    def _note_failure(self, replies: Iterable[Message]) -> None:
        for reply in replies:
            # Another process or machine: what is left of the error is its text.
            if reply.has_error() and AttackError.__name__ in (reply.error.reason or ""):
                told = reason_of(reply.error)
                self.failure = self.failure or AttackError(told.partition("AttackError: ")[2] or told)

    def _corrupt(self, phase: _Phase) -> None:
        """Replace what the attackers of a complete phase send."""
        payloads = [payload for _, payload in phase.honest if payload is not None]
        for message_id, reply in phase.attackers.items():
            content, config = reply.content, _config(phase.asked[message_id])
            layout = layout_of(content)
            partition = int(str(_metrics(reply).pop(ATTACKER)))
            sent = _arrays(reply)
            form = [(array.shape, array.dtype) for array in sent]
            alike = [
                model for model, _ in phase.honest if [(array.shape, array.dtype) for array in model] == form
            ]
            crowd = Crowd(alike, payloads, len(phase.attackers))
            names = json.loads(str(config.get(flower_records.NAMES, "[]")))
            received = _received(phase.asked[message_id])
            arrays = self._attack.models(sent, received, names, generator(config, partition), crowd)
            record = content.array_records[layout.sent_arrays]
            keys = [key for key in record if key != EMPTY]
            for key, array in zip(keys, arrays, strict=True):
                record[key] = as_record_array(array)
            knowledge = content.config_records.get(layout.knowledge, ConfigRecord())
            payload = knowledge.get(flower_records.PAYLOAD)
            if isinstance(payload, bytes):
                count = content.metric_records[layout.count[0]][layout.count[1]]
                knowledge[flower_records.PAYLOAD] = self._attack.knowledge(payload, int(count), crowd)  # type: ignore[arg-type]
        phase.attackers, phase.honest = {}, []


def _honest(reply: Message) -> list[tuple[list[NDArray], bytes | None]]:
    """Return what an honest client sent, read before the server empties the reply; nothing if it is malformed."""
    try:
        told = flower_records.read_train_reply(reply, message_api=layout_of(reply.content).named)
    except PayloadError:
        return []
    return [(told.arrays, told.payload)]


def _metrics(reply: Message) -> Any:
    """Return the record with a reply's numbers; an empty one if there is none."""
    layout = layout_of(reply.content)
    return layout.records_of_metrics(reply.content).get(layout.metrics, {})


def _config(message: Message) -> Any:
    return message.content.config_records[layout_of(message.content).config]


def _received(message: Message) -> list[NDArray]:
    return _read(message.content.array_records[layout_of(message.content).arrays])


def _arrays(reply: Message) -> list[NDArray]:
    return _read(reply.content.array_records[layout_of(reply.content).sent_arrays])


def _read(record: ArrayRecord) -> list[NDArray]:
    return [read_array(name, value) for name, value in record.items() if name != EMPTY]
