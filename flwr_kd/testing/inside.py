"""What the checks need of a strategy beyond the interface of its author: the steps of a round, one at a time.

This is the only module of the checks that knows how :class:`~flwr_kd.server.run.Run` runs a round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

from flwr.app import ArrayRecord, Message, MetricRecord
from flwr.serverapp import Grid

from flwr_kd.server.records import Node, Outgoing, Reply
from flwr_kd.server.run import Run
from flwr_kd.server.strategy import KDStrategy

__all__ = [
    "aggregate",
    "aggregate_as_flower",
    "begin",
    "evaluate_messages",
    "forget_node",
    "forget_warnings",
    "last_trained",
    "load_checkpoint",
    "mean_evaluation",
    "nodes_by_id",
    "nodes_in_order",
    "noting_phases",
    "pausing",
    "read_reply",
    "refresh_nodes",
    "refusals",
    "train_messages",
    "wait_for_nodes",
]

Strategy = KDStrategy[Any, Any]
Delivered = Any
Pairs = Iterable[tuple[Message, Delivered]]


def begin(strategy: Strategy, arrays: ArrayRecord, timeout: float = 3600.0) -> None:
    """Begin a run with initial arrays; it waits for clients for some seconds."""
    strategy.prepare(arrays, timeout)


def load_checkpoint(strategy: Strategy) -> tuple[int, ArrayRecord | None] | None:
    """Restore a strategy whose run has begun; return the checkpoint's round and arrays, or None without one."""
    return strategy.current_run.load_checkpoint()


def nodes_by_id(strategy: Strategy) -> dict[int, Node]:
    """Return the accepted clients by node id."""
    return dict(strategy.current_run.roster.nodes)


def nodes_in_order(strategy: Strategy) -> list[Node]:
    """Return the accepted clients in the order of their partitions."""
    return sorted(strategy.current_run.roster.nodes.values(), key=lambda node: node.order)


def forget_node(strategy: Strategy, node_id: int) -> None:
    """Let a client be new to the strategy."""
    del strategy.current_run.roster.nodes[node_id]


def wait_for_nodes(strategy: Strategy, grid: Grid, least: int) -> list[Node]:
    """Wait for clients as at the start of a run."""
    return strategy.current_run.roster.wait(grid, least)


def refresh_nodes(strategy: Strategy, grid: Grid) -> list[Node]:
    """Look for new clients as at the start of a round."""
    return strategy.current_run.roster.refresh(grid)


@contextmanager
def pausing(pause: Callable[..., None]) -> Iterator[None]:
    """Call a function whenever a strategy pauses while it waits for clients."""
    with mock.patch("flwr_kd.server.nodes.time.sleep", pause):
        yield


def refusals(strategy: Strategy) -> dict[int, str]:
    """Return why clients were refused, by node id."""
    return {**strategy.current_run.roster.malformed, **strategy.current_run.roster.refused}


def last_trained(strategy: Strategy) -> dict[int, int]:
    """Return in which round each client trained last, by its key."""
    return dict(strategy.current_run.personal.trained)


def forget_warnings(strategy: Strategy) -> None:
    """Forget which clients the strategy has already warned of for their sample count."""
    strategy.current_run.checker.capped.clear()


def read_reply(strategy: Strategy, phase: str, message: Message, delivered: Delivered) -> Reply[Any] | None:
    """Check what arrived for a message; return the reply, or None if it is dropped."""
    return strategy.current_run.check(phase, message, delivered)


def train_messages(
    strategy: Strategy,
    phase: str,
    server_round: int,
    nodes: list[Node],
    arrays: ArrayRecord | None,
) -> list[Message]:
    """Return what the clients are sent in a phase."""
    outgoing: list[Outgoing] = list(strategy.configure_phase(phase, server_round, nodes, arrays))
    return strategy.current_run.train_messages(phase, server_round, outgoing)


def aggregate(
    strategy: Strategy, phase: str, server_round: int, pairs: Pairs, arrays: ArrayRecord | None
) -> tuple[list[Reply[Any]], ArrayRecord | None]:
    """Check and aggregate a phase's replies; return those that were used, and new arrays."""
    return strategy.current_run.aggregate(phase, server_round, pairs, arrays)


def aggregate_as_flower(
    strategy: Strategy,
    server_round: int,
    messages: Sequence[Message],
    replies: Sequence[Message],
    arrays: ArrayRecord | None,
) -> tuple[ArrayRecord | None, Mapping[str, Any]]:
    """Aggregate through the hook that Flower's own loop calls; return new arrays and metrics."""
    strategy.current_run.sent, strategy.current_run.sent_arrays = list(messages), arrays
    new, metrics = strategy.aggregate_train(server_round, replies)
    return new, dict(metrics or {})


def evaluate_messages(
    strategy: Strategy, server_round: int, nodes: list[Node], arrays: ArrayRecord
) -> list[Message]:
    """Return what the clients are sent for an evaluation."""
    strategy.current_run.present = nodes
    return strategy.current_run.evaluate_messages(server_round, arrays)


def mean_evaluation(strategy: Strategy, pairs: Pairs) -> MetricRecord | None:
    """Check and average the replies of an evaluation."""
    return strategy.current_run.mean_evaluation(pairs)


@contextmanager
def noting_phases(
    note: Callable[[Strategy, str, int, list[tuple[Message, Delivered]], ArrayRecord | None], None],
) -> Iterator[None]:
    """Call a function with what arrived in each phase, before it is aggregated; it may change the list of pairs."""
    real = Run.aggregate

    def noting(
        self: Run, phase: str, server_round: int, pairs: Pairs, arrays: ArrayRecord | None
    ) -> tuple[list[Reply[Any]], ArrayRecord | None]:
        arrived = list(pairs)
        note(self.strategy, phase, server_round, arrived, arrays)
        return real(self, phase, server_round, arrived, arrays)

    with mock.patch.object(Run, "aggregate", noting):
        yield
