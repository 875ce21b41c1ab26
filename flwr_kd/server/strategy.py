"""The server half of every method: one loop for rounds, phases, faults, counting and checkpoints.

A method derives from :class:`KDStrategy`, names its phases and overrides a few hooks; no method has a loop of
its own. The class is a Flower ``Strategy``: ``start(...)`` has Flower's signature and returns a ``Result``.
"""

from __future__ import annotations

import io
import json
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from logging import INFO, WARNING
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from flwr_kd.checks import ConfigError, number, share, whole_number
from flwr_kd.config import ConfigT, MethodConfig
from flwr_kd.seeding import numpy_generator
from flwr_kd.server.aggregation import RunningMean, shares
from flwr_kd.server.checkpoint import CHECKPOINT, Checkpoint
from flwr_kd.server.nodes import Roster
from flwr_kd.server.records import (
    KDResult,
    NDArray,
    Node,
    Outgoing,
    Reply,
    RoundStats,
    VoidRoundsError,
)
from flwr_kd.text import first_line, plain
from flwr_kd.transport import flower_records
from flwr_kd.transport.delivery import Delivered, lifetime, pair, reason_of, receive
from flwr_kd.transport.payload import MAX_PAYLOAD_BYTES, Payload, PayloadError, PayloadT
from flwr_kd.transport.template import ArrayTemplate

__all__ = ["MAX_EXAMPLES", "KDStrategy"]

T = TypeVar("T")
MAX_EXAMPLES = 1_000_000
"""Largest sample count with which a client is weighted, unless a strategy is told otherwise."""
_SHARES = ("local-accuracy", "local-top5")
_LARGEST_METRIC = 1e15


class _TooFew(Exception):  # noqa: N818
    """Ends the answers of a phase that has too few of them, before anything was changed."""


