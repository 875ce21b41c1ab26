"""Bars per client or per clients' model: accuracy of each method in the last round."""

from __future__ import annotations

import math
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np

from flwr_kd.plotting.lines import interval_of_mean, joined
from flwr_kd.plotting.style import (
    COLOURS,
    HATCHES,
    add_legend,
    empty_figure,
    heading,
    legend_columns,
    set_title,
    shared_config,
    write_picture,
)
from flwr_kd.results.clients import ClientGains, alone_beside, client_gains
from flwr_kd.results.errors import ResultError
from flwr_kd.results.measures import ACCURACIES
from flwr_kd.results.schema import Comparison, RunResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["figure", "plot"]

_BAR, _LEAST, _MOST = 0.16, 4.8, 24.0
"""Inches: a bar where there is room, and the sides of a panel."""
_COLUMN = 1.8
"""Inches of a legend's column."""
_TURNED = 8
"""Characters of a label, beyond which labels stand upright."""
_WHOLE = 0.8
"""Of the room of a client, which its bars fill together."""
_BEYOND = 15.0
"""Points above the highest bar, where a longer interval is cut."""


def plot(
    comparisons: Sequence[Comparison],
    path: Path,
    *,
    metric: str = "local_accuracy",
    by_model: bool = False,
) -> Path:
    """Write the :func:`figure` to a PNG, as :func:`flwr_kd.plotting.curves.plot` does."""
    return write_picture(figure(comparisons, metric=metric, by_model=by_model), path)


def figure(
    comparisons: Sequence[Comparison], *, metric: str = "local_accuracy", by_model: bool = False
) -> Figure:
    """Draw a bar for each client and method, as FedDKC's figure 5.

    Parameters
    ----------
    comparisons : sequence of Comparison
        Those of one data set are one panel, in which bars are means over them: FedDKC's figure is the mean over
        four partitions.
    metric : str
        What is kept of each client, such as ``local_accuracy`` or ``local_top5``.
    by_model : bool
        Whether bars are means over the clients with one model.

    Returns
    -------
    matplotlib.figure.Figure
        Clients stand in the order of the first method's bars, the highest first, and models in their own. A bar is
        the mean over seeds, in percent, and its line the mean's 95 % interval (Student's t; none with one
        seed); what varies between results is averaged before. With a row named "alone" it says below how many
        clients are better off than in it. Clients with heterogeneous models are labelled with theirs, if these are
        the same with all methods. Methods without the metric are named below the panel.

    Raises
    ------
    ResultError
        If no client has the metric, ``by_model`` is true and results do not name the models, or results of one
        data set have other rows, seeds or clients, so that a mean over them compares what differs.
    ImportError
        If ``matplotlib`` is not installed.
    """
    groups: dict[str, list[Comparison]] = {}
    for comparison in comparisons:
        groups.setdefault(str(comparison.config.get("dataset", "")), []).append(comparison)
    for dataset, alike in groups.items():
        _check_alike(dataset, alike, metric.replace("-", "_"))
    bars = {name: _bars(group, metric.replace("-", "_"), by_model) for name, group in groups.items()}
    if not any(bars.values()):
        kept = sorted({key for each in comparisons for run in each.runs for key in _kept(run)})
        raise ResultError(
            f"no client has {metric!r} in the last round; kept are {', '.join(kept) or 'no numbers'}"
        )
    methods = list(dict.fromkeys(name for group in bars.values() for name in group))
    most = max(len({key for column in group.values() for key in column}) for group in bars.values())
    side = min(max(_BAR * most * (len(methods) + 1.5), _LEAST), _MOST)
    height = 3.9 * len(bars) + 0.9
    drawn = empty_figure(side + 0.8 + _COLUMN * legend_columns(len(methods), height), height)
    grid: Sequence[Axes] = list(drawn.subplots(len(bars), 1, squeeze=False).flat)
    for axes, (name, group) in zip(grid, bars.items(), strict=True):
        first = None if by_model else next((method for method in methods if method in group), None)
        _draw(axes, group, methods, _axis(metric), sorted_by=first)
        unmeasured = [method for each in groups[name] for method in each.by_method() if method not in group]
        note = f"\nnot measured: {joined(list(dict.fromkeys(unmeasured)))}" if unmeasured else ""
        note += _better_off(groups[name], metric.replace("-", "_"))
        label = "clients' model" if by_model else "client"
        if first is not None and len(group) > 1:
            label += f", sorted by {first}"
        axes.set_xlabel(label + note).set_parse_math(False)
        if len(bars) > 1:
            axes.set_title(name, fontsize=11).set_parse_math(False)
    _add_legend(drawn, methods)
    config = shared_config(comparisons)
    seeds = sorted({run.seed for each in comparisons for run in each.runs})
    averaged = [_averaged(group) for group in groups.values() if len(group) > 1]
    spread = ["mean and 95 % interval"] if len(seeds) > 1 else []
    set_title(drawn, [*heading(config, seeds), *dict.fromkeys(averaged), "last round", *spread])
    return drawn


def _better_off(group: Sequence[Comparison], metric: str) -> str:
    """Return a line that says which share of the clients is better off than alone; empty without such a row."""
    found: dict[str, list[ClientGains]] = {}
    for comparison in group:
        rows = comparison.by_method()
        for name, runs in rows.items():
            alone = alone_beside(name, rows)
            if alone is not None and metric in ACCURACIES and ACCURACIES[metric].of_client:
                found.setdefault(name, []).append(client_gains(runs, rows[alone], metric))
    counts = {
        name: (sum(each.better for each in of), sum(each.of for each in of)) for name, of in found.items()
    }
    shares = [f"{name} {100 * better / count:.0f} %" for name, (better, count) in counts.items() if count]
    return "\n" + textwrap.fill(f"clients better off than alone: {', '.join(shares)}", 90) if shares else ""


