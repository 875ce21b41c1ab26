"""Charts: axes, lines that coincide, and the table from which the pointer's values come."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flwr_kd.report.charts import Chart, Line, Point, draw, limits, ticks


def line(name: str, style: int, values: list[float], **more: float) -> Line:
    points = [
        Point(number, value, str(number), f"{value:g} %", **more) for number, value in enumerate(values, 1)
    ]
    return Line(name, style, tuple(points))


def chart(*lines: Line, **more: object) -> Chart:
    return Chart("title", "meaning", "round", "accuracy (%)", "round", lines, (0.0, 100.0), **more)


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6), st.integers(2, 10))
def test_ticks_are_round_few_and_inside(low: float, width: float, most: int) -> None:
    high = low + width
    found = ticks(low, high, most)
    assert len(found) <= most + 1
    assert all(low - 1e-6 * width <= value <= high + 1e-6 * width for value in found)
    steps = {f"{later - earlier:.6g}" for earlier, later in itertools.pairwise(found)}
    assert len(steps) <= 1 or width < 1e-6 * abs(low)


@pytest.mark.parametrize(
    ("values", "expected"),
    [([80.0, 90.0], (79.5, 90.5)), ([50.0], (47.5, 52.5)), ([99.9], (97.4, 101.0)), ([0.0], (-1.0, 2.5))],
)
def test_an_axis_in_percent_has_room_but_stays_near_0_to_100(
    values: list[float], expected: tuple[float, float]
) -> None:
    assert limits(values) == pytest.approx(expected)


def test_points_are_where_their_values_say() -> None:
    text = draw(chart(line("fedavg", 0, [0.0, 50.0, 100.0])))
    places = [tuple(map(float, found)) for found in re.findall(r'data-at="([\d.]+),([\d.]+)"', text)]
    # Even steps to the right, and up: pixels count downwards.
    assert places[1][0] - places[0][0] == pytest.approx(places[2][0] - places[1][0], abs=0.2)
    assert places[0][1] - places[1][1] == pytest.approx(places[1][1] - places[2][1], abs=0.2)
    assert places[0][1] > places[2][1]
    stroke = re.search(r'<polyline points="([^"]+)"', text)
    assert stroke is not None
    assert [tuple(map(float, pair.split(","))) for pair in stroke[1].split()] == places


def test_lines_that_coincide_have_several_widths_and_a_note() -> None:
    text = draw(chart(line("a", 0, [50, 60]), line("b", 1, [50.1, 60]), line("c", 2, [20, 30])))
    assert re.findall(r'stroke-width="([\d.]+)"', text) == ["5.0", "2.0", "2.0"]
    assert "One line (within 0.2 points): a, b." in text


def test_bands_of_many_lines_wait_to_be_chosen() -> None:
    few = [line(str(index), index, [10 * index, 10 * index + 5], low=0.0, high=9.0) for index in range(6)]
    assert " many" not in draw(chart(*few))
    text = draw(chart(*few, line("6", 6, [1, 2], low=0.0, high=3.0)))
    assert text.count("<polygon") == text.count(" many") == 7
    assert "pressed in the list" in text


def test_a_single_point_is_drawn_in_the_middle() -> None:
    assert 'cx="281.0"' in draw(chart(line("a", 0, [50])))
