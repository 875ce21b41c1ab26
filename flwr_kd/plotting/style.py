"""What all pictures share: colours, panels, titles, writing."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flwr_kd.results.errors import ResultError
from flwr_kd.results.schema import Comparison, RunResult
from flwr_kd.text import plural

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "COLOURS",
    "HATCHES",
    "MARKERS",
    "MOST_COLUMNS",
    "add_legend",
    "add_title",
    "chosen_runs",
    "empty_figure",
    "heading",
    "legend_columns",
    "make_panels",
    "measured_on",
    "method_styles",
    "name_panel",
    "number_range",
    "palette",
    "set_title",
    "shared_config",
    "title_lines",
    "write_picture",
]

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's colours, distinguishable with common colour blindnesses; without yellow, too pale for a line."""
MARKERS = ("o", "^", "s", "D", "v", "P", "X")
"""Matplotlib's marks of points, one for each colour."""
HATCHES = ("", "//", "..", "xx", "\\\\", "++")
"""Matplotlib's hatches of bars: a further one from each seventh bar on, since colours repeat."""
MOST_COLUMNS = 10
"""Maximum number of images in a row."""
_STYLES = ("-", "--", ":", "-.", (0, (6, 1, 1, 1, 1, 1)), (0, (9, 3)))
_ROW = 0.24
"""Inches of a legend's row."""
_FEW_SEEDS = 10
_MOST_PANELS = 3


def number_range(counts: Iterable[int]) -> str:
    """Return one number, or the smallest and the largest of several, as text."""
    numbers = sorted(set(counts))
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"


def chosen_runs(comparison: Comparison, drawn: Mapping[str, Any], seed: int | None) -> dict[str, RunResult]:
    """Return the runs of the methods to draw, in the order in which they are to be drawn."""
    if not drawn:
        raise ResultError("there is no method to draw")
    runs = comparison.one_each(seed)
    if unknown := [name for name in drawn if name not in runs]:
        raise ResultError(
            f"the result has no run of {', '.join(unknown)}{'' if seed is None else f' with seed {seed}'}"
        )
    return {name: runs[name] for name in drawn}


def make_panels(
    runs: Mapping[str, RunResult],
    *,
    size: float,
    height: float | None = None,
    shared: bool = False,
    metric: str = "global_accuracy",
) -> tuple[Figure, list[Axes]]:
    """Return a figure with an empty panel per method, titled with its name and its accuracy in the last round."""
    if metric == "local_accuracy" and all(run.last[metric] is None for run in runs.values()):
        # Without test splits of their own, clients are measured on the common test set.
        metric = "common_accuracy"
    rows = math.ceil(len(runs) / _MOST_PANELS)
    columns = math.ceil(len(runs) / rows)
    width, tall = columns * (size + 0.5) + 1, rows * ((height or size) + 0.9) + 0.6
    drawn = empty_figure(max(width, 5.5), tall)
    grid = drawn.subplots(rows, columns, sharex=shared, sharey=shared, squeeze=False)
    panels = list(grid.flat)
    for axes in panels[len(runs) :]:
        axes.set_visible(False)
    for axes, (name, run) in zip(panels, runs.items(), strict=False):
        accuracy = run.last[metric]
        text = "not measured" if accuracy is None else f"{100 * accuracy:.2f} %"
        name_panel(axes, name, f"{metric.replace('_', ' ')} {text}")
    return drawn, panels[: len(runs)]


def name_panel(axes: Axes, name: str, text: str) -> None:
    """Write a panel's name above it, and a smaller line between the two."""
    axes.set_title(f"{name}\n", fontsize=11).set_parse_math(False)
    axes.annotate(
        text,
        (0.5, 1),
        xycoords="axes fraction",
        xytext=(0, 5),
        textcoords="offset points",
        ha="center",
        fontsize=8.5,
        color="0.35",
    )


def empty_figure(width: float, height: float) -> Figure:
    """Return a figure in inches that belongs to no window."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install 'flwr-kd[simulation]'") from error
    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12)
    drawn = Figure(figsize=(width, height), dpi=150, layout=layout)
    FigureCanvasAgg(drawn)
    return drawn


def write_picture(drawn: Figure, path: Path) -> Path:
    """Write a figure to a PNG, and return its path."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    drawn.savefig(path, format="png")
    return path


