"""HTML elements whose texts are escaped, so that no text of a result file can become markup."""

from __future__ import annotations

import html
import unicodedata
from collections.abc import Iterable
from typing import TypeAlias

__all__ = ["Child", "Markup", "element", "joined", "raw", "table", "visible"]

_VOID = {"br", "link", "meta"}
_INVISIBLE = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
"""Unicode's categories of characters that change how a text looks, or that no HTML file may have."""


class Markup(str):
    """HTML. Only this module makes it: every other text is escaped."""

    __slots__ = ()


Child: TypeAlias = "str | int | float | Iterable[Child] | None"
"""What an element contains: markup stays, texts and numbers are escaped, None is nothing."""


def visible(text: object) -> str:
    r"""Return a text in which each character is seen: control characters and the like as their escape sequence.

    Otherwise a command could look different from what it is, for example by characters that reverse the direction.

    Examples
    --------
    >>> visible("rm\u202e -rf\x00\ud800"), visible("naïve\ntext")
    ('rm\\u202e -rf\\x00\\ud800', 'naïve\ntext')
    """
    return "".join(
        character
        if character in "\n\t" or unicodedata.category(character) not in _INVISIBLE
        else character.encode("unicode_escape").decode("ascii")
        for character in str(text)
    )


def element(name: str, /, *children: Child, **attributes: object) -> Markup:
    """Return an element.

    Parameters
    ----------
    name : str
        Of the element; written by the caller, never a text of a result.
    children : Child
        In order.
    attributes : object
        ``class_`` is ``class``, and ``aria_label`` is ``aria-label``. None and False leave an attribute out, and
        True writes its name alone.

    Examples
    --------
    >>> element("p", "1 < 2", element("b", "&"), class_='"note"')
    '<p class="&quot;note&quot;">1 &lt; 2<b>&amp;</b></p>'
    """
    written = ""
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        key = key.rstrip("_").replace("_", "-")
        written += f" {key}" if value is True else f' {key}="{html.escape(visible(value))}"'
    if name in _VOID:
        return Markup(f"<{name}{written}>")
    return Markup(f"<{name}{written}>{joined(*children)}</{name}>")


def joined(*children: Child) -> Markup:
    """Return the children one after the other, escaped where they are not markup."""
    return Markup("".join(_parts(children)))


def _parts(children: Iterable[Child]) -> Iterable[str]:
    for child in children:
        if child is None:
            continue
        if isinstance(child, Markup):
            yield child
        elif isinstance(child, str | int | float):
            yield html.escape(visible(child), quote=False)
        else:
            yield from _parts(child)


def raw(text: str) -> Markup:
    """Return this package's own style sheet or script as it is; never a text of a result."""
    return Markup(text)


def table(
    head: Iterable[Child],
    rows: Iterable[Iterable[Child]],
    *,
    caption: Child = None,
    class_: str | None = None,
) -> Markup:
    """Return a table in a box that scrolls sideways. The first cell of a row is its header.

    A cell that is a ``td`` or ``th`` already stays as it is.
    """
    body = [
        element("tr", [_cell(child, header=index == 0) for index, child in enumerate(row)]) for row in rows
    ]
    whole = element(
        "table",
        None if caption is None else element("caption", caption),
        element("thead", element("tr", [element("th", child, scope="col") for child in head])),
        element("tbody", body),
        class_=class_,
    )
    label = None if caption is None else f"table: {caption}"
    # A box that scrolls must be reachable by the keyboard.
    return element("div", whole, class_="scroll", tabindex=0, role="region", aria_label=label or "table")


def _cell(child: Child, *, header: bool) -> Markup:
    if isinstance(child, Markup) and child.startswith(("<td", "<th")):
        return child
    return element("th", child, scope="row") if header else element("td", child)
