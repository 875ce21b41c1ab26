"""A line per round in Flower's log, for runs that nobody watches with a bar."""

from __future__ import annotations

from logging import INFO
from pathlib import Path

from flwr.common.logger import log

from flwr_kd.server.callbacks import Callback, RunInfo
from flwr_kd.server.records import KDResult, RoundStats

__all__ = ["RoundLines", "accuracies", "round_line"]

_SHOWN = {"local": "local_accuracy", "global": "global_accuracy", "server": "server_accuracy"}
_MEGABYTE = 10**6


class RoundLines(Callback):
    """Logs accuracy, bytes and seconds of each round, and where the result goes.

    Parameters
    ----------
    result : Path, optional
        The result's file; None if none is written.
    """

    def __init__(self, result: Path | None = None) -> None:
        self._result, self._rounds = result, 0

    def on_start(self, run: RunInfo) -> None:
        """Note the number of rounds."""
        self._rounds = run.num_rounds

    def on_round(self, stats: RoundStats) -> None:
        """Log the round's line."""
        log(INFO, "%s", round_line(stats, self._rounds))

    def on_end(self, result: KDResult, error: BaseException | None) -> None:
        """Log the result's place, if the run has come to its end."""
        if error is None and self._result is not None:
            log(INFO, "result: %s", self._result)


def accuracies(stats: RoundStats) -> str:
    """Return a round's accuracies in a few words, in percent; an empty text if none was measured.

    >>> accuracies(RoundStats(1, local_accuracy=0.875, global_accuracy=0.5))
    'local 87.5 %, global 50.0 %'
    """
    values = {name: getattr(stats, field) for name, field in _SHOWN.items()}
    return ", ".join(f"{name} {100 * value:.1f} %" for name, value in values.items() if value is not None)


def round_line(stats: RoundStats, rounds: int) -> str:
    """Return a round in one line.

    >>> stats = RoundStats(2, local_accuracy=0.5, bytes_up=1_250_000, seconds=3.21, participants=4, available=5)
    >>> round_line(stats, 10)
    'round 2 of 10: accuracy local 50.0 %; 1.25 MB up, 0 MB down; 3.2 s; 4 of 5 clients'
    """
    accuracy = accuracies(stats)
    parts = [
        "void, nothing has changed" if stats.void else f"accuracy {accuracy}" if accuracy else "no accuracy",
        f"{stats.bytes_up / _MEGABYTE:.3g} MB up, {stats.bytes_down / _MEGABYTE:.3g} MB down",
        f"{stats.seconds:.1f} s",
        f"{stats.participants} of {stats.available} clients",
    ]
    return f"round {stats.server_round} of {rounds}: {'; '.join(parts)}"
