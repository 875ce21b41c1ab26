"""Charts over rounds, bytes and seconds: accuracies and training loss."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence

from flwr_kd.report.charts import Chart, Line, Point, draw, limits
from flwr_kd.report.html import Markup, element
from flwr_kd.results.measures import ACCURACIES
from flwr_kd.results.rounds import RoundResult
from flwr_kd.results.schema import Comparison, RunResult

__all__ = ["against_cost", "main_accuracy", "measured_accuracies", "over_rounds", "side_by_side"]

_MORE = ("top5", "trained")
"""Parts of the names of accuracies that stand in a part of the page that is closed at first."""


def over_rounds(results: Mapping[str, Comparison], styles: Mapping[str, int]) -> Markup | None:
    """Return charts of all accuracies and of the training loss over rounds; None without any.

    A line is the mean over seeds, its band ± one standard deviation (ddof = 1). Clients that were measured after
    the last round are left out, so that each point of a line has the same meaning.
    """
    names = measured_accuracies(results.values())
    first = [name for name in names if not any(part in name for part in _MORE)]
    shown = [chart for name in [*first, "train_loss"] if (chart := _metric(results, styles, name))]
    more = [
        chart for name in names if name not in first and (chart := _metric(results, styles, name)) is not None
    ]
    if not shown and not more:
        return None
    closed = element("details", element("summary", "more accuracies"), more) if more else None
    return element("div", side_by_side(results, shown), closed)


def side_by_side(results: Mapping[str, object], groups: Sequence[Markup]) -> Markup:
    """Return groups of charts: of one result side by side; of several, each group is a row already."""
    return element("div", groups, class_="grid" if len(results) == 1 else None)


def measured_accuracies(comparisons: Iterable[Comparison]) -> list[str]:
    """Return the names of the accuracies that any round has, in the order of the table's columns."""
    rounds = [stats for comparison in comparisons for run in comparison.runs for stats in run.rounds]
    return [name for name in ACCURACIES if any(stats.of_participants(name) is not None for stats in rounds)]


def main_accuracy(comparison: Comparison) -> str | None:
    """Return the accuracy that charts show if they show one: local accuracy, or the first that there is."""
    return next(iter(measured_accuracies([comparison])), None)


def _metric(results: Mapping[str, Comparison], styles: Mapping[str, int], name: str) -> Markup | None:
    """Return the charts of one quantity, a chart for each result that has it, with one scale."""
    percent = name in ACCURACIES
    lines = {title: _lines(result, styles, name) for title, result in results.items()}
    lines = {title: found for title, found in lines.items() if found}
    if not lines:
        return None
    range_ = limits(_heights(itertools.chain(*lines.values()), bands=percent), percent=percent)
    label = ACCURACIES[name].title if percent else "training loss"
    meaning = ACCURACIES[name].meaning if percent else "mean over clients"
    charts = []
    for title, found in lines.items():
        absent = [method for method in results[title].by_method() if method not in {x.name for x in found}]
        charts.append(
            draw(
                Chart(
                    title=label if len(results) == 1 else f"{label} – {title}",
                    meaning=meaning + _spread(results[title]),
                    x_label="round",
                    y_label=f"{label} (%)" if percent else label,
                    row_label="round",
                    lines=tuple(found),
                    y_range=range_,
                    whole_x=True,
                    percent=percent,
                    notes=(f"Not measured: {', '.join(absent)}.",) if absent else (),
                )
            )
        )
    return charts[0] if len(results) == 1 else element("div", charts, class_="grid")


def _spread(comparison: Comparison) -> str:
    several = any(len(runs) > 1 for runs in comparison.by_method().values())
    return "; mean ± standard deviation over seeds" if several else ""


def _heights(lines: Iterable[Line], *, bands: bool = True) -> list[float]:
    """Return the heights that an axis must hold. The band of a loss may be much wider than all lines."""
    points = [point for line in lines for point in line.points]
    around = [y for point in points for y in (point.low, point.high) if y is not None]
    return [point.y for point in points] + (around if bands else [])


