"""Tables of numbers from csv files: the one reader for ``csv:PATH`` and for clients' own data.

The reader accepts what has one meaning, and refuses the rest with the row and what to do: a table that is read in
another way than it was meant gives wrong numbers without a word.
"""

from __future__ import annotations

import csv
import itertools
import re
from array import array
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import numpy as np

from flwr_kd.checks import DataError, plain_number
from flwr_kd.data._base import AnyArray
from flwr_kd.data._files import check_regular
from flwr_kd.text import shown
from flwr_kd.wording import warn_once

__all__ = ["LABEL_WORDS", "Table", "check_features", "read_table"]

_LABEL_NAMES = ("label", "target", "class")
LABEL_WORDS = frozenset({*_LABEL_NAMES, "labels", "targets", "classes"})

# What pandas and R read as missing, and further usual spellings, in lower case.
_MISSING = frozenset(
    {"", "?", ".", "na", "n/a", "<na>", "#n/a", "#n/a n/a", "#na", "nan", "-nan", "+nan", "nat", "null"}
    | {"1.#ind", "-1.#ind", "1.#qnan", "-1.#qnan", "#null!", "#div/0!", "#value!", "#ref!", "#num!", "#name?"}
)
# "none" may well be a class.
_MISSING_AS_WRITTEN = frozenset({"None"})

# Names of columns that number the rows, without what is no letter or digit.
_INDEX_NAMES = frozenset(
    {"index", "idx", "id", "rowid", "rowindex", "rownumber", "rowname", "rownames", "level0"}
)
# In shorter tables, consecutive or distinct numbers happen by chance.
_TELLING_ROWS = 10

# A starting digit of any script, after a sign; or infinity.
_NUMBER_LIKE = re.compile(r"[-+−]?([.,]?\d|inf(inity)?$)", re.IGNORECASE)

_DELIMITERS = ",;\t"
_LONGEST_LINE = 2**24
"""Characters; a longer line is refused before it is read."""


@dataclass(frozen=True)
class Table:
    """Rows of numbers, and the label of each row as text.

    Attributes
    ----------
    features : ndarray
        Finite, float64, ``[N, F]``.
    labels : list of str
        ``[N]``; empty if the file has none.
    rows : sequence of int
        The line of each sample in the file, ``[N]``.
    path : Path
        The file.
    label_title : str
        The label column's name in quotation marks or its number, for error messages; empty without labels.
    """

    features: AnyArray
    labels: list[str]
    rows: Sequence[int]
    path: Path
    label_title: str

    @property
    def where(self) -> str:
        """File and column of the labels, for error messages."""
        return f"{self.path}, column {self.label_title}"

    def where_of(self, sample: int) -> str:
        """File, row and column of a sample's label, for error messages."""
        return f"{self.path}, row {self.rows[sample]}, column {self.label_title}"


@dataclass(frozen=True)
class _Form:
    """The columns of a table: their names (None without a header), and which has the labels (None without)."""

    path: Path
    width: int
    names: list[str] | None
    label: int | None

    @property
    def features(self) -> list[int]:
        return [column for column in range(self.width) if column != self.label]

    def title(self, column: int | None) -> str:
        if column is None:
            return ""
        return repr(self.names[column]) if self.names is not None else str(column)


def read_table(path: Path, *, unlabelled: int | None = None, classes: Collection[str] = ()) -> Table:
    """Read a table of finite numbers with one column of labels, found by its header or as the last one.

    Parameters
    ----------
    path : Path
        See :func:`flwr_kd.data.load` for its form.
    unlabelled : int, optional
        A file with this number of columns has no labels, unless its header names a label column.
    classes : collection of str
        Labels that are known, and are therefore no missing values, whatever they look like.

    Raises
    ------
    DataError
        If the file cannot be read, has too few rows or columns, a cell that is not a number or label, or columns
        whose meaning is not certain.
    """
    try:
        check_regular(path)
        with open(path, encoding="utf-8-sig", newline="") as file:
            rows = _rows(path, file)
            first = next(rows, None)
            if first is None:
                raise DataError(f"csv file {str(path)!r} is empty")
            form = _form(path, first[1], unlabelled)
            table = _body(form, rows if form.names is not None else itertools.chain([first], rows), classes)
    except (OSError, UnicodeDecodeError) as error:
        hint = "; save it as UTF-8" if isinstance(error, UnicodeDecodeError) else ""
        raise DataError(f"csv file {str(path)!r} cannot be read: {error}{hint}") from error
    _check_not_a_header(form, first[1], table, classes)
    _check_row_numbers(form, table)
    _warn_of_labels(form, table)
    return table


