"""The columns of a data set of Hugging Face's library: which are inputs and labels, and their values."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from flwr_kd.checks import DataError
from flwr_kd.data._base import AnyArray, IntArray, require
from flwr_kd.data._csv import LABEL_WORDS, Table, check_features
from flwr_kd.data._image_files import decoded_from
from flwr_kd.data._images import LazyImage
from flwr_kd.data._source import Origin
from flwr_kd.data._tables import encode_labels
from flwr_kd.text import unknown_name

__all__ = ["Form", "HubImage", "form_of", "inputs_of", "kind_of", "labelled", "labels_of", "scalars_of"]

_TOKENS = "input_ids"
"""Name of the column that a tokenizer writes."""
_KINDS = {
    "class": "a class",
    "image": "an image",
    "number": "a number",
    "tensor": "numbers",
    "text": "a text",
    "other": "other",
}
"""Kinds of columns, in words for errors."""


@dataclass(frozen=True)
class Form:
    """What the columns are.

    Attributes
    ----------
    kind : str
        ``images``, ``tables`` or ``own`` (tensors).
    inputs : tuple of str
        One column of images or tensors, or the columns of a table.
    label : str
        The column of labels.
    chosen : bool
        Whether the user named the inputs.
    kinds : mapping of str to str
        Of all columns; see :func:`kind_of`.
    """

    kind: str
    inputs: tuple[str, ...]
    label: str
    chosen: bool
    kinds: Mapping[str, str]

    @property
    def tokens(self) -> bool:
        """Whether inputs are token ids."""
        return self.kind == "own" and self.inputs == (_TOKENS,)


class HubImage(LazyImage):
    """An image in a column, by its row.

    Attributes
    ----------
    origin : Origin
        The data set.
    """

    def __init__(self, column: Any, name: str, row: int, origin: Origin) -> None:
        self._column, self._name, self._row, self.origin = column, name, row, origin

    def decoded(self) -> Tensor:
        """Return it as ``[1 or 3, H, W]`` in [0, 1].

        Raises
        ------
        DataError
            If it is missing or cannot be read.
        """
        value = self._column[self._row][self._name]
        where = f"in row {self._row} of {self._name!r} of {self.origin}"
        if value is None:
            raise DataError(f"there is no image {where}: remove the row")
        content = Path(value["path"]) if value["bytes"] is None else io.BytesIO(value["bytes"])
        return decoded_from(content, where)


def kind_of(feature: Any) -> str:
    """Return what a column has: ``class``, ``image``, ``number``, ``tensor``, ``text`` or ``other``."""
    library = require("datasets", "hf")
    if isinstance(feature, library.ClassLabel):
        return "class"
    if isinstance(feature, library.Image):
        return "image"
    if isinstance(feature, library.Value):
        return _kind_of_dtype(feature.dtype)
    dtype = getattr(feature, "dtype", None)
    if type(feature).__name__ in ("Array2D", "Array3D", "Array4D", "Array5D"):
        return "tensor" if _kind_of_dtype(str(dtype)) == "number" else "other"
    inner = getattr(feature, "feature", None)
    if inner is None and isinstance(feature, list) and len(feature) == 1:
        inner = feature[0]
    return "tensor" if inner is not None and kind_of(inner) in ("number", "tensor") else "other"


def _kind_of_dtype(dtype: str) -> str:
    if dtype.startswith(("int", "uint", "float", "bool")):
        return "number"
    return "text" if dtype.endswith("string") else "other"


def form_of(
    features: Mapping[str, Any],
    origin: Origin,
    *,
    input: Sequence[str] = (),
    drop: Sequence[str] = (),
    label: str = "",
) -> Form:
    """Return which columns are inputs and labels.

    Parameters
    ----------
    features : mapping of str to feature
        Of a ``datasets.Dataset``.
    origin : Origin
        The data set, for errors.
    input, drop, label
        What the user names; found by the columns' kinds if empty.

    Raises
    ------
    DataError
        If a column is not there, has a kind that cannot be used, or if there are several that may be meant.
    """
    kinds = {column: kind_of(feature) for column, feature in features.items()}
    for column in (*input, *drop, *([label] if label else [])):
        if column not in kinds:
            raise DataError(f"{origin}: {unknown_name('column', column, kinds)}")
    label = label or _label_of(kinds, origin)
    if label in input:
        raise DataError(f"{origin}: the column {label!r} cannot be both an input and the label")
    if kinds[label] not in ("class", "number", "text"):
        raise DataError(
            f"{origin}: the label column {label!r} must have classes, whole numbers or texts, it has "
            f"{_KINDS[kinds[label]]}"
        )
    rest = {
        c: kind for c, kind in kinds.items() if c != label and c not in drop and (not input or c in input)
    }
    of_kind = {kind: [c for c, found in rest.items() if found == kind] for kind in _KINDS}
    unusable = [column for column in input if kinds[column] not in ("image", "number", "tensor")]
    if unusable:
        raise DataError(
            f"{origin}: the input {unusable[0]!r} must have images or numbers, it has "
            f"{_KINDS[kinds[unusable[0]]]}"
        )
    for kind, form in (("image", "images"), ("tensor", "own")):
        found = of_kind[kind]
        if len(found) > 1 or (found and input and len(input) > 1):
            raise DataError(
                f"{origin} has the inputs {', '.join(input or found)}, of which one is used: name it, for "
                f"example {origin.option('input', found[0])}"
            )
        if found:
            return Form(form, tuple(found), label, bool(input), kinds)
    if not of_kind["number"]:
        columns = ", ".join(f"{column} ({_KINDS[kind]})" for column, kind in kinds.items())
        hint = "; texts must be tokenized or embedded first, with dataset.map" if of_kind["text"] else ""
        raise DataError(
            f"{origin} needs a column of images or numbers beside the label {label!r}, it has {columns}{hint}"
        )
    numbers = tuple(input) or tuple(of_kind["number"])
    return Form("tables", numbers, label, bool(input), kinds)


def _label_of(kinds: Mapping[str, str], origin: Origin) -> str:
    """Return the column of the labels: the only one of classes, or one that is called so."""
    named = [
        c for c, kind in kinds.items() if c.lower() in LABEL_WORDS and kind in ("class", "number", "text")
    ]
    classes = [column for column, kind in kinds.items() if kind == "class"]
    found = [column for column in named if column in classes] or named or classes
    if len(found) == 1:
        return found[0]
    problem = (
        f"several columns may have the labels ({', '.join(found)})" if found else "no column has the labels"
    )
    choices = ", ".join(found or kinds)
    raise DataError(
        f"{origin}: {problem}: name one of {choices}, for example {origin.option('label', (found or [*kinds])[0])}"
    )


# ---------------------------------------------------------------------- values


def labelled(part: Any, form: Form) -> bool:
    """Return whether the rows of a split have labels: those of a contest's test data are -1 or missing."""
    if form.label not in part.features:
        return False
    values = _values(part, form.label)
    return bool(values) and all(value is not None and value != -1 for value in values)


