"""Texts for error messages and log lines."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

__all__ = ["clipped", "first_line", "plain", "plural", "shown", "similar", "unknown_name"]


def shown(value: object) -> str:
    """Return a short text of a client's value, for an error message.

    >>> shown(0.5), shown(2**200), shown([1, 2])
    ('0.5', 'a number of 201 bits', 'a list')
    """
    if value is None or isinstance(value, bool | float | str):
        return repr(value)[:80]
    if isinstance(value, int):
        return repr(value) if abs(value) < 2**64 else f"a number of {value.bit_length()} bits"
    return f"a {type(value).__name__}"


def clipped(text: str, width: int) -> str:
    """Return a text of at most that many characters, at least one; the last is "…" where more are left out.

    >>> clipped("fedavg, learning-rate=0.01", 10), clipped("fedavg", 10)
    ('fedavg, l…', 'fedavg')
    """
    return text if len(text) <= width else f"{text[: max(width - 1, 0)]}…"


def similar(name: str, valid: Iterable[str]) -> str | None:
    """Return the valid name that was most likely meant, or None.

    Case, punctuation and what follows a colon do not count, so that a paper's spelling finds its method.

    >>> names = ["cifar10", "fedhkd", "fedhkd-star", "dirichlet:ALPHA"]
    >>> [similar(name, names) for name in ("CIFAR-10", "FedHKD*", "fedhdk", "Dirichlet:0.5", "x")]
    ['cifar10', 'fedhkd-star', 'fedhkd', 'dirichlet:ALPHA', None]
    """
    names: dict[str, str] = {}
    for candidate in valid:
        names.setdefault(_letters(candidate), candidate)
    closest = difflib.get_close_matches(_letters(name), names, n=1)
    return names[closest[0]] if closest else None


def _letters(name: str) -> str:
    spelt = name.casefold().replace("*", "star").replace("+", "plus")
    return re.sub(r"[^a-z0-9]", "", re.split(r"[:\[]", spelt)[0])


def unknown_name(kind: str, name: str, valid: Iterable[str], *, meant: str | None = None) -> str:
    """Return one line with an unknown name, the most similar valid name, and all valid names.

    ``meant`` replaces the most similar name where the caller knows better.

    >>> unknown_name("method", "fedhdk", ["fedavg", "fedhkd"])
    "unknown method 'fedhdk' (did you mean 'fedhkd'?); valid: fedavg, fedhkd"
    """
    names = list(valid)
    meant = meant or similar(name, names)
    hint = f" (did you mean {meant!r}?)" if meant else ""
    return f"unknown {kind} {shown(name)}{hint}; valid: {', '.join(names)}"


def plain(text: str, longest: int = 400) -> str:
    r"""Return a text of a client as one short line of printable characters, which cannot flood or forge a log.

    >>> plain("lost\n\x1b[31mWARNING: all is lost"), plain("x" * 500, longest=5)
    ('lost??[31mWARNING: all is lost', 'xxxxx...')
    """
    printable = "".join(character if character.isprintable() else "?" for character in text[:longest])
    return printable if len(text) <= longest else f"{printable}..."


def plural(number: int, one: str, many: str | None = None) -> str:
    """Return a number with its noun.

    >>> plural(1, "round"), plural(2, "round"), plural(0, "class", "classes")
    ('1 round', '2 rounds', '0 classes')
    """
    return f"{number} {one if number == 1 else many or one + 's'}"


def first_line(error: Exception) -> str:
    r"""Return the first line of another library's error, short enough to quote; its type if it has no text.

    >>> first_line(ValueError("too wide\nby 3")), first_line(KeyError())
    ('too wide', 'KeyError')
    """
    return plain((str(error).splitlines() or [type(error).__name__])[0], 200)