# ---------------------------------------------------------------------- cells


def _rows(path: Path, file: TextIO) -> Iterator[tuple[int, list[str]]]:
    """Yield the line number and the cells of each row that is not blank."""
    delimiter = _delimiter(path, file)
    file.seek(0)
    reader = csv.reader(_lines(path, file), delimiter=delimiter, skipinitialspace=True, strict=True)
    try:
        for row in reader:
            cells = [cell.strip() for cell in row]
            if any("\n" in cell or "\r" in cell for cell in cells):
                raise csv.Error("a cell goes over several lines")
            if cells not in ([], [""]):
                yield reader.line_num, cells
    except csv.Error as error:
        raise DataError(f"{path}, row {reader.line_num}: {error}; is a quotation mark missing?") from error


def _lines(path: Path, file: TextIO) -> Iterator[str]:
    for number in itertools.count(1):
        line = file.readline(_LONGEST_LINE)
        if not line:
            return
        if len(line) == _LONGEST_LINE:
            raise DataError(f"{path}, row {number} has over {_LONGEST_LINE:,} characters")
        if "\0" in line:
            raise DataError(f"{path}, row {number} has a NUL byte, so it is no csv file in UTF-8")
        yield line


def _delimiter(path: Path, file: TextIO) -> str:
    """Return the delimiter that the first two rows have equally often, outside of quotation marks."""
    first = list(itertools.islice((line for line in _lines(path, file) if line.strip()), 2))
    counts = {
        delimiter: [re.sub(r'"[^"]*"', "", line).strip("\r\n").count(delimiter) for line in first]
        for delimiter in _DELIMITERS
    }
    occurring = [delimiter for delimiter, numbers in counts.items() if numbers and numbers[0]]
    consistent = [delimiter for delimiter in occurring if len(set(counts[delimiter])) == 1]
    if len(consistent) > 1:
        raise DataError(
            f"{path}, row 1: the cells may be separated by {' or '.join(map(repr, consistent))}; write decimals "
            "with a point, and texts that have a separator in quotation marks"
        )
    return (consistent or occurring or [","])[0]


# ---------------------------------------------------------------------- the header


def _form(path: Path, row: list[str], unlabelled: int | None) -> _Form:
    width = len(row)
    if row[0].lower().startswith("sep="):
        raise DataError(
            f"{path}, row 1: {','.join(row)!r} is a note for Excel and no header: remove the line"
        )
    named = [column for column, cell in enumerate(row) if cell.lower() in LABEL_WORDS]
    labelled = bool(named) or width != unlabelled
    if len(named) > 1:
        titles = " and ".join(repr(row[column]) for column in named)
        raise DataError(f"{path} has the columns {titles}, which all name labels: keep one of them")
    label = (named[0] if named else width - 1) if labelled else None
    is_header = bool(named) or any(
        not _is_missing(cell) and not _NUMBER_LIKE.match(cell)
        for column, cell in enumerate(row)
        if column != label
    )
    numbers_rows = row[0] == "" and row[1:] == [str(column) for column in range(width - 1)]
    if is_header or numbers_rows:
        _check_names(path, row)
    if is_header and labelled:
        _check_label_names(path, row, named)
    return _Form(path, width, row if is_header else None, label)


def _check_names(path: Path, names: list[str]) -> None:
    if names[0] == "" or names[0].lower().startswith("unnamed:"):
        raise DataError(
            f"{path}: the first column has no name, so it is an index of the rows and no feature: remove it (in "
            "pandas: to_csv(..., index=False), in R: row.names=FALSE), or name it"
        )
    for column, name in enumerate(names):
        if not name:
            raise DataError(
                f"{path}: column {column} of the header has no name: name it, or remove the column"
            )
        if name in names[:column]:
            raise DataError(f"{path}: the header has the name {shown(name)} twice: rename or remove a column")


