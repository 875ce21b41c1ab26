"""``flwr-kd table``, and how the tables of results are printed."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from flwr_kd.checks import ConfigError
from flwr_kd.cli.completion import values_of
from flwr_kd.cli.plot_results import ResultDirs, read_results
from flwr_kd.text import unknown_name

if TYPE_CHECKING:
    from flwr_kd.results.schema import Comparison

__all__ = ["check_format", "print_tables", "table"]


def table(
    result_dirs: ResultDirs,
    format: Annotated[
        str, typer.Option(help="text, csv, markdown or latex", autocompletion=values_of("format"))
    ] = "text",
    columns: Annotated[str | None, typer.Option(help="columns, separated by commas, as of `compare`")] = None,
) -> None:
    """Print the tables of results: text, CSV, Markdown or LaTeX."""
    from flwr_kd.results.columns import check_columns

    check_format(format)
    names = [] if columns is None else check_columns(columns.split(","))
    results = read_results(result_dirs)
    for folder, comparison in results.items():
        if len(results) > 1:
            print(f"{folder}:", file=sys.stdout if format == "text" else sys.stderr)
        print_tables(comparison, format, names, sys.stdout)


def check_format(name: str) -> None:
    """Refuse a form in which tables are not printed.

    Raises
    ------
    ConfigError
        If there is no such format.
    """
    from flwr_kd.results.formats import FORMATS

    if name not in FORMATS:
        raise ConfigError(unknown_name("format", name, FORMATS))


def print_tables(comparison: Comparison, form: str, columns: Sequence[str], file: TextIO) -> None:
    """Print a result's tables in a checked format; as text none is wider than the terminal."""
    from rich.console import Console

    from flwr_kd.results import formats
    from flwr_kd.results.table import fitting

    if form == "text":
        console = Console(file=file)
        console.print(*fitting(comparison, console.width, columns))
        return
    write = {"csv": formats.csv_text, "markdown": formats.markdown_text, "latex": formats.latex_text}[form]
    file.write(write(comparison, columns))