def labels_of(
    parts: Sequence[Any], form: Form, origin: Origin, *, least: int = 2
) -> tuple[list[IntArray], tuple[str, ...]]:
    """Return the labels of each split, numbers from 0, and the names of the classes, at least ``least``.

    Raises
    ------
    DataError
        If a split has no such column, or a row has no label.
    """
    values: list[Any] = []
    for part in parts:
        if form.label not in part.features:
            raise DataError(f"{origin}: a split has no column {form.label!r}")
        values += _values(part, form.label)
    missing = next((row for row, value in enumerate(values) if value is None or value == ""), None)
    if missing is None and form.kinds[form.label] == "class":
        missing = next((row for row, value in enumerate(values) if value < 0), None)
    if missing is not None:
        raise DataError(
            f"{origin}: row {missing} has no label in {form.label!r} ({values[missing]!r}): remove it"
        )
    if form.kinds[form.label] == "class":
        labels, names = np.asarray(values, dtype=np.int64), tuple(parts[0].features[form.label].names)
        if any(tuple(part.features[form.label].names) != names for part in parts):
            raise DataError(f"{origin}: the splits have different classes in {form.label!r}")
    else:
        table = _table(np.empty((0, 0)), values, form, origin)
        labels, names = encode_labels(table, least)
    ends = np.cumsum([len(part) for part in parts])[:-1]
    return list(np.split(labels, ends)), names


