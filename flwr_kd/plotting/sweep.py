"""Sweeps: accuracy in the last round against a setting in which results or runs differ, one line per method."""

from __future__ import annotations

import math
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from flwr_kd.plotting.lines import Curve, coinciding, interval_of_mean, joined
from flwr_kd.plotting.style import (
    MARKERS,
    add_legend,
    empty_figure,
    heading,
    palette,
    set_title,
    shared_config,
    write_picture,
)
from flwr_kd.results.clients import ALONE, is_alone
from flwr_kd.results.errors import ResultError
from flwr_kd.results.measures import ACCURACIES
from flwr_kd.results.schema import Comparison
from flwr_kd.wording import option

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["METRICS", "figure", "plot", "settings_that_vary"]

_USUAL = ("global_accuracy", "local_accuracy", "server_accuracy", "local_top5")
METRICS = (*_USUAL, *(name for name in ACCURACIES if name not in _USUAL))
"""What may be drawn; without a choice the first that was measured."""
_NO_SETTINGS = frozenset(
    {
        "seeds",
        "backend",
        "workers",
        "device",
        "data-dir",
        "attacker-ids",
        "model",
        "nondeterministic",
        "ray-address",
    }
)
_FIRST = (
    "partition",
    "imbalance",
    "attackers",
    "clients",
    "public-limit",
    "client-samples",
    "classes",
    "dataset",
)
"""Which of several settings that vary together names the axis."""
_LOGARITHMIC = 20
_APART, _MOST_APART = 5.0, 30.0
"""Points between the methods' marks at one value, and all of them together."""
_LEAST_HEIGHT, _BEYOND = 10.0, 15.0
_ROOM = 0.08
"""Of the axis, beside the first and the last value."""


_ALL = object()
"""In place of a value, for a method that does not have the setting."""


class _Point(NamedTuple):
    """One run: what is drawn, where, and with which line."""

    panel: tuple[str, ...]
    line: str
    x: Any
    seed: int
    value: float | None


def plot(
    comparisons: Sequence[Comparison], path: Path, *, along: str | None = None, metric: str | None = None
) -> Path:
    """Write the :func:`figure` to a PNG, as :func:`flwr_kd.plotting.curves.plot` does."""
    return write_picture(figure(comparisons, along=along, metric=metric), path)


def figure(
    comparisons: Sequence[Comparison], *, along: str | None = None, metric: str | None = None
) -> Figure:
    """Draw accuracy against a setting, as FedHyb's figures 6 to 10 and KT-pFL's tables 3, 4 and 6.

    Parameters
    ----------
    comparisons : sequence of Comparison
        Several that differ in an option, or one whose runs of a method differ in a hyper-parameter.
    along : str, optional
        The setting on the axis, in kebab-case. If None it is the only one that varies; of several that vary
        together, such as ``clients`` and ``limit``, the best known.
    metric : str, optional
        One of :data:`METRICS`; the first that a run has if None.

    Returns
    -------
    matplotlib.figure.Figure
        One panel for each combination of further options that vary, such as ``attack``; results without attackers
        belong to each. A mark is the mean over seeds in the last round, and its bar the mean's 95 % interval
        (Student's t; none with one seed). Marks at one value stand beside each other. A bar that leaves the panel
        is cut: with two seeds intervals are wide. A method that does not have the hyper-parameter of the axis is
        drawn at each value, and so are clients that train alone. Where a method's runs differ in further
        hyper-parameters, each has a line of its own, and so has each row where a method's rows differ in their
        models. Methods that coincide or were not measured are named below
        the panel. The axis is logarithmic if the largest value is at least 20 times the smallest.

    Raises
    ------
    ResultError
        If there is nothing to draw, nothing or too much varies, ``along`` does not vary, ``metric`` is not one of
        them, or two runs have the same place.
    ImportError
        If ``matplotlib`` is not installed.
    """
    if not any(comparison.runs for comparison in comparisons):
        raise ResultError("runs is empty: there is nothing to plot")
    along = _chosen(comparisons, along)
    metric = _metric(comparisons, metric)
    points = _points(comparisons, along, metric)
    panels = list(dict.fromkeys(point.panel for point in points))
    lines = palette(dict.fromkeys(point.line for point in points))
    drawn = empty_figure(1.6 + 5.2 * len(panels), max(4.8, 1 + 0.22 * len(lines)))
    from matplotlib.lines import Line2D

    grid: Sequence[Axes] = drawn.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    for axes, panel in zip(grid, panels, strict=True):
        _draw_panel(axes, [point for point in points if point.panel == panel], lines, along, metric)
        axes.set_title(", ".join(panel), fontsize=11).set_parse_math(False)
    _set_heights(grid)
    measured = {point.line for point in points if point.value is not None}
    handles = [
        Line2D([], [], marker=MARKERS[index % len(MARKERS)], **style)
        for index, (line, style) in enumerate(lines.items())
        if line in measured
    ]
    names = [line for line in lines if line in measured]
    add_legend(drawn, handles, names)
    config = shared_config(comparisons)
    seeds = sorted({point.seed for point in points})
    spread = ["mean and 95 % interval"] if len(seeds) > 1 else []
    set_title(drawn, [*heading(config, seeds), "last round", *spread])
    return drawn


