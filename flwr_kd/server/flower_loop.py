"""Flower's interfaces besides ``start``: the hooks of its own loop, and those of its old API, which are refused."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from logging import WARNING
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, cast

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from flwr_kd.config import meant
from flwr_kd.measured_rounds import MeasuredRounds
from flwr_kd.server.averaged_model import averages_models
from flwr_kd.server.callbacks import Callbacks
from flwr_kd.server.measurements import summarise
from flwr_kd.server.records import Node, RoundStats
from flwr_kd.server.replies import TooFewReplies
from flwr_kd.server.run import Run
from flwr_kd.server.unread import unread_in_start, without_global_model
from flwr_kd.server.wrappers import check_wrapper, wrapper_of
from flwr_kd.transport import flower_records
from flwr_kd.transport.delivery import pair

if TYPE_CHECKING:
    from flwr_kd.server.strategy import KDStrategy

__all__ = ["FlowerLoop"]

_OLD_API = (
    "this is a strategy for ServerApp's @app.main(), and not for Flower's old server_fn with ServerAppComponents: "
    "write `@app.main()` above `def main(grid, context)`, and call "
    "`strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=3)` in it; docs/moving.md shows both"
)


class FlowerLoop(Strategy):
    """What Flower's own ``Strategy.start`` and its wrappers call, round by round.

    There are no checkpoints then, no calls of ``on_round`` or of callbacks, and no measurement after the last
    round, which Flower's loop does not name.
    """

    phases: tuple[str, ...]
    reply_metrics: ClassVar[frozenset[str]]
    sends_weights: ClassVar[bool]
    measured_rounds: MeasuredRounds
    uses_initial_arrays: ClassVar[bool]
    config: Any
    fraction_evaluate: float
    checkpoint_dir: Path | None
    on_round: Any
    callbacks: Callbacks
    min_available_nodes: int
    min_train_nodes: int
    stats: RoundStats
    current_run: Run

    @abstractmethod
    def prepare(self, initial_arrays: ArrayRecord, timeout: float = 3600.0) -> Run:
        """Begin a run, up to the handshakes."""

    @abstractmethod
    def begin(self, nodes: list[Node]) -> None:
        """Prepare a run with the clients that are there."""

    @abstractmethod
    def finish_round(self, server_round: int, arrays: ArrayRecord | None) -> ArrayRecord | None:
        """End a round that was not void."""

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Build a round's messages.

        The messages' time to live is an hour and more, whatever the timeout. A method with several phases per round
        raises :class:`RuntimeError`.
        """
        wrapper = wrapper_of(self)
        if len(self.phases) > 1:
            raise RuntimeError(
                f"{type(self).__name__} has the phases {', '.join(self.phases)} per round; call its own start()"
                + (f", without {wrapper}" if wrapper else "")
            )
        run = self.current_run
        if server_round == 1 or not run.begun:
            if self.checkpoint_dir is not None or self.on_round is not None or self.callbacks:
                log(
                    WARNING, "checkpoint_dir, resume, on_round and callbacks need this strategy's own start()"
                )
            # Flower's wrappers add keys of their own, which its mods read.
            own = {key: value for key, value in config.items() if meant(key, self.config.to_wire())}
            self.warn_of_unused({"train_config": own}, None, arrays)
            check_wrapper(cast("KDStrategy[Any, Any]", self), wrapper)
            run = self.prepare(arrays)
            run.wrapper = wrapper
            self.begin(run.roster.wait(grid, self.min_available_nodes))
        run.end_if_void()
        # Flower's loop does not name the last round.
        run.state_privacy(server_round, so_far=True)
        self.stats = RoundStats(server_round, measured=self.measured_rounds.has(server_round, 0))
        run.present = run.roster.of_round(grid, self.min_train_nodes)
        run.sent = run.phase_messages(self.phases[0], server_round, [], arrays, dict(config))
        run.sent_arrays = arrays
        # Wrappers that leave the clipping to the clients send its norm.
        run.clipping_norm = config.get("clipping_norm") if wrapper else None
        return list(run.sent)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Aggregate a round's replies, the counterpart of :meth:`configure_train`; nothing for a void round."""
        run = self.current_run
        delivered = pair(run.sent, replies)
        try:
            used, arrays = run.aggregate(self.phases[0], server_round, delivered, run.sent_arrays)
        except TooFewReplies:
            run.count_void()
            return None, None
        run.voids = 0
        metrics = summarise(used, self.stats, self.reply_metrics)
        return self.finish_round(server_round, arrays or run.sent_arrays) or arrays, metrics

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Build the evaluation's messages; none unless ``fraction_evaluate`` is above 0."""
        run = self.current_run
        run.end_if_void()
        run.sent = run.evaluate_messages(server_round, arrays, dict(config))
        return list(run.sent)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Return the means over clients, weighted by their sample counts; None without usable replies."""
        return self.current_run.mean_evaluation(pair(self.current_run.sent, replies))

    def warn_of_unused(
        self, given: Mapping[str, Mapping[str, Any] | None], evaluate_fn: object, arrays: ArrayRecord
    ) -> None:
        """Log a warning for each argument of ``start`` that has no effect.

        Parameters
        ----------
        given : mapping
            ``train_config`` and ``evaluate_config``, by these names.
        evaluate_fn : object
            None if the caller passed none.
        arrays : ArrayRecord
            The initial ones.
        """
        name, scalars = type(self).__name__, {key: value for key, value in given.items() if value}
        if "evaluate_config" in scalars and not (self.fraction_evaluate and self.sends_weights):
            del scalars["evaluate_config"]
            log(
                WARNING,
                "evaluate_config has no effect: without fraction_evaluate no client evaluates a global model",
            )
        lines = unread_in_start(self.config, scalars, strategy=name, reserved=flower_records.SET_BY_RUN)
        unused = bool(arrays) and not self.uses_initial_arrays
        missing = without_global_model(name, unused, evaluate_fn is not None)
        if not (self.sends_weights or averages_models(self.config)) and missing is not None:
            lines.append(missing)
        for line in lines:
            log(WARNING, "%s", line)

    # ------------------------------------------------------------------ Flower's old API

    def initialize_parameters(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse ``server_fn`` and ``ServerAppComponents``, which call this first.

        Raises
        ------
        RuntimeError
            Always; the text says how to move.
        """
        raise RuntimeError(f"{type(self).__name__}: {_OLD_API}")

    configure_fit = aggregate_fit = evaluate = initialize_parameters
