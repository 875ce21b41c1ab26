"""A comparison as a table to print."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

from flwr_kd.results.columns import COLUMNS, check_columns
from flwr_kd.results.measures import ACCURACIES
from flwr_kd.results.schema import Comparison, RunResult
from flwr_kd.results.statistics import Difference, differences

if TYPE_CHECKING:
    from rich.table import Column, Table

__all__ = ["chosen_columns", "coverage", "difference_table", "fitting", "table"]

_USUAL = ("local_accuracy", "global_accuracy", "server_accuracy", "bytes_up", "bytes_down", "seconds")


def table(comparison: Comparison, columns: Sequence[str] = ()) -> Table:
    """Return the comparison as a table to print: one row per method, the last round.

    Accuracies are mean ± standard deviation over seeds, in percent; ``–`` if none was measured. If only some seeds
    have a value, their number is added. Bytes are the mean per round over all clients together, in MB (10^6 bytes);
    seconds the mean over seeds of the median round.

    Parameters
    ----------
    comparison : Comparison
        What to show.
    columns : sequence of str
        Names in :data:`flwr_kd.results.columns.COLUMNS`, or ``all`` for those that have a value. If empty: local
        and global accuracy, bytes and seconds, which fit into 80 columns; a server's own model has a column if
        there is one, with which the table fits into 97. Common accuracy takes the place of local accuracy where
        that was not measured. If the comparison has a target that any run reaches, rounds, bytes and seconds to it
        follow, and with a row named "alone" the share of clients that are better off than in it.

    Raises
    ------
    ResultError
        If there is no such column.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    counts = sorted({len(runs) for runs in comparison.by_method().values()})
    seeds = " or ".join(map(str, counts)) or "0"
    spread = "" if counts in ([], [1]) else ", mean ± std"
    title = (
        f"last round{spread} over {seeds} seed{'' if counts == [1] else 's'}; MB = 10^6 bytes, all clients"
    )
    shown = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left")
    shown.add_column("method", overflow="fold")
    rows = comparison.summary()
    chosen = [COLUMNS[name] for name in chosen_columns(rows, check_columns(columns))]
    for column in chosen:
        shown.add_column(column.header, justify="right", no_wrap=True)
    for row in rows:
        of = len(row["seeds"])
        shown.add_row(Text(row["method"]), *(column.cell(row[column.name], of) for column in chosen))
    notes = [*coverage(comparison), *_without_test_set(comparison.config)]
    of_target = any(column.name.endswith("_to_target") for column in chosen)
    if comparison.target is not None and (of_target or not columns or "all" in columns):
        notes.append(comparison.target_line)
    shown.caption, shown.caption_justify = "\n".join(notes) or None, "left"
    return shown


