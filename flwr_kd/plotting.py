"""Pictures of a comparison, as PNGs: curves over rounds, what its last models look like, who learns from whom."""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from flwr_kd.results import Comparison, ResultError, RunResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "coefficients",
    "coefficients_figure",
    "figure",
    "landscape",
    "landscape_figure",
    "palette",
    "plot",
    "samples",
    "samples_figure",
    "tsne",
    "tsne_figure",
]

FloatArray: TypeAlias = npt.NDArray[np.float64]
IntArray: TypeAlias = npt.NDArray[np.integer[Any]]

# Okabe and Ito's colours, told apart with the common colour blindnesses; without yellow, too pale for a line.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_STYLES = ("-", "--", ":", "-.")
_MARKERS = ("o", "^", "s", "D", "v", "P", "X")
_FEW_ROUNDS = 15
_FEW_SEEDS = 10
_LEAST_HEIGHT = 10.0
_LEAST_LOSS = 0.1
_STEEPEST = 5.0
_MOST_PANELS = 3
_MOST_COLUMNS = 10
_MOST_ROWS = 20
_LONGEST_LEGEND = 20
_LEAST_SPREAD = 1e-9
_TICK_CHARACTERS = 42
_PANELS = (
    ("local_accuracy", "local accuracy", "clients' own models, own test splits"),
    ("global_accuracy", "global accuracy", "aggregated model, common test set"),
)
_SERVER = ("server_accuracy", "server accuracy", "server's own model, clients' test splits")


def plot(comparison: Comparison, path: Path) -> Path:
    """Write the :func:`figure` of a comparison to a PNG.

    Parameters
    ----------
    comparison : Comparison
        With at least one run.
    path : Path
        The PNG to write, whatever its suffix. Its directory is made if it does not exist; a file that is
        there is overwritten.

    Returns
    -------
    Path
        ``path``.

    Raises
    ------
    ResultError
        There is no run to draw.
    ImportError
        ``matplotlib`` is not installed.
    """
    return _write(figure(comparison), path)


def figure(comparison: Comparison) -> Figure:
    """Draw local and global accuracy over rounds, one line per method.

    Where no method has a global model, and a server's own was measured, that one takes its place.

    A line is the mean over seeds, its band ± one standard deviation (ddof = 1; none where fewer than two
    seeds have a value). A round without a value is left out: the line goes on to the next that has one. A
    method without any value in a panel, such as one that has no global model, is named below that panel
    instead. Neither pyplot nor the caller's backend is touched.

    Parameters
    ----------
    comparison : Comparison
        With at least one run.

    Returns
    -------
    matplotlib.figure.Figure
        Two axes, local and global accuracy in percent, and a legend beside them. It belongs to no window.

    Raises
    ------
    ResultError
        There is no run to draw.
    ImportError
        ``matplotlib`` is not installed.
    """
    if not comparison.runs:
        raise ResultError("runs is empty: there is nothing to plot")
    methods = comparison.by_method()
    styles = _styles(comparison)
    drawn = _empty(11, max(4.6, 1 + 0.22 * len(methods)))
    from matplotlib.lines import Line2D

    panels: Sequence[Axes] = drawn.subplots(1, 2, sharex=True, sharey=True)
    shown = [_PANELS[0], _SERVER if _only_server(comparison) else _PANELS[1]]
    for axes, (metric, title, meaning) in zip(panels, shown, strict=True):
        absent = [name for name, runs in methods.items() if not _draw(axes, runs, metric, styles[name])]
        axes.set_title(f"{title}\n", fontsize=11)
        meaning = meaning.replace("common test set", _measured_on(comparison.config))
        axes.text(0.5, 1.02, meaning, transform=axes.transAxes, ha="center", fontsize=8.5, color="0.35")
        _decorate(axes, title, absent, everything=len(absent) == len(methods))
    low, high = panels[0].get_ylim()
    # Without a least height, half a point of noise looks like a difference.
    missing = max(0.0, _LEAST_HEIGHT - (high - low)) / 2
    panels[0].set_ylim(max(low - missing, -2.0), min(high + missing, 102.0))

    handles = [Line2D([], [], **style) for style in styles.values()]
    legend = drawn.legend(handles, list(methods), loc="outside right center", frameon=False)
    _title(drawn, comparison, comparison.runs)
    for text in legend.get_texts():
        text.set_parse_math(False)
    return drawn


