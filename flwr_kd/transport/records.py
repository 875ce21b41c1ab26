"""Flower's records without Flower's checks of each entry, for entries that were checked before."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from flwr.app import ArrayRecord

__all__ = ["copied", "entries", "record_of"]

RecordT = TypeVar("RecordT")
_HELD = "_data"


def entries(record: Any) -> Mapping[str, Any]:
    """Return what a record holds, not to be changed; Flower's own way makes four calls per entry."""
    held = vars(record).get(_HELD)
    return held if isinstance(held, dict) else dict(record.items())


def record_of(kind: type[RecordT], values: Mapping[str, Any]) -> RecordT:
    """Return a record of its own with these entries, which have been in a record of this kind.

    Examples
    --------
    >>> from flwr.app import ConfigRecord
    >>> first = ConfigRecord({"seed": 3})
    >>> second = record_of(ConfigRecord, entries(first))
    >>> second["seed"] = 4
    >>> first["seed"], dict(second)
    (3, {'seed': 4})
    """
    record: Any = kind()
    held = vars(record).get(_HELD)
    (held if isinstance(held, dict) else record).update(values)
    return record  # type: ignore[no-any-return]


def copied(content: RecordT) -> RecordT:
    """Return a copy of a ``RecordDict``, its records and lists, but not of arrays, which never change in place."""
    copies = {key: record_of(type(record), _values(record)) for key, record in entries(content).items()}
    return record_of(type(content), copies)


def _values(record: Any) -> Mapping[str, Any]:
    values = entries(record)
    if isinstance(record, ArrayRecord):
        return values
    return {key: list(value) if isinstance(value, list) else value for key, value in values.items()}
