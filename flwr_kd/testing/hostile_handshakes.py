"""Handshakes of a malicious client: properties that are missing, impossible or made to grow when they are read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from flwr_kd.testing.hostile_values import FORGED, LONG, TEXTS

__all__ = ["PROPERTIES", "properties"]

_ODD: tuple[Any, ...] = (
    *(-1, 2**53, 2**63 - 1, 10**400, 0.5, float("nan"), -float("inf"), True, b"", [], [1] * 2000, "[" * LONG),
    *TEXTS,
)
_SHAPES = (
    *(
        "[]",
        "[0]",
        "[-1]",
        "[1.5]",
        "[true]",
        "[2]",
        "[9]",
        "[8, 1]",
        "[1099511627775]",
        "[1099511627776]",
        "8",
        "{}",
    ),
    *(
        "[8, 1, 1, 1, 1, 1, 1, 1]",
        "[8, 1, 1, 1, 1, 1, 1, 1, 1]",
        json.dumps([2**39] * 8),
        "[NaN]",
        "[8" + "0" * 5000 + "]",
    ),
    *(json.dumps([1] * 10_000), '["8"]', "null", "[" * 100_000),
)
_TEMPLATES = (
    *(
        "[]",
        "[[], [], []]",
        "[[], []]",
        "{}",
        "null",
        "[1, 2, 3]",
        '[["a"], ["float32"], [[1]]]',
        "[" * 100_000,
    ),
    *('[["a"], ["float32"], [["' + "Z" * 5000 + '"]]]', '[["a"], ["object"], [[1]]]', '[["a"], [], []]'),
    json.dumps([["n" * 5000], ["float32"], [[1]]]),
    json.dumps([[FORGED], ["float32"], [[1]]]),
    json.dumps([["a"], [FORGED], [[1]]]),
    json.dumps([["a"] * 3, ["d" * 5000] * 3, [[1]] * 3]),
    json.dumps([[f"a{i}" for i in range(2000)], ["float32"] * 2000, [[1]] * 2000]),
    '[["a"], ["float32"], [[' + "9" * 5000 + "]]]",
    '[["a"], ["float32"], [[1e400]]]',
    '[["a"], ["float32"], [[NaN]]]',
)
_SPECIAL: dict[str, tuple[Any, ...]] = {
    "partition-id": (0, 1, 2, 3, 4, 2**53 - 1, 2**53, -1),
    "num-examples": (0, 1, 2**31, 2**53 - 1, 2**53),
    "num-test-examples": (0, 1, 2**31, 2**53 - 1),
    "num-classes": (0, 1, 2, 3, 5, 2**17, 2**29, 2**31, 2**53 - 1),
    "feature-shape": _SHAPES,
    "arrays": _TEMPLATES,
    "num-public-examples": (0, 1, 31, 33, 2**40),
    "public-digest": ("", "a" * 64, "A" * 128, "A" * 129, "../x", "é" * 64),
    "sector": ("", "a", "0", 0, -5, 2**63 - 1, 1.5, "s" * 100, "s" * 101, FORGED),
    "wire-version": (1, 3, "2", 2.5, FORGED),
    "refusal": ("", "no", FORGED, "r" * 5000, 5, True),
    "client-api": ("message", "Message", "grpc", FORGED, "c" * 5000, 5),
}
PROPERTIES = tuple(_SPECIAL)
"""Properties of a handshake that have hostile values of their own."""


def properties(honest: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Return handshakes with one property replaced or left out, each with its name, and some with all replaced."""
    found: list[tuple[str, dict[str, Any]]] = []
    for name in PROPERTIES:
        found.append((f"without {name}", {k: v for k, v in honest.items() if k != name}))
        for value in (*_SPECIAL[name], *_ODD):
            found.append(
                (
                    f"{name}={str(type(value)) if isinstance(value, bytes) else _brief(value)}",
                    {**honest, name: value},
                )
            )
        template = honest.get("arrays")
        if name == "arrays" and isinstance(template, str):
            found += [(f"arrays: {what}", {**honest, name: text}) for what, text in _near(template)]
    for i, name in enumerate(("", FORGED, "p" * 5000)):
        found.append((f"unknown property {i}", {**honest, name: FORGED}))
    found.append(("nothing", {}))
    return found


def _near(template: str) -> list[tuple[str, str]]:
    names, dtypes, shapes = json.loads(template)
    if not names:
        return []
    return [
        ("reversed", json.dumps([names[::-1], dtypes[::-1], shapes[::-1]])),
        ("one less", json.dumps([names[1:], dtypes[1:], shapes[1:]])),
        ("one twice", json.dumps([[*names, names[0]], [*dtypes, dtypes[0]], [*shapes, shapes[0]]])),
        ("float64", json.dumps([names, ["float64"] * len(names), shapes])),
        ("bool", json.dumps([names, ["bool"] * len(names), shapes])),
        ("negative", json.dumps([names, dtypes, [[-size for size in shape] for shape in shapes]])),
        ("long", json.dumps([names, dtypes, [[10**4000, *shape] for shape in shapes]])),
        ("many axes", json.dumps([names, dtypes, [[1] * 5000 for _ in shapes]])),
    ]


def _brief(value: Any) -> str:
    try:
        return repr(value)[:40]
    except ValueError:  # a whole number of too many digits
        return type(value).__name__
