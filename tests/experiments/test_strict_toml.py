"""TOML files read into dataclasses."""

from __future__ import annotations

from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from flwr_kd import ConfigError
from flwr_kd.experiments.strict_toml import Value, build, plain, read_toml


@dataclass(frozen=True, kw_only=True)
class Inner:
    id: str
    share: float = 0.5


@dataclass(frozen=True, kw_only=True)
class Outer:
    title: str
    count: int = 0
    printed: Decimal | None = None
    set: dict[str, Value] = field(default_factory=dict)
    inner_ones: tuple[Inner, ...] = ()
    named: dict[str, Inner] = field(default_factory=dict)
    on: bool = False


def read(text: str, folder: Path) -> Outer:
    file = folder / "a.toml"
    file.write_text(text)
    return build(Outer, read_toml(file), "a.toml")


def test_values_have_their_types_and_numbers_their_digits(tmp_path: Path) -> None:
    text = """
    title = "t"
    count = 3
    printed = 0.5950
    set = { a = 1, b = 0.10, c = "x", d = true }
    [[inner-ones]]
    id = "one"
    share = 1
    [named.two]
    id = "two"
    """
    found = read(text, tmp_path)
    assert str(found.printed) == "0.5950"
    assert found.set == {"a": 1, "b": 0.1, "c": "x", "d": True}
    assert isinstance(found.set["b"], float)
    assert found.inner_ones == (Inner(id="one", share=1.0),)
    assert found.named["two"].share == 0.5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("count = 1", r"a.toml: title is missing"),
        ('title = "t"\ncolour = 1', r"a.toml: unknown key 'colour'"),
        ('title = "t"\ninner_ones = []', r"unknown key 'inner_ones' \(did you mean 'inner-ones'\?\)"),
        ('title = "t"\ncount = "3"', r"a.toml: count must be a whole number, got '3'"),
        ('title = "t"\ncount = 3.0', r"a.toml: count must be a whole number, got 3.0"),
        ('title = "t"\ncount = true', r"a.toml: count must be a whole number, got True"),
        ('title = "t"\non = 1', r"a.toml: on must be true or false, got 1"),
        ("title = 1", r"a.toml: title must be a text, got 1"),
        ('title = "t"\nprinted = "0.5"', r"printed must be a number, got '0.5'"),
        ('title = "t"\nset = [1]', r"set must be a table, got a list"),
        ('title = "t"\nset = { a = [1] }', r"set.a must be .* got a list"),
        ('title = "t"\ninner-ones = { id = "x" }', r"inner-ones must be a list, got a dict"),
        (
            'title = "t"\n[[inner-ones]]\nid = "x"\nshare = "1"',
            r"inner-ones\[x\]: share must be a number, got '1'",
        ),
        ('title = "t"\n[[inner-ones]]\nshare = 1', r"inner-ones\[1\]: id is missing"),
        ('title = "t"\n[named.x]\nid = "x"\nshare = inf', r"named.x: share must be a number, got inf"),
        ("title = ", r"is no TOML"),
    ],
)
def test_what_is_not_allowed_is_named_with_its_place(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(text, tmp_path)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"b.toml cannot be read"):
        read_toml(tmp_path / "b.toml")


def test_plain_values_have_floats() -> None:
    values: dict[str, Any] = {"a": [Decimal("0.10"), 2], "b": {"c": Decimal(1)}}
    assert plain(values) == {"a": [0.1, 2], "b": {"c": 1.0}}
