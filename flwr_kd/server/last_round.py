"""Measurements at the end of a round, which need messages of their own."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from logging import INFO, WARNING
from typing import TYPE_CHECKING, Any

from flwr.app import ArrayRecord
from flwr.common.logger import log
from flwr.serverapp import Grid

from flwr_kd.server.measurements import BEFORE, GLOBAL_ON_CLIENTS, SHARES, mean_of_clients
from flwr_kd.server.records import Node, Outgoing, Reply, RoundStats
from flwr_kd.server.replies import check_shares, read_evaluations
from flwr_kd.transport import flower_records
from flwr_kd.transport.delivery import Delivered, receive

if TYPE_CHECKING:
    from flwr_kd.server.run import Run

__all__ = ["measure_global", "measure_others", "take_measurements"]

_OWN = {"local-accuracy", "common-accuracy"}
"""What a client is measured for."""


def measure_others(
    run: Run, grid: Grid, arrays: ArrayRecord, replies: Sequence[Reply[Any]], extra: Mapping[str, Any]
) -> None:
    """Measure the clients that did not take part in the last round; its means become those of all clients.

    A client measures its personal model of this run, else the model that it would receive. If all connected clients
    took part, nothing is sent. Where clients adapt the last global model (``personalize-epochs``), all of them are
    asked, and measure it before and after. Clients without any test data are not asked, nor those that have just
    not replied in time. The messages are no part of the method: their bytes are not counted. A client that fails
    costs nothing.

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
    common = strategy.stats.measured
    reachable = [
        node
        for node in run.present
        if (node.num_test_examples or (common and node.num_common_examples))
        and node.node_id not in run.silent
    ]
    others = [
        node
        for node in reachable
        if node.node_id not in took_part and not _OWN & strategy.stats.clients.get(node.key, {}).keys()
    ]
    adapt = strategy.config.personalizes
    if adapt:
        strategy.stats.clients = {}
        log(INFO, "Measuring %d clients before and after they adapt the global model", len(reachable))
    elif others:
        log(INFO, "Measuring %d clients that did not take part in the last round", len(others))
    measured = reachable if adapt else others
    if not measured:
        return
    messages = run.messages.evaluate(
        strategy.stats.server_round,
        list(strategy.configure_measurement(measured, arrays)),
        RoundStats(strategy.stats.server_round),
        names_of=lambda node: strategy.template_of(node).names,
        phase=flower_records.PERSONALIZE if adapt else flower_records.MEASURE,
        personal=lambda node: {**run.personal.of(node), **run.steps.known(strategy.config)},
        extra=extra,
    )
    delivered = receive(grid, messages, run.timeout)
    take_measurements(
        ((run.roster.nodes[message.metadata.dst_node_id], arrived) for message, arrived in delivered),
        strategy.stats,
        took_part={node.key for node in measured} - {node.key for node in others},
    )


def measure_global(run: Run, grid: Grid, arrays: ArrayRecord, extra: Mapping[str, Any]) -> None:
    """Measure the aggregated model on the test data of all connected clients, in the rounds that ``measure`` names.

    Without a global model nothing is sent. Clients without test data are not asked, nor those that have just not
    replied in time. The bytes are not counted, and a client that fails costs nothing.

    Parameters
    ----------
    run, grid, arrays, extra
        See :func:`measure_others`; after any round.
    """
    strategy, stats = run.strategy, run.strategy.stats
    nodes = [node for node in run.present if node.num_test_examples and node.node_id not in run.silent]
    if not (stats.measured and strategy.sends_weights and nodes):
        return
    messages = run.messages.evaluate(
        stats.server_round,
        [Outgoing(node, arrays) for node in nodes],
        RoundStats(stats.server_round),
        names_of=lambda node: strategy.template.names,
        extra=extra,
    )
    delivered = (
        (run.roster.nodes[message.metadata.dst_node_id], arrived)
        for message, arrived in receive(grid, messages, run.timeout)
    )
    for node, reply in read_evaluations(delivered, check=check_shares):
        stats.clients.setdefault(node.key, {}).update(
            {ours: reply.metrics[name] for name, ours in GLOBAL_ON_CLIENTS.items() if name in reply.metrics}
        )
    mean_of_clients(stats)


def take_measurements(
    delivered: Iterable[tuple[Node, Delivered]], stats: RoundStats, *, took_part: Collection[int] = ()
) -> None:
    """Add the clients' measurements to a round's statistics, and compute its means again.

    Those of ``took_part``, by their keys, are not listed as measured in addition.
    """
    for node, reply in read_evaluations(delivered, check=check_shares):
        reported = {name: reply.metrics[name] for name in (*SHARES, BEFORE) if name in reply.metrics}
        if not _OWN & reported.keys():
            log(WARNING, "the evaluation of %s is dropped: it has no local-accuracy", node)
            continue
        stats.clients[node.key] = stats.clients.get(node.key, {}) | reported
        if node.key in took_part:
            continue
        (stats.stored if reply.metrics.get(flower_records.STORED) else stats.received).append(node.key)
    mean_of_clients(stats)
