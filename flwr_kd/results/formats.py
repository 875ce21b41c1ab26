"""A comparison's tables as text of other programs: CSV, Markdown, LaTeX."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from flwr_kd.results.columns import check_columns
from flwr_kd.results.measures import ACCURACIES
from flwr_kd.results.schema import Comparison
from flwr_kd.results.statistics import differences
from flwr_kd.results.table import chosen_columns, difference_table, table

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["FORMATS", "csv_text", "latex_cell", "latex_text", "markdown_cell", "markdown_text"]

FORMATS = ("text", "csv", "markdown", "latex")
"""Names of the forms in which tables are printed; ``text`` is that of :mod:`flwr_kd.results.table`."""
_MARKDOWN = re.compile(r"([\\`*_<>|~\[\]#$])")
_LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "±": r"$\pm$",
    "–": "--",
    **{character: f"\\{character}" for character in "&%$#_{}"},
}
_MINUS = re.compile(r"(?<![\w.)-])-(?=\d)")


def csv_text(comparison: Comparison, columns: Sequence[str] = ()) -> str:
    """Return a comparison as CSV: a row per method, all digits, in the units of ``result.json``.

    Each column has ``_mean``, ``_std`` (with ddof = 1) and ``_n``, the number of seeds that have a value.
    Accuracies, which are shares, also have ``_difference``, ``_low`` and ``_high``: the mean of the paired
    differences to the first method, and its 95 % interval. A value that does not exist is empty.

    Parameters
    ----------
    comparison : Comparison
        What to write.
    columns : sequence of str
        As :func:`flwr_kd.results.table.table` takes them.

    Raises
    ------
    ResultError
        If there is no such column.
    """
    summary = comparison.summary()
    names = chosen_columns(summary, check_columns(columns))
    compared = {
        name: differences(comparison, name) for name in names if name in ACCURACIES and len(summary) > 1
    }
    header = ["method", "seeds"]
    for name in names:
        header += [f"{name}_{part}" for part in ("mean", "std", "n")]
        header += [f"{name}_{part}" for part in ("difference", "low", "high") if name in compared]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    for row in summary:
        cells: list[Any] = [row["method"], " ".join(map(str, row["seeds"]))]
        for name in names:
            cells += [row[name][part] for part in ("mean", "std", "n")]
            if name in compared:
                difference = compared[name].get(row["method"])
                low, high = (difference and difference.interval) or (None, None)
                cells += [difference.mean if difference else None, low, high]
        writer.writerow(cells)
    return text.getvalue()


def markdown_text(comparison: Comparison, columns: Sequence[str] = ()) -> str:
    """Return a comparison's tables as Markdown, with the cells of :func:`flwr_kd.results.table.table`.

    ``columns`` and errors are as in :func:`csv_text`.
    """
    parts = []
    for shown in _tables(comparison, columns):
        header, *rows = [[markdown_cell(cell) for cell in row] for row in _cells(shown)]
        rule = ["---", *["---:"] * (len(header) - 1)]
        lines = [f"| {' | '.join(row)} |" for row in (header, rule, *rows)]
        notes = [markdown_cell(line) for line in str(shown.caption or "").splitlines()]
        parts.append(
            "\n".join([markdown_cell(str(shown.title)), "", *lines, *(["", *notes] if notes else [])])
        )
    return "\n\n".join(parts) + "\n"


def latex_text(comparison: Comparison, columns: Sequence[str] = ()) -> str:
    """Return a comparison's tables as LaTeX, for the package ``booktabs``; the notes are in the captions.

    ``columns`` and errors are as in :func:`csv_text`.
    """
    parts = ["% \\usepackage{booktabs}"]
    for shown in _tables(comparison, columns):
        header, *rows = [" & ".join(map(latex_cell, row)) + r" \\" for row in _cells(shown)]
        caption = ". ".join(map(latex_cell, [str(shown.title), *str(shown.caption or "").splitlines()]))
        parts += [
            r"\begin{table}",
            r"\centering",
            rf"\caption{{{caption}.}}",
            rf"\begin{{tabular}}{{l{'r' * (len(shown.columns) - 1)}}}",
            *(r"\toprule", header, r"\midrule", *rows, r"\bottomrule"),
            r"\end{tabular}",
            r"\end{table}",
        ]
    return "\n".join(parts) + "\n"


def markdown_cell(text: str) -> str:
    r"""Return a text that Markdown shows as it is.

    >>> print(markdown_cell("my_method*|2 of 3 & more"))
    my\_method\*\|2 of 3 &amp; more
    """
    return _MARKDOWN.sub(r"\\\1", text.replace("&", "&amp;"))


def latex_cell(text: str) -> str:
    r"""Return a text that LaTeX shows as it is.

    >>> print(latex_cell("my_method {2} 50 % ± 1, [-1.5, +2]"))
    my\_method \{2\} 50 \% $\pm$ 1, [$-$1.5, +2]
    """
    # A bracket after the end of a row would be an argument.
    start = "{}" if text.startswith("[") else ""
    marked = _MINUS.sub("\0", text)
    return start + "".join("$-$" if each == "\0" else _LATEX.get(each, each) for each in marked)


def _tables(comparison: Comparison, columns: Sequence[str]) -> list[Table]:
    both = (table(comparison, columns), difference_table(comparison, columns))
    return [shown for shown in both if shown is not None]


def _cells(shown: Table) -> list[list[str]]:
    """Return header and rows; a cell's second line, such as the number of seeds, goes into parentheses."""
    header = [" ".join(str(column.header).split("\n")) for column in shown.columns]
    rows = zip(*(column.cells for column in shown.columns), strict=True)
    return [header, *([_one_line(str(cell)) for cell in row] for row in rows)]


def _one_line(cell: str) -> str:
    first, separator, second = cell.partition("\n")
    return f"{first} ({second})" if separator else first
