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


def _reached(spread: Mapping[str, Any], of: int, unit: int = 1) -> str:
    """Write a mean over the seeds that reach the target, and how many these are."""
    text = _significant(spread["mean"], unit)
    return text if spread["n"] in (0, of) else f"{text}\n{spread['n']} of {of} seeds"


def _in(unit: int = 1) -> Callable[[Mapping[str, Any], int], str]:
    return lambda spread, of: _significant(spread["mean"], unit)


def _columns() -> dict[str, _Column]:
    columns = [
        *(_Column(each.name, each.header, _percent) for each in ACCURACIES.values()),
        _Column("bytes_up", "MB up\n/round", _in(_MEGABYTE)),
        _Column("bytes_down", "MB down\n/round", _in(_MEGABYTE)),
        _Column("seconds", "s\n/round", _in()),
        _Column("rounds_to_target", "rounds\nto target", _reached),
        _Column("bytes_to_target", "MB\nto target", lambda spread, of: _reached(spread, of, _MEGABYTE)),
        _Column("seconds_to_target", "s\nto target", _reached),
        _Column("bytes_knowledge", "MB of knowledge\n/round", _in(_MEGABYTE)),
        _Column("round_trips", "round trips\n/round", _in()),
        _Column("parameters_trained", "trained\nmillions", _in(10**6)),
        _Column("parameters_held", "held\nmillions", _in(10**6)),
        _Column("parameters_server", "at server\nmillions", _in(10**6)),
        _Column("better_off", "better off\nthan alone %", _percent),
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
