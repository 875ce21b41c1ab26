"""One run of a strategy: its loop over rounds and phases, and what it remembers between them."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from logging import INFO, WARNING
from typing import TYPE_CHECKING, Any

from flwr.app import ArrayRecord, Message, MetricRecord
from flwr.common.logger import log
from flwr.serverapp import Grid

from flwr_kd.checks import ConfigError
from flwr_kd.learning.allocator import keep_freed_memory
from flwr_kd.server.averaged_model import difference_of_models, measured_model
from flwr_kd.server.callbacks import RunInfo
from flwr_kd.server.checkpoint import CHECKPOINT, Checkpoint, CheckpointWriter, partitions_of
from flwr_kd.server.last_round import measure_global, measure_others
from flwr_kd.server.measurements import mean_evaluation, summarise
from flwr_kd.server.messages import Messages, PersonalRounds, StepCount
from flwr_kd.server.nodes import Roster, draw
from flwr_kd.server.records import KDResult, Node, Outgoing, Reply, RoundStats, VoidRoundsError
from flwr_kd.server.replies import Replies, ReplyChecker, TooFewReplies, evaluations
from flwr_kd.server.restored import restore
from flwr_kd.server.stated_privacy import stated_privacy
from flwr_kd.server.wrappers import check_clipped, unfit_for_wrapper
from flwr_kd.text import first_line
from flwr_kd.transport import flower_records
from flwr_kd.transport.delivery import Delivered, receive
from flwr_kd.transport.payload import PayloadError

if TYPE_CHECKING:
    from flwr_kd.server.strategy import KDStrategy

__all__ = ["Run"]

EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]


class Run:
    """One run of a strategy. The strategy says what happens in a round; the run makes it happen.

    Parameters
    ----------
    strategy : KDStrategy
        Its hooks are called in the order that CONTRIBUTING.md draws ("A round").
    timeout : float
        Seconds that a phase waits for replies.

    Attributes
    ----------
    key : str
        The run's name, under which clients keep their personal models. A resumed run keeps it.
    roster : Roster
        The clients.
    personal : PersonalRounds
        What is known about the clients' personal models.
    steps : StepCount
        The steps so far, where the learning rate falls with them.
    checkpoints : CheckpointWriter
        Writes the rounds from which the run could be resumed.
    checker : ReplyChecker
        Checks the replies.
    voids : int
        Void rounds in a row.
    partitions, resumed_partitions : int
        Number of parts into which the clients' data are divided, as most clients name it, now and in the checkpoint
        that is resumed; 0 if they name none.
    begun : bool
        Whether :meth:`begin` was called.
    present : list of Node
        The clients that were there when the round began.
    silent, failed : set of int
        Ids of the nodes that did not reply in time in this round, and of those without a usable reply to a phase.
    sent : list of Message
        For Flower's own loop, the messages whose replies come next; ``sent_arrays`` are the arrays of that round,
        and ``clipping_norm`` is the norm to which a wrapper expects clients to clip their updates.
    wrapper : str or None
        The class of Flower's wrapper around the strategy, if there is one.
    reference : ArrayRecord or None
        The global arrays with which the phase began.
    """

    def __init__(self, strategy: KDStrategy[Any, Any], timeout: float = 3600.0) -> None:
        self.strategy, self.timeout = strategy, timeout
        self.key = secrets.token_hex(8)
        question = {**strategy.config.to_wire(), flower_records.SEED: strategy.seed}
        self.roster = Roster(self._refusal, question, timeout)
        self.personal, self.steps = PersonalRounds(), StepCount()
        self.checkpoints = CheckpointWriter(strategy.checkpoint_dir, strategy.checkpoint_seconds)
        self.checker = ReplyChecker(strategy)
        self.voids = self.partitions = self.resumed_partitions = 0
        self.begun = self._uncovered = False
        self.present: list[Node] = []
        self.silent: set[int] = set()
        self.failed: set[int] = set()
        self.sent: list[Message] = []
        self.sent_arrays: ArrayRecord | None = None
        self.clipping_norm: Any = None
        self.wrapper: str | None = None
        self.reference: ArrayRecord | None = None

    # ------------------------------------------------------------------ the loop

    def begin(self) -> None:
        """Check the folder for checkpoints, and let the method forget what an earlier run taught it."""
        if self.strategy.checkpoint_dir is not None:
            Checkpoint.prepare(self.strategy.checkpoint_dir)
        self.strategy.reset()
        self.begun = True

    def state_privacy(self, rounds: int, *, so_far: bool = False) -> None:
        """Log how the clients' weights are protected in the whole run, or ``so_far`` where its end is not known."""
        strategy = self.strategy
        # What is not covered is the same in each round.
        uncovered = not so_far or rounds == 1
        for line in stated_privacy(
            strategy.config, strategy.phases, strategy.reply_arrays, rounds, uncovered=uncovered
        ):
            log(INFO, "%s: %s", f"privacy up to round {rounds}" if so_far else "privacy", line)

    def execute(
        self,
        grid: Grid,
        arrays: ArrayRecord,
        *,
        first_round: int = 1,
        train_config: Mapping[str, Any] | None = None,
        evaluate_config: Mapping[str, Any] | None = None,
        evaluate_fn: EvaluateFn | None = None,
    ) -> KDResult:
        """Wait for the clients, and run all rounds; see :meth:`flwr_kd.KDStrategy.start`."""
        keep_freed_memory()
        strategy, result = self.strategy, KDResult()
        result.arrays = arrays
        if strategy.sends_weights:
            self._evaluate_at_server(evaluate_fn, first_round - 1, arrays, result)
        nodes = self.roster.wait(grid, strategy.min_available_nodes)
        self.partitions = partitions_of(nodes, self.resumed_partitions, strategy.checkpoint_dir)
        strategy.begin(nodes)
        self.state_privacy(strategy.num_rounds)
        with strategy.callbacks.around(RunInfo.of(self, first_round, len(nodes)), result):
            try:
                for server_round in range(first_round, strategy.num_rounds + 1):
                    self._execute_round(
                        grid, server_round, result, train_config or {}, evaluate_config or {}, evaluate_fn
                    )
            finally:
                # Also after an error or an interrupt: the last complete round is what the run can be resumed from.
                self.checkpoints.flush()
        if not strategy.sends_weights:
            # They were never trained.
            result.arrays = ArrayRecord()
        # A resumed run has at least the checkpoint's round, which was not void.
        if first_round == 1 and all(stats.void for stats in result.rounds):
            raise VoidRoundsError.of_all(result, strategy.min_train_nodes)
        return result

    def _execute_round(
        self,
        grid: Grid,
        server_round: int,
        result: KDResult,
        train_config: Mapping[str, Any],
        evaluate_config: Mapping[str, Any],
        evaluate_fn: EvaluateFn | None,
    ) -> None:
        """Run one round, and add it to the result."""
        strategy, begun = self.strategy, time.monotonic()
        log(INFO, "[ROUND %d/%d]", server_round, strategy.num_rounds)
        measured = strategy.measured_rounds.has(server_round, strategy.num_rounds)
        strategy.stats = stats = RoundStats(server_round, measured=measured)
        arrays, replies = self.phases(grid, server_round, result.arrays, train_config)
        if stats.round_trips is None:
            stats.round_trips = len(replies)
        metrics = summarise(replies, stats, strategy.reply_metrics)
        if metrics is not None:
            result.train_metrics_clientapp[server_round] = metrics
        result.arrays = arrays
        if stats.void:
            self.end_if_void()
        else:
            if not strategy.checkpoint_seconds:
                # The round is done: keep it before anything else, which may fail.
                self.save_checkpoint(server_round, arrays)
            messages = self.evaluate_messages(server_round, arrays, evaluate_config)
            metrics = self.mean_evaluation(receive(grid, messages, self.timeout))
            if metrics is not None:
                result.evaluate_metrics_clientapp[server_round] = metrics
        stats.seconds = time.monotonic() - begun
        if server_round == strategy.num_rounds:
            measure_others(self, grid, arrays, replies, evaluate_config)
        measure_global(self, grid, arrays, evaluate_config)
        if evaluate_fn is not None:
            model = measured_model(self, grid, arrays, replies, train_config)
            self._evaluate_at_server(evaluate_fn, server_round, model, result)
        result.rounds.append(stats)
        if strategy.on_round is not None:
            strategy.on_round(stats)
        strategy.callbacks.on_round(stats)
        if strategy.checkpoint_seconds and not stats.void:
            self.save_checkpoint(server_round, arrays)

    def phases(
        self, grid: Grid, server_round: int, arrays: ArrayRecord, extra: Mapping[str, Any]
    ) -> tuple[ArrayRecord, list[Reply[Any]]]:
        """Run a round's phases; return the new global arrays and all used replies, without what they held."""
        strategy = self.strategy
        self.present = self.roster.of_round(grid, strategy.min_train_nodes)
        self.silent, self.failed = set(), set()
        strategy.stats.available = len(self.present)
        answered: list[Node] = []
        used: list[Reply[Any]] = []
        for phase in strategy.phases:
            if strategy.stats.void and phase not in strategy.independent_phases:
                continue
            with strategy.callbacks.phase(phase, strategy.stats) as count:
                messages = self.phase_messages(phase, server_round, answered, arrays, extra)
                count.asked = len(messages)
                try:
                    replies, new = self.aggregate(
                        phase, server_round, receive(grid, messages, self.timeout), arrays
                    )
                except TooFewReplies:
                    self.count_void()
                    continue
                count.usable = len(replies)
            answered = [reply.node for reply in replies]
            used.extend(replies)
            arrays = arrays if new is None else new
        if strategy.stats.void:
            return arrays, used
        self.voids = 0
        return strategy.finish_round(server_round, arrays) or arrays, used

    def phase_messages(
        self,
        phase: str,
        server_round: int,
        answered: list[Node],
        arrays: ArrayRecord | None,
        extra: Mapping[str, Any],
    ) -> list[Message]:
        """Let the method select nodes and say what they are sent; return the messages."""
        strategy = self.strategy
        chosen = strategy.select(phase, server_round, self.present, answered)
        if not chosen:
            return []
        outgoing = list(strategy.configure_phase(phase, server_round, chosen, arrays))
        return self.train_messages(phase, server_round, outgoing, extra)

    def aggregate(
        self,
        phase: str,
        server_round: int,
        delivered: Iterable[tuple[Message, Delivered]],
        arrays: ArrayRecord | None,
    ) -> tuple[list[Reply[Any]], ArrayRecord | None]:
        """Hand a phase's replies to the method one by one.

        Returns
        -------
        replies : list of Reply
            Those that were used, without what they held.
        arrays : ArrayRecord or None
            The new global arrays; None to keep the old.

        Raises
        ------
        TooFewReplies
            If it is the round's first phase, and fewer than ``min_train_nodes`` replies are usable.
        """
        strategy, self.reference = self.strategy, arrays
        first = phase == strategy.phases[0]

        def check(message: Message, arrived: Delivered) -> Reply[Any] | None:
            reply = self.check(phase, message, arrived)
            if reply is not None and first:
                self.personal.trained[reply.node.key] = server_round
            return reply

        replies: Replies[Any] = Replies(delivered, check, least=strategy.min_train_nodes if first else 0)
        new = None
        try:
            if replies.look():
                new = strategy.aggregate_phase(phase, server_round, replies, arrays)
                replies.drain()
            elif replies.asked:
                log(WARNING, "round %d, phase %s: no usable replies", server_round, phase)
        finally:
            if first:
                strategy.stats.participants = len(replies.used)
        return replies.used, new

    # ------------------------------------------------------------------ messages and replies

    @property
    def messages(self) -> Messages:
        """Makes the run's messages."""
        strategy = self.strategy
        scalars = {
            **strategy.config.to_wire(),
            flower_records.SEED: strategy.seed,
            flower_records.MAX_BYTES: strategy.max_payload_bytes,
            flower_records.RUN: self.key,
        }
        if strategy.stats.measured:
            scalars[flower_records.MEASURE_COMMON] = True
        return Messages(scalars, self.timeout, strategy.max_payload_bytes)

    def train_messages(
        self,
        phase: str,
        server_round: int,
        outgoing: list[Outgoing],
        extra: Mapping[str, Any] | None = None,
        *,
        stats: RoundStats | None = None,
        names_of: Callable[[Node], Sequence[str]] | None = None,
    ) -> list[Message]:
        """Return a phase's messages in the order of partition ids, and count their bytes in the round's statistics.

        A phase that is no part of the method has ``stats`` and ``names_of`` of its own.
        """
        strategy = self.strategy
        # Without checkpoints nothing is ever resumed: clients need nothing older than the round before.
        saved = whole = server_round - 1
        if strategy.checkpoint_dir is not None:
            saved, whole = self.checkpoints.saved, self.checkpoints.whole
        nodes = sorted((out.node for out in outgoing), key=lambda node: node.order)
        steps = self.steps.ask(strategy.config, phase, nodes, max_examples=strategy.max_examples)
        return self.messages.train(
            phase,
            server_round,
            outgoing,
            stats or strategy.stats,
            names_of=names_of or (lambda node: strategy.template_of(node).names),
            personal=lambda node: {
                **self.personal.ask(
                    node, server_round, first_phase=phase == strategy.phases[0], saved=saved, whole=whole
                ),
                **steps.get(node.node_id, {}),
            },
            extra=extra,
        )

    def evaluate_messages(
        self, server_round: int, arrays: ArrayRecord, extra: Mapping[str, Any] | None = None
    ) -> list[Message]:
        """Return the messages of the evaluation phase; none unless ``fraction_evaluate`` is above 0."""
        strategy, nodes = self.strategy, self.present
        if strategy.fraction_evaluate == 0 or not strategy.sends_weights or not nodes:
            return []
        fraction, least = strategy.fraction_evaluate, strategy.min_evaluate_nodes
        chosen = draw(nodes, fraction, least, strategy.seed, "sample-evaluate", server_round)
        outgoing = [Outgoing(node, arrays) for node in chosen]
        return self.messages.evaluate(
            server_round,
            outgoing,
            strategy.stats,
            names_of=lambda node: strategy.template.names,
            extra=extra,
        )

    def mean_evaluation(self, delivered: Iterable[tuple[Message, Delivered]]) -> MetricRecord | None:
        """Return the clients' mean evaluation of the global model; None without usable replies."""
        by_node = (
            (self.roster.nodes[message.metadata.dst_node_id], arrived) for message, arrived in delivered
        )
        strategy = self.strategy
        return mean_evaluation(evaluations(by_node, strategy.stats, max_examples=strategy.max_examples))

    def check(self, phase: str, message: Message, arrived: Delivered) -> Reply[Any] | None:
        """Return the checked reply to a message; None, with one warning, if it cannot be used."""
        node = self.roster.nodes[message.metadata.dst_node_id]
        if arrived is None:
            self.silent.add(node.node_id)
        reply = self.checker.check(phase, node, arrived, self.strategy.stats)
        if reply is not None and not self._is_clipped(reply):
            reply = None
        if reply is None:
            self.failed.add(node.node_id)
        if reply is not None and reply.metrics.pop(flower_records.STATE_LOST, 0):
            log(
                WARNING,
                "%s has lost its personal model, which it had after round %d: it began anew",
                node,
                self.personal.trained.get(node.key, 0),
            )
        if reply is not None and reply.metrics.pop(flower_records.UNCOVERED, 0) and not self._uncovered:
            self._uncovered = True
            log(
                WARNING,
                "a mod of %s protects the weights; the knowledge that it sends beside them is not covered",
                node,
            )
        return reply

    def _is_clipped(self, reply: Reply[Any]) -> bool:
        """Return whether a reply is clipped as the wrapper expects, if one does; else count a failure, and warn."""
        if self.clipping_norm is None or self.sent_arrays is None:
            return True
        try:
            check_clipped(reply.arrays, self.sent_arrays.to_numpy_ndarrays(), float(self.clipping_norm))
        except PayloadError as error:
            log(WARNING, "the reply of %s is dropped: %s", reply.node, error)
            self.strategy.stats.failures += 1
            return False
        return True

    def _evaluate_at_server(
        self, evaluate_fn: EvaluateFn | None, server_round: int, arrays: ArrayRecord | None, result: KDResult
    ) -> None:
        """Call the user's function; before the first round its accuracy belongs to no round."""
        if evaluate_fn is None or arrays is None:
            return
        metrics = evaluate_fn(server_round, arrays)
        if metrics is None:
            return
        result.evaluate_metrics_serverapp[server_round] = metrics
        accuracy = metrics.get("accuracy")
        if self.strategy.stats.server_round == server_round and isinstance(accuracy, int | float):
            for name in ("accuracy", "top5", "auroc"):
                value = metrics.get(name)
                measured = float(value) if isinstance(value, int | float) else None
                setattr(self.strategy.stats, f"global_{name}", measured)

    def _refusal(self, node: Node) -> str | None:
        try:
            refusal = unfit_for_wrapper(self.wrapper, node) or self.strategy.accept_node(node)
            refusal = refusal or difference_of_models(self, node)
            if refusal is None:
                self.strategy.config.check_classes(node.num_classes)
                known = {*self.strategy.template.constants, *self.strategy.template_of(node).constants}
                refusal = node.unknown_values(known) if self.strategy.reply_arrays else None
            return refusal
        except (PayloadError, ConfigError) as error:
            return str(error)
        # A method's own check may fail on what no check foresaw; the run goes on without that client.
        except Exception as error:
            return f"unexpected {type(error).__name__}: {first_line(error)}"

    # ------------------------------------------------------------------ void rounds

    def count_void(self) -> None:
        """Note that the round had too few usable replies."""
        self.voids += 1
        stats = self.strategy.stats
        stats.void = True
        log(
            WARNING,
            "round %d is void: %d usable replies, at least %d are needed; the server's state stays as it was",
            stats.server_round,
            stats.participants,
            self.strategy.min_train_nodes,
        )

    def end_if_void(self) -> None:
        """Raise :class:`VoidRoundsError` if ``max_void_rounds`` rounds in a row were void."""
        strategy, stats = self.strategy, self.strategy.stats
        if self.voids >= strategy.max_void_rounds:
            raise VoidRoundsError(
                f"{self.voids} rounds in a row were void: the last, round {stats.server_round}, had "
                f"{stats.participants} usable replies and {stats.failures} failures, min_train_nodes is "
                f"{strategy.min_train_nodes}; the warnings before say what failed"
            )

    # ------------------------------------------------------------------ checkpoints

    def resume(self, arrays: ArrayRecord) -> tuple[int, ArrayRecord]:
        """Return the last finished round and its arrays; 0 and the given arrays unless the run is resumed."""
        strategy = self.strategy
        if strategy.resume and (restored := self.load_checkpoint()) is not None:
            last, restored_arrays = restored
            self.checkpoints.saved = self.personal.resumed = last
            log(INFO, "Resuming after round %d", last)
            return last, restored_arrays or arrays
        if strategy.checkpoint_dir is not None and (strategy.checkpoint_dir / CHECKPOINT).exists():
            path = strategy.checkpoint_dir / CHECKPOINT
            log(WARNING, "%s is replaced; resume=True would go on from it", path)
        return 0, arrays

    def save_checkpoint(self, server_round: int, arrays: ArrayRecord) -> None:
        """Keep the global arrays and the method's state after a round, where ``checkpoint_dir`` is set."""
        strategy = self.strategy
        if strategy.checkpoint_dir is None:
            return
        self.checkpoints.offer(
            Checkpoint(
                type(strategy).__name__,
                server_round,
                strategy.config.to_wire(),
                strategy.seed,
                arrays,
                strategy.state_arrays(),
                run=self.key,
                trained=dict(self.personal.trained),
                partitions=self.partitions,
                steps=self.steps.taken,
            )
        )

    def load_checkpoint(self) -> tuple[int, ArrayRecord | None] | None:
        """Read the checkpoint into the strategy: the last round and its arrays; None if there is no checkpoint.

        Raises
        ------
        ConfigError
            If it was written by another method or version, has other arrays than ``initial_arrays`` or values that
            cannot be, or is of a later round than the last one that is planned.
        """
        return restore(self)
