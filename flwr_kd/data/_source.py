"""What a loader returns before anything is cut, limited or turned into tensors."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flwr_kd.checks import DataError
from flwr_kd.data._base import AnyArray, IntArray


@dataclass(frozen=True)
class Part:
    """Inputs as the set has them, and labels.

    Inputs are images (uint8, or floats in [0, 1], ``[N, C, H, W]``; or paths, as objects ``[N]``), texts (str
    objects, ``[N]``) or table rows (float64, ``[N, F]``).
    """

    inputs: AnyArray
    labels: IntArray

    def __post_init__(self) -> None:
        if len(self.inputs) != len(self.labels):
            raise DataError(f"{len(self.inputs)} inputs do not fit {len(self.labels)} labels")

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, rows: AnyArray) -> Part:
        return Part(self.inputs[rows], self.labels[rows])


@dataclass(frozen=True)
class Source:
    """A set as its files have it: ``test`` is None where it comes without a test set of its own."""

    pool: Part
    test: Part | None
    num_classes: int

    def __post_init__(self) -> None:
        for part, what in ((self.pool, "training"), (self.test, "test")):
            if part is None:
                continue
            if not len(part):
                raise DataError(f"the {what} data is empty")
            low, high = part.labels.min(), part.labels.max()
            if low < 0 or high >= self.num_classes:
                raise DataError(
                    f"labels of the {what} data must lie in 0 .. {self.num_classes - 1}, "
                    f"but there are {low} .. {high}"
                )


def cache_dir() -> Path:
    """Return where downloads go unless the caller says otherwise."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "flwr-kd"


def first_folder(folders: Sequence[Path], files: Sequence[str], endings: Sequence[str]) -> list[Path] | None:
    """Return all ``files``, each with one of ``endings``, from the first folder that has them all."""
    for folder in folders:
        found = [
            next((path for end in endings if (path := folder / (file + end)).is_file()), None)
            for file in files
        ]
        if None not in found:
            return [path for path in found if path is not None]
    return None