def palette(names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return a line of its own for each name, as Matplotlib's ``plot`` takes it: ``color`` and ``linestyle``.

    The colours are distinguishable with the common colour blindnesses. From the eighth name on, the dashes differ;
    42 names have a line of their own.

    Examples
    --------
    >>> palette(["fedavg", "fedhkd"])["fedhkd"]
    {'color': '#D55E00', 'linestyle': '-'}
    """
    return {
        name: {
            "color": COLOURS[index % len(COLOURS)],
            "linestyle": _STYLES[index // len(COLOURS) % len(_STYLES)],
        }
        for index, name in enumerate(names)
    }


def legend_columns(count: int, height: float) -> int:
    """Return the number of columns that a legend beside a figure of this height in inches needs.

    >>> legend_columns(20, 4.8), legend_columns(21, 4.8)
    (1, 2)
    """
    return max(1, math.ceil(count / max(1, int(height / _ROW))))


def add_legend(drawn: Figure, handles: Sequence[Any], names: Sequence[str]) -> None:
    """Add a legend beside a figure, in as many columns as its height asks for."""
    columns = legend_columns(len(names), drawn.get_figheight())
    legend = drawn.legend(handles, names, loc="outside right center", frameon=False, ncols=columns)
    for text in legend.get_texts():
        text.set_parse_math(False)


def add_title(drawn: Figure, comparison: Comparison, runs: Iterable[RunResult], *more: str) -> None:
    """Add a title with the settings that a figure's runs share, and more parts."""
    seeds = sorted({run.seed for run in runs})
    spread = ["mean ± std"] if len(seeds) > 1 and not more else []
    set_title(drawn, heading(comparison.config, seeds) + spread + list(more))


def set_title(drawn: Figure, parts: Sequence[str]) -> None:
    """Write the parts of a title above a figure, in as many lines as it needs."""
    # The title is as wide as the figure: 110 characters take 11 inches.
    width = int(10 * drawn.get_figwidth())
    # A "$" in a path or a name must not be read as mathematics.
    drawn.suptitle("\n".join(title_lines(parts, width)), fontsize=12).set_parse_math(False)


def title_lines(parts: Sequence[str], width: int) -> list[str]:
    """Return the lines of a title, broken between its parts; a part is broken only if it is longer than a line.

    >>> title_lines(["digits", "inner-dirichlet:0.1", "10 clients"], 30)
    ['digits · inner-dirichlet:0.1', '10 clients']
    """
    lines: list[str] = []
    for part in parts:
        if lines and len(lines[-1]) + len(part) + 3 <= width:
            lines[-1] += f" · {part}"
        else:
            lines += textwrap.wrap(part, width, break_on_hyphens=False) or [part]
    return lines


def heading(config: Mapping[str, Any], seeds: Sequence[int]) -> list[str]:
    """Return the parts of a title: the settings that a figure's runs share, and their seeds if there are any."""
    parts = [str(config[name]) for name in ("dataset", "partition") if config.get(name) is not None]
    if config.get("clients") is not None:
        parts.append(plural(config["clients"], "client"))
    if config.get("rounds") is not None:
        parts.append(plural(config["rounds"], "round"))
    parts += _models(config.get("model"))
    if len(seeds) > _FEW_SEEDS:
        parts.append(f"{len(seeds)} seeds")
    elif seeds:
        parts.append(f"seed{'' if len(seeds) == 1 else 's'} {', '.join(map(str, seeds))}")
    if config.get("imbalance") is not None:
        parts.append(f"imbalance {config['imbalance']:g}")
    if config.get("classes") is not None and config.get("dataset") != "own":
        parts.append(f"classes {config['classes']}")
    if config.get("attack") is not None:
        parts.append(f"{config['attack']} by {config.get('attackers')}")
    return parts


def _models(model: object) -> list[str]:
    """Return the part of a title that names the models, of which a comparison may have one for each method."""
    names = list(dict.fromkeys(model.values() if isinstance(model, Mapping) else [model]))
    if names in ([], [None]):
        return []
    return (
        [str(names[0]).replace(",", ", ")]
        if len(names) == 1
        else [f"{len(names)} kinds of models, by method"]
    )


def measured_on(config: Mapping[str, Any]) -> str:
    """Return the name of the samples on which the global model was measured."""
    return "validation part" if config.get("validation") else "common test set"


def shared_config(comparisons: Iterable[Comparison]) -> dict[str, Any]:
    """Return the part of their configurations in which comparisons agree, for a title of all of them.

    >>> shared_config([Comparison({"rounds": 3, "clients": n}, {}, "", ()) for n in (5, 10)])
    {'rounds': 3}
    """
    first, *others = [comparison.config for comparison in comparisons]
    return {
        name: value
        for name, value in first.items()
        if all(name in config and config[name] == value for config in others)
    }


def method_styles(comparison: Comparison) -> dict[str, dict[str, Any]]:
    """Return each method's line style, which is the same in all pictures of a comparison."""
    return palette(comparison.by_method())
