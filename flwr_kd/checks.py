"""Checks of options and numbers, and the errors that they raise."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any, cast

from flwr_kd.text import shown

__all__ = [
    "ConfigError",
    "DataError",
    "allowed",
    "check_label",
    "checked",
    "is_whole_number",
    "number",
    "plain_number",
    "read_number",
    "read_whole_number",
    "share",
    "whole_number",
]


Scalar = bool | int | float | str
_LABEL = re.compile(r"([A-Za-z0-9][A-Za-z0-9 .,_=+*()-]{0,98}[A-Za-z0-9.*)+-]|[A-Za-z0-9]?)")
_MOST_DIGITS = 4000  # Python does not read longer numbers.


class ConfigError(ValueError):
    """A hyper-parameter or option has a name or a value that is not allowed."""


class DataError(ValueError):
    """Data is malformed; the text says what was given and what is expected."""


def is_whole_number(value: object, least: int | None = None) -> bool:
    """Return whether a value is a whole number of at least ``least``, of Python or NumPy; no bool and no float.

    >>> is_whole_number(3, 1), is_whole_number(0, 1), is_whole_number(True), is_whole_number(3.0)
    (True, False, False, False)
    """
    return (
        isinstance(value, Integral) and not isinstance(value, bool) and (least is None or int(value) >= least)
    )


def whole_number(
    name: str,
    value: object,
    least: int = 0,
    most: int | None = None,
    *,
    error: type[Exception] = ConfigError,
    type_error: type[Exception] | None = None,
) -> int:
    """Return a value as an int after checking that it is a whole number in a range.

    Parameters
    ----------
    name : str
        Name of the value, for the error message.
    value : object
        The value. NumPy's whole numbers are allowed; bools and floats are not.
    least, most : int
        The allowed range, both ends included; no upper end if ``most`` is None.
    error : type
        Exception to raise.
    type_error : type, optional
        Exception to raise for a value of another type; ``error`` if None.

    Raises
    ------
    error, type_error
        If the value is not allowed.

    Examples
    --------
    >>> whole_number("clients", 3, 1)
    3
    >>> whole_number("clients", 0, 1)
    Traceback (most recent call last):
    flwr_kd.ConfigError: clients must be a whole number from 1, got 0
    """
    parsed = int(value) if isinstance(value, Integral) and not isinstance(value, bool) else None
    if parsed is not None and parsed >= least and (most is None or parsed <= most):
        return parsed
    exception = error if type_error is None or parsed is not None else type_error
    raise exception(f"{name} must be {_whole_range(least, most)}, got {_shown(value)}")


def number(
    name: str,
    value: object,
    low: float | None = None,
    high: float | None = None,
    *,
    open_low: bool = False,
    open_high: bool = False,
    error: type[Exception] = ConfigError,
    type_error: type[Exception] | None = None,
) -> float:
    """Return a value as a float after checking that it is a number in an interval, and finite.

    Parameters
    ----------
    name : str
        Name of the value, for the error message.
    value : object
        The value. NumPy's numbers are allowed; bools are not.
    low, high : float, optional
        The ends of the interval; None is no bound. An infinite end allows infinity.
    open_low, open_high : bool
        Whether an end itself is excluded.
    error : type
        Exception to raise.
    type_error : type, optional
        Exception to raise for a value of another type; ``error`` if None.

    Raises
    ------
    error, type_error
        If the value is not allowed.

    Examples
    --------
    >>> number("sigma", 7, 0, open_low=True)
    7.0
    >>> number("sigma", float("nan"), 0, open_low=True)
    Traceback (most recent call last):
    flwr_kd.ConfigError: sigma must be a finite number above 0, got nan
    >>> number("fraction", 0, 0, 1, open_low=True)
    Traceback (most recent call last):
    flwr_kd.ConfigError: fraction must be in (0, 1], got 0
    """
    parsed = _as_float(value) if isinstance(value, Real) and not isinstance(value, bool) else None
    if parsed is not None and _lies_in(parsed, low, high, open_low, open_high):
        return parsed
    exception = error if type_error is None or parsed is not None else type_error
    raise exception(f"{name} must be {_interval(low, high, open_low, open_high)}, got {_shown(value)}")


def share(name: str, value: object, *, open_low: bool = False, error: type[Exception] = ConfigError) -> float:
    """Return a value as a float after checking that it is a share, in [0, 1]; see :func:`number`.

    >>> share("validation-share", 0.1)
    0.1
    """
    return number(name, value, 0, 1, open_low=open_low, error=error)


def check_label(label: object, *, error: type[Exception] = ConfigError) -> None:
    """Check that a run's name can also be that of a folder.

    >>> check_label("fedhkd gamma=0.1")
    >>> check_label("a/b")
    Traceback (most recent call last):
    flwr_kd.ConfigError: a run's name must be of at most 100 letters, digits, spaces and .,_=+*()-, got 'a/b'
    """
    if not isinstance(label, str) or not _LABEL.fullmatch(label):
        raise error(
            f"a run's name must be of at most 100 letters, digits, spaces and .,_=+*()-, got {shown(label)}"
        )


def read_whole_number(
    name: str, text: str, least: int = 0, most: int | None = None, *, error: type[Exception] = ConfigError
) -> int:
    """Read a whole number in a range from a text; see :func:`whole_number`.

    >>> read_whole_number("K", "2", 1)
    2
    >>> read_whole_number("K", "two", 1)
    Traceback (most recent call last):
    flwr_kd.ConfigError: K must be a whole number from 1, got 'two'
    """
    digits = text.strip().removeprefix("-")
    # int() alone would also read "1_000" and the digits of other scripts.
    parsed = int(text) if digits.isascii() and digits.isdigit() and len(digits) < _MOST_DIGITS else None
    if parsed is None or parsed < least or (most is not None and parsed > most):
        raise error(f"{name} must be {_whole_range(least, most)}, got {shown(text)}")
    return parsed


def read_number(
    name: str,
    text: str,
    low: float | None = None,
    high: float | None = None,
    *,
    open_low: bool = False,
    open_high: bool = False,
    error: type[Exception] = ConfigError,
) -> float:
    """Read a number in an interval from a text; see :func:`number`.

    >>> read_number("ALPHA", "-1", 0, open_low=True)
    Traceback (most recent call last):
    flwr_kd.ConfigError: ALPHA must be a finite number above 0, got '-1'
    """
    parsed = _read_float(text)
    if not _lies_in(parsed, low, high, open_low, open_high):
        raise error(f"{name} must be {_interval(low, high, open_low, open_high)}, got {shown(text)}")
    return parsed


def plain_number(text: str) -> float | None:
    """Return the finite number that a text is, written with the digits 0 to 9, or None.

    >>> plain_number("-1.5e3"), plain_number("1_0"), plain_number("inf"), plain_number("0x1F")
    (-1500.0, None, None, None)
    """
    value = _read_float(text)
    return value if math.isfinite(value) else None


def _read_float(text: str) -> float:
    """Return the number that a text is, or nan."""
    # float() alone would also read "1_0" and the digits of other scripts.
    if not text.isascii() or "_" in text:
        return math.nan
    try:
        return float(text)
    except ValueError:
        return math.nan


def _shown(value: object) -> str:
    """Return the text of a value for an error message; NumPy's numbers look like Python's."""
    if isinstance(value, Integral) and not isinstance(value, bool):
        return shown(int(value))
    return shown(float(value)) if isinstance(value, Real) and not isinstance(value, bool) else shown(value)


def _as_float(value: Real) -> float:
    try:
        return float(value)
    except OverflowError:  # a whole number beyond float's range
        return math.nan


def _lies_in(value: float, low: float | None, high: float | None, open_low: bool, open_high: bool) -> bool:
    if math.isnan(value) or (math.isinf(value) and value not in (low, high)):
        return False
    above = low is None or (value > low if open_low else value >= low)
    return above and (high is None or (value < high if open_high else value <= high))


def _whole_range(least: int, most: int | None) -> str:
    return f"a whole number from {least}" + ("" if most is None else f" to {most}")


def _interval(low: float | None, high: float | None, open_low: bool, open_high: bool) -> str:
    if low is not None and high is not None:
        return f"in {'(' if open_low else '['}{low:g}, {high:g}{')' if open_high else ']'}"
    if low is not None:
        return f"a finite number {'above' if open_low else 'from'} {low:g}"
    if high is not None:
        return f"a finite number {'below' if open_high else 'up to'} {high:g}"
    return "a finite number"


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
    """Return a value after checking its type and range; a whole number for a float becomes a float.

    Parameters
    ----------
    name : str
        The key, for error messages.
    value : Any
        The value.
    kind : type
        bool, int, float or str.
    metadata : mapping
        ``choices``, the allowed values, and ``bounds``, numbers by ``>``, ``>=``, ``<``, ``<=``; both are
        optional.

    Raises
    ------
    ConfigError
        If the value has another type, is not finite, or is not allowed.
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