def inputs_of(part: Any, form: Form, origin: Origin, *, labels: IntArray) -> AnyArray:
    """Return the inputs of a split: images that are not decoded, rows float64 ``[N, F]``, or tensors ``[N, ...]``.

    Raises
    ------
    DataError
        If a column is missing, a value is missing or not finite, or rows have different shapes.
    """
    absent = [column for column in form.inputs if column not in part.features]
    if absent:
        raise DataError(f"{origin}: a split has no column {absent[0]!r}")
    if form.kind == "images":
        return _images(part, form.inputs[0], origin)
    return _tensors(part, form, origin) if form.kind == "own" else _rows(part, form, origin, labels)


def _table(rows: AnyArray, labels: Sequence[Any], form: Form, origin: Origin) -> Table:
    path = Path(origin.name or "datasets.Dataset")
    return Table(rows, [str(label) for label in labels], range(len(labels)), path, repr(form.label))


def _images(part: Any, column: str, origin: Origin) -> AnyArray:
    coded = part.select_columns([column]).cast_column(column, require("datasets", "hf").Image(decode=False))
    images = np.empty(len(part), dtype=object)
    images[:] = [HubImage(coded, column, row, origin) for row in range(len(part))]
    return images


def _tensors(part: Any, form: Form, origin: Origin) -> AnyArray:
    (column,) = form.inputs
    array = _numbers(part, column, origin)
    _check_finite(array, [column], origin)
    if not form.tokens:
        return array.astype(np.float32)
    if array.size and not ((array == np.round(array)) & (array >= 0)).all():
        raise DataError(f"{origin}: {column!r} must be token ids, whole numbers from 0")
    return array.astype(np.int64)


def _rows(part: Any, form: Form, origin: Origin, labels: IntArray) -> AnyArray:
    rows = np.stack([_numbers(part, column, origin) for column in form.inputs], axis=1)
    _check_finite(rows, form.inputs, origin)
    if not form.chosen:
        remedy = "leave it out with drop=COLUMN in the data set's name" if origin.name else "leave it out"
        check_features(_table(rows, labels.tolist(), form, origin), form.inputs, remedy)
    return rows


def _numbers(part: Any, column: str, origin: Origin) -> AnyArray:
    try:
        values = part.select_columns([column]).with_format("numpy", dtype=np.float64)[:][column]
        return np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError):
        raise DataError(
            f"{origin}: the rows of {column!r} have different shapes or no value: pad or remove them"
        ) from None


def _check_finite(array: AnyArray, columns: Sequence[str], origin: Origin) -> None:
    bad = np.argwhere(~np.isfinite(array))
    if len(bad):
        column = columns[int(bad[0][1])] if len(columns) > 1 else columns[0]
        raise DataError(
            f"{origin}: row {bad[0][0]} of {column!r} has a value that is missing or not finite: fill it "
            "in, or remove the row"
        )


def scalars_of(part: Any, form: Form) -> dict[str, AnyArray]:
    """Return the columns that say more of each row, for natural partitions: texts, numbers and names of classes.

    Those of inputs, those with missing values, and numbers with a fraction are left out.
    """
    found = {}
    for column, kind in form.kinds.items():
        if column in (*form.inputs, form.label) or kind not in ("class", "number", "text"):
            continue
        values = _values(part, column)
        if any(value is None for value in values):
            continue
        if kind == "class":
            values = [part.features[column].int2str(value) if value >= 0 else "" for value in values]
        if any(isinstance(value, float) and not value.is_integer() for value in values):
            continue
        found[column] = np.asarray(values)
    return found


def _values(part: Any, column: str) -> list[Any]:
    values: list[Any] = part.with_format(None).select_columns([column]).to_dict()[column]
    return values
