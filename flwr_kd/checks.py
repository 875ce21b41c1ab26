"""Checks of options and numbers, and the errors that they raise."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast

__all__ = ["ConfigError", "DataError", "allowed", "checked", "in_range"]


Scalar = bool | int | float | str


class ConfigError(ValueError):
    """A hyper-parameter or option has a name or a value that is not allowed."""


class DataError(ValueError):
    """Data is not what it must be; the text says what was found and what is expected."""


def in_range(name: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
    """Check that an option is a number in an interval.

    Raises
    ------
    ConfigError
        If it is not.
    """
    fits = isinstance(value, int | float) and not isinstance(value, bool)
    if not fits or not (low < value if open_low else low <= value) or not value <= high:
        raise ConfigError(f"{name} must be in {'(' if open_low else '['}{low:g}, {high:g}], got {value!r}")


_COMPARE = {
    ">": lambda value, bound: value > bound,
    ">=": lambda value, bound: value >= bound,
    "<": lambda value, bound: value < bound,
    "<=": lambda value, bound: value <= bound,
}


def allowed(metadata: Mapping[str, Any]) -> str:
    """Return the allowed values of :func:`checked` as text."""
    if metadata.get("choices"):
        return "one of " + ", ".join(metadata["choices"])
    return " and ".join(f"{sign} {bound:g}" for sign, bound in metadata.get("bounds", {}).items())


def checked(name: str, value: Any, kind: type, metadata: Mapping[str, Any]) -> Scalar:
    """Return a value of a kind; a whole number for a float becomes one.

    Parameters
    ----------
    name : str
        The key, for error messages.
    value : Any
        What was given.
    kind : type
        bool, int, float or str.
    metadata : mapping
        ``choices``, the values that are allowed, and ``bounds``, numbers by ``>``, ``>=``, ``<``, ``<=``; each may
        be missing.

    Raises
    ------
    ConfigError
        If it is of another kind, not finite, or not allowed.
    """
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            value = float(value)
        except OverflowError:
            raise ConfigError(f"{name} must be finite, got a whole number beyond float's range") from None
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ConfigError(f"{name} must be of type {kind.__name__}, got {value!r}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{name} must be finite, got {value!r}")
    if metadata.get("choices") and value not in metadata["choices"]:
        raise ConfigError(f"{name} must be {allowed(metadata)}, got {value!r}")
    if not all(_COMPARE[sign](value, bound) for sign, bound in metadata.get("bounds", {}).items()):
        raise ConfigError(f"{name} must be {allowed(metadata)}, got {value!r}")
    return cast(Scalar, value)
