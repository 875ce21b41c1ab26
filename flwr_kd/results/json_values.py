"""Values as JSON holds them, and checks of a JSON document's structure."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from typing import Any, cast

import numpy as np

from flwr_kd.results.errors import ResultError

__all__ = ["check_keys", "check_list", "json_mapping", "json_value", "refuse_constant"]


def json_mapping(where: str, value: object) -> dict[str, Any]:
    """Copy a mapping as JSON gives it back; see :func:`json_value`."""
    if not isinstance(value, Mapping):
        raise ResultError(f"{where} must be a mapping, got {type(value).__name__}")
    return cast(dict[str, Any], json_value(where, value))


def json_value(where: str, value: object) -> Any:
    """Copy a value as JSON gives it back, so that what is read equals what was written.

    Tuples become lists, paths texts, NumPy's values Python's, and numbers that are not finite None.

    Raises
    ------
    ResultError
        If a value cannot be written as JSON; the text begins with ``where``.

    Examples
    --------
    >>> json_value("config", {"path": (1, np.float32(0.5), float("nan"))})
    {'path': [1, 0.5, None]}
    """
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if value is None or isinstance(value, bool):
        return value
    # int(), str(): a subclass, such as an IntEnum or a StrEnum, would come back as the plain type.
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, str):
        return str(value)
    if isinstance(value, os.PathLike):
        return str(value)
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise ResultError(f"{where} has the key {key!r}; keys must be text")
        return {str(key): json_value(f"{where}[{key!r}]", each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(f"{where}[{index}]", each) for index, each in enumerate(value)]
    raise ResultError(f"{where} is a {type(value).__name__}, which cannot be written as JSON")


def refuse_constant(name: str) -> None:
    """Refuse NaN and the infinities, which Python's ``json`` reads by default."""
    raise ValueError(f"{name} is not allowed, null is")


def check_list(where: str, value: object) -> list[Any]:
    """Return a value after checking that it is a list."""
    if not isinstance(value, list):
        raise ResultError(f"{where} must be a list, got {type(value).__name__}")
    return value


def check_keys(where: str, value: object, required: tuple[str, ...], optional: Iterable[str] = ()) -> None:
    """Check that a value is an object with all required fields, and no others than these and the optional ones."""
    if not isinstance(value, dict):
        raise ResultError(f"{where} must be an object, got {type(value).__name__}")
    missing = [name for name in required if name not in value]
    unknown = sorted(set(value) - set(required) - set(optional))
    if missing or unknown:
        raise ResultError(f"{where}: fields missing {missing}, not expected {unknown}")
