"""Flower's own strategies inside our loop: their aggregation, our client, sampling, checks and numbers."""

from __future__ import annotations

from typing import Any

from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg

from .aggregation import weighted_mean
from .strategy import KDStrategy, Reply

__all__ = ["FlowerStrategy"]


class FlowerStrategy(KDStrategy):
    """A :class:`KDStrategy` whose aggregation is that of a Flower strategy.

    A subclass returns the Flower strategy from :meth:`make_inner`: ``FedAvg``, or one that inherits its
    ``aggregate_train`` and needs nothing from its ``configure_train``. So the methods in a comparison differ
    in their method alone. Whole-number arrays (BatchNorm's counter) do not go through Flower's mean, which
    would make floats of them.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.inner = self.make_inner()

    def make_inner(self) -> FlowerFedAvg:
        """Return the Flower strategy to wrap."""
        return FlowerFedAvg()

    def aggregate_phase(
        self, phase: str, server_round: int, replies: list[Reply], arrays: ArrayRecord | None
    ) -> ArrayRecord | None:
        """Hand the checked answers to Flower's ``aggregate_train``."""
        weights = [reply.num_examples for reply in replies]
        if not any(weights):
            weights = [1] * len(replies)
        floats = [n for n, d in zip(self.template.names, self.template.dtypes, strict=True) if "float" in d]
        messages = []
        for reply, weight in zip(replies, weights, strict=True):
            named = dict(zip(self.template.names, reply.arrays, strict=True))
            content = RecordDict(
                {
                    "arrays": ArrayRecord({name: Array(named[name]) for name in floats}),
                    "metrics": MetricRecord({self.inner.weighted_by_key: weight}),
                }
            )
            messages.append(Message(content, dst_node_id=reply.node.node_id, message_type="train"))
        mean, _ = self.inner.aggregate_train(server_round, messages)
        if mean is None:
            return None
        others = weighted_mean([reply.arrays for reply in replies], weights)
        merged = [
            mean[name].numpy() if name in floats else other
            for name, other in zip(self.template.names, others, strict=True)
        ]
        return self.template.record(self.template.check(merged))
