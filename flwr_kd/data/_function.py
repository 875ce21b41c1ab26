"""A data set that a user's own function returns, by the function's name."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from flwr_kd.by_name import import_function
from flwr_kd.checks import ConfigError, DataError
from flwr_kd.data._base import AnyArray, as_labels
from flwr_kd.data._source import Part, Source
from flwr_kd.text import first_line


@dataclass(frozen=True)
class Samples:
    """What a function returns that ``--dataset package.module:function`` names.

    Parameters
    ----------
    x : ndarray
        Inputs ``[N, ...]``: floats, or token ids as int64. They are used as they are.
    y : ndarray
        Classes ``[N]``, whole numbers from 0; or, where samples have several labels each, ``[N, C]`` of 0 and 1.
    columns : mapping of str to ndarray
        What else is known of each sample, ``[N]``, such as the person that it comes from: for partitions
        ``natural:COLUMN``.
    test_x, test_y : ndarray, optional
        The common test set; a fifth of the samples if None.
    vocabulary : int
        Number of token ids; 0 where inputs are no token ids.

    Raises
    ------
    DataError
        If lengths differ, a value is not finite, or a label is neither.
    """

    x: AnyArray
    y: AnyArray
    columns: Mapping[str, AnyArray] = field(default_factory=dict)
    test_x: AnyArray | None = None
    test_y: AnyArray | None = None
    vocabulary: int = 0

    def __post_init__(self) -> None:
        if (self.test_x is None) is not (self.test_y is None):
            raise DataError("test_x and test_y must be given together")
        self.source()

    def source(self) -> Source:
        """Return the samples as other loaders do."""
        columns = {name: np.asarray(values) for name, values in self.columns.items()}
        pool, test = self._part(self.x, self.y, "", columns), None
        if self.test_x is not None and self.test_y is not None:
            test = self._part(self.test_x, self.test_y, "test_", {})
        parts = [pool] if test is None else [pool, test]
        widths = {None if part.all_labels is None else part.all_labels.shape[1] for part in parts}
        if len(widths) > 1:
            raise DataError("y and test_y must both be [N], or both [N, C]")
        (width,) = widths
        if width is not None:
            return Source(pool, test, width)
        highest = [int(part.labels.max()) for part in parts if len(part)]
        return Source(pool, test, max(highest) + 1 if highest else 0)

    def _part(self, x: AnyArray, y: AnyArray, prefix: str, columns: Mapping[str, AnyArray]) -> Part:
        inputs, labels = self._inputs(x, f"{prefix}x"), np.asarray(y)
        if labels.ndim != 2:
            return Part(inputs, as_labels(labels, f"{prefix}y"), columns)
        if labels.shape[1] < 2 or not ((labels == 0) | (labels == 1)).all():
            raise DataError(
                f"{prefix}y with shape {list(labels.shape)} must be 0 or 1 for each of at least two labels"
            )
        return Part.of_several(inputs, labels.astype(np.float32), columns)

    def _inputs(self, values: AnyArray, name: str) -> AnyArray:
        array = np.asarray(values)
        whole = array.dtype.kind in "iu" and self.vocabulary > 0
        if array.ndim < 2 or not (whole or array.dtype.kind in "fiub"):
            raise DataError(
                f"{name} must be numbers with shape [N, ...], not {array.dtype} {list(array.shape)}"
            )
        if whole:
            if array.size and not 0 <= array.min() <= array.max() < self.vocabulary:
                raise DataError(f"{name} must have token ids below vocabulary={self.vocabulary}")
            return array.astype(np.int64)
        if not np.isfinite(array).all():
            raise DataError(f"{name} has values that are not finite")
        return array.astype(np.float32)


@functools.lru_cache(maxsize=2)
def samples(name: str) -> Samples:
    """Return what a function by name returns; it is called once per process.

    Raises
    ------
    DataError
        If the function cannot be imported, fails, or returns something else.
    """
    try:
        found = import_function(name, "dataset")()
    except ConfigError as error:
        raise DataError(str(error)) from error
    except Exception as error:  # A user's own code may raise anything.
        raise DataError(f"dataset {name!r} failed ({type(error).__name__}: {first_line(error)})") from error
    if not isinstance(found, Samples):
        raise DataError(f"dataset {name!r} must return flwr_kd.data.Samples, got {type(found).__name__}")
    return found


def source(name: str) -> Source:
    """Return the data set of a function by name; see :func:`samples` for errors."""
    return samples(name).source()