def settings_that_vary(comparisons: Iterable[Comparison]) -> list[str]:
    """Return the options in which comparisons differ, and the hyper-parameters in which runs of a method differ.

    Examples
    --------
    >>> results = [Comparison({"partition": form, "rounds": 3}, {}, "", ()) for form in ("iid", "dirichlet:1")]
    >>> settings_that_vary(results)
    ['partition']
    """
    comparisons = list(comparisons)
    options = _varying(_options(comparison) for comparison in comparisons)
    others = [name for runs in _by_method(comparisons).values() for name in _varying(runs)]
    return list(dict.fromkeys([*options, *others]))


def _by_method(comparisons: Iterable[Comparison]) -> dict[str, list[Mapping[str, Any]]]:
    """Return the hyper-parameters of each method's runs; clients that train alone are no setting of a method."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for comparison in comparisons:
        for run in comparison.runs:
            if not is_alone(run.name):
                found.setdefault(run.method, []).append(run.hyperparameters)
    return found


def _with_several_models(comparisons: Iterable[Comparison]) -> set[str]:
    """Return the methods whose rows in one comparison have different models."""
    several: set[str] = set()
    for comparison in comparisons:
        models = comparison.config.get("model")
        if isinstance(models, Mapping):
            pairs = {(run.method, models.get(run.name)) for run in comparison.runs if not is_alone(run.name)}
            counts = Counter(method for method, _ in pairs)
            several.update(method for method, count in counts.items() if count > 1)
    return several


def _options(comparison: Comparison) -> dict[str, Any]:
    named = {name.replace("_", "-"): value for name, value in comparison.config.items()}
    return {name: value for name, value in named.items() if name not in _NO_SETTINGS}


def _varying(settings: Iterable[Mapping[str, Any]]) -> list[str]:
    values: dict[str, set[str]] = {}
    settings = list(settings)
    for name in dict.fromkeys(name for each in settings for name in each):
        values[name] = {repr(each.get(name)) for each in settings}
    return [name for name, found in values.items() if len(found) > 1]


def _chosen(comparisons: Sequence[Comparison], along: str | None) -> str:
    """Return the setting of the axis."""
    varying = settings_that_vary(comparisons)
    if not varying:
        raise ResultError(
            "no setting varies: name several results, or one in which a method has several settings"
        )
    if along is not None:
        along = along.replace("_", "-")
        if along not in varying:
            raise ResultError(f"along must be a setting that varies, {' or '.join(varying)}, got {along!r}")
        return along
    if len(varying) == 1:
        return varying[0]
    options = _varying(_options(comparison) for comparison in comparisons)
    known = [name for name in _FIRST if name in options]
    together = [name for name in known if set(options) <= {name, *_following(comparisons, name)}]
    if together and len(options) == len(varying):
        return together[0]
    raise ResultError(
        f"several settings vary, {' and '.join(varying)}: choose one for the axis, such as "
        f"{option('along', varying[0])}"
    )


def _following(comparisons: Sequence[Comparison], along: str) -> list[str]:
    """Return the options whose values follow from that of ``along``."""
    options = [_options(comparison) for comparison in comparisons]
    places = {repr(each.get(along)) for each in options}
    return [
        name
        for name in _varying(options)
        if len({(repr(each.get(along)), repr(each.get(name))) for each in options}) == len(places)
    ]


def _metric(comparisons: Sequence[Comparison], metric: str | None) -> str:
    if metric is not None and metric.replace("-", "_") not in METRICS:
        raise ResultError(f"metric must be one of {', '.join(METRICS)}, got {metric!r}")
    runs = [run for comparison in comparisons for run in comparison.runs]
    wanted = METRICS if metric is None else (metric.replace("-", "_"),)
    for name in wanted:
        if any(run.last[name] is not None for run in runs):
            return name
    raise ResultError(f"no run has a {' or '.join(wanted)} in its last round")


def _points(comparisons: Sequence[Comparison], along: str, metric: str) -> list[_Point]:
    options = _varying(_options(comparison) for comparison in comparisons)
    apart = [name for name in options if name != along and name not in _following(comparisons, along)]
    by_method, several = _by_method(comparisons), _with_several_models(comparisons)
    points: list[_Point] = []
    for comparison in comparisons:
        values = _options(comparison)
        panel = tuple(f"{name} {_text(values.get(name))}" for name in apart)
        for run in comparison.runs:
            # The only row of clients that train alone is drawn at each value, those of a grid at their own.
            settings = values if run.name == ALONE else {**values, **run.hyperparameters}
            line = ALONE
            if not is_alone(run.name):
                further = [name for name in _varying(by_method[run.method]) if name not in (along, *options)]
                row = run.name.partition(", ")[0] if run.method in several else run.method
                line = " ".join([row, *(f"{name}={_text(settings.get(name))}" for name in further)])
            points.append(_Point(panel, line, settings.get(along, _ALL), run.seed, run.last[metric]))
    points = _at_each_value(_in_each_panel(points, along))
    seen = [(point.panel, point.line, repr(point.x), point.seed) for point in points]
    if twice := next((key for key in seen if seen.count(key) > 1), None):
        raise ResultError(
            f"two runs of {twice[1]} have {along} {twice[2]} and seed {twice[3]}: leave one out"
        )
    return points


def _in_each_panel(points: Sequence[_Point], along: str) -> list[_Point]:
    """Return the points with those of no attackers in each panel: they are the same for each attack."""
    if along != "attackers":
        return list(points)
    panels = list(dict.fromkeys(point.panel for point in points if point.x))
    return [
        point._replace(panel=panel)
        for point in points
        for panel in ([point.panel] if point.x or not panels else panels)
    ]


def _at_each_value(points: Sequence[_Point]) -> list[_Point]:
    """Return the points with those of methods that do not have the setting at each of its values."""
    values = list({repr(point.x): point.x for point in points if point.x is not _ALL}.values())
    return [point._replace(x=x) for point in points for x in (values if point.x is _ALL else [point.x])]


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _draw_panel(
    axes: Axes, points: Sequence[_Point], lines: Mapping[str, dict[str, Any]], along: str, metric: str
) -> None:
    from matplotlib.transforms import ScaledTranslation

    places, labels, numeric = _places([point.x for point in points])
    curves: dict[str, Curve] = {}
    for line in lines:
        curve = _curve([point for point in points if point.line == line], places)
        if curve is not None:
            curves[line] = curve
    step = min(_APART, _MOST_APART / max(1, len(curves)))
    for index, (line, style) in enumerate(lines.items()):
        if line not in curves:
            continue
        x, values = curves[line]
        mean, (low, high) = np.nanmean(values, axis=0), interval_of_mean(values)
        moved = (list(curves).index(line) - (len(curves) - 1) / 2) * step / 72
        axes.errorbar(
            x,
            mean,
            yerr=np.nan_to_num([mean - low, high - mean]),
            marker=MARKERS[index % len(MARKERS)],
            markersize=5,
            linewidth=1.5,
            elinewidth=1,
            capsize=2.5,
            transform=axes.transData + ScaledTranslation(moved, 0, axes.figure.dpi_scale_trans),
            **style,
        )
    _scale(axes, labels, logarithmic=numeric)
    absent = sorted({point.line for point in points} - set(curves))
    notes = [f"within 0.2 points everywhere: {joined(group)}" for group in coinciding(curves)]
    notes += [f"no {metric.replace('_', ' ')}: {joined(absent)}"] if absent else []
    axes.set_xlabel(
        "\n".join(
            [_axis_name(along, points), *(textwrap.fill(note, 60, break_on_hyphens=False) for note in notes)]
        )
    ).set_parse_math(False)
    axes.set_ylabel(f"{metric.replace('_', ' ')} (%)")
    axes.grid(visible=True, color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelleft=True)


def _scale(axes: Axes, labels: Mapping[float, str], *, logarithmic: bool) -> None:
    """Mark the positions on the axis, with room beside the first and the last."""
    positions = sorted(labels)
    first, last = positions[0], positions[-1]
    if logarithmic and first > 0 and last >= _LOGARITHMIC * first:
        axes.set_xscale("log")
        room = (last / first) ** _ROOM
        axes.set_xlim(first / room, last * room)
    else:
        room = _ROOM * (last - first) or 1.0
        axes.set_xlim(first - room, last + room)
    axes.set_xticks(positions, [labels[position] for position in positions])
    axes.minorticks_off()


def _axis_name(along: str, points: Sequence[_Point]) -> str:
    """Return the setting, with the kind that all of its values have, such as ``dirichlet``."""
    kinds = {str(point.x).partition(":")[:2] for point in points}
    (kind, colon), *others = kinds
    return f"{along}: {kind}" if colon and not others else along


def _curve(points: Sequence[_Point], places: Mapping[str, float]) -> Curve | None:
    """Return the positions that have a value, ascending, and the seeds' values there in percent."""
    measured = {
        (places[repr(point.x)], point.seed): 100 * point.value for point in points if point.value is not None
    }
    if not measured:
        return None
    x, seeds = (sorted({key[side] for key in measured}) for side in (0, 1))
    values = [[measured.get((place, int(seed)), math.nan) for place in x] for seed in seeds]
    return np.array(x, dtype=np.float64), np.array(values, dtype=np.float64)


