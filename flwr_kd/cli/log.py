"""Flower's log, as the command shows it."""

from __future__ import annotations

import logging
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

__all__ = ["one_line_warnings", "showing_log"]


class _FirstOfEachKind(logging.Filter):
    """Passes the first warning of each kind: those that differ in numbers only, such as the round's, are alike."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds: set[str] = set()
        self.left_out = 0

    def filter(self, record: logging.LogRecord) -> bool:
        kind = re.sub(r"-?\d[\d.e+-]*", "#", record.getMessage())
        if record.levelno != logging.WARNING:
            return True
        if kind in self.kinds:
            self.left_out += 1
            return False
        self.kinds.add(kind)
        return True


@contextmanager
def showing_log(*, verbose: bool) -> Iterator[None]:
    """Show Flower's warnings, one of each kind, or all of its log; colours only on a terminal that wants them."""
    from flwr.common.logger import FLOWER_LOGGER, update_console_handler
    from rich.console import Console

    console = Console(stderr=True)
    update_console_handler(colored=console.is_terminal and not console.no_color)
    level, first = FLOWER_LOGGER.level, _FirstOfEachKind()
    FLOWER_LOGGER.setLevel(logging.INFO if verbose else logging.WARNING)
    if not verbose:
        FLOWER_LOGGER.addFilter(first)
    try:
        yield
    finally:
        FLOWER_LOGGER.removeFilter(first)
        FLOWER_LOGGER.setLevel(level)
        if count := first.left_out:
            more = "warning" if count == 1 else "warnings"
            print(f"note: {count} more {more} of the kinds above; --verbose shows all", file=sys.stderr)


@contextmanager
def one_line_warnings() -> Iterator[None]:
    """Show Python's warnings without the line of code that they come from."""
    before = warnings.showwarning
    warnings.showwarning = _show  # the hook that Python documents
    try:
        yield
    finally:
        warnings.showwarning = before


def _show(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    print(f"warning: {' '.join(str(message).split())}", file=file or sys.stderr)
