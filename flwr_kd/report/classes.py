"""Who has which classes: a map of the clients' training samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flwr_kd.report.html import Markup, element, table
from flwr_kd.results.schema import Comparison
from flwr_kd.text import clipped

__all__ = ["class_maps"]

_LEFT, _TOP, _BOTTOM, _WIDE = 44, 6, 40, 580
_MOST_SIDE, _LEAST_SIDE = 44.0, 5.0
_MOST_NUMBERS = 400
_MOST_LABELS = 25
_FAINTEST = 0.1
_NAME, _CHARACTER, _DIGITS = 24, 7.5, 3
"""Characters of a class's name, the width of one, and the number of those for which there is room anyway."""


def class_maps(results: Mapping[str, Comparison]) -> Markup:
    """Return a map of classes for each result, all with one scale, and say where there is none."""
    histograms = {title: _histogram(result) for title, result in results.items()}
    most = max((max(map(max, rows)) for _, rows in histograms.values() if rows), default=1)
    parts = []
    for title, (seed, rows) in histograms.items():
        name = "" if len(results) == 1 else f" – {title}"
        if rows:
            named = next((run.class_names for run in results[title].runs if run.class_names), [])
            parts.append(_map(rows, most, f"training samples per client and class{name}", seed, named))
        else:
            parts.append(
                element(
                    "p",
                    f"No numbers of samples per class{name}: a deployment has them only if the node config "
                    "of every SuperNode has share-histogram=true.",
                    class_="note",
                )
            )
    return element("div", parts, class_="grid")


def _histogram(comparison: Comparison) -> tuple[int, list[list[int]]]:
    """Return the first seed with samples, and its histogram ``[clients][classes]``."""
    for run in sorted(comparison.runs, key=lambda run: run.seed):
        if any(any(row) for row in run.histogram):
            return run.seed, run.histogram
    return 0, []


def _map(rows: Sequence[Sequence[int]], most: int, title: str, seed: int, names: Sequence[str]) -> Markup:
    clients, classes = len(rows), len(rows[0])
    side = min(max(_WIDE / clients, _LEAST_SIDE), _MOST_SIDE)
    height = min(side, 28.0)
    numbers = clients * classes <= _MOST_NUMBERS and side >= 24
    labels = [clipped(name, _NAME) for name in names] or [str(label) for label in range(classes)]
    left = _LEFT + _CHARACTER * max(0, max(map(len, labels)) - _DIGITS)
    width, tall = left + side * clients + 8, _TOP + height * classes + _BOTTOM
    samples = sorted(sum(row) for row in rows)
    present = sorted(sum(count > 0 for count in row) for row in rows)
    meaning = (
        f"seed {seed}; per client {_range(samples)} samples of {_range(present)} of {classes} classes; "
        "the darker, the more (in dark mode the lighter)"
    )
    picture = element(
        "svg",
        [
            _cell(client, label, count, most, (left, side, height), numbers)
            for client, row in enumerate(rows)
            for label, count in enumerate(row)
            if count
        ],
        element("rect", x=left, y=_TOP, width=side * clients, height=height * classes, class_="frame"),
        [
            element(
                "text", client, x=f"{left + side * (client + 0.5):.1f}", y=tall - 26, text_anchor="middle"
            )
            for client in range(0, clients, _step(clients, int(_WIDE // 26)))
        ],
        [
            element(
                "text",
                labels[label],
                x=left - 6,
                y=f"{_TOP + height * (label + 0.5):.1f}",
                dy="0.35em",
                text_anchor="end",
            )
            for label in range(0, classes, _step(classes, int(height * classes // 12)))
        ],
        element(
            "text", "client", x=left + side * clients / 2, y=tall - 6, text_anchor="middle", class_="label"
        ),
        element(
            "text",
            "class",
            transform=f"translate(12 {_TOP + height * classes / 2:.0f}) rotate(-90)",
            text_anchor="middle",
            class_="label",
        ),
        viewBox=f"0 0 {max(width, 320):.0f} {tall:.0f}",
        style=f"max-width: {max(width, 320):.0f}px",
        role="img",
        tabindex=0,
        aria_label=f"{title}: {meaning}. The numbers are in the table below.",
        data_grid=f"{left:g} {_TOP} {side:.4f} {height:.4f}",
    )
    head = ["client", *(names or [f"class {label}" for label in range(classes)]), "all"]
    body = [[client, *row, sum(row)] for client, row in enumerate(rows)]
    return element(
        "figure",
        element("figcaption", element("strong", title), element("span", meaning)),
        picture,
        element("details", element("summary", "values"), table(head, body, caption=title, class_="values")),
        class_="chart",
        data_mode="grid",
    )


def _cell(
    client: int, label: int, count: int, most: int, place: tuple[float, float, float], numbers: bool
) -> list[Markup | None]:
    left, side, height = place
    x, y, share = left + side * client, _TOP + height * label, count / most
    rect = element(
        "rect",
        x=f"{x:.2f}",
        y=f"{y:.2f}",
        width=f"{side:.2f}",
        height=f"{height:.2f}",
        class_="cell",
        fill_opacity=f"{_FAINTEST + (1 - _FAINTEST) * share:.3f}",
    )
    text = element(
        "text",
        count,
        x=f"{x + side / 2:.1f}",
        y=f"{y + height / 2:.1f}",
        dy="0.35em",
        text_anchor="middle",
        class_="count strong" if share > 0.5 else "count",
    )
    return [rect, text if numbers else None]


def _step(count: int, most: int) -> int:
    """Return the step between labels, of which there are at most ``most``."""
    most = max(min(most, _MOST_LABELS), 1)
    return next(step for step in (1, 2, 5, 10, 20, 50, 100, 1000, 10**9) if count / step <= most)


def _range(ordered: Sequence[int]) -> str:
    return str(ordered[0]) if ordered[0] == ordered[-1] else f"{ordered[0]} to {ordered[-1]}"
