"""The columns that a table may have, and how their values are written."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from flwr_kd.results.errors import ResultError
from flwr_kd.results.measures import ACCURACIES
from flwr_kd.text import unknown_name

__all__ = ["COLUMNS", "check_columns"]

_MEGABYTE = 10**6


class _Column(NamedTuple):
    """A column: a key of :meth:`~flwr_kd.results.schema.Comparison.summary`, and how its values are written."""

    name: str
    header: str
    cell: Callable[[Mapping[str, Any], int], str]


def _percent(spread: Mapping[str, Any], of: int) -> str:
    if spread["mean"] is None:
        return "–"
    text = f"{100 * spread['mean']:.2f}"
    if spread["std"] is not None:
        text += f" ± {100 * spread['std']:.2f}"
    return text if spread["n"] == of else f"{text}\n{spread['n']} of {of} seeds"


def _significant(value: float | None, unit: int = 1) -> str:
    """Write three significant digits without an exponent, down to a millionth."""
    if value is None:
        return "–"
    value /= unit
    if value == 0:
        return "0"
    return f"{value:.{min(6, max(0, 2 - math.floor(math.log10(value))))}f}"


def _columns() -> dict[str, _Column]:
    def megabytes(spread: Mapping[str, Any], of: int) -> str:
        return _significant(spread["mean"], _MEGABYTE)

    def seconds(spread: Mapping[str, Any], of: int) -> str:
        return _significant(spread["mean"])

    columns = [
        *(_Column(each.name, each.header, _percent) for each in ACCURACIES.values()),
        _Column("bytes_up", "MB up\n/round", megabytes),
        _Column("bytes_down", "MB down\n/round", megabytes),
        _Column("seconds", "s\n/round", seconds),
    ]
    return {column.name: column for column in columns}


COLUMNS = _columns()
"""By name, the columns that a table may have."""


def check_columns(names: Iterable[str]) -> list[str]:
    """Return the names of columns, in kebab-case or with underscores, each once; ``all`` stays as it is.

    Raises
    ------
    ResultError
        If there is no such column.

    Examples
    --------
    >>> check_columns(["common-accuracy", "seconds"])
    ['common_accuracy', 'seconds']
    """
    found = list(dict.fromkeys(name.strip().replace("-", "_") for name in names))
    for name in found:
        if name not in COLUMNS and name != "all":
            known = ["all", *(other.replace("_", "-") for other in COLUMNS)]
            raise ResultError(unknown_name("column", name.replace("_", "-"), known))
    return found