def tsne(
    comparison: Comparison,
    embeddings: Mapping[str, tuple[FloatArray, npt.NDArray[np.int64]]],
    path: Path,
    *,
    seed: int | None = None,
) -> Path:
    """Write the :func:`tsne_figure` to a PNG; as :func:`plot`."""
    return _write(tsne_figure(comparison, embeddings, seed=seed), path)


def tsne_figure(
    comparison: Comparison,
    embeddings: Mapping[str, tuple[FloatArray, npt.NDArray[np.int64]]],
    *,
    seed: int | None = None,
) -> Figure:
    """Draw maps of features, one panel per method, one colour and marker per class; FedHyb's figure 3.

    Parameters
    ----------
    comparison : Comparison
        Tells each method's accuracy in the last round.
    embeddings : mapping of str to (ndarray, ndarray)
        By method, points ``[N, 2]`` as from :func:`flwr_kd.analysis.embed`, and their classes ``[N]``. Points
        that are not finite are not drawn.
    seed : int, optional
        The runs with this seed; each method's first run if None.

    Returns
    -------
    matplotlib.figure.Figure
        Axes without numbers, since a map's scale means nothing, and a legend of the classes beside them.

    Raises
    ------
    ResultError
        There is no method to draw, or the comparison has no run of one.
    ImportError
        ``matplotlib`` is not installed.
    """
    runs = _chosen(comparison, embeddings, seed)
    drawn, panels = _panels(runs, size=3.4)
    from matplotlib.lines import Line2D

    classes = sorted({int(label) for _, labels in embeddings.values() for label in np.unique(labels)})
    looks: dict[int, dict[str, Any]] = {
        label: {
            "color": _COLOURS[index % len(_COLOURS)],
            "marker": _MARKERS[index // len(_COLOURS) % len(_MARKERS)],
        }
        for index, label in enumerate(classes)
    }
    for axes, (points, labels) in zip(panels, embeddings.values(), strict=True):
        for label, look in looks.items():
            of_class = points[labels == label]
            axes.scatter(of_class[:, 0], of_class[:, 1], s=11, alpha=0.75, linewidths=0, **look)
        axes.set_aspect("equal", adjustable="datalim")
        axes.set_xticks([])
        axes.set_yticks([])
        axes.spines[:].set_color("0.8")
    handles = [Line2D([], [], linestyle="", markersize=5, **look) for look in looks.values()]
    names = [f"class {label}" for label in classes]
    columns = math.ceil(len(classes) / _LONGEST_LEGEND)
    drawn.legend(handles, names, loc="outside right center", frameon=False, ncols=columns)
    _title(
        drawn,
        comparison,
        runs.values(),
        f"features of {_range(len(e[1]) for e in embeddings.values())} samples of the "
        f"{_measured_on(comparison.config)}",
    )
    return drawn


def landscape(
    comparison: Comparison,
    magnitudes: FloatArray,
    losses: Mapping[str, FloatArray],
    path: Path,
    *,
    seed: int | None = None,
) -> Path:
    """Write the :func:`landscape_figure` to a PNG; as :func:`plot`."""
    return _write(landscape_figure(comparison, magnitudes, losses, seed=seed), path)


def landscape_figure(
    comparison: Comparison,
    magnitudes: FloatArray,
    losses: Mapping[str, FloatArray],
    *,
    seed: int | None = None,
) -> Figure:
    """Draw the loss along random directions, one panel per method on the same axes; FedHyb's figure 4.

    Parameters
    ----------
    comparison : Comparison
        Tells each method's accuracy in the last round.
    magnitudes : ndarray
        ``[M]``, ascending, at least two; 0 is the model itself.
    losses : mapping of str to ndarray
        By method, ``[directions, M]`` as from :func:`flwr_kd.analysis.loss_along`. A line has a gap where the
        loss is not finite.
    seed : int, optional
        The runs with this seed; each method's first run if None.

    Returns
    -------
    matplotlib.figure.Figure
        A thin line per direction, a thick one for their median. The height is that of all methods together, but
        at most five times that of the flattest one's median; steeper lines leave the picture at the top.

    Raises
    ------
    ResultError
        There is no method to draw, or the comparison has no run of one.
    ImportError
        ``matplotlib`` is not installed.
    """
    runs = _chosen(comparison, losses, seed)
    drawn, panels = _panels(runs, size=3.4, shared=True)
    from matplotlib.lines import Line2D

    styles = _styles(comparison)
    for axes, (name, found) in zip(panels, losses.items(), strict=True):
        colour = styles[name]["color"]
        lines = np.where(np.isfinite(found), found, np.nan)
        axes.plot(magnitudes, lines.T, color=colour, linewidth=0.8, alpha=0.45)
        axes.plot(magnitudes, _median(lines), color=colour, linewidth=2.2)
        axes.grid(visible=True, color="0.9", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelleft=True, labelbottom=True)
        axes.set_xlabel("magnitude of the perturbation")
        axes.set_ylabel("training loss")
    _limit_loss(panels[0], list(losses.values()))
    looks: list[dict[str, Any]] = [{"linewidth": 0.8, "alpha": 0.6}, {"linewidth": 2.2}]
    handles = [Line2D([], [], color="0.2", **look) for look in looks]
    names = ["a direction", "median"]
    panels[0].legend(handles, names, loc="upper center", frameon=False, fontsize=8.5)
    directions = _range(len(each) for each in losses.values())
    _title(drawn, comparison, runs.values(), f"loss in {directions} directions")
    return drawn


def samples(
    comparison: Comparison, images: Mapping[str, FloatArray], path: Path, *, seed: int | None = None
) -> Path:
    """Write the :func:`samples_figure` to a PNG; as :func:`plot`."""
    return _write(samples_figure(comparison, images, seed=seed), path)


def samples_figure(
    comparison: Comparison, images: Mapping[str, FloatArray], *, seed: int | None = None
) -> Figure:
    """Draw the images that a server made, one panel per method, one row per class.

    Parameters
    ----------
    comparison : Comparison
        Tells each method's accuracy in the last round.
    images : mapping of str to ndarray
        By method, ``[C, n, K, H, W]``: n images of each class, of which the first ten are drawn, and the first
        20 classes. Images of three channels are in colour, all others in grey, of several channels the mean.
        A method's darkest pixels are black and its brightest white, but for one in a hundred at either end.
    seed : int, optional
        The runs with this seed; each method's first run if None.

    Returns
    -------
    matplotlib.figure.Figure
        The numbers of the classes are to the left of their rows.

    Raises
    ------
    ResultError
        There is no method to draw, the comparison has no run of one, or images have another shape.
    ImportError
        ``matplotlib`` is not installed.
    """
    runs = _chosen(comparison, images, seed)
    for name, found in images.items():
        if found.ndim != 5 or not found.size:
            raise ResultError(
                f"images of {name} must have the shape [C, n, K, H, W], got {list(found.shape)}"
            )
    shown = {name: found[:_MOST_ROWS, :_MOST_COLUMNS] for name, found in images.items()}
    rows, columns = (max(each.shape[axis] for each in shown.values()) for axis in (0, 1))
    drawn, panels = _panels(runs, size=max(0.45 * columns, 2.4), height=max(0.45 * rows, 2.4))
    for axes, found, part in zip(panels, images.values(), shown.values(), strict=True):
        axes.imshow(_mosaic(part), interpolation="nearest")
        height = part.shape[3] + 1
        labels = range(len(part))
        axes.set_yticks([label * height + height / 2 for label in labels], [str(each) for each in labels])
        axes.set_xticks([])
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        axes.set_ylabel("class")
        if part.shape[:2] != found.shape[:2]:
            counts = [f"{a} of {b}" for a, b in zip(part.shape[:2], found.shape[:2], strict=True)]
            axes.set_xlabel(f"{counts[0]} classes, {counts[1]} images of each")
    _title(drawn, comparison, runs.values(), "images made by the server")
    return drawn


def coefficients(
    comparison: Comparison,
    matrices: Mapping[str, tuple[FloatArray, IntArray]],
    path: Path,
    *,
    seed: int | None = None,
) -> Path:
    """Write the :func:`coefficients_figure` to a PNG; as :func:`plot`."""
    return _write(coefficients_figure(comparison, matrices, seed=seed), path)


def coefficients_figure(
    comparison: Comparison,
    matrices: Mapping[str, tuple[FloatArray, IntArray]],
    *,
    seed: int | None = None,
) -> Figure:
    """Draw how clients weigh each other's knowledge, one heat map per method.

    Groups of clients that learn from each other are blocks, where a group's clients have neighbouring ids.

    Parameters
    ----------
    comparison : Comparison
        Tells each method's accuracy in the last round.
    matrices : mapping of str to (ndarray, ndarray)
        By method, a matrix ``[N, N]`` as from :func:`flwr_kd.kept.coefficients`, finite: row n has the weights
        of all clients in client n's target. Then the clients' ids ``[N]``, in the order of rows and columns.
    seed : int, optional
        The runs with this seed; each method's first run if None.

    Returns
    -------
    matplotlib.figure.Figure
        Client n's row is the n-th from the top. Each panel has a scale of its own, from the smallest to the
        largest weight off the diagonal: clients' weights for themselves often exceed all others, and blocks would
        not show beside them. Where they are beyond the scale they have the colour of its end, the colour bar is
        pointed, and its label has their range. Where all others are the same, the scale is that of the whole
        matrix; where that is uniform too, it begins or ends at 0, with the weight in its middle.

    Raises
    ------
    ResultError
        There is no method to draw, the comparison has no run of one, or a matrix or its clients are not as above.
    ImportError
        ``matplotlib`` is not installed.
    """
    runs = _chosen(comparison, matrices, seed)
    for name, (matrix, clients) in matrices.items():
        count = len(clients)
        if not count or matrix.shape != (count, count) or not np.isfinite(matrix).all():
            raise ResultError(
                f"coefficients of {name} must be finite and of the shape [N, N] for its clients [N], got "
                f"{list(matrix.shape)} for {list(clients.shape)}"
            )
    drawn, panels = _panels(runs, size=4.6, height=3.6, metric="local_accuracy")
    from matplotlib.ticker import MaxNLocator, ScalarFormatter

    for axes, (matrix, clients) in zip(panels, matrices.values(), strict=True):
        low, high = _scale(matrix)
        image = axes.imshow(matrix, cmap="viridis", vmin=low, vmax=high, interpolation="antialiased")
        # Inside the panel's own axes, which are square and narrower than their place: it stays beside the cells.
        bar = drawn.colorbar(
            image,
            cax=axes.inset_axes((1.04, 0.0, 0.05, 1.0)),
            extend=_beyond(matrix, low, high),
            ticks=MaxNLocator(5),
            format=ScalarFormatter(useOffset=False),
        )
        bar.ax.tick_params(labelsize=8)
        bar.set_label(_scale_label(matrix, low, high), fontsize=8.5)
        shown = _thinned(clients)
        labels = [str(clients[index]) for index in shown]
        axes.set_xticks(shown, labels, fontsize=8)
        axes.set_yticks(shown, labels, fontsize=8)
        axes.set_xlabel("weight of client m")
        axes.set_ylabel("client n")
    _title(drawn, comparison, runs.values(), "knowledge coefficients")
    return drawn


def _scale(matrix: FloatArray) -> tuple[float, float]:
    """Return the weights at both ends of the colours."""
    others = matrix[~np.eye(len(matrix), dtype=bool)]
    for shown in (others, matrix):
        # Less is rounding, which would look like a pattern.
        if shown.size and np.ptp(shown) > _LEAST_SPREAD * np.abs(shown).max():
            return float(shown.min()), float(shown.max())
    low, high = sorted((0.0, 2 * float(matrix.mean()) or 1.0))
    return low, high


def _beyond(matrix: FloatArray, low: float, high: float) -> str:
    """Return at which ends the diagonal leaves the scale, as a colour bar names it."""
    diagonal, rounding = np.diagonal(matrix), _LEAST_SPREAD * (high - low)
    below, above = diagonal.min() < low - rounding, diagonal.max() > high + rounding
    if below and above:
        return "both"
    return "min" if below else "max" if above else "neither"


def _scale_label(matrix: FloatArray, low: float, high: float) -> str:
    if _beyond(matrix, low, high) == "neither":
        return "weight"
    diagonal = np.diagonal(matrix)
    # As many digits as tell the scale's ends apart.
    digits = max(2, 1 + math.ceil(-math.log10(max((high - low) / max(abs(low), abs(high)), 1e-9))))
    ends = dict.fromkeys(f"{each:.{digits}g}" for each in (diagonal.min(), diagonal.max()))
    return f"weight (diagonal clipped: {' to '.join(ends)})"


def _thinned(clients: IntArray) -> list[int]:
    """Return the indices of every first, second, fifth, tenth, ... client, so many that their ids fit."""
    most = max(2, _TICK_CHARACTERS // (1 + max(len(str(each)) for each in clients)))
    steps = (factor * 10**power for power in itertools.count() for factor in (1, 2, 5))
    step = next(each for each in steps if math.ceil(len(clients) / each) <= most)
    return list(range(0, len(clients), step))


def _mosaic(images: FloatArray) -> FloatArray:
    """Lay ``[C, n, K, H, W]`` out as one image ``[.., .., 3]``, with values in [0, 1] and white lines between."""
    rows, columns, channels, height, width = images.shape
    pixels = np.where(np.isfinite(images), images, np.nan).astype(np.float64)
    if channels != 3:
        pixels = np.repeat(pixels.mean(axis=2, keepdims=True), 3, axis=2)
    finite = pixels[np.isfinite(pixels)]
    low, high = np.percentile(finite, [1, 99]) if finite.size else (0.0, 1.0)
    if low == high:
        low, high = finite.min(), max(finite.max(), finite.min() + 1e-6)
    pixels = np.nan_to_num(np.clip((pixels - low) / (high - low), 0, 1))
    page = np.ones((rows * (height + 1) + 1, columns * (width + 1) + 1, 3))
    for row in range(rows):
        for column in range(columns):
            top, left = 1 + row * (height + 1), 1 + column * (width + 1)
            page[top : top + height, left : left + width] = pixels[row, column].transpose(1, 2, 0)
    return page


def _limit_loss(axes: Axes, losses: Sequence[FloatArray]) -> None:
    """Show the flattest method in at least a fifth of the height, however steep another is."""
    finite = np.concatenate([each[np.isfinite(each)] for each in losses])
    if not finite.size:
        return
    tops = [line[np.isfinite(line)].max(initial=-np.inf) for line in map(_median, losses)]
    flattest = min((top for top in tops if np.isfinite(top)), default=finite.max())
    low, high = finite.min(), finite.max()
    high = max(min(high, low + _STEEPEST * (flattest - low)), low + _LEAST_LOSS)
    margin = 0.04 * (high - low)
    axes.set_ylim(max(low - margin, 0.0) if low > margin else -margin, high + margin)


def _median(lines: FloatArray) -> FloatArray:
    """Return the median over directions ``[M]``; NaN where fewer than half of them are finite."""
    # NaN counts as largest: most of the directions have left the picture there.
    found = np.median(np.where(np.isnan(lines), np.inf, lines), axis=0)
    return np.where(np.isfinite(found), found, np.nan)


def _range(counts: Iterable[int]) -> str:
    found = sorted(set(counts))
    return str(found[0]) if len(found) == 1 else f"{found[0]} to {found[-1]}"


def _chosen(comparison: Comparison, drawn: Mapping[str, Any], seed: int | None) -> dict[str, RunResult]:
    """Return the runs of the methods to draw, in the order in which they are to be drawn."""
    if not drawn:
        raise ResultError("there is no method to draw")
    runs = comparison.one_each(seed)
    if unknown := [name for name in drawn if name not in runs]:
        raise ResultError(
            f"the result has no run of {', '.join(unknown)}{'' if seed is None else f' with seed {seed}'}"
        )
    return {name: runs[name] for name in drawn}


def _panels(
    runs: Mapping[str, RunResult],
    *,
    size: float,
    height: float | None = None,
    shared: bool = False,
    metric: str = "global_accuracy",
) -> tuple[Figure, list[Axes]]:
    """Return an empty panel per method, under its name and its accuracy in the last round."""
    rows = math.ceil(len(runs) / _MOST_PANELS)
    columns = math.ceil(len(runs) / rows)
    width, tall = columns * (size + 0.5) + 1, rows * ((height or size) + 0.9) + 0.6
    drawn = _empty(max(width, 5.5), tall)
    grid = drawn.subplots(rows, columns, sharex=shared, sharey=shared, squeeze=False)
    panels = list(grid.flat)
    for axes in panels[len(runs) :]:
        axes.set_visible(False)
    for axes, (name, run) in zip(panels, runs.items(), strict=False):
        axes.set_title(f"{name}\n", fontsize=11).set_parse_math(False)
        accuracy = run.last[metric]
        text = "not measured" if accuracy is None else f"{100 * accuracy:.2f} %"
        axes.annotate(
            f"{metric.replace('_', ' ')} {text}",
            (0.5, 1),
            xycoords="axes fraction",
            xytext=(0, 5),
            textcoords="offset points",
            ha="center",
            fontsize=8.5,
            color="0.35",
        )
    return drawn, panels[: len(runs)]


def _empty(width: float, height: float) -> Figure:
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


def _write(drawn: Figure, path: Path) -> Path:
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    drawn.savefig(path, format="png")
    return path


def _styles(comparison: Comparison) -> dict[str, dict[str, Any]]:
    """Return each method's line; the same in all pictures of a comparison."""
    return palette(comparison.by_method())


def palette(names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return a line of its own for each name, as Matplotlib's ``plot`` takes it: ``color`` and ``linestyle``.

    Colours that are told apart with the common colour blindnesses; from the eighth name on with other dashes.

    Examples
    --------
    >>> palette(["fedavg", "fedhkd"])["fedhkd"]
    {'color': '#D55E00', 'linestyle': '-'}
    """
    return {
        name: {
            "color": _COLOURS[index % len(_COLOURS)],
            "linestyle": _STYLES[index // len(_COLOURS) % len(_STYLES)],
        }
        for index, name in enumerate(names)
    }


def _only_server(comparison: Comparison) -> bool:
    """Say whether a server's own model was measured, and no global one."""
    rounds = [each for run in comparison.runs for each in run.rounds]
    return any(each.server_accuracy is not None for each in rounds) and all(
        each.global_accuracy is None for each in rounds
    )


def _draw(axes: Axes, runs: Sequence[RunResult], metric: str, style: dict[str, Any]) -> bool:
    """Draw one method; return whether it had anything to draw."""
    rounds, values = _curves(runs, metric)
    if not rounds.size:
        return False
    mean = np.nanmean(values, axis=0)
    marker: dict[str, Any] = {"marker": "o", "markersize": 3.5} if rounds.size <= _FEW_ROUNDS else {}
    axes.plot(rounds, mean, linewidth=1.6, **style, **marker)
    several = (~np.isnan(values)).sum(axis=0) > 1
    if several.any():
        std = np.nanstd(values[:, several], axis=0, ddof=1)
        centre = mean[several]
        axes.fill_between(
            rounds[several],
            np.maximum(centre - std, 0.0),
            np.minimum(centre + std, 100.0),
            color=style["color"],
            alpha=0.15,
            linewidth=0,
        )
    return True


def _curves(runs: Sequence[RunResult], metric: str) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Return the rounds ``[R]`` in which a seed has a value, and those in percent ``[S, R]``, else NaN."""
    series = [
        {each.round: getattr(each, metric) for each in run.rounds if getattr(each, metric) is not None}
        for run in runs
    ]
    rounds = sorted(set().union(*series))
    values = [[100 * curve.get(number, np.nan) for number in rounds] for curve in series]
    return np.array(rounds, dtype=np.int64), np.array(values, dtype=np.float64)


def _decorate(axes: Axes, title: str, absent: Sequence[str], *, everything: bool) -> None:
    from matplotlib.ticker import MaxNLocator

    is_global = title == "global accuracy"
    axes.xaxis.set_major_locator(MaxNLocator(steps=[1, 2, 5, 10], integer=True, min_n_ticks=1))
    axes.tick_params(labelleft=True)
    axes.set_ylabel(f"{title} (%)")
    label = "round"
    if absent and not everything:
        reason = "no global model" if is_global else "not measured"
        label += "\n" + textwrap.fill(f"{reason}: {', '.join(absent)}", 60)
    axes.set_xlabel(label).set_parse_math(False)
    axes.grid(visible=True, color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if everything:
        message = "no method here has a global model" if is_global else f"{title} was not measured"
        axes.text(0.5, 0.5, message, transform=axes.transAxes, ha="center", va="center", color="0.35")


def _title(drawn: Figure, comparison: Comparison, runs: Iterable[RunResult], *more: str) -> None:
    """Write above a figure what its runs share."""
    seeds = sorted({run.seed for run in runs})
    spread = ["mean ± std"] if len(seeds) > 1 and not more else []
    parts = _heading(comparison.config, seeds) + spread + list(more)
    # As wide as the figure: 110 characters are 11 inches.
    heading = textwrap.fill(" · ".join(parts), int(10 * drawn.get_figwidth()))
    # A "$" in a path or a name is a character, not mathematics.
    drawn.suptitle(heading, fontsize=12).set_parse_math(False)


def _heading(config: Mapping[str, Any], seeds: Sequence[int]) -> list[str]:
    parts = [str(config[name]) for name in ("dataset", "partition") if config.get(name) is not None]
    if config.get("clients") is not None:
        parts.append(f"{config['clients']} clients")
    if len(seeds) > _FEW_SEEDS:
        parts.append(f"{len(seeds)} seeds")
    else:
        parts.append(f"seed{'' if len(seeds) == 1 else 's'} {', '.join(map(str, seeds))}")
    if config.get("imbalance") is not None:
        parts.append(f"imbalance {config['imbalance']:g}")
    if config.get("attack") is not None:
        parts.append(f"{config['attack']} by {config.get('attackers')}")
    return parts


def _measured_on(config: Mapping[str, Any]) -> str:
    return "validation part" if config.get("validation") else "common test set"
