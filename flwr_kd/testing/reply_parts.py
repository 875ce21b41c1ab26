"""Parts of a reply to a train message, of either kind of client: its arrays, its count and its payload."""

from __future__ import annotations

from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from flwr_kd.transport.flower_records import PAYLOAD, Layout, layout_of

__all__ = ["arrays_of", "count_of", "metrics_of", "put", "record_names", "set_count", "set_payload"]


def arrays_of(content: RecordDict) -> ArrayRecord:
    """Return the record of a reply's arrays; an empty one if there is none."""
    return content.array_records.get(layout_of(content).sent_arrays, ArrayRecord())


def count_of(content: RecordDict) -> Any:
    """Return a reply's number of samples."""
    record, key = layout_of(content).count
    return content.metric_records[record][key]


def set_count(content: RecordDict, value: Any) -> None:
    """Set a reply's number of samples."""
    record, key = layout_of(content).count
    content.metric_records[record][key] = value


def metrics_of(content: RecordDict) -> MetricRecord | ConfigRecord | None:
    """Return the record of a reply's numbers; None if there is none."""
    layout = layout_of(content)
    if layout.named:
        return content.metric_records.get(layout.metrics)
    return content.config_records.get(layout.metrics)


def set_payload(content: RecordDict, value: Any) -> None:
    """Set a reply's payload, in a record that is made if there is none."""
    name = layout_of(content).knowledge
    if name not in content.config_records:
        put(content, name, ConfigRecord())
    content.config_records[name][PAYLOAD] = value


def record_names(content: RecordDict) -> tuple[str, ...]:
    """Return the names of the records that a reply has."""
    layout: Layout = layout_of(content)
    return tuple(dict.fromkeys((layout.sent_arrays, layout.count[0], layout.metrics, layout.knowledge)))


def put(content: RecordDict, name: str, record: Any) -> None:
    """Set a record of any type; Flower warns of one that takes the place of one of another type."""
    content.pop(name, None)
    content[name] = record