class KDStrategy(Strategy, Generic[ConfigT, PayloadT]):
    """Base of all methods' server halves.

    Parameters
    ----------
    config : MethodConfig, optional
        The method's hyper-parameters; they travel to the clients, which have none of their own.
    fraction_train : float
        Share of the available clients that is drawn per round, in (0, 1]; at least ``min_train_nodes``.
    min_train_nodes : int
        Least number of clients drawn per round, and of usable answers to its first phase: with fewer the round is
        void, and nothing is changed at the server. A round waits up to ``timeout`` for so many clients to be there.
    min_available_nodes : int
        The run waits for so many fitting clients before round 1.
    fraction_evaluate : float
        Share of the clients that also evaluate the global model on their own test data, in [0, 1]. 0 (the
        default) leaves out the evaluation phase, which costs as much time as training on a real SuperLink.
    seed : int
        Of every random choice on both sides.
    max_payload_bytes : int
        Largest payload that is sent or accepted. Of a client's answer, no more is decoded than its model, classes
        and samples can need.
    max_void_rounds : int
        So many void rounds in a row end the run with :class:`VoidRoundsError`.
    max_examples : int
        Largest sample count with which a client is weighted. Counts are what clients claim, and nothing proves
        them: choose what the largest of yours can have.
    checkpoint_dir : path, optional
        Arrays and the method's state are written there after every round that is not void.
    resume : bool
        Go on after the round of the checkpoint, if there is one. Clients go on with their personal models where
        those outlived the run, which needs a ``state-dir`` in their node configs.
    on_round : callable, optional
        Called with the :class:`RoundStats` after every round.
    **hyperparameters
        Instead of ``config``: its fields by name, for example ``FedHKD(gamma=0.1)``.

    Raises
    ------
    ConfigError
        If an option or a hyper-parameter is not allowed.
    """

    config_class: ClassVar[type[MethodConfig]] = MethodConfig
    phases: ClassVar[tuple[str, ...]] = ("train",)
    """Phases of a round, in order. A client's method ``phase_<name>`` answers each."""
    reply_payloads: ClassVar[Mapping[str, type[Payload]]] = {}
    """By phase, the payload that an answer must have."""
    reply_arrays: ClassVar[frozenset[str]] = frozenset({"train"})
    """Phases whose answers hold the model's arrays."""
    independent_phases: ClassVar[frozenset[str]] = frozenset()
    """Phases that do not build on the round's first one, and so take place in a void round, too."""
    reply_metrics: ClassVar[frozenset[str]] = frozenset()
    """Metrics of the method's own in its clients' answers, whose means go into the round's train metrics."""
    sends_weights: ClassVar[bool] = True
    """Whether there are global arrays, which every client's model must match."""

    def __init__(
        self,
        config: ConfigT | None = None,
        *,
        fraction_train: float = 1.0,
        min_train_nodes: int = 1,
        min_available_nodes: int = 2,
        fraction_evaluate: float = 0.0,
        seed: int = 0,
        max_payload_bytes: int = MAX_PAYLOAD_BYTES,
        max_void_rounds: int = 3,
        max_examples: int = MAX_EXAMPLES,
        checkpoint_dir: str | Path | None = None,
        resume: bool = False,
        on_round: Callable[[RoundStats], None] | None = None,
        **hyperparameters: Any,
    ) -> None:
        if config is not None and hyperparameters:
            raise ConfigError(
                f"either config or hyper-parameters, got both (config and {list(hyperparameters)})"
            )
        if config is not None and not isinstance(config, self.config_class):
            raise ConfigError(f"config must be a {self.config_class.__name__}, got {type(config).__name__}")
        # A class variable cannot be of a type variable; the class statement names the same class twice.
        kind: type[Any] = self.config_class
        self.config: ConfigT = config if config is not None else kind.from_mapping(hyperparameters)
        share("fraction_train", fraction_train, open_low=True)
        share("fraction_evaluate", fraction_evaluate)
        for name, value in (
            ("min_train_nodes", min_train_nodes),
            ("min_available_nodes", min_available_nodes),
            ("max_void_rounds", max_void_rounds),
        ):
            whole_number(name, value, 1, 2**31)
        whole_number("max_payload_bytes", max_payload_bytes, 1, 2**31 - 2**20)
        whole_number("max_examples", max_examples, 1, 2**53)
        if resume and checkpoint_dir is None:
            raise ConfigError("resume=True needs checkpoint_dir")
        self.fraction_train, self.fraction_evaluate = fraction_train, fraction_evaluate
        self.min_train_nodes, self.min_available_nodes = min_train_nodes, min_available_nodes
        self.seed, self.max_payload_bytes = seed, max_payload_bytes
        self.max_void_rounds, self.max_examples = max_void_rounds, max_examples
        self.checkpoint_dir = None if checkpoint_dir is None else Path(checkpoint_dir)
        self.resume, self.on_round = resume, on_round
        self.template = ArrayTemplate()
        self.stats = RoundStats(0)
        self.num_rounds = 0
        self._last_trained: dict[int, int] = {}
        self._last_asked: dict[int, int] = {}
        self._saved = self._resumed = 0
        self._run = ""
        self._voids = 0
        self._capped: set[int] = set()
        self._timeout = 3600.0
        self._roster = self._new_roster()
        self._hooked: list[Message] = []
        self._hooked_arrays: ArrayRecord | None = None
        self._present: list[Node] = []
        self._begun = False

    # ------------------------------------------------------------------ hooks for a method's author

    def accept_node(self, node: Node) -> str | None:
        """Say why a client cannot take part; None if it can.

        The base checks, where weights are exchanged, that the client's model has the names and shapes of
        ``initial_arrays``.
        """
        if self.sends_weights and self.template.names:
            return self.template.difference(node.template)
        return None

    def common(
        self, kind: Callable[[Node], T], node: Node, *, among: Callable[[Node], bool] = lambda _: True
    ) -> T:
        """Return what most clients have, for a method whose clients must be alike in it.

        Of those that were accepted; before any was, of all that introduced themselves together, so that one
        client alone does not decide. ``among`` says which of them count. ``node`` stands for them where there are
        none.
        """
        return self._roster.common(kind, node, among)

    def unlike(self, node: Node) -> str | None:
        """Say how a client's numbers of classes and features are not those of most; None where they are."""
        classes, features = self.common(lambda each: (each.num_classes, each.feature_dim), node)
        if (node.num_classes, node.feature_dim) != (classes, features):
            return f"{node.num_classes} classes and {node.feature_dim} features, expected {classes} and {features}"
        return None

    def begin(self, nodes: list[Node]) -> None:
        """Prepare a run, or what is left of one that is resumed; nothing by default.

        Called once, before the first round, with the clients that are there; :attr:`template` is known.

        Raises
        ------
        ConfigError
            If an option does not go with the clients or the model.
        """

    def select(self, phase: str, server_round: int, nodes: list[Node], answered: list[Node]) -> list[Node]:
        """Return who takes part in a phase.

        The base draws ``fraction_train`` of the nodes for the first phase, and then keeps to those that
        answered the phase before.

        Parameters
        ----------
        phase : str
            One of :attr:`phases`.
        server_round : int
            From 1.
        nodes : list of Node
            All that are there, in the order of partition ids.
        answered : list of Node
            Those that answered the phase before; empty in the first.
        """
        if phase != self.phases[0]:
            return answered
        return self._draw(nodes, self.fraction_train, self.min_train_nodes, "sample", server_round)

    def configure_phase(
        self, phase: str, server_round: int, nodes: list[Node], arrays: ArrayRecord | None
    ) -> Iterable[Outgoing]:
        """Return what each node is sent; the base sends everyone the global arrays."""
        return [Outgoing(node, arrays) for node in nodes]

    def template_of(self, node: Node) -> ArrayTemplate:
        """Return the names and shapes of the arrays that a client sends: :attr:`template`, the global model's.

        For a method whose clients have different models, or that has no global one.
        """
        return self.template

    def payload_dims(self, phase: str, node: Node) -> Mapping[str, int]:
        """Return the sizes that a node's payload must have, by the letters of its fields' shapes."""
        return {"C": node.num_classes, "D": node.feature_dim}

    def payload_limit(self, phase: str, node: Node) -> int:
        """Return how many bytes a node's payload can have at most: more are refused before they are decoded.

        The base goes by :meth:`payload_dims`; an axis that is not in it has at most C entries.
        """
        kind = self.reply_payloads[phase]
        found = kind.max_nbytes(self.payload_dims(phase, node), others=node.num_classes)
        return self.max_payload_bytes if found is None else min(found, self.max_payload_bytes)

    def check_reply(self, phase: str, reply: Reply[PayloadT]) -> None:
        """Raise :class:`PayloadError` where an answer breaks a rule of the method's own."""

    def aggregate_phase(
        self, phase: str, server_round: int, replies: Iterable[Reply[PayloadT]], arrays: ArrayRecord | None
    ) -> ArrayRecord | None:
        """Use the answers, in the order of partition ids; return new global arrays, or None to keep the old.

        Not called when nobody answered. The base returns the mean weighted by sample counts.

        Parameters
        ----------
        phase : str
            One of :attr:`phases`.
        server_round : int
            From 1.
        replies : iterable of Reply
            To be gone through once, to its end, before anything of the strategy is changed: where too few come, it
            ends in an exception, and the round is void. Each is fetched and checked when it is asked for, so a
            method that only sums holds one at a time; one that needs all takes ``list(replies)``.
        arrays : ArrayRecord or None
            The global arrays.
        """
        if phase not in self.reply_arrays:
            return None
        mean = RunningMean()
        for reply in replies:
            mean.add(reply.arrays, reply.num_examples)
            # Else it would still be held while the next is read.
            del reply
        return self.template.record(mean.result())

    def finish_round(self, server_round: int, arrays: ArrayRecord | None) -> ArrayRecord | None:
        """End a round that was not void; return new global arrays, or None to keep them.

        For a method whose phases leave something to be done together. Nothing by default.
        """
        return None

    def state_arrays(self) -> dict[str, NDArray]:
        """Return the method's own state between rounds, as named arrays; nothing by default."""
        return {}

    def load_state_arrays(self, state: Mapping[str, NDArray]) -> None:
        """Take :meth:`state_arrays` back.

        Raises
        ------
        ValueError
            If the state is not this method's.
        """
        if state:
            raise ValueError(f"{type(self).__name__} has no state of its own, got {sorted(state)}")

    # ------------------------------------------------------------------ Flower's interface

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> KDResult:
        """Run all rounds.

        Parameters
        ----------
        grid : Grid
            Flower's, or an :class:`~flwr_kd.InlineGrid`.
        initial_arrays : ArrayRecord
            ``ArrayRecord(model.state_dict())``; empty for a method that exchanges no weights.
        num_rounds : int
            At least 1. With ``resume``, the number of the last round.
        timeout : float
            Seconds that a phase waits for answers. The messages live 200 seconds longer, and two for each client,
            in which answers are fetched.
        train_config, evaluate_config : ConfigRecord, optional
            Further scalars for the clients. Not changed.
        evaluate_fn : callable, optional
            Called with the round (0: before the first) and the global arrays, where there are any. A metric
            named ``accuracy`` becomes the round's global accuracy.

        Returns
        -------
        KDResult
            Flower's ``Result``, and ``rounds``.

        Raises
        ------
        HandshakeError
            If clients do not fit the method and too few remain.
        TimeoutError
            If fewer than ``min_available_nodes`` clients come within ``timeout``.
        ConfigError
            If ``num_rounds`` or ``timeout`` is out of range, ``initial_arrays`` are missing, ``checkpoint_dir``
            cannot be written to, or its checkpoint is another method's, another model's or unreadable.
        VoidRoundsError
            If ``max_void_rounds`` rounds in a row had fewer than ``min_train_nodes`` usable answers.
        """
        whole_number("num_rounds", num_rounds, 1, 2**31)
        number("timeout", timeout, 0, float("inf"), open_low=True)
        log(INFO, "Starting %s strategy:", type(self).__name__)
        self.summary()
        self._timeout, self.num_rounds = timeout, num_rounds
        extra = dict(train_config or {})
        result = KDResult()
        arrays: ArrayRecord | None = ArrayRecord(dict(initial_arrays))
        self._begin(initial_arrays)
        first = 1
        if self.resume and (restored := self.load_checkpoint()) is not None:
            last, restored_arrays = restored
            self._saved = self._resumed = last
            first, arrays = last + 1, restored_arrays or arrays
            log(INFO, "Resuming after round %d", last)
        elif self.checkpoint_dir is not None and (self.checkpoint_dir / CHECKPOINT).exists():
            log(WARNING, "%s is replaced; resume=True would go on from it", self.checkpoint_dir / CHECKPOINT)
        assert arrays is not None
        result.arrays = arrays
        self._evaluate_at_server(evaluate_fn, first - 1, arrays, result, None)
        self.begin(self._roster.wait(grid, self.min_available_nodes))

        for server_round in range(first, num_rounds + 1):
            begun = time.monotonic()
            log(INFO, "[ROUND %d/%d]", server_round, num_rounds)
            self.stats = stats = RoundStats(server_round)
            nodes = self._roster.of_round(grid, self.min_train_nodes)
            arrays, told = self._run_phases(grid, server_round, nodes, arrays, extra)
            self._summarise(told, result)
            result.arrays = arrays
            if stats.void:
                self._end_if_void()
            else:
                # Before anything else, which can fail: the round is done.
                self.save_checkpoint(server_round, arrays)
                self._evaluate_at_clients(
                    grid, server_round, nodes, arrays, dict(evaluate_config or {}), result
                )
            stats.seconds = time.monotonic() - begun
            self._evaluate_at_server(evaluate_fn, server_round, arrays, result, stats)
            result.rounds.append(stats)
            if self.on_round is not None:
                self.on_round(stats)
        for line in io.StringIO(str(result)):
            log(INFO, "\t%s", line.rstrip("\n"))
        return result

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Build a round's messages; for Flower's own ``Strategy.start`` and its wrappers.

        There are no checkpoints then, and no calls of ``on_round``; the messages' time to live is an hour and more,
        whatever the timeout.

        Raises
        ------
        RuntimeError
            If the method has several phases per round, which only its own ``start`` can run.
        """
        if len(self.phases) > 1:
            raise RuntimeError(
                f"{type(self).__name__} has the phases {', '.join(self.phases)} per round; call its own start()"
            )
        if server_round == 1 or not self._begun:
            if self.checkpoint_dir is not None or self.on_round is not None:
                log(WARNING, "checkpoint_dir, resume and on_round need this strategy's own start()")
            self._begin(arrays)
            self.begin(self._roster.wait(grid, self.min_available_nodes))
        self._end_if_void()
        self.stats = RoundStats(server_round)
        nodes = self._roster.of_round(grid, self.min_train_nodes)
        self._present = nodes
        chosen = self.select(self.phases[0], server_round, nodes, [])
        outgoing = list(self.configure_phase(self.phases[0], server_round, chosen, arrays)) if chosen else []
        self._hooked = self._train_messages(self.phases[0], server_round, outgoing, dict(config))
        self._hooked_arrays = arrays
        return list(self._hooked)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Aggregate a round's answers; the counterpart of :meth:`configure_train`.

        Of a void round nothing is returned.
        """
        result = KDResult()
        pairs = pair(self._hooked, replies)
        try:
            told, new = self._aggregate(self.phases[0], server_round, pairs, self._hooked_arrays)
        except _TooFew:
            self._count_void()
            return None, None
        self._voids = 0
        self._summarise(told, result)
        new = self.finish_round(server_round, new or self._hooked_arrays) or new
        return new, result.train_metrics_clientapp.get(server_round)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Build the evaluation's messages; none unless ``fraction_evaluate`` is above 0."""
        self._end_if_void()
        self._hooked = self._evaluate_messages(server_round, self._present, arrays, dict(config))
        return list(self._hooked)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Return the means over clients, weighted by their sample counts; None without answers."""
        return self._mean_evaluation(pair(self._hooked, replies))

    def summary(self) -> None:
        """Log hyper-parameters and sampling."""
        values = ", ".join(f"{name}={value}" for name, value in self.config.to_wire().items())
        log(INFO, "\t├──> Hyper-parameters: %s", values)
        log(INFO, "\t├──> Phases: %s", ", ".join(self.phases))
        log(
            INFO,
            "\t└──> Fraction: train (%.2f) | evaluate (%.2f)",
            self.fraction_train,
            self.fraction_evaluate,
        )

    # ------------------------------------------------------------------ nodes

    def _begin(self, arrays: ArrayRecord) -> None:
        self.template = ArrayTemplate.of(arrays)
        if self.sends_weights and not self.template.names:
            raise ConfigError(f"{type(self).__name__} needs initial_arrays: ArrayRecord(model.state_dict())")
        self._roster = self._new_roster()
        self._last_trained, self._last_asked, self._saved, self._resumed = {}, {}, 0, 0
        self._capped, self._voids = set(), 0
        self._run = secrets.token_hex(8)
        if self.checkpoint_dir is not None:
            Checkpoint.prepare(self.checkpoint_dir)
        # A strategy may be started again; what it learnt in the run before is not this run's.
        self.load_state_arrays({})
        self._begun = True

    def _new_roster(self) -> Roster:
        return Roster(self._refusal, {**self.config.to_wire(), flower_records.SEED: self.seed}, self._timeout)

    def _refusal(self, node: Node) -> str | None:
        try:
            refusal = self.accept_node(node)
            if refusal is None:
                self.config.check_classes(node.num_classes)
            return refusal
        except (PayloadError, ConfigError) as error:
            return str(error)
        # A method's own check may stumble over what no check foresaw; the run goes on.
        except Exception as error:
            return f"unexpected {type(error).__name__}: {first_line(error)}"

    def _draw(
        self, nodes: list[Node], fraction: float, least: int, purpose: str, server_round: int
    ) -> list[Node]:
        size = min(len(nodes), max(int(len(nodes) * fraction + 1e-9), least))
        if size == len(nodes):
            return nodes
        rng = numpy_generator(self.seed, purpose, server_round)
        return [nodes[i] for i in sorted(rng.choice(len(nodes), size=size, replace=False))]

    # ------------------------------------------------------------------ messages

    def _config(self, phase: str, server_round: int, extra: Mapping[str, Any]) -> dict[str, Any]:
        return {
            **extra,
            **self.config.to_wire(),
            flower_records.ROUND: server_round,
            flower_records.PHASE: phase,
            flower_records.SEED: self.seed,
            flower_records.MAX_BYTES: self.max_payload_bytes,
            flower_records.RUN: self._run,
            flower_records.NAMES: json.dumps(self.template.names),
        }

    def _train_messages(
        self, phase: str, server_round: int, outgoing: Sequence[Outgoing], extra: Mapping[str, Any]
    ) -> list[Message]:
        config = self._config(phase, server_round, extra)
        encoded: dict[int, bytes] = {}
        messages = []
        # Answers are used in the order of the messages.
        for out in sorted(outgoing, key=lambda each: each.node.order):
            data = None
            if out.payload is not None:
                # Most methods send everyone the same payload: encode it once.
                if id(out.payload) not in encoded:
                    encoded[id(out.payload)] = out.payload.to_bytes(max_bytes=self.max_payload_bytes)
                data = encoded[id(out.payload)]
            message = flower_records.train_message(
                out.node.node_id,
                arrays=out.arrays if out.arrays is None else ArrayRecord(dict(out.arrays)),
                config={
                    **config,
                    flower_records.NAMES: json.dumps(self.template_of(out.node).names),
                    **self._of_state(phase, server_round, out.node),
                    **out.config,
                },
                payload=data,
                ttl=lifetime(self._timeout, len(outgoing)),
                group_id=str(server_round),
            )
            self.stats.count(out.node, down=flower_records.nbytes(message.content))
            messages.append(message)
        return messages

    def _of_state(self, phase: str, server_round: int, node: Node) -> dict[str, int]:
        """Return what a client must know to find its personal model of this run, or that it has lost it."""
        known, key = server_round, node.key
        if phase == self.phases[0]:
            # What it did in rounds of which a resumed run knows nothing, does not count.
            known = self._last_asked.get(key, self._resumed)
            self._last_asked[key] = server_round
        # Without checkpoints nothing is ever resumed: what was there before this round is enough.
        saved = server_round - 1 if self.checkpoint_dir is None else self._saved
        return {
            flower_records.TRAINED: self._last_trained.get(key, 0),
            flower_records.KNOWN: known,
            flower_records.SAVED: saved,
        }

    def _evaluate_messages(
        self, server_round: int, nodes: list[Node], arrays: ArrayRecord, extra: Mapping[str, Any]
    ) -> list[Message]:
        if self.fraction_evaluate == 0 or not self.sends_weights or not nodes:
            return []
        config = self._config("evaluate", server_round, extra)
        chosen = self._draw(nodes, self.fraction_evaluate, 1, "sample-evaluate", server_round)
        messages = [
            flower_records.evaluate_message(
                node.node_id,
                arrays=ArrayRecord(dict(arrays)),
                config=config,
                ttl=lifetime(self._timeout, len(chosen)),
                group_id=str(server_round),
            )
            for node in chosen
        ]
        for node, message in zip(chosen, messages, strict=True):
            self.stats.count(node, down=flower_records.nbytes(message.content))
        return messages

    def _run_phases(
        self,
        grid: Grid,
        server_round: int,
        nodes: list[Node],
        arrays: ArrayRecord,
        extra: Mapping[str, Any],
    ) -> tuple[ArrayRecord, list[Reply[PayloadT]]]:
        """Run a round's phases; return the new global arrays and the answers, without what they held."""
        answered: list[Node] = []
        told: list[Reply[PayloadT]] = []
        for phase in self.phases:
            if self.stats.void and phase not in self.independent_phases:
                continue
            chosen = self.select(phase, server_round, nodes, answered)
            outgoing = list(self.configure_phase(phase, server_round, chosen, arrays)) if chosen else []
            messages = self._train_messages(phase, server_round, outgoing, extra)
            del outgoing
            pairs = receive(grid, messages, self._timeout)
            try:
                found, new = self._aggregate(phase, server_round, pairs, arrays)
            except _TooFew:
                self._count_void()
                continue
            answered = [reply.node for reply in found]
            told.extend(found)
            arrays = arrays if new is None else new
        if self.stats.void:
            return arrays, told
        self._voids = 0
        return self.finish_round(server_round, arrays) or arrays, told

    def _aggregate(
        self,
        phase: str,
        server_round: int,
        pairs: Iterable[tuple[Message, Delivered]],
        arrays: ArrayRecord | None,
    ) -> tuple[list[Reply[PayloadT]], ArrayRecord | None]:
        """Hand a phase's answers to the method, one by one; return them, without what they held, and new arrays.

        Raises
        ------
        _TooFew
            If it is the round's first phase, and fewer than ``min_train_nodes`` can be used.
        """
        told: list[Reply[PayloadT]] = []
        nothing: Any = None
        first = phase == self.phases[0]
        asked = 0

        def answers() -> Iterator[Reply[PayloadT]]:
            nonlocal asked
            for message, message_back in pairs:
                asked += 1
                reply = self._checked(phase, message, message_back)
                if reply is not None:
                    if first:
                        self._last_trained[reply.node.key] = server_round
                    told.append(replace(reply, arrays=[], payload=nothing))
                    yield reply
                    # Else it would still be held while the next is fetched.
                    del reply
            if first:
                self.stats.participants = len(told)
                if len(told) < self.min_train_nodes:
                    raise _TooFew

        coming = answers()
        waiting = [reply for reply in (next(coming, None),) if reply is not None]
        if not waiting:
            if asked:
                log(WARNING, "round %d, phase %s: no usable answers", server_round, phase)
            return told, None

        def all_answers() -> Iterator[Reply[PayloadT]]:
            yield waiting.pop()
            yield from coming

        replies = all_answers()
        new = self.aggregate_phase(phase, server_round, replies, arrays)
        # A method that asked for fewer than there are must not cost the others their count.
        for _ in replies:
            pass
        return told, new

    def _count_void(self) -> None:
        self._voids += 1
        self.stats.void = True
        log(
            WARNING,
            "round %d is void: %d usable answers, at least %d are needed; the server's state stays as it was",
            self.stats.server_round,
            self.stats.participants,
            self.min_train_nodes,
        )

    def _end_if_void(self) -> None:
        if self._voids >= self.max_void_rounds:
            raise VoidRoundsError(
                f"{self._voids} rounds in a row were void: the last, round {self.stats.server_round}, had "
                f"{self.stats.participants} usable answers and {self.stats.failures} failures, min_train_nodes is "
                f"{self.min_train_nodes}; the warnings before say what failed"
            )

    def _checked(self, phase: str, message: Message, message_back: Delivered) -> Reply[PayloadT] | None:
        """Return an answer that is what the phase expects; else say why it is dropped, and return None.

        The message is emptied once it has been read, so that there is one copy of what it held.
        """
        node = self._roster.nodes[message.metadata.dst_node_id]
        reply = None
        if message_back is None:
            log(WARNING, "%s did not answer in time", node)
        elif isinstance(message_back, PayloadError):
            log(WARNING, "the answer of %s is dropped: %s", node, plain(str(message_back)))
        elif message_back.has_error():
            log(WARNING, "%s failed: %s", node, reason_of(message_back.error))
        else:
            try:
                reply = self._read(phase, node, message_back)
            except PayloadError as error:
                log(WARNING, "the answer of %s is dropped: %s", node, plain(str(error)))
            # What no check of ours foresaw must not cost the others their round either.
            except Exception as error:
                log(
                    WARNING,
                    "the answer of %s is dropped: unexpected %s: %s",
                    node,
                    type(error).__name__,
                    first_line(error),
                )
            flower_records.forget(message_back)
        if reply is None:
            self.stats.failures += 1
        elif reply.metrics.pop(flower_records.STATE_LOST, 0):
            log(
                WARNING,
                "%s has lost its personal model, which it had after round %d: it began anew",
                node,
                self._last_trained.get(node.key, 0),
            )
        return reply

    def _read(self, phase: str, node: Node, message: Message) -> Reply[PayloadT]:
        raw = flower_records.read_train_reply(message)
        self.stats.count(node, up=raw.nbytes)
        arrays: list[NDArray] = []
        if phase in self.reply_arrays:
            arrays = self.template_of(node).check(raw.arrays)
        elif raw.arrays:
            raise PayloadError(f"{len(raw.arrays)} arrays came back, expected none in phase {phase!r}")
        payload: Any = None
        expected = self.reply_payloads.get(phase)
        if expected is not None:
            if raw.payload is None:
                raise PayloadError(f"{expected.schema}: the payload is missing")
            payload = expected.from_bytes(
                raw.payload, dims=self.payload_dims(phase, node), max_bytes=self.payload_limit(phase, node)
            )
        elif raw.payload is not None:
            raise PayloadError(f"a payload came back, expected none in phase {phase!r}")
        for name in _SHARES:
            if not 0 <= raw.metrics.get(name, 0.0) <= 1:
                raise PayloadError(f"metric {name!r} must be in [0, 1], got {raw.metrics[name]}")
        for name in self.reply_metrics:
            if abs(raw.metrics.get(name, 0.0)) > _LARGEST_METRIC:
                raise PayloadError(
                    f"metric {name!r} must be within ±{_LARGEST_METRIC:g}, got {raw.metrics[name]}"
                )
        reply = Reply(node, arrays, raw.num_examples, raw.metrics, payload)
        self.check_reply(phase, reply)
        if raw.num_examples > self.max_examples and node.key not in self._capped:
            self._capped.add(node.key)
            log(
                WARNING,
                "%s claims %d samples, and counts as %d (max_examples)",
                node,
                raw.num_examples,
                self.max_examples,
            )
        return replace(reply, num_examples=min(raw.num_examples, self.max_examples))

    # ------------------------------------------------------------------ numbers

    def _summarise(self, replies: list[Reply[PayloadT]], result: KDResult) -> None:
        """Means over clients: the local accuracy counts each client once, the loss by its samples."""
        for reply in replies:
            found = {k: v for k, v in reply.metrics.items() if k in _SHARES}
            if found:
                self.stats.clients[reply.node.key] = self.stats.clients.get(reply.node.key, {}) | found
        # By client: of several phases, the last that told.
        told = list(self.stats.clients.values())
        accuracies, top5 = ([each[name] for each in told if name in each] for name in _SHARES)
        first: dict[int, Reply[PayloadT]] = {}
        for reply in replies:
            first.setdefault(reply.node.key, reply)
        losses = [
            (r.metrics["train-loss"], r.num_examples) for r in first.values() if "train-loss" in r.metrics
        ]
        metrics: dict[str, int | float | list[int] | list[float]] = {}
        if accuracies:
            self.stats.local_accuracy = metrics["local-accuracy"] = float(np.mean(accuracies))
        if top5:
            self.stats.local_top5 = metrics["local-top5"] = float(np.mean(top5))
        if losses:
            self.stats.train_loss = metrics["train-loss"] = _average(
                [loss for loss, _ in losses], [max(weight, 1) for _, weight in losses]
            )
        for name in sorted(self.reply_metrics):
            values = [reply.metrics[name] for reply in replies if name in reply.metrics]
            if values:
                metrics[name] = float(np.mean(values))
        if metrics:
            result.train_metrics_clientapp[self.stats.server_round] = MetricRecord(metrics)

    def _evaluate_at_clients(
        self,
        grid: Grid,
        server_round: int,
        nodes: list[Node],
        arrays: ArrayRecord,
        extra: Mapping[str, Any],
        result: KDResult,
    ) -> None:
        messages = self._evaluate_messages(server_round, nodes, arrays, extra)
        metrics = self._mean_evaluation(receive(grid, messages, self._timeout))
        if metrics is not None:
            result.evaluate_metrics_clientapp[server_round] = metrics

    def _mean_evaluation(self, pairs: Iterable[tuple[Message, Delivered]]) -> MetricRecord | None:
        rows: list[tuple[int, dict[str, float]]] = []
        for message, reply in pairs:
            node = self._roster.nodes[message.metadata.dst_node_id]
            try:
                if reply is None:
                    raise PayloadError("it did not answer in time")
                if isinstance(reply, PayloadError):
                    raise reply
                if reply.has_error():
                    raise PayloadError(reason_of(reply.error))
                answer = flower_records.read_evaluate_reply(reply)
            except PayloadError as error:
                self.stats.failures += 1
                log(WARNING, "the evaluation of %s is dropped: %s", node, plain(str(error)))
                continue
            if answer.num_examples:
                count = min(answer.num_examples, self.max_examples)
                rows.append((count, {"loss": answer.loss, **answer.metrics}))
        if not rows:
            return None
        names = set.intersection(*(set(metrics) for _, metrics in rows))
        weights = [count for count, _ in rows]
        return MetricRecord({name: _average([m[name] for _, m in rows], weights) for name in sorted(names)})

    def _evaluate_at_server(
        self,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None,
        server_round: int,
        arrays: ArrayRecord,
        result: KDResult,
        stats: RoundStats | None,
    ) -> None:
        if evaluate_fn is None or not self.sends_weights:
            return
        metrics = evaluate_fn(server_round, arrays)
        if metrics is None:
            return
        result.evaluate_metrics_serverapp[server_round] = metrics
        accuracy = metrics.get("accuracy")
        if stats is not None and isinstance(accuracy, int | float):
            stats.global_accuracy = float(accuracy)

    # ------------------------------------------------------------------ checkpoints

    def save_checkpoint(self, server_round: int, arrays: ArrayRecord) -> Path | None:
        """Write global arrays and the method's state, where ``checkpoint_dir`` is set; return the file.

        Where that fails, as on a full disk, the checkpoint of before stays, and None is returned with a warning.
        """
        if self.checkpoint_dir is None:
            return None
        found = Checkpoint(
            type(self).__name__,
            server_round,
            self.config.to_wire(),
            self.seed,
            arrays,
            self.state_arrays(),
            run=self._run,
            trained=self._last_trained,
        )
        try:
            path = found.save(self.checkpoint_dir)
            self._saved = server_round
            return path
        except OSError as error:
            log(
                WARNING,
                "round %d: no checkpoint could be written (%s); the run goes on, the one of before stays",
                server_round,
                error,
            )
            return None

    def load_checkpoint(self) -> tuple[int, ArrayRecord | None] | None:
        """Read the checkpoint: the last round and its arrays; None if there is none.

        Raises
        ------
        ConfigError
            If it was written by another method or version, or has other arrays than ``initial_arrays``.
        """
        if self.checkpoint_dir is None:
            return None
        found = Checkpoint.load(self.checkpoint_dir, type(self).__name__)
        if found is None:
            return None
        if (found.config, found.seed) != (self.config.to_wire(), self.seed):
            log(
                WARNING,
                "the checkpoint was written with other hyper-parameters or another seed: %s, seed %d",
                found.config,
                found.seed,
            )
        if (other := self.template.difference(ArrayTemplate.of(found.arrays))) is not None:
            raise ConfigError(f"{self.checkpoint_dir / CHECKPOINT} does not fit initial_arrays: {other}")
        self.load_state_arrays(found.state)
        self._run, self._last_trained = found.run or self._run, dict(found.trained)
        if not found.arrays:
            return found.server_round, None
        arrays = {name: value.numpy() for name, value in found.arrays.items()}
        return found.server_round, self.template.record([arrays[name] for name in self.template.names])


def _average(values: Sequence[float], weights: Sequence[float]) -> float:
    """Return the weighted mean; of numbers near the largest, too."""
    return float(np.dot(shares(weights), values))
