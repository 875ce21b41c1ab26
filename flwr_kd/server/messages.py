"""What the server sends in a round: configs, train and evaluate messages."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message

from flwr_kd.config import MethodConfig, StepDecayConfig
from flwr_kd.server.records import Node, Outgoing, RoundStats
from flwr_kd.transport import flower_records
from flwr_kd.transport.delivery import lifetime
from flwr_kd.transport.records import entries, record_of

__all__ = ["Messages", "PersonalRounds", "StepCount"]


@dataclass
class PersonalRounds:
    """What the server knows about the personal models that clients keep.

    A client cannot tell by itself whether its personal model counts: a resumed server may have forgotten the last
    rounds, and a restarted client may have lost what it had. So each message says it.

    Attributes
    ----------
    trained : dict of int to int
        By client key, the last round in which it trained; it travels as ``trained-round``.
    asked : dict of int to int
        By client key, the last round in which it was asked to train; it travels as ``known-round``.
    resumed : int
        The round after which this run was resumed; 0 in a new run.
    """

    trained: dict[int, int] = field(default_factory=dict)
    asked: dict[int, int] = field(default_factory=dict)
    resumed: int = 0

    def ask(
        self, node: Node, server_round: int, *, first_phase: bool, saved: int, whole: int
    ) -> dict[str, int]:
        """Return what a client must know about its personal model in a phase, and note that it was asked.

        In the first phase, the model of any round after the last in which this run asked the client does not count:
        a run that was broken off may have left it.

        Parameters
        ----------
        saved : int
            The last round from which the server could be resumed; it travels as ``saved-round``.
        whole : int
            The last round from which it could be if it ended now, where that is another one: ``whole-round``.
        """
        scalars = {**self.of(node), flower_records.SAVED: saved}
        if whole != saved:
            scalars[flower_records.WHOLE] = whole
        if first_phase:
            self.asked[node.key] = server_round
        else:
            scalars[flower_records.KNOWN] = server_round
        return scalars

    def of(self, node: Node) -> dict[str, int]:
        """Return in which round a client trained last, and up to which round its personal model counts."""
        return {
            flower_records.TRAINED: self.trained.get(node.key, 0),
            flower_records.KNOWN: self.asked.get(node.key, self.resumed),
        }


@dataclass
class StepCount:
    """The steps of a run, for methods whose learning rate falls with them.

    Attributes
    ----------
    taken : int
        Those of all clients and of the server so far, as planned; see :class:`flwr_kd.config.StepDecayConfig`.
    """

    taken: int = 0

    def known(self, config: MethodConfig) -> dict[str, int]:
        """Return the steps so far, ``steps-before``, for training that counts none; nothing without step-decay."""
        falls = isinstance(config, StepDecayConfig) and config.step_decay
        return {flower_records.STEPS: self.taken} if falls else {}

    def ask(
        self, config: MethodConfig, phase: str, nodes: Iterable[Node], *, max_examples: int
    ) -> dict[int, dict[str, int]]:
        """Return by node id the steps before a client's own, ``steps-before``, and count those of a phase.

        Nothing where the learning rate does not fall.

        Parameters
        ----------
        nodes : iterable of Node
            In the order of partition ids, in which they count as taking turns.
        max_examples : int
            Largest number of samples that a client's claim counts with.
        """
        before: dict[int, dict[str, int]] = {}
        if isinstance(config, StepDecayConfig) and config.step_decay:
            for node in nodes:
                before[node.node_id] = self.known(config)
                self.add(config, config.planned_steps(phase, min(node.num_examples, max_examples)))
        return before

    def add(self, config: MethodConfig, steps: int) -> None:
        """Count steps, where the learning rate falls with them."""
        if isinstance(config, StepDecayConfig) and config.step_decay:
            self.taken += steps


@dataclass(frozen=True)
class Messages:
    """Makes a run's messages.

    Attributes
    ----------
    scalars : mapping
        What every message of the run says: hyper-parameters, seed, limits, the run's key.
    timeout : float
        Seconds within which replies may come.
    max_payload_bytes : int
        Largest payload that is sent.
    """

    scalars: Mapping[str, Any]
    timeout: float
    max_payload_bytes: int

    def config(
        self, phase: str, server_round: int, names: Sequence[str], extra: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return a message's config.

        Parameters
        ----------
        phase : str
            The phase's name, or ``"evaluate"``.
        server_round : int
            From 1.
        names : sequence of str
            Names of the model's arrays, in the order in which they travel.
        extra : mapping, optional
            The user's ``train_config`` or ``evaluate_config``. The run's own scalars win over it.
        """
        return {
            **(extra or {}),
            **self.scalars,
            flower_records.ROUND: server_round,
            flower_records.PHASE: phase,
            flower_records.NAMES: json.dumps(names),
        }

    def train(
        self,
        phase: str,
        server_round: int,
        outgoing: Sequence[Outgoing],
        stats: RoundStats,
        *,
        names_of: Callable[[Node], Sequence[str]],
        personal: Callable[[Node], Mapping[str, int]],
        extra: Mapping[str, Any] | None = None,
    ) -> list[Message]:
        """Return a phase's messages in the order of partition ids, which is that of their replies.

        Parameters
        ----------
        phase, server_round, extra
            See :meth:`config`.
        outgoing : sequence of Outgoing
            What each node is sent. A payload that several nodes share is encoded once.
        stats : RoundStats
            Counts the bytes.
        names_of : callable
            Returns the names of a node's arrays.
        personal : callable
            Returns what a node must know about its personal model; see :meth:`PersonalRounds.ask`.

        Raises
        ------
        PayloadError
            If a payload is larger than ``max_payload_bytes``.
        """
        encoded: dict[int, bytes] = {}
        contents = _Contents(lambda names: self.config(phase, server_round, names, extra))
        messages = []
        for out in sorted(outgoing, key=lambda item: item.node.order):
            payload = None
            if out.payload is not None:
                if id(out.payload) not in encoded:
                    encoded[id(out.payload)] = out.payload.to_bytes(max_bytes=self.max_payload_bytes)
                payload = encoded[id(out.payload)]
            names = names_of(out.node)
            message = flower_records.train_message(
                out.node.node_id,
                arrays=contents.arrays(out, names),
                config=contents.config(names, {**personal(out.node), **out.config}),
                payload=payload,
                ttl=lifetime(self.timeout, len(outgoing)),
                group_id=str(server_round),
                message_api=out.node.message_api,
            )
            content = message.content
            knowledge = flower_records.knowledge_nbytes(content)
            stats.count(out.node, down=flower_records.nbytes(content), knowledge=knowledge)
            messages.append(message)
        return messages

    def evaluate(
        self,
        server_round: int,
        outgoing: Sequence[Outgoing],
        stats: RoundStats,
        *,
        names_of: Callable[[Node], Sequence[str]],
        phase: str = "evaluate",
        personal: Callable[[Node], Mapping[str, int]] = lambda node: {},
        extra: Mapping[str, Any] | None = None,
    ) -> list[Message]:
        """Return the messages by which nodes evaluate a model on their own test data.

        Parameters
        ----------
        server_round, outgoing, stats, names_of, personal, extra
            See :meth:`train`; payloads are not sent.
        phase : str
            ``"evaluate"`` for the model that is sent, ``"measure"`` for the one that the client would train.
        """
        contents = _Contents(lambda names: self.config(phase, server_round, names, extra))
        messages = []
        for out in outgoing:
            names = names_of(out.node)
            message = flower_records.evaluate_message(
                out.node.node_id,
                arrays=contents.arrays(out, names),
                config=contents.config(names, {**personal(out.node), **out.config}),
                ttl=lifetime(self.timeout, len(outgoing)),
                group_id=str(server_round),
                message_api=out.node.message_api,
            )
            stats.count(out.node, down=flower_records.nbytes(message.content))
            messages.append(message)
        return messages


