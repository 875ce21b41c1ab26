"""TOML files read into dataclasses, strictly: an unknown key or a wrong type is an error that names its place.

Fields are keys in kebab-case. Numbers keep the digits that are printed: one with a point becomes a
:class:`~decimal.Decimal`, and a field of type float takes its value.
"""

from __future__ import annotations

import tomllib
import types
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from flwr_kd.checks import ConfigError
from flwr_kd.text import shown, unknown_name

__all__ = ["Value", "build", "plain", "read_toml"]

T = TypeVar("T")
Value = bool | int | float | str
"""What an option or a hyper-parameter may be."""
_NAMES = {str: "a text", bool: "true or false", int: "a whole number", float: "a number", Decimal: "a number"}


def read_toml(file: Path) -> dict[str, Any]:
    """Return a file's content.

    Raises
    ------
    ConfigError
        If the file cannot be read, or is no TOML.
    """
    try:
        return tomllib.loads(file.read_text(encoding="utf-8-sig"), parse_float=Decimal)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{file} is no TOML: {error}") from None


def build(kind: type[T], values: object, where: str) -> T:
    """Return a dataclass whose fields have a table's values.

    Parameters
    ----------
    kind : type
        A dataclass. Its fields are of the types str, bool, int, float, Decimal or :data:`Value`, of other
        dataclasses, ``tuple[X, ...]``, ``dict[str, X]``, unions of these with None, or of a class with a class
        method ``from_toml(value, where)``.
    values : mapping
        As from :func:`read_toml`.
    where : str
        The place of the table, for errors.

    Raises
    ------
    ConfigError
        If a key is unknown or missing, or a value is of another type.

    Examples
    --------
    >>> from dataclasses import dataclass
    >>> @dataclass
    ... class Point:
    ...     x: float
    ...     of: str = "none"
    >>> build(Point, {"x": Decimal("0.50")}, "point.toml")
    Point(x=0.5, of='none')
    >>> build(Point, {"x": 1, "off": "a"}, "point.toml")
    Traceback (most recent call last):
    flwr_kd.ConfigError: point.toml: unknown key 'off' (did you mean 'of'?); valid: x, of
    """
    if not isinstance(values, Mapping):
        raise ConfigError(f"{where} must be a table, got {shown(values)}")
    hints = get_type_hints(kind)
    known = {_key(each.name): each for each in fields(kind)}  # type: ignore[arg-type]
    for key in values:
        if key not in known:
            raise ConfigError(f"{where}: {unknown_name('key', key, known)}")
    for key, each in known.items():
        if key not in values and each.default is MISSING and each.default_factory is MISSING:
            raise ConfigError(f"{where}: {key} is missing")
    given = {
        each.name: _convert(hints[each.name], values[key], f"{where}: {key}")
        for key, each in known.items()
        if key in values
    }
    try:
        return kind(**given)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def plain(value: object) -> Any:
    """Return a value with Python's floats in place of decimals."""
    if isinstance(value, Decimal):
        return float(value)
    if isinstance(value, Mapping):
        return {name: plain(each) for name, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, list | tuple) else value


def _key(name: str) -> str:
    return name.rstrip("_").replace("_", "-")


def _convert(hint: Any, value: object, where: str) -> Any:
    if hint is Any:
        return plain(value)
    origin, arguments = get_origin(hint), get_args(hint)
    if hasattr(hint, "from_toml"):
        return hint.from_toml(value, where)
    if origin in (Union, types.UnionType):
        kinds = [each for each in arguments if each is not type(None)]
        return _convert(kinds[0], value, where) if len(kinds) == 1 else _scalar(kinds, value, where)
    if origin is tuple:
        if not isinstance(value, list):
            raise ConfigError(f"{where} must be a list, got {shown(value)}")
        return tuple(
            _convert(arguments[0], each, f"{where}[{_place(index, each)}]")
            for index, each in enumerate(value)
        )
    if origin is dict:
        if not isinstance(value, Mapping):
            raise ConfigError(f"{where} must be a table, got {shown(value)}")
        return {name: _convert(arguments[1], each, f"{where}.{name}") for name, each in value.items()}
    if is_dataclass(hint):
        return build(hint, value, where)  # type: ignore[arg-type]
    return _scalar([hint], value, where)


def _place(index: int, value: object) -> str:
    """Return an item's own id where it has one; counted from 1 otherwise."""
    name = value.get("id") if isinstance(value, Mapping) else None
    return name if isinstance(name, str) else str(index + 1)


def _scalar(kinds: list[Any], value: object, where: str) -> Any:
    if isinstance(value, bool):
        if bool in kinds:
            return value
    elif isinstance(value, str):
        if str in kinds:
            return value
    elif isinstance(value, int):
        if int in kinds:
            return value
        if Decimal in kinds:
            return Decimal(value)
        if float in kinds:
            return float(value)
    elif isinstance(value, Decimal):
        if Decimal in kinds:
            return value
        if float in kinds and value.is_finite():
            return float(value)
    allowed = " or ".join(_NAMES[kind] for kind in kinds)
    raise ConfigError(f"{where} must be {allowed}, got {shown(plain(value))}")