def chosen_columns(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[str]:
    """Return the names of the columns that a table of a summary's rows has; see :func:`table`."""
    measured = [name for name in COLUMNS if any(row[name]["n"] for row in rows)]
    if names:
        # In place of "all", those that have a value and are not named.
        return [
            column
            for name in names
            for column in ([name] if name != "all" else [m for m in measured if m not in names])
        ]
    usual, to_target = [*_USUAL], [name for name in measured if name.endswith("_to_target")]
    to_target += [name for name in measured if name == "better_off"]
    if "server_accuracy" not in measured:
        usual.remove("server_accuracy")
    elif "global_accuracy" not in measured:
        # The table becomes wider, unless no method has a global model.
        usual.remove("global_accuracy")
    if "local_accuracy" not in measured and "common_accuracy" in measured:
        # Clients train on all of their samples.
        usual[0] = "common_accuracy"
    # The share of right labels says little where most samples lack most labels.
    areas = {name: name.replace("_accuracy", "_auroc") for name in usual}
    return [*(areas[name] if areas[name] in measured else name for name in usual), *to_target]


def difference_table(comparison: Comparison, columns: Sequence[str] = ()) -> Table | None:
    """Return each method's difference to the first method, paired by seed: mean and 95 % interval, in points.

    None with one method, or where no method shares two seeds with the first. Where only some of a method's seeds
    have a value on both sides, their number is added. It fits into 80 columns, with a server's own model into 100.

    Parameters
    ----------
    comparison : Comparison
        What to show.
    columns : sequence of str
        As :func:`table` takes them: the accuracies among them are shown.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    names = chosen_columns(comparison.summary(), check_columns(columns))
    accuracies = [ACCURACIES[name] for name in names if name in ACCURACIES]
    shares = {each.title: differences(comparison, each.name) for each in accuracies}
    shares = {title: column for title, column in shares.items() if any(column.values())}
    found = [each for column in shares.values() for each in column.values() if each is not None]
    if all(each.interval is None for each in found):
        return None
    groups = comparison.by_method()
    reference = next(iter(groups))
    title = f"difference to {reference} in points"
    shown = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left")
    shown.add_column("method", overflow="fold")
    for header in shares:
        shown.add_column(f"{header}\nmean [95 % interval]", justify="right", no_wrap=True)
    for method, runs in groups.items():
        if method != reference:
            cells = (_points(column[method], len(runs)) for column in shares.values())
            shown.add_row(Text(method), *cells)
    return shown


def fitting(comparison: Comparison, width: int, columns: Sequence[str] = ()) -> list[Table]:
    """Return the tables of a comparison, none wider than the width.

    First that of :func:`table`, or several with some of its columns each, then likewise that of
    :func:`difference_table`. A single column may still be wider. ``columns`` are as :func:`table` takes them.
    """
    whole = [table(comparison, columns), difference_table(comparison, columns)]
    return [part for each in whole if each is not None for part in _parts(each, width)]


def _parts(whole: Table, width: int) -> list[Table]:
    from rich.console import Console
    from rich.measure import Measurement

    console = Console(width=10_000)

    def fits(columns: Sequence[Column]) -> bool:
        return Measurement.get(console, console.options, _with(whole, columns)).maximum <= width

    first, *others = whole.columns
    groups = [[first]]
    for column in others:
        if len(groups[-1]) > 1 and not fits([*groups[-1], column]):
            groups.append([first])
        groups[-1].append(column)
    parts = [_with(whole, group) for group in groups]
    parts[0].title, parts[-1].caption = whole.title, whole.caption
    return parts


def _with(whole: Table, columns: Sequence[Column]) -> Table:
    from rich.table import Table

    part = Table(box=whole.box, title_justify="left", caption_justify="left")
    for column in columns:
        part.add_column(
            column.header, justify=column.justify, no_wrap=column.no_wrap, overflow=column.overflow
        )
    for cells in zip(*(column.cells for column in columns), strict=True):
        part.add_row(*cells)
    return part


def coverage(comparison: Comparison) -> list[str]:
    """Return lines that say of which clients the last round's local accuracy is; none if all took part in it.

    Examples
    --------
    >>> from flwr_kd.results.schema import RoundResult, RunResult
    >>> last = RoundResult(1, 0.5, None, None, 0, 0, 1.0, 2, 0, available=6)
    >>> coverage(Comparison({}, {}, "", (RunResult("fedavg", 0, (last,)),)))
    ['local accuracy: the 2 of 6 clients that took part in the last round']
    """
    methods: dict[str, list[str]] = {}
    for method, runs in comparison.by_method().items():
        methods.setdefault(_clients_of(runs, comparison.config.get("clients")), []).append(method)
    return [
        f"local accuracy{' of ' + ', '.join(names) if len(methods) > 1 else ''}: {text}"
        for text, names in methods.items()
        if text
    ]


def _without_test_set(config: Mapping[str, Any]) -> list[str]:
    """Return a line that says why no global accuracy was measured, where the clients have the common test set."""
    if not config.get("merge_test") or config.get("validation"):
        return []
    return ["global accuracy: none, the common test set is divided among the clients"]


def _clients_of(runs: Sequence[RunResult], clients: object) -> str:
    """Say whose local accuracy a method's runs have in the last round; an empty text if all clients took part."""
    last = [run.rounds[-1] for run in runs if run.rounds and run.rounds[-1].local_accuracy is not None]
    before = [stats.accuracy_before for stats in last if stats.accuracy_before is not None]
    if before:
        return f"each client's adapted copy of the global model, which has {100 * fmean(before):.2f} % before"
    # Results of earlier versions do not name the number of clients that were there.
    known = [stats.available for stats in last if stats.available is not None]
    total = max(known) if known else clients
    if not last or not isinstance(total, int) or all(stats.participants >= total for stats in last):
        return ""
    took_part = _range([stats.participants for stats in last])
    stored, received = ([len(getattr(stats, name)) for stats in last] for name in ("stored", "received"))
    if not any(stored + received):
        return f"the {took_part} of {total} clients that took part in the last round"
    measured = [
        sum(values["local_accuracy"] is not None for values in stats.clients.values()) for stats in last
    ]
    whole = "all" if set(measured) == {total} else f"{_range(measured)} of"
    kept = [f"{_range(stored)} with the personal model that they keep"] if any(stored) else []
    given = [f"{_range(received)} with the model that they would receive"] if any(received) else []
    return (
        f"{whole} {total} clients; {took_part} took part in the last round, the others were measured after it, "
        f"{' and '.join([*kept, *given])}"
    )


def _range(counts: Sequence[int]) -> str:
    low, high = min(counts), max(counts)
    return str(low) if low == high else f"{low} to {high}"


def _points(difference: Difference | None, of: int) -> str:
    if difference is None:
        return "–"
    text = f"{100 * difference.mean:+.2f}"
    if difference.interval is not None:
        low, high = difference.interval
        text += f" [{100 * low:+.2f}, {100 * high:+.2f}]"
    return text if len(difference.seeds) == of else f"{text}\n{len(difference.seeds)} of {of} seeds"