def _check_label_names(path: Path, names: list[str], named: list[int]) -> None:
    """Refuse or warn of further columns that may have labels, such as those of a one-hot code."""
    words = [re.split(r"[^a-z0-9]+", name.lower()) for name in names]
    like = [c for c, parts in enumerate(words) if c not in named and {parts[0], parts[-1]} & LABEL_WORDS]
    titles = " and ".join(repr(names[column]) for column in like[:5])
    if named:
        if like:
            warn_once(f"{path}: {titles} is used as a feature beside the labels: remove it if it is none")
        return
    like += [column for column, name in enumerate(names) if name.lower() == "y"]
    if len(like) > 1 or like not in ([], [len(names) - 1]):
        titles = titles or "'y'"
        raise DataError(
            f"{path}: {titles} may have the labels, or the last column, {names[-1]!r}: keep one column of labels, "
            "and name it 'label'"
        )


def _check_not_a_header(form: _Form, first: list[str], table: Table, classes: Collection[str]) -> None:
    """Refuse a first row that may be a header of column numbers, such as pandas writes."""
    if form.names is not None:
        return
    # A label of its own beside column numbers is the label column's name.
    named = bool(table.labels) and table.labels.count(table.labels[0]) == 1 and table.labels[0] not in classes
    beside = first[:-1] if named and (first[0] == "0" or form.width > 3) else first
    if first == ["0", "1"] or (form.width > 2 and _count_up(beside)):
        raise DataError(
            f"{form.path}, row 1: {', '.join(first)[:80]} may be a header of column numbers or a sample; add a "
            f"header of names, one of them {' or '.join(map(repr, _LABEL_NAMES))} (in pandas: df.columns = [...])"
        )


def _count_up(cells: list[str]) -> bool:
    """Return whether cells are consecutive whole numbers, as the columns of a table are numbered."""
    start = plain_number(cells[0])
    if start is None or not start.is_integer():
        return False
    return [plain_number(cell) for cell in cells] == [start + place for place in range(len(cells))]


# ---------------------------------------------------------------------- the body


def _body(form: _Form, rows: Iterator[tuple[int, list[str]]], classes: Collection[str]) -> Table:
    columns, labelled = form.features, form.label is not None
    values, labels, numbers = array("d"), [], array("q")
    for number, row in rows:
        if len(row) != form.width:
            raise DataError(
                f"{form.path}, row {number} has {len(row)} cells, but the first row has {form.width}"
                f"{_why_not_as_wide(form, len(row)) if len(numbers) < 2 else ''}"
            )
        for column in columns:
            value = plain_number(row[column])
            if value is None:
                where = f"{form.path}, row {number}, column {form.title(column)}"
                raise DataError(f"{where}: {shown(row[column])} is not a finite number ({_why(row[column])})")
            values.append(value)
        if form.label is not None:
            labels.append(_label(row[form.label], f"{form.path}, row {number}", form, classes))
        numbers.append(number)
    if form.width < 1 + labelled or not numbers:
        need = "one label column and " if labelled else ""
        hint = "; cells must be separated by commas, semicolons or tabs" if form.width == 1 else ""
        raise DataError(f"{form.path} must have at least one feature, {need}one row of data{hint}")
    features = np.frombuffer(values).reshape(len(numbers), len(columns))
    return Table(features, labels, numbers, form.path, form.title(form.label))


def _label(cell: str, where: str, form: _Form, classes: Collection[str]) -> str:
    if cell in classes:
        return cell
    where = f"{where}, column {form.title(form.label)}"
    if _is_missing(cell):
        raise DataError(
            f"{where}: a row has no label ({shown(cell)} means a missing value); remove the row, or give the class "
            "another name"
        )
    if plain_number(cell) is None and _python_reads(cell):
        raise DataError(
            f"{where}: the label {shown(cell)} is not a plain number; write it with the digits 0 to 9"
        )
    return cell


