"""What a run keeps on the disk while it runs, so that one that was interrupted can go on.

The folder has the checkpoint of the last complete round, the numbers of all rounds so far, and the clients'
personal models. It is of no use after the run.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import IO

from flwr_kd.results.errors import ResultError
from flwr_kd.results.schema import RoundResult
from flwr_kd.server.checkpoint import CHECKPOINT, Checkpoint

__all__ = ["CHECKPOINT_SECONDS", "RunFolder"]

CHECKPOINT_SECONDS = 5.0
"""Minimum number of seconds between two checkpoints of a simulation."""
_ROUNDS, _PERSONAL, _MODELS = "rounds.jsonl", "personal", "models"


class RunFolder:
    """The folder of one run.

    Parameters
    ----------
    path : Path
        Need not exist.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self._file: IO[str] | None = None

    @property
    def last_round(self) -> int:
        """The round after which the run can be resumed; 0 if it begins at the first."""
        return Checkpoint.last_round(self.path)

    @property
    def personal(self) -> Path:
        """The folder of the clients' personal models."""
        return self.path / _PERSONAL

    @property
    def models(self) -> Path:
        """The folder of the global models of all rounds, if they are kept."""
        return self.path / _MODELS

    def clear(self) -> None:
        """Remove what an earlier run left, and nothing else."""
        for name in (CHECKPOINT, _ROUNDS):
            (self.path / name).unlink(missing_ok=True)
        for kept in (self.personal, self.models):
            shutil.rmtree(kept, ignore_errors=True)

    def rounds(self) -> list[RoundResult]:
        """Return the numbers of all rounds so far; a line that was not written to its end is left out."""
        file = self.path / _ROUNDS
        rounds: list[RoundResult] = []
        for line in file.read_text("utf-8").splitlines() if file.exists() else ():
            try:
                rounds.append(RoundResult(**json.loads(line)))
            except (ValueError, TypeError, ResultError):
                break
        return rounds

    def add(self, result: RoundResult) -> None:
        """Append a round's numbers, in place of those of the same and later rounds that were not complete."""
        if self._file is None:
            earlier = [other for other in self.rounds() if other.round < result.round]
            self._file = (self.path / _ROUNDS).open("w", encoding="utf-8")
            for other in earlier:
                self._write(other)
        self._write(result)
        # Handed to the system, which keeps it if this process is killed.
        self._file.flush()

    def close(self) -> None:
        """Close the file of the rounds."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, result: RoundResult) -> None:
        assert self._file is not None
        self._file.write(json.dumps(asdict(result), allow_nan=False) + "\n")
