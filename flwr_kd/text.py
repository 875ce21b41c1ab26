"""Texts for people: error messages and log lines."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["first_line", "plain", "unknown_name"]


def shown(value: object) -> str:
    """Return a client's value for an error message, short."""
    if value is None or isinstance(value, bool | float | str):
        return repr(value)[:80]
    if isinstance(value, int):
        return repr(value) if abs(value) < 2**64 else f"a number of {value.bit_length()} bits"
    return f"a {type(value).__name__}"


def unknown_name(kind: str, name: str, valid: Iterable[str]) -> str:
    """Return one line that names what is unknown, the nearest valid name, and all valid names.

    >>> unknown_name("method", "fedhdk", ["fedavg", "fedhkd"])
    "unknown method 'fedhdk' (did you mean 'fedhkd'?); valid: fedavg, fedhkd"
    """
    names = list(valid)
    near = difflib.get_close_matches(name, names, n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    return f"unknown {kind} {name!r}{hint}; valid: {', '.join(names)}"


def plain(text: str, longest: int = 400) -> str:
    r"""Return somebody else's text as one line of printable characters, which can neither flood nor forge a log.

    >>> plain("lost\n\x1b[31mWARNING: all is lost"), plain("x" * 500, longest=5)
    ('lost??[31mWARNING: all is lost', 'xxxxx...')
    """
    shown = "".join(c if c.isprintable() else "?" for c in text[:longest])
    return shown if len(text) <= longest else f"{shown}..."


def first_line(error: Exception) -> str:
    r"""Return what a foreign error says, short enough to be quoted in one of ours; its type if it says nothing.

    >>> first_line(ValueError("too wide\nby 3")), first_line(KeyError())
    ('too wide', 'KeyError')
    """
    return plain((str(error).splitlines() or [type(error).__name__])[0], 200)