class _Contents:
    """The records of a phase's messages: what is the same for many nodes is made, and checked by Flower, once.

    Parameters
    ----------
    config : callable
        Returns the config of nodes whose arrays have these names.
    """

    def __init__(self, config: Callable[[tuple[str, ...]], Mapping[str, Any]]) -> None:
        self._config = config
        self._configs: dict[tuple[str, ...], ConfigRecord] = {}
        self._arrays: dict[tuple[int, tuple[str, ...]], tuple[ArrayRecord, ArrayRecord]] = {}

    def arrays(self, out: Outgoing, names: Sequence[str]) -> ArrayRecord | None:
        """Return a copy of a node's arrays, the same one for all nodes that are sent the same record.

        Grids copy or serialise a message before a client has it. A client of the Message API gets one model's
        arrays with the ``names`` that its reply must have; a record of several models is left as it is.
        """
        given = out.arrays
        if given is None:
            return None
        held = entries(given)
        renamed = out.node.message_api and len(held) == len(names)
        key = id(given), tuple(names) if renamed else ()
        if key not in self._arrays:
            values = dict(zip(names, held.values(), strict=True)) if renamed else held
            # The given record is kept, so that no other has its identity.
            self._arrays[key] = given, record_of(ArrayRecord, values)
        return self._arrays[key][1]

    def config(self, names: Sequence[str], own: Mapping[str, Any]) -> ConfigRecord:
        """Return a node's config, a record of its own."""
        key = tuple(names)
        if key not in self._configs:
            self._configs[key] = ConfigRecord(dict(self._config(key)))
        record = record_of(ConfigRecord, entries(self._configs[key]))
        record.update(own)
        return record
