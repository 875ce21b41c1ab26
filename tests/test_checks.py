"""Checks of numbers: what they allow, what they return, and what their errors say."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import numpy as np
import pytest

from flwr_kd.checks import (
    ConfigError,
    DataError,
    number,
    read_number,
    read_whole_number,
    share,
    whole_number,
)


@pytest.mark.parametrize("value", [3, np.int64(3), np.uint8(3)])
def test_a_whole_number_is_returned_as_an_int(value: object) -> None:
    assert type(whole_number("n", value, 3, 3)) is int


@pytest.mark.parametrize("value", [2, 5, 3.0, True, np.bool_(True), None, "3", [3], math.nan])
def test_what_is_no_whole_number_in_the_range_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match=r"n must be a whole number from 3 to 4, got"):
        whole_number("n", value, 3, 4)


def test_the_family_of_the_error_is_chosen() -> None:
    with pytest.raises(DataError, match=r"^n must be a whole number from 0, got -1$"):
        whole_number("n", -1, error=DataError)
    with pytest.raises(ValueError, match=r"^n must be a whole number from 0, got -1$"):
        whole_number("n", -1, error=ValueError, type_error=TypeError)
    with pytest.raises(TypeError, match=r"^n must be a whole number from 0, got 0\.5$"):
        whole_number("n", 0.5, error=ValueError, type_error=TypeError)
    with pytest.raises(TypeError, match="x must be a finite number, got '1'"):
        number("x", "1", error=ValueError, type_error=TypeError)


def test_a_value_cannot_flood_the_message() -> None:
    with pytest.raises(ConfigError, match=r"got a number of 3322 bits$"):
        whole_number("n", 10**1000, 0, 1)
    with pytest.raises(ConfigError) as raised:
        number("x", "1" * 1000)
    assert len(str(raised.value)) < 120


@pytest.mark.parametrize("value", [0.5, np.float32(0.5), 1, np.int64(1)])
def test_a_number_is_returned_as_a_float(value: float) -> None:
    checked = number("x", value)
    assert type(checked) is float
    assert checked == float(value)


@pytest.mark.parametrize(
    ("low", "high", "ends", "allowed", "refused", "text"),
    [
        (None, None, {}, [-1e300, 1e300], [math.inf, -math.inf], "a finite number"),
        (0, None, {}, [0, 1e300], [-1e-300, math.inf], "a finite number from 0"),
        (0, None, {"open_low": True}, [1e-300], [0, math.inf], "a finite number above 0"),
        (None, 1, {}, [-1e300, 1], [1.1, -math.inf], "a finite number up to 1"),
        (None, 1, {"open_high": True}, [0.9], [1], "a finite number below 1"),
        (0, 1, {}, [0, 1], [-0.1, 1.1], "in [0, 1]"),
        (0, 1, {"open_low": True, "open_high": True}, [0.5], [0, 1], "in (0, 1)"),
        (0, math.inf, {}, [0, math.inf], [-1], "in [0, inf]"),
    ],
)
def test_intervals(
    low: float | None,
    high: float | None,
    ends: dict[str, bool],
    allowed: list[float],
    refused: list[float],
    text: str,
) -> None:
    for value in allowed:
        assert number("x", value, low, high, **ends) == value
        assert read_number("x", str(value), low, high, **ends) == value
    for wrong in (*refused, math.nan, True, None, "0.5", 10**400):
        with pytest.raises(ConfigError, match=f"^{re.escape(f'x must be {text}, got ')}"):
            number("x", wrong, low, high, **ends)
    for wrong in (*refused, "nan", "one", ""):
        with pytest.raises(ConfigError, match=f"^{re.escape(f'x must be {text}, got {str(wrong)!r}')}$"):
            read_number("x", str(wrong), low, high, **ends)


def test_a_share_is_in_0_to_1() -> None:
    assert [share("s", value) for value in (0, 0.5, 1)] == [0.0, 0.5, 1.0]
    with pytest.raises(ConfigError, match=r"s must be in \(0, 1\], got 0"):
        share("s", 0, open_low=True)


@pytest.mark.parametrize("text", ["", "-", "1.0", "1_0", "³", "١", "--1", "3", "-1", "9" * 5000])
def test_texts_that_are_no_whole_number_in_the_range(text: str) -> None:
    with pytest.raises(ConfigError, match=r"n must be a whole number from 0 to 2, got '"):
        read_whole_number("n", text, 0, 2)


@pytest.mark.parametrize("read", [read_whole_number, read_number])
def test_texts_may_have_blanks_around_them(read: Callable[[str, str, int], float]) -> None:
    assert read("n", " 2 ", 0) == 2
    assert read("n", "-2", -2) == -2
