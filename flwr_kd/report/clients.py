"""How accuracy is distributed over clients in the last round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from flwr_kd.report.charts import Chart, Line, Point, draw, limits, style_class
from flwr_kd.report.html import Markup, element, table
from flwr_kd.results.clients import ALONE, alone_beside, client_gains, is_alone
from flwr_kd.results.measures import ACCURACIES
from flwr_kd.results.schema import Comparison, RunResult
from flwr_kd.text import plural

__all__ = ["distribution"]

_QUANTILES = (0.0, 0.25, 0.5, 0.75, 1.0)


class _Client(NamedTuple):
    """A client's accuracy in percent, in one run."""

    accuracy: float
    name: str
    seed: int


def distribution(results: Mapping[str, Comparison], styles: Mapping[str, int]) -> Markup | None:
    """Return a chart of the clients' accuracies, sorted, with tables; None where no client has a value.

    Clients of all seeds are taken together, since another seed divides the data in another way.
    """
    found: dict[str, tuple[str, dict[str, list[_Client]]]] = {}
    for title, result in results.items():
        metric = next((name for name in ACCURACIES if any(_clients(run, name) for run in result.runs)), None)
        if metric:
            methods = {
                method: [client for run in runs for client in _clients(run, metric)]
                for method, runs in result.by_method().items()
            }
            found[title] = (metric, {method: values for method, values in methods.items() if values})
    if not found:
        return None
    range_ = limits(
        client.accuracy for _, methods in found.values() for column in methods.values() for client in column
    )
    parts = []
    for title, (metric, methods) in found.items():
        label = ACCURACIES[metric].title
        name = "" if len(results) == 1 else f" – {title}"
        chart = Chart(
            title=f"clients from the worst to the best{name}",
            meaning=f"{ACCURACIES[metric].meaning}; last round, all seeds together",
            x_label="share of clients (%)",
            y_label=f"{label} (%)",
            row_label="rank",
            lines=tuple(_line(method, styles[method], column) for method, column in methods.items()),
            y_range=range_,
            by_x=False,
        )
        one = results[title]
        parts.append(
            element(
                "div",
                draw(chart),
                _summary(one, metric, methods, styles, name),
                _each_client(one, methods, label, name),
            )
        )
    return element("div", parts, class_="grid")


def _clients(run: RunResult, metric: str) -> list[_Client]:
    last = run.rounds[-1].clients if run.rounds else {}
    values = {name: kept.get(metric) for name, kept in last.items()}
    return [_Client(100 * value, name, run.seed) for name, value in values.items() if value is not None]


def _line(method: str, style: int, column: Sequence[_Client]) -> Line:
    ordered = sorted(column, key=lambda client: client.accuracy)
    points = (
        Point(
            100 * (rank + 0.5) / len(ordered),
            client.accuracy,
            str(rank + 1),
            f"{client.accuracy:.2f} % (client {client.name}, seed {client.seed})",
        )
        for rank, client in enumerate(ordered)
    )
    return Line(method, style, tuple(points))


def _summary(
    comparison: Comparison,
    metric: str,
    methods: Mapping[str, Sequence[_Client]],
    styles: Mapping[str, int],
    name: str,
) -> Markup:
    """Return quantiles, and how many clients are better off than alone, or than with the first method."""
    runs, rows = comparison.by_method(), []
    first = next(iter(methods))
    beside_alone = any(is_alone(method) for method in methods)
    seeds = len({client.seed for client in methods[first]})
    for method, column in methods.items():
        quantiles = np.quantile([client.accuracy for client in column], _QUANTILES)
        cells: list[Any] = [f"{value:.2f}" for value in quantiles]
        if len(methods) > 1:
            reference = alone_beside(method, methods) if beside_alone else first
            beside = () if reference in (None, method) else runs[str(reference)]
            gains = client_gains(runs[method], beside, metric)
            cells += [f"{count} of {gains.of}" if gains.of else "–" for count in (gains.better, gains.worse)]
        rows.append([element("span", method, class_=style_class(styles[method])), *cells])
    head = ["method", "worst", "lower quartile", "median", "upper quartile", "best"]
    if len(methods) > 1:
        head += [f"better off than {ALONE if beside_alone else f'with {first}'}", "worse off"]
    caption = f"{ACCURACIES[metric].title} of clients in percent, of {plural(seeds, 'seed')}{name}"
    return table(head, rows, caption=caption)


def _each_client(
    comparison: Comparison, methods: Mapping[str, Sequence[_Client]], label: str, name: str
) -> Markup:
    """Return the table of the first seed's clients: what data they have, and their accuracies."""
    seed = min(client.seed for column in methods.values() for client in column)
    columns = {
        method: {client.name: client.accuracy for client in column if client.seed == seed}
        for method, column in methods.items()
    }
    names = sorted({client for column in columns.values() for client in column}, key=_order)
    histogram = next((run.histogram for run in comparison.runs if run.seed == seed and run.histogram), [])
    rows = []
    for client in names:
        index = int(client) if client.isdecimal() and len(client) < 10 else len(histogram)
        counts = histogram[index] if index < len(histogram) else None
        known = ["–", "–"] if counts is None else [sum(counts), sum(count > 0 for count in counts)]
        values = [column.get(client) for column in columns.values()]
        rows.append([client, *known, *("–" if value is None else f"{value:.2f}" for value in values)])
    return element(
        "details",
        element("summary", f"every client of seed {seed}"),
        table(
            ["client", "training samples", "classes", *columns],
            rows,
            caption=f"{label} in percent, last round, seed {seed}{name}",
        ),
    )


def _order(client: str) -> tuple[int, str]:
    return (int(client), client) if client.isdecimal() and len(client) < 10 else (10**10, client)
