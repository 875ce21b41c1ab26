"""``flwr-kd report``: results as one HTML file."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from flwr_kd.cli.plot_results import ResultDirs, check_file, read_results

__all__ = ["report", "short_names"]


def report(
    result_dirs: ResultDirs,
    out: Annotated[
        Path | None, typer.Option(help="the HTML file; report.html in the first RESULT_DIR if not set")
    ] = None,
) -> None:
    """Write a page with tables, curves, clients, classes, bytes and settings of results, side by side."""
    from flwr_kd.plotting import REPORT
    from flwr_kd.report.page import write

    target = out or result_dirs[0] / REPORT
    check_file(target)
    results = read_results(result_dirs)
    named = dict(zip(short_names(results), results.values(), strict=True))
    print(f"report: {write(named, target).resolve()}")


def short_names(folders: Iterable[str]) -> list[str]:
    """Return the ends of paths, with as many folders as tell them all apart.

    Examples
    --------
    >>> short_names(["runs/a/digits", "runs/b/digits"]), short_names(["runs/digits"])
    (['a/digits', 'b/digits'], ['digits'])
    """
    parts = [Path(folder).resolve().parts for folder in folders]
    for length in range(1, max(map(len, parts), default=1) + 1):
        names = ["/".join(path[-length:]) for path in parts]
        if len(set(names)) == len(names):
            return names
    return list(map(str, folders))