def _axis(metric: str) -> str:
    known = ACCURACIES.get(metric.replace("-", "_"))
    if known is not None:
        return f"{known.title} (%)"
    return f"{metric.replace('_', ' ').replace('-', ' ')} (%)"


def _kept(run: RunResult) -> set[str]:
    clients = run.rounds[-1].clients if run.rounds else {}
    return {key for values in clients.values() for key, value in values.items() if value is not None}


def _check_alike(dataset: str, group: Sequence[Comparison], metric: str) -> None:
    """Refuse results to average of which one lacks a row, a seed or a client that another has."""
    results_with = Counter(
        (run.name, run.seed, client)
        for comparison in group
        for run in comparison.runs
        for client, values in (run.rounds[-1].clients if run.rounds else {}).items()
        if values.get(metric) is not None
    )
    if partly := sorted(bar for bar, count in results_with.items() if count < len(group)):
        name, seed, client = partly[0]
        raise ResultError(
            f"the bars of a data set are means over its results, but not all {len(group)} of {dataset} have the "
            f"{metric.replace('_', ' ')} of {name}, seed {seed}, client {client}: draw them one by one"
        )


def _bars(group: Sequence[Comparison], metric: str, by_model: bool) -> dict[str, dict[str, list[float]]]:
    """Return by method and client (or model) the seeds' values in percent, each a mean over the results."""
    found: dict[str, dict[str, dict[int, list[float]]]] = {}
    for comparison in group:
        for run in comparison.runs:
            labels = _labels(comparison.config, run, by_model)
            for client, values in (run.rounds[-1].clients if run.rounds else {}).items():
                value = values.get(metric)
                if value is not None:
                    column = found.setdefault(run.name, {}).setdefault(labels[client], {})
                    column.setdefault(run.seed, []).append(100 * value)
    return {
        method: {label: [fmean(values) for values in seeds.values()] for label, seeds in column.items()}
        for method, column in found.items()
    }


def _labels(config: Mapping[str, Any], run: RunResult, by_model: bool) -> dict[str, str]:
    """Return what a run's clients are called: their number, with the model if models differ; or the model alone."""
    model = config.get("model")
    text = model.get(run.name) if isinstance(model, Mapping) else model
    models = [name.strip() for name in str(text or "").split(",") if name.strip()]
    clients = run.rounds[-1].clients if run.rounds else {}
    if by_model and not (models and all(client.isdigit() for client in clients)):
        raise ResultError(f"the result does not say which model each client of {run.name} has")
    if by_model:
        return {client: models[int(client) % len(models)] for client in clients}
    # A client that has another model with each method is named by its number alone.
    if len(models) < 2 or (isinstance(model, Mapping) and len(set(model.values())) > 1):
        return {client: client for client in clients}
    return {
        client: f"{client}\n{models[int(client) % len(models)]}" if client.isdigit() else client
        for client in clients
    }


def _draw(
    axes: Axes,
    group: Mapping[str, Mapping[str, Sequence[float]]],
    methods: Sequence[str],
    label: str,
    *,
    sorted_by: str | None,
) -> None:
    """Draw a panel, whose clients are in the order of a method's values, the highest first, if one is named."""
    keys = sorted({key for column in group.values() for key in column}, key=_order)
    if sorted_by is not None:
        values = group[sorted_by]
        keys.sort(key=lambda key: -fmean(values[key]) if key in values else math.inf)
    width = _WHOLE / max(1, len(methods))
    ends: list[float] = []
    for index, method in enumerate(methods):
        column = group.get(method, {})
        places = [place for place, key in enumerate(keys) if key in column]
        for place in places:
            seeds = np.array(column[keys[place]])[:, None]
            mean, (low, high) = float(seeds.mean()), interval_of_mean(seeds)
            error = [[mean - low[0]], [high[0] - mean]] if math.isfinite(low[0]) else None
            axes.bar(
                place + (index - (len(methods) - 1) / 2) * width,
                mean,
                width,
                yerr=error,
                color=COLOURS[index % len(COLOURS)],
                hatch=HATCHES[index // len(COLOURS) % len(HATCHES)],
                edgecolor="white",
                linewidth=0.4,
                error_kw={"elinewidth": 0.9, "capsize": 1.8, "ecolor": "0.2"},
            )
            ends.append(mean)
    axes.set_ylim(0, min(102.0, max(ends) + _BEYOND))
    axes.set_ylabel(label)
    upright = max(len(part) for key in keys for part in key.split("\n")) > _TURNED or len(keys) > _MOST * 2
    axes.set_xticks(range(len(keys)), keys, fontsize=8, rotation=90 if upright else 0)
    axes.set_xlim(-0.6, len(keys) - 0.4)
    axes.grid(visible=True, axis="y", color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _order(key: str) -> tuple[int, int, str]:
    first = key.split("\n")[0]
    return (0, int(first), key) if first.isdigit() else (1, 0, key)


def _add_legend(drawn: Figure, methods: Sequence[str]) -> None:
    from matplotlib.patches import Patch

    handles = [
        Patch(
            facecolor=COLOURS[index % len(COLOURS)],
            hatch=HATCHES[index // len(COLOURS) % len(HATCHES)],
            edgecolor="white",
        )
        for index in range(len(methods))
    ]
    add_legend(drawn, handles, list(methods))


def _averaged(group: Sequence[Comparison]) -> str:
    """Say over what a panel's bars are means."""
    partitions = list(dict.fromkeys(str(each.config.get("partition")) for each in group))
    if len(partitions) == len(group):
        return f"mean over {', '.join(partitions)}"
    return f"mean over {len(group)} results"
