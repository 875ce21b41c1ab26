"""The result of a loader, before it is divided, limited or converted to tensors."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Self

import numpy as np

from flwr_kd.checks import DataError
from flwr_kd.data._base import AnyArray, IntArray


@dataclass(frozen=True)
class Origin:
    """Where rows are from, in the words of the interface that the reader is using.

    ``name`` is what ``--dataset`` names, or empty for a data set that Python has.
    """

    name: str = ""

    def __str__(self) -> str:
        return f"data set {self.name!r}" if self.name else "the data set"

    def option(self, key: str, value: str) -> str:
        """Return how an option is written.

        >>> Origin("hf:faces").option("label", "person"), Origin().option("label", "person")
        ('hf:faces,label=person', "label_key='person'")
        """
        if self.name:
            return f"{self.name},{key}={value}"
        return f"input_shape=({value.replace('x', ', ')})" if key == "shape" else f"{key}_key={value!r}"


@dataclass(frozen=True)
class Part:
    """Inputs in the form of the set's files, and labels.

    Inputs are images (uint8, or floats in [0, 1], ``[N, C, H, W]``; or paths, as objects ``[N]``), texts (str
    objects, ``[N]``) or table rows (float64, ``[N, F]``). Columns say more of each sample, ``[N]``, such as the
    person that it comes from. ``all_labels`` are ``[N, C]`` of 0 and 1 where samples have several labels each;
    ``labels`` then have the first of them, by which data is divided.
    """

    inputs: AnyArray
    labels: IntArray
    columns: Mapping[str, AnyArray] = field(default_factory=dict)
    all_labels: AnyArray | None = None

    @classmethod
    def of_several(
        cls, inputs: AnyArray, all_labels: AnyArray, columns: Mapping[str, AnyArray] = MappingProxyType({})
    ) -> Self:
        """Return samples with several labels each; one without any counts as of the first class."""
        return cls(inputs, all_labels.argmax(axis=1).astype(np.int64), columns, all_labels)

    def __post_init__(self) -> None:
        if len(self.inputs) != len(self.labels):
            raise DataError(f"{len(self.inputs)} inputs do not fit {len(self.labels)} labels")
        for name, values in self.columns.items():
            if len(values) != len(self.labels):
                raise DataError(f"column {name!r} has {len(values)} values for {len(self.labels)} samples")

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, rows: AnyArray) -> Part:
        columns = {name: values[rows] for name, values in self.columns.items()}
        several = None if self.all_labels is None else self.all_labels[rows]
        return Part(self.inputs[rows], self.labels[rows], columns, several)


@dataclass(frozen=True)
class Source:
    """The parts of a set's files; ``test`` is None if the set has none, and empty if it is not kept apart.

    ``class_names`` are those of all classes in their order, or none, and ``inputs`` those of a table's columns.
    """

    pool: Part
    test: Part | None
    num_classes: int
    class_names: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for part, role in ((self.pool, "training"), (self.test, "test")):
            if part is None or (part is self.test and not len(part)):
                continue
            if not len(part):
                raise DataError(f"the {role} data is empty")
            low, high = part.labels.min(), part.labels.max()
            if low < 0 or high >= self.num_classes:
                raise DataError(
                    f"labels of the {role} data must lie in 0 .. {self.num_classes - 1}, "
                    f"but there are {low} .. {high}"
                )


def cache_dir() -> Path:
    """Return the default folder of downloads."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "flwr-kd"


def first_folder(folders: Sequence[Path], files: Sequence[str], endings: Sequence[str]) -> list[Path] | None:
    """Return all ``files``, each with one of ``endings``, from the first folder that has all of them."""
    for folder in folders:
        paths = [
            next((path for end in endings if (path := folder / (file + end)).is_file()), None)
            for file in files
        ]
        if None not in paths:
            return [path for path in paths if path is not None]
    return None