def _value(stats: RoundResult, name: str) -> float | None:
    if name in ACCURACIES:
        share = stats.of_participants(name)
        return None if share is None else 100 * share
    return stats.train_loss


def _lines(comparison: Comparison, styles: Mapping[str, int], name: str) -> list[Line]:
    """Return a line for each method with a value; none where one round alone was measured of several."""
    lines = []
    for method, runs in comparison.by_method().items():
        points = tuple(_points(runs, name))
        if len(points) > 1 or (points and all(len(run.rounds) < 2 for run in runs)):
            lines.append(Line(method, styles[method], points))
    return lines


def _points(runs: Sequence[RunResult], name: str) -> Iterable[Point]:
    values: dict[int, list[float]] = {}
    for run in runs:
        for stats in run.rounds:
            value = _value(stats, name)
            if value is not None:
                values.setdefault(stats.round, []).append(value)
    digits, unit = (2, " %") if name in ACCURACIES else (4, "")
    for number in sorted(values):
        found = values[number]
        mean = statistics.fmean(found)
        text, low, high = f"{mean:.{digits}f}{unit}", None, None
        if len(found) > 1:
            std = statistics.stdev(found)
            text, low, high = f"{mean:.{digits}f} ± {std:.{digits}f}{unit}", mean - std, mean + std
        yield Point(number, mean, str(number), text, low, high)


def against_cost(results: Mapping[str, Comparison], styles: Mapping[str, int]) -> Markup | None:
    """Return charts of accuracy against the bytes, and against the seconds, of all rounds so far."""
    costs: dict[str, tuple[Callable[[RoundResult], float], str]] = {
        "megabytes": (lambda stats: stats.megabytes, "MB"),
        "seconds": (lambda stats: stats.seconds, "s"),
    }
    groups = []
    for name, (cost, unit) in costs.items():
        lines = {
            title: (metric, found)
            for title, result in results.items()
            if (metric := main_accuracy(result))
            and (found := _cost_lines(result, styles, metric, cost, unit))
        }
        range_ = limits(_heights(line for _, found in lines.values() for line in found))
        charts = [
            draw(
                Chart(
                    title=f"accuracy against {name}" + ("" if len(results) == 1 else f" – {title}"),
                    meaning=f"{ACCURACIES[metric].title}: {ACCURACIES[metric].meaning}; all clients, up and down, "
                    f"means over seeds"
                    if unit == "MB"
                    else f"{ACCURACIES[metric].title}; wall clock of the rounds, means over seeds",
                    x_label=f"{name} of all rounds so far",
                    y_label=f"{ACCURACIES[metric].title} (%)",
                    row_label="round",
                    lines=tuple(found),
                    y_range=range_,
                    by_x=False,
                    percent=False,
                )
            )
            for title, (metric, found) in lines.items()
        ]
        if charts:
            groups.append(charts[0] if len(results) == 1 else element("div", charts, class_="grid"))
    return side_by_side(results, groups) if groups else None


def _cost_lines(
    comparison: Comparison,
    styles: Mapping[str, int],
    metric: str,
    cost: Callable[[RoundResult], float],
    unit: str,
) -> list[Line]:
    lines = []
    for method, runs in comparison.by_method().items():
        pairs: dict[int, list[tuple[float, float]]] = {}
        for run in runs:
            spent = itertools.accumulate(cost(stats) for stats in run.rounds)
            for stats, total in zip(run.rounds, spent, strict=True):
                value = _value(stats, metric)
                if value is not None:
                    pairs.setdefault(stats.round, []).append((total, value))
        points = []
        for number in sorted(pairs):
            x, y = (statistics.fmean(column) for column in zip(*pairs[number], strict=True))
            points.append(Point(x, y, str(number), f"{x:.3g} {unit}, {y:.2f} %"))
        if points:
            lines.append(Line(method, styles[method], tuple(points)))
    return lines
