"""Which samples of a data set's files are used: some classes, a part of each, with or without a test part.

A selection comes first: what it leaves is then divided into training, test and public data.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import numpy as np

from flwr_kd.checks import DataError, whole_number
from flwr_kd.data._source import Part, Source
from flwr_kd.seeding import numpy_generator
from flwr_kd.text import shown

__all__ = ["Selection", "chosen_classes"]

_PIECE = re.compile(r"\s*([0-9]{1,9})\s*(?:-\s*([0-9]{1,9})\s*)?")


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Which samples of a data set are used, before it is divided.

    Parameters
    ----------
    classes : str, optional
        The classes that are kept, by their numbers in the set: ``"10"`` is the first ten, ``"0,3,5"`` and
        ``"10-19"`` are those named. They are numbered anew from 0, in ascending order. All if None.
    class_limit : int, optional
        Largest number of training samples of each class, drawn at random; all if None. In a set without a test
        part it is applied before one is divided off. Otherwise the test part stays whole.
    merge_test : bool
        The samples of the common test set are training samples as well, and the test set is empty. For papers that
        divide whole data sets among the clients, such as KT-pFL.
    held : int, optional
        Number of samples that are held back as public data, if any are; a fifth of the training part if None.

    Raises
    ------
    DataError
        If a value is not allowed. Whether the set has the classes and samples is checked when it is loaded.

    Examples
    --------
    >>> Selection(classes="10-12,3").numbers(26)
    [3, 10, 11, 12]
    """

    classes: str | None = None
    class_limit: int | None = None
    merge_test: bool = False
    held: int | None = None

    def __post_init__(self) -> None:
        if self.classes is not None:
            _parsed(self.classes)
        for name, value in (("class-limit", self.class_limit), ("hold-back", self.held)):
            if value is not None:
                whole_number(name, value, 1, error=DataError)
        if not isinstance(self.merge_test, bool):
            raise DataError(f"merge-test must be true or false, got {shown(self.merge_test)}")

    def numbers(self, num_classes: int) -> list[int]:
        """Return the numbers of the classes that are kept, ascending.

        Parameters
        ----------
        num_classes : int
            C; the set's classes are ``0 .. C - 1``.

        Raises
        ------
        DataError
            If one of them is not a class of the set.
        """
        if self.classes is None:
            return list(range(num_classes))
        return chosen_classes(self.classes, num_classes)

    def of(self, source: Source, seed: int) -> Source:
        """Return the selected samples of a set. The seed determines which ones ``class_limit`` keeps.

        Raises
        ------
        DataError
            If the set lacks a class that is named, or no sample of the named classes is left.
        """
        pool, test, num_classes = source.pool, source.test, source.num_classes
        names = source.class_names
        if self.classes is not None:
            if pool.all_labels is not None:
                raise DataError("classes cannot be chosen where samples have several labels")
            kept = self.numbers(num_classes)
            pool, num_classes = _of_classes(pool, kept), len(kept)
            test = None if test is None else _of_classes(test, kept)
            names = tuple(names[number] for number in kept) if names else ()
        if self.merge_test:
            empty = pool[np.zeros(len(pool), dtype=bool)]
            pool, test = (pool if test is None else _joined(pool, test)), empty
        if self.class_limit is not None:
            pool = _capped(pool, self.class_limit, seed)
        return replace(source, pool=pool, test=test, num_classes=num_classes, class_names=names)


def chosen_classes(text: str, num_classes: int) -> list[int]:
    """Return the numbers of the classes that a text names, ascending; see :class:`Selection`.

    Examples
    --------
    >>> chosen_classes("3", 10), chosen_classes("5,0", 10)
    ([0, 1, 2], [0, 5])
    >>> chosen_classes("8-11", 10)
    Traceback (most recent call last):
    flwr_kd.DataError: classes must be among the data set's 0 .. 9, got '8-11'
    """
    spans = _parsed(text)
    # The numbers of a range are counted before they are listed: it may be long.
    if spans[-1][1] >= num_classes:
        raise DataError(f"classes must be among the data set's 0 .. {num_classes - 1}, got {text!r}")
    return [number for low, high in spans for number in range(low, high + 1)]


def _parsed(text: object) -> list[tuple[int, int]]:
    """Return the first and the last number of each range that a text names, ascending and disjoint."""
    problem = DataError(
        "classes must be a number of classes from 2, such as 10, or at least two of their numbers, such as 0,3,5 "
        f"or 10-19, each once; got {shown(text)}"
    )
    if not isinstance(text, str):
        raise problem
    pieces = [_PIECE.fullmatch(piece) for piece in text.split(",")]
    spans = sorted((int(piece[1]), int(piece[2] or piece[1])) for piece in pieces if piece is not None)
    if len(spans) < len(pieces):
        raise problem
    if len(pieces) == 1 and "-" not in text:
        spans = [(0, spans[0][0] - 1)]
    ordered = all(low <= high for low, high in spans)
    disjoint = all(spans[i][1] < spans[i + 1][0] for i in range(len(spans) - 1))
    if not (ordered and disjoint) or sum(high - low + 1 for low, high in spans) < 2:
        raise problem
    return spans


def _of_classes(part: Part, numbers: list[int]) -> Part:
    kept = part[np.isin(part.labels, numbers)]
    return Part(kept.inputs, np.searchsorted(numbers, kept.labels).astype(np.int64), kept.columns)


def _joined(first: Part, second: Part) -> Part:
    inputs = np.concatenate([first.inputs, second.inputs])
    # What only one part says of its samples is not known of all.
    shared = [name for name in first.columns if name in second.columns]
    columns = {name: np.concatenate([first.columns[name], second.columns[name]]) for name in shared}
    several = None
    if first.all_labels is not None and second.all_labels is not None:
        several = np.concatenate([first.all_labels, second.all_labels])
    return Part(inputs, np.concatenate([first.labels, second.labels]), columns, several)


def _capped(part: Part, limit: int, seed: int) -> Part:
    rng = numpy_generator(seed, "data", "class-limit")
    kept = [rng.permutation(np.flatnonzero(part.labels == k))[:limit] for k in np.unique(part.labels)]
    return part[np.sort(np.concatenate(kept))]
