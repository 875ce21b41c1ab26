"""Tables from csv files."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from flwr_kd.checks import DataError
from flwr_kd.data._base import AnyArray, IntArray, require
from flwr_kd.data._source import Part, Source

_LABEL_NAMES = ("label", "target", "class")


def table_encoder(rows: AnyArray) -> Callable[[AnyArray], Tensor]:
    """Fit mean and standard deviation per column on ``rows``; return a map from float64 to float32 ``[N, F]``.

    A column that is constant in ``rows`` is only centred.
    """
    scaler = require("sklearn.preprocessing").StandardScaler().fit(rows)

    def encode(inputs: AnyArray) -> Tensor:
        if inputs.shape[1] != rows.shape[1]:
            raise DataError(
                f"a table with {inputs.shape[1]} features cannot replace one with {rows.shape[1]}"
            )
        return torch.from_numpy(scaler.transform(inputs).astype(np.float32))

    return encode


@dataclass(frozen=True)
class Table:
    """Rows of numbers, and the label of each row as text.

    Attributes
    ----------
    features : ndarray
        Finite, float64, ``[N, F]``.
    labels : list of str
        ``[N]``; empty if the file has none.
    where : str
        File and column of the labels, for error messages.
    """

    features: AnyArray
    labels: list[str]
    where: str


def read_csv(path: Path) -> Source:
    """Read a table of numbers with one column of labels; see :func:`flwr_kd.data.load` for its form."""
    table = read_table(path)
    labels, num_classes = _encode_labels(table.labels, table.where)
    return Source(Part(table.features, labels), None, num_classes)


def read_table(path: Path, *, unlabelled: int | None = None) -> Table:
    """Read a table of finite numbers with one column of labels, found by its header or as the last one.

    Parameters
    ----------
    path : Path
        See :func:`flwr_kd.data.load` for its form.
    unlabelled : int, optional
        A file with this number of columns has no labels, unless its header names a label column.

    Raises
    ------
    DataError
        If the file cannot be read, has too few rows or columns, or a cell that is not a number or label.
    """
    table = _cells(path)
    width = len(table[0])
    labelled = width != unlabelled or _names_label(table[0])
    names = _header(table[0] if labelled else [*table[0], ""])
    body = table if names is None else table[1:]
    column = width - 1 if labelled else width
    if labelled and names is not None:
        column = next((names.index(name) for name in _LABEL_NAMES if name in names), column)
    titles = [repr(name) for name in table[0]] if names is not None else [str(i) for i in range(width)]
    if width < 1 + labelled or not body:
        need = "one label column and " if labelled else ""
        raise DataError(f"{path} must have at least one feature, {need}one row of data")

    first_line = 1 if names is None else 2
    features = np.empty((len(body), width - labelled))
    for i, row in enumerate(body):
        if len(row) != width:
            raise DataError(
                f"{path}, row {i + first_line} has {len(row)} cells, but the first row has {width}"
            )
        for j, k in enumerate(k for k in range(width) if k != column):
            value = _number(row[k])
            if not math.isfinite(value):
                raise DataError(
                    f"{path}, row {i + first_line}, column {titles[k]}: {row[k]!r} is not a finite number "
                    "(features must be numbers, only the label may be text)"
                )
            features[i, j] = value
    if not labelled:
        return Table(features, [], "")
    where, labels = f"{path}, column {titles[column]}", [row[column] for row in body]
    if any(cell in ("", "?") for cell in labels):
        raise DataError(f"{where}: a row has no label")
    return Table(features, labels, where)


def _cells(path: Path) -> list[list[str]]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"csv file {str(path)!r} cannot be read: {error}") from error
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        raise DataError(f"csv file {str(path)!r} is empty")
    delimiter = max(",;\t", key=lines[0].count)
    return [[cell.strip() for cell in row] for row in csv.reader(lines, delimiter=delimiter)]


def _header(row: list[str]) -> list[str] | None:
    """Return a header in lower case, or None for data; a header names a label, or has a text as a feature."""
    names = [cell.lower() for cell in row]
    if _names_label(row):
        return names
    # An empty or "?" cell is a missing value, which is reported later.
    texts = [cell for cell in row[:-1] if cell not in ("", "?")]
    return names if any(not _is_number(cell) for cell in texts) else None


def _names_label(row: list[str]) -> bool:
    return any(cell.lower() in _LABEL_NAMES for cell in row)


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _number(cell: str) -> float:
    return float(cell) if _is_number(cell) else math.nan


def _encode_labels(cells: list[str], where: str) -> tuple[IntArray, int]:
    """Return the classes as numbers from 0, ordered by value (numbers) or alphabetically (texts)."""
    numeric = all(_is_number(cell) for cell in cells)
    values: AnyArray = np.asarray([float(cell) for cell in cells] if numeric else cells)
    if numeric and not (values == np.round(values)).all():
        raise DataError(
            f"{where}: labels must be whole numbers or texts; this looks like a regression target"
        )
    names, labels = np.unique(values, return_inverse=True)
    if len(names) < 2:
        raise DataError(f"{where}: there must be at least 2 classes, but every row has {cells[0]!r}")
    return labels.astype(np.int64), len(names)
