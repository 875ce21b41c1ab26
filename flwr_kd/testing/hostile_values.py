"""What all mutations of replies build on: hostile texts and numbers, and changes of bytes."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy.typing as npt
from flwr.app import Error, Message, RecordDict

__all__ = [
    "BYTES",
    "FLOATS",
    "FORGED",
    "LONG",
    "NUMBERS",
    "REASONS",
    "SIZES",
    "TEXTS",
    "WHOLE",
    "Mutation",
    "Unfit",
    "failed",
    "fresh",
]

NDArray = npt.NDArray[Any]
Mutation = Callable[[RecordDict, random.Random, Sequence[RecordDict]], None]
"""A change of a reply: it gets the reply, a generator and the other clients' replies."""

FORGED = "x\nWARNING :      all is well\r\x1b[31m\x00\u202e\u2028"
"""Would begin a line of its own in a log, or turn a terminal red."""
LONG = 100_000
"""Length of a long text."""
TEXTS = ("", "0", "nan", FORGED, "A" * LONG, "é\U0001f600", "'\"\\")
"""Values where a text is expected."""
NUMBERS = (
    *(0, 1, -1, 2, 255, 2**31, -(2**31), 2**40, 2**53, 2**53 + 1, 2**63 - 1, -(2**63), 10**400),
    *(0.5, -0.0, 1e-320, 1e15, -1e300, 1.7e308, float("nan"), float("inf"), -float("inf")),
)
"""Values where a number is expected."""
SIZES = (0, 1, 2, 3, 7, 2**31, 2**40, 2**62, 2**63 - 1, 2**64, -1, -(2**63))
"""Values where a size is expected."""
REASONS = (
    *(None, "", " \n\t\r\n ", FORGED, FORGED[::-1], "r" * 10**6, "\n" * 10**5, "a" + "\u0301" * 400),
    *("<class 'ValueError'>:<'boom'>", "%s %d %(x)s {} {0}", "\ud800", "\x07" * 300),
)
"""Values where the reason of a failure is expected."""
FLOATS = (
    *(
        float("nan"),
        float("inf"),
        -float("inf"),
        3e38,
        -3e38,
        1e-45,
        -1.0,
        -0.0,
        0.0,
        1.0,
        0.5,
        65504.0,
        65520.0,
    ),
    *(1e30, 1e19, -1e-6, 1.01, 2.0),
)
"""Floats at the edges of their range."""
WHOLE = (0, 1, -1, 2, 3, 4, 5, 255, 2**31, 2**40, 2**40 + 1, 2**53, 2**62, 2**63 - 1, -(2**63), -(2**63) + 5)
"""Whole numbers at the edges of their range."""


class Unfit(Exception):  # noqa: N818
    """The answer has nothing that this mutation changes."""


def fresh(content: RecordDict) -> RecordDict:
    """Copy the records; their values are never changed in place."""
    return RecordDict({key: type(record)(dict(record)) for key, record in content.items()})  # type: ignore[arg-type]


def failed(message: Message, reason: str | None, code: int = 2) -> Message:
    """Return an error reply, as Flower sends it of a client that raised."""
    return Message(Error(code, reason), reply_to=message)


def _cut(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.choice([0, 1, 7, 8, 9, 10, len(data) - 1, rng.randrange(max(len(data), 1))])]


def _flip(data: bytes, rng: random.Random) -> bytes:
    if not data:
        raise Unfit
    changed = bytearray(data)
    # Half of them where the header is: in the body of a large array they only change a number.
    reach = min(len(changed), 200) if rng.random() < 0.5 else len(changed)
    for _ in range(rng.choice([1, 1, 1, 2, 8, 64])):
        changed[rng.randrange(reach)] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _extend(data: bytes, rng: random.Random) -> bytes:
    return data + rng.choice([b"\0", b" ", rng.randbytes(rng.randint(1, 64)), b"\0" * 4096, data])


def _noise(data: bytes, rng: random.Random) -> bytes:
    return rng.choice(
        [b"", rng.randbytes(rng.randint(1, 300)), b"\0" * 64, b"\xff" * 64, b"{}", b"\x80\x04N."]
    )


BYTES: tuple[Callable[[bytes, random.Random], bytes], ...] = (_cut, _flip, _flip, _extend, _noise)
"""Changes of a field of bytes."""