def _is_missing(cell: str) -> bool:
    return cell.lower() in _MISSING or cell in _MISSING_AS_WRITTEN


def _python_reads(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _why_not_as_wide(form: _Form, width: int) -> str:
    if form.names is not None and width == form.width + 1:
        return ": the header must name every column, and rows need no names (in R: row.names=FALSE)"
    return ": it must be a header or a sample, and comments are not allowed" if form.width == 1 else ""


def _why(cell: str) -> str:
    if _is_missing(cell):
        return "a missing value: fill it in, or remove the row"
    if re.fullmatch(r"[-+]?\d*,\d+", cell):
        return "decimals must be written with a point"
    if re.fullmatch(r"[-+]?\d{1,3}(,\d{3})+(\.\d*)?", cell):
        return "numbers must be written without separators of thousands"
    if cell.lower() in ("true", "false"):
        return "features must be numbers: write 1 and 0"
    return "features must be numbers, only the label may be text"


# ---------------------------------------------------------------------- columns that give the label away


def check_features(table: Table, names: Sequence[str], remedy: str) -> None:
    """Refuse or warn of features that give the labels away, in a table that was read elsewhere.

    Parameters
    ----------
    table : Table
        Rows of numbers and their labels.
    names : sequence of str
        The features' names, ``[F]``.
    remedy : str
        What the user can do, in errors and warnings.

    Raises
    ------
    DataError
        If a column is named as an index of the rows and is one.
    """
    form = _Form(table.path, len(names) + 1, [*names, ""], len(names))
    _check_row_numbers(form, table, remedy)
    _warn_of_labels(form, table, remedy)


_REMOVE, _OF_PANDAS = "remove it", " (in pandas: to_csv(..., index=False))"


def _check_row_numbers(form: _Form, table: Table, remedy: str = "") -> None:
    """Refuse a column that is named as a row index and is one; warn of one that only looks like it."""
    count = len(table.rows)
    for j, column in enumerate(form.features):
        values, name = table.features[:, j], form.names[column] if form.names is not None else ""
        is_index = re.sub(r"[^a-z0-9]", "", name.lower()) in _INDEX_NAMES
        consecutive = count > 1 and _numbers_rows(values)
        distinct = is_index and count >= _TELLING_ROWS and len(np.unique(values)) == count
        if not (consecutive or distinct):
            continue
        text = (
            f"{form.path}, column {form.title(column)} numbers the rows from {values.min():.0f} to "
            f"{values.max():.0f}, and may give their labels away"
        )
        if is_index:
            raise DataError(f"{text}: {remedy or _REMOVE + _OF_PANDAS}")
        if count >= _TELLING_ROWS:
            warn_once(f"{text}: {remedy or _REMOVE} if it is no feature")


def _numbers_rows(values: AnyArray) -> bool:
    """Return whether whole numbers are consecutive, in any order, or ascending without a repetition."""
    if values.max() - values.min() != len(values) - 1 and not (np.diff(values) > 0).all():
        return False
    return bool((values == np.round(values)).all()) and len(np.unique(values)) == len(values)


def _warn_of_labels(form: _Form, table: Table, remedy: str = "") -> None:
    """Warn of a column of whole numbers that has one value per class, and another for each: the labels again."""
    if len(table.labels) < 2 * _TELLING_ROWS:
        return
    names, labels = np.unique(table.labels, return_inverse=True)
    for j, column in enumerate(form.features):
        # Most columns are ruled out by their first rows.
        if all(_renames(table.features[:rows, j], labels[:rows]) for rows in (100, None)) and len(names) > 1:
            warn_once(
                f"{form.path}, column {form.title(column)} has one value for each of {len(names)} classes, like "
                f"the labels {table.label_title} under another name: {remedy or _REMOVE} if it is no feature"
            )


def _renames(values: AnyArray, labels: AnyArray) -> bool:
    """Return whether whole numbers and labels determine each other."""
    if not (values == np.round(values)).all():
        return False
    pairs = len(np.unique(np.stack([values, labels]), axis=1).T)
    return pairs == len(np.unique(values)) == len(np.unique(labels))
