"""Elements of the report: what is escaped, and what is made visible."""

from __future__ import annotations

from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flwr_kd.report.html import Markup, element, joined, table, visible


class Reader(HTMLParser):
    """The standard library's reader, which knows nothing of the writer."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.texts: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def read(text: str) -> Reader:
    reader = Reader()
    reader.feed(text)
    reader.close()
    return reader


@given(st.text())
def test_any_text_comes_back_as_text_and_as_attribute(text: str) -> None:
    reader = read(element("p", text, title=text))
    assert reader.tags == ["p"]
    assert reader.attributes == [("title", visible(text))]
    assert "".join(reader.texts) == visible(text)


def test_markup_stays_and_text_beside_it_is_escaped() -> None:
    assert joined(element("b", "a"), "<b>", None, [1, Markup("<i></i>")]) == "<b>a</b>&lt;b&gt;1<i></i>"


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("\x00", "\\x00"),
        ("\ud800", "\\ud800"),
        ("\u202e", "\\u202e"),
        ("é€\n", "é€\n"),
        ("\x1b[0m", "\\x1b[0m"),
    ],
)
def test_characters_that_are_not_seen_become_their_escape(text: str, seen: str) -> None:
    assert visible(text) == seen
    element("p", text).encode()


def test_a_table_has_headers_for_columns_and_rows() -> None:
    text = table(["method", "MB"], [["fedavg", 1.5]], caption="bytes")
    reader = read(text)
    assert reader.tags == ["div", "table", "caption", "thead", "tr", "th", "th", "tbody", "tr", "th", "td"]
    assert [value for name, value in reader.attributes if name == "scope"] == ["col", "col", "row"]
    assert reader.texts == ["bytes", "method", "MB", "fedavg", "1.5"]
