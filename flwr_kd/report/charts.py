"""Charts as SVG with a table of their values, from which the page's script reads what is under the pointer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from flwr_kd.plotting.lines import COINCIDING, Curve, coinciding, joined, widths_below
from flwr_kd.report.html import Markup, element, table

__all__ = ["Chart", "Line", "Point", "draw", "limits", "style_class", "ticks"]

WIDTH, HEIGHT = 520, 320
"""Of a chart, in units of its view box."""
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 14, 12, 46
_COLOURS, _DASHES = 7, 6
_FEW_POINTS = 30
_FEW_BANDS = 6
"""With more lines, the bands of highlighted ones alone are seen."""
_THIN, _WIDER, _WIDEST = 2.0, 3.0, 12.0
_LEAST_HEIGHT = 5.0


@dataclass(frozen=True)
class Point:
    """A point of a line.

    Attributes
    ----------
    x, y : float
        Where it is, in units of the axes.
    row : str
        Its row in the table of values, such as the round.
    text : str
        Its value as the table and the pointer show it.
    low, high : float or None
        Limits of the band around the line; None without a band.
    """

    x: float
    y: float
    row: str
    text: str
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Line:
    """A line of a chart.

    Attributes
    ----------
    name : str
        What it is called.
    style : int
        Number of its colour and dashes, from 0; the same for one name in the whole page.
    points : tuple of Point
        In order.
    """

    name: str
    style: int
    points: tuple[Point, ...]


@dataclass(frozen=True)
class Chart:
    """What a chart shows.

    Attributes
    ----------
    title, meaning : str
        The caption, and a line below it.
    x_label, y_label, row_label : str
        Of the axes, and of the first column of the values.
    lines : tuple of Line
        At least one, with at least one point.
    y_range : tuple of float
        Limits of the axis, the same for charts that stand side by side.
    whole_x : bool
        Whether the places are whole numbers, such as rounds.
    by_x : bool
        Whether all lines have the same places, so that the pointer shows the values of all lines at the nearest
        one; else it shows the nearest point.
    percent : bool
        Whether lines are in percent. Those that coincide within a line's width are then drawn one above the other,
        from the widest to the thinnest, and named below the chart.
    notes : tuple of str
        Lines below the chart.
    """

    title: str
    meaning: str
    x_label: str
    y_label: str
    row_label: str
    lines: tuple[Line, ...]
    y_range: tuple[float, float]
    whole_x: bool = False
    by_x: bool = True
    percent: bool = True
    notes: tuple[str, ...] = ()


def style_class(style: int) -> str:
    """Return the classes of a colour and of dashes.

    >>> style_class(0), style_class(8)
    ('c0 d0', 'c1 d1')
    """
    return f"c{style % _COLOURS} d{style // _COLOURS % _DASHES}"


def limits(values: Iterable[float], *, percent: bool = True) -> tuple[float, float]:
    """Return the limits of an axis that holds all values, with some room; at least five points of a percentage.

    >>> limits([80.0, 90.0]), limits([50.0]), limits([])
    ((79.5, 90.5), (47.5, 52.5), (0.0, 1.0))
    """
    found = list(values)
    if not found:
        return 0.0, 1.0
    low, high = min(found), max(found)
    least = _LEAST_HEIGHT if percent else max(abs(high), 1e-9) / 10
    room = max((high - low) * 0.05, (least - (high - low)) / 2)
    low, high = low - room, high + room
    return (max(low, -1.0), min(high, 101.0)) if percent else (low, high)


def ticks(low: float, high: float, most: int, *, whole: bool = False) -> list[float]:
    """Return round numbers between two limits, at most ``most`` + 1 of them; whole numbers if asked.

    >>> ticks(0, 10, 5), ticks(0.2, 0.9, 4), ticks(0.5, 1.5, 8, whole=True)
    ([0.0, 2.0, 4.0, 6.0, 8.0, 10.0], [0.2, 0.4, 0.6, 0.8], [1.0])
    """
    if not high > low:
        return [low]
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * (1 - 1e-9))
    step = max(step, 1.0) if whole else step
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [float(f"{number * step:.12g}") for number in range(first, last + 1)]


def draw(chart: Chart) -> Markup:
    """Return a chart as a figure: caption, SVG, notes, and the table of its values."""
    places = [point.x for line in chart.lines for point in line.points]
    x_range = (min(places), max(places)) if max(places) > min(places) else (places[0] - 0.5, places[0] + 0.5)
    to_x, to_y = _scale(x_range, _LEFT, WIDTH - _RIGHT), _scale(chart.y_range, HEIGHT - _BOTTOM, _TOP)
    curves = _curves(chart) if chart.percent else {}
    together, below = coinciding(curves), widths_below(curves)
    names = ", ".join(line.name for line in chart.lines)
    picture = element(
        "svg",
        _axes(chart, x_range, to_x, to_y),
        [_band(line, to_x, to_y, many=len(chart.lines) > _FEW_BANDS) for line in chart.lines],
        [_line(line, to_x, to_y, below.get(line.name, 0)) for line in chart.lines],
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        role="img",
        tabindex=0,
        aria_label=f"{chart.title}: {chart.y_label} against {chart.x_label} of {names}. "
        "The left and right arrow keys read the values; they are also in the table below.",
    )
    notes = [f"One line (within {COINCIDING:g} points): {joined(group)}." for group in together]
    if len(chart.lines) > _FEW_BANDS and any(p.low is not None for line in chart.lines for p in line.points):
        notes.append("Bands are those of the methods that are pressed in the list above.")
    return element(
        "figure",
        element("figcaption", element("strong", chart.title), element("span", chart.meaning)),
        picture,
        [element("p", note, class_="note") for note in (*notes, *chart.notes)],
        element("details", element("summary", "values"), _values(chart, to_x, to_y)),
        class_="chart",
        data_mode="column" if chart.by_x else "point",
    )


def _scale(ends: tuple[float, float], low: float, high: float) -> Callable[[float], float]:
    first, last = ends
    return lambda value: low + (high - low) * (value - first) / (last - first)


def _curves(chart: Chart) -> dict[str, Curve]:
    """Return the lines as those of pictures, which say where lines coincide."""
    return {
        line.name: (
            np.array([point.x for point in line.points]),
            np.array([[point.y for point in line.points]]),
        )
        for line in chart.lines
    }


def _axes(
    chart: Chart,
    x_range: tuple[float, float],
    to_x: Callable[[float], float],
    to_y: Callable[[float], float],
) -> list[Markup]:
    bottom, right = HEIGHT - _BOTTOM, WIDTH - _RIGHT
    parts = []
    for value in ticks(*chart.y_range, 6):
        y = f"{to_y(value):.1f}"
        parts.append(element("line", x1=_LEFT, x2=right, y1=y, y2=y, class_="grid"))
        parts.append(element("text", _number(value), x=_LEFT - 8, y=y, dy="0.35em", text_anchor="end"))
    for value in ticks(*x_range, 8, whole=chart.whole_x):
        x = f"{to_x(value):.1f}"
        parts.append(element("line", x1=x, x2=x, y1=bottom, y2=bottom + 5, class_="axis"))
        parts.append(element("text", _number(value), x=x, y=bottom + 18, text_anchor="middle"))
    parts.append(element("line", x1=_LEFT, x2=right, y1=bottom, y2=bottom, class_="axis"))
    middle = (_LEFT + right) / 2
    parts.append(element("text", chart.x_label, x=middle, y=HEIGHT - 8, text_anchor="middle", class_="label"))
    turned = f"translate(14 {(bottom + _TOP) / 2:.0f}) rotate(-90)"
    parts.append(element("text", chart.y_label, transform=turned, text_anchor="middle", class_="label"))
    return parts


def _number(value: float) -> str:
    """Write a tick without an exponent where it has at most seven digits.

    >>> _number(0.25), _number(1500000.0), _number(20.0)
    ('0.25', '1,500,000', '20')
    """
    return f"{value:,.10g}" if 1e-6 <= abs(value) < 1e7 or value == 0 else f"{value:g}"


def _band(
    line: Line, to_x: Callable[[float], float], to_y: Callable[[float], float], *, many: bool
) -> Markup | None:
    around = [point for point in line.points if point.low is not None and point.high is not None]
    if len(around) < 2:
        return None
    upper = [f"{to_x(point.x):.1f},{_within(to_y(point.high or 0.0)):.1f}" for point in around]
    lower = [f"{to_x(point.x):.1f},{_within(to_y(point.low or 0.0)):.1f}" for point in reversed(around)]
    return element(
        "polygon",
        points=" ".join([*upper, *lower]),
        class_=f"band {style_class(line.style)}{' many' if many else ''}",
        data_name=line.name,
    )


def _within(y: float) -> float:
    return min(max(y, _TOP), HEIGHT - _BOTTOM)


def _line(line: Line, to_x: Callable[[float], float], to_y: Callable[[float], float], below: int) -> Markup:
    width = _THIN + min(_WIDER * below, _WIDEST)
    places = [(to_x(point.x), to_y(point.y)) for point in line.points]
    dots = [
        element("circle", cx=f"{x:.1f}", cy=f"{y:.1f}", r=f"{1.4 + width / 2:.1f}")
        for x, y in (places if len(places) <= _FEW_POINTS else [])
    ]
    stroke = element(
        "polyline", points=" ".join(f"{x:.1f},{y:.1f}" for x, y in places), stroke_width=f"{width:.1f}"
    )
    return element("g", stroke, dots, class_=f"line {style_class(line.style)}", data_name=line.name)


def _values(chart: Chart, to_x: Callable[[float], float], to_y: Callable[[float], float]) -> Markup:
    cells: list[Mapping[str, Point]] = [{point.row: point for point in line.points} for line in chart.lines]
    places = {point.row: point.x for line in chart.lines for point in line.points}
    rows: list[Sequence[Markup | str]] = []
    for row in sorted(places, key=places.__getitem__) if chart.by_x else places:
        found = [column.get(row) for column in cells]
        rows.append(
            [
                row,
                *(
                    "–"
                    if point is None
                    else element("td", point.text, data_at=f"{to_x(point.x):.1f},{to_y(point.y):.1f}")
                    for point in found
                ),
            ]
        )
    names = [
        element("span", line.name, class_=style_class(line.style), data_name=line.name)
        for line in chart.lines
    ]
    return table([chart.row_label, *names], rows, caption=f"{chart.title}, {chart.y_label}", class_="values")
