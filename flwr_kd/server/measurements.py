"""Numbers of a round: means over the clients that took part."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from flwr.app import MetricRecord

from flwr_kd.server.aggregation import shares
from flwr_kd.server.records import Reply, RoundStats

__all__ = [
    "BEFORE",
    "COMMON",
    "GLOBAL_ON_CLIENTS",
    "SHARES",
    "average",
    "mean_evaluation",
    "mean_of_clients",
    "summarise",
]

COMMON = ("common-accuracy", "common-top5", "common-auroc")
"""Names of the metrics on the common test set in clients' replies."""
_OWN = tuple(f"{kind}-{name}" for kind in ("local", "trained") for name in ("accuracy", "top5", "auroc"))
SHARES = (*_OWN, *COMMON)
"""Metrics of its own model that every client may report, in [0, 1]."""
GLOBAL_ON_CLIENTS = {
    "accuracy": "global-on-clients",
    "top5": "global-on-clients-top5",
    "auroc": "global-on-clients-auroc",
}
"""By the metric of an evaluation, the name that it has where the model is the aggregated one."""
BEFORE = "local-accuracy-before"
"""The accuracy of a model that the client then adapted."""


def average(values: Sequence[float], weights: Sequence[float]) -> float:
    """Return the weighted mean. It is finite even where the sum of the values is not.

    Examples
    --------
    >>> average([1.0, 4.0], [2, 1]), average([1e308, 1e308], [1, 1])
    (2.0, 1e+308)
    """
    return float(np.dot(shares(weights), values))


def summarise(
    replies: Sequence[Reply[Any]], stats: RoundStats, own_metrics: Collection[str] = ()
) -> MetricRecord | None:
    """Write a round's means over clients into its statistics.

    Accuracies count each client once, by its last reply that has them. The training loss is weighted by sample
    counts, by each client's first reply.

    Parameters
    ----------
    replies : sequence of Reply
        All used replies of the round, phase after phase.
    stats : RoundStats
        Gets ``clients``, the means of the accuracies in :data:`SHARES`, and ``train_loss``. The common accuracy
        counts where the round is ``measured``.
    own_metrics : collection of str
        Further metrics of the method, which are averaged over all replies that have them.

    Returns
    -------
    MetricRecord or None
        The same means for Flower's ``Result``; None where no client reported anything.
    """
    for reply in replies:
        reported = {
            name: reply.metrics[name]
            for name in SHARES
            if name in reply.metrics and (stats.measured or name not in COMMON)
        }
        if reported:
            stats.clients[reply.node.key] = stats.clients.get(reply.node.key, {}) | reported
    metrics: dict[str, int | float | list[int] | list[float]] = {**mean_of_clients(stats)}
    first: dict[int, Reply[Any]] = {}
    for reply in replies:
        first.setdefault(reply.node.key, reply)
    trained = [reply for reply in first.values() if "train-loss" in reply.metrics]
    if trained:
        stats.train_loss = metrics["train-loss"] = average(
            [reply.metrics["train-loss"] for reply in trained],
            [max(reply.num_examples, 1) for reply in trained],
        )
    for name in sorted(own_metrics):
        values = [reply.metrics[name] for reply in replies if name in reply.metrics]
        if values:
            metrics[name] = float(np.mean(values))
    return MetricRecord(metrics) if metrics else None


def mean_of_clients(stats: RoundStats) -> dict[str, float]:
    """Write the means over a round's ``clients`` into its statistics, and return them by their names."""
    means = {}
    for name in (*SHARES, *GLOBAL_ON_CLIENTS.values()):
        values = [client[name] for client in stats.clients.values() if name in client]
        if values:
            means[name] = float(np.mean(values))
        setattr(stats, name.replace("-", "_"), means.get(name))
    before = [client[BEFORE] for client in stats.clients.values() if BEFORE in client]
    stats.accuracy_before = float(np.mean(before)) if before else None
    return means


def mean_evaluation(rows: Sequence[tuple[int, Mapping[str, float]]]) -> MetricRecord | None:
    """Return the means of the clients' evaluations, weighted by their sample counts.

    Parameters
    ----------
    rows : sequence of (int, mapping)
        By client, its sample count and its metrics. Only metrics that all clients have are averaged.

    Examples
    --------
    >>> dict(mean_evaluation([(1, {"loss": 1.0, "accuracy": 0.5}), (3, {"loss": 2.0})]))
    {'loss': 1.75}
    """
    if not rows:
        return None
    names = set.intersection(*(set(metrics) for _, metrics in rows))
    weights = [count for count, _ in rows]
    return MetricRecord({name: average([m[name] for _, m in rows], weights) for name in sorted(names)})
