"""The measurement after the last round of the clients that did not take part in it, so that all are measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from logging import INFO, WARNING
from typing import TYPE_CHECKING, Any

from flwr.app import ArrayRecord
from flwr.common.logger import log
from flwr.serverapp import Grid

from flwr_kd.server.measurements import SHARES, mean_of_clients
from flwr_kd.server.records import Node, Reply, RoundStats
from flwr_kd.server.replies import check_shares, read_evaluations
from flwr_kd.transport import flower_records
from flwr_kd.transport.delivery import Delivered, receive

if TYPE_CHECKING:
    from flwr_kd.server.run import Run

__all__ = ["measure_others", "take_measurements"]


def measure_others(
    run: Run, grid: Grid, arrays: ArrayRecord, replies: Sequence[Reply[Any]], extra: Mapping[str, Any]
) -> None:
    """Measure the clients that did not take part in the last round; its means become those of all clients.

    A client measures its personal model of this run, else the model that it would receive. If all connected clients
    took part, nothing is sent. Clients without test data are not asked, nor those that have just not replied in
    time. The messages are no part of the method: their bytes are not counted. A client that fails costs nothing.

    Parameters
    ----------
    run : Run
        After its last round.
    grid : Grid
        Flower's.
    arrays : ArrayRecord
        The global arrays.
    replies : sequence of Reply
        All used replies of the round.
    extra : mapping
        The user's ``evaluate_config``.
    """
    strategy = run.strategy
    took_part = {reply.node.node_id for reply in replies} - run.failed
    others = [
        node
        for node in run.present
        if node.node_id not in took_part | run.silent
        and node.key not in strategy.stats.clients
        and node.num_test_examples
    ]
    if not others:
        return
    log(INFO, "Measuring %d clients that did not take part in the last round", len(others))
    messages = run.messages.evaluate(
        strategy.stats.server_round,
        list(strategy.configure_measurement(others, arrays)),
        RoundStats(strategy.stats.server_round),
        names_of=lambda node: strategy.template_of(node).names,
        phase=flower_records.MEASURE,
        personal=run.personal.of,
        extra=extra,
    )
    delivered = receive(grid, messages, run.timeout)
    take_measurements(
        ((run.roster.nodes[message.metadata.dst_node_id], arrived) for message, arrived in delivered),
        strategy.stats,
    )


def take_measurements(delivered: Iterable[tuple[Node, Delivered]], stats: RoundStats) -> None:
    """Add the clients' measurements to a round's statistics, and compute its means again."""
    for node, reply in read_evaluations(delivered, check=check_shares):
        reported = {name: reply.metrics[name] for name in SHARES if name in reply.metrics}
        if "local-accuracy" not in reported:
            log(WARNING, "the evaluation of %s is dropped: it has no local-accuracy", node)
            continue
        stats.clients[node.key] = reported
        (stats.stored if reply.metrics.get(flower_records.STORED) else stats.received).append(node.key)
    mean_of_clients(stats)