def _places(values: Sequence[Any]) -> tuple[dict[str, float], dict[float, str], bool]:
    """Return the position of each value, the positions' labels, and whether positions are the values themselves."""
    found = {repr(value): value for value in values}
    numbers = {key: _number(value) for key, value in found.items()}
    kinds = {str(value).partition(":")[0] for value in found.values() if isinstance(value, str)}
    if len(kinds) <= 1 and all(number is not None for number in numbers.values()):
        places = {key: float(number) for key, number in numbers.items() if number is not None}
        return places, {place: f"{place:g}" for place in places.values()}, True
    order = sorted(found, key=lambda key: (numbers[key] is None, numbers[key] or 0.0))
    places = {key: float(index) for index, key in enumerate(order)}
    return places, {place: _text(found[key]) for key, place in places.items()}, False


def _number(value: Any) -> float | None:
    """Return a number, also that of a text such as ``dirichlet:0.5``."""
    if isinstance(value, bool) or value is None:
        return None
    text = value.partition(":")[2] if isinstance(value, str) else value
    try:
        number = float(text)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def _set_heights(grid: Sequence[Axes]) -> None:
    """Show all means, and their intervals up to some points beyond; not less than ten points in all."""
    means, ends = [], []
    for axes in grid:
        for container in axes.containers:
            line, _, bars = container.lines  # type: ignore[attr-defined]
            means += [value for value in line.get_ydata() if math.isfinite(value)]
            ends += [float(end) for bar in bars for segment in bar.get_segments() for end in segment[:, 1]]
    if not means:
        return
    low = max(min([*ends, *means]), min(means) - _BEYOND)
    high = min(max([*ends, *means]), max(means) + _BEYOND)
    missing = max(0.0, _LEAST_HEIGHT - (high - low)) / 2 + 1
    grid[0].set_ylim(max(low - missing, -2.0), min(high + missing, 102.0))
