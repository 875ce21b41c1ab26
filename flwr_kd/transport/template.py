"""Names, dtypes and shapes of a model's arrays, and the checks of arrays against them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from flwr.app import ArrayRecord

from flwr_kd.transport.npy import as_record_array, read_array
from flwr_kd.transport.payload import DTYPES, PayloadError

__all__ = ["EMPTY", "ArrayTemplate", "GivenNames", "plain_name"]

NDArray = npt.NDArray[Any]
T = TypeVar("T")
VARIANCE = "running_var"
"""How the names of BatchNorm's variances end."""
_STATISTICS = ("running_mean", VARIANCE)
EMPTY = "_empty"
"""Name of the array that stands for no arrays."""
_COMPILED = "_orig_mod."
_LONGEST_TEMPLATE = 4 * 10**6
"""Characters: some 40,000 arrays."""


@dataclass(frozen=True)
class ArrayTemplate:
    """Names, dtypes and shapes of a model's arrays, in the server's order.

    Parameters
    ----------
    names : tuple of str
        Keys of the model's ``state_dict``.
    dtypes : tuple of str
        Names of numpy dtypes.
    shapes : tuple of tuple of int
        ``()`` for a counter such as BatchNorm's ``num_batches_tracked``.
    constants : mapping of str to ndarray
        The arrays that are not finite everywhere, such as a causal mask with -inf, which training does not change.
        A reply must have the same values there. Not compared.
    not_finite : tuple of str
        Their names, where a client named them in the handshake. Not compared.
    buffers : tuple of str
        Names of the arrays that are no parameters, where a client named them in the handshake. Not compared.
    """

    names: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()
    constants: Mapping[str, NDArray] = field(default_factory=dict, compare=False)
    not_finite: tuple[str, ...] = field(default=(), compare=False)
    buffers: tuple[str, ...] = field(default=(), compare=False)

    @classmethod
    def of(cls, record: ArrayRecord) -> ArrayTemplate:
        """Read the template of the caller's own arrays, with the names that they have without ``torch.compile``.

        Raises
        ------
        PayloadError
            If an array's bytes are not a numpy array.
        """
        arrays = {name: read_array(name, value) for name, value in record.items() if name != EMPTY}
        return cls.of_ndarrays({plain_name(name): value for name, value in arrays.items()})

    @classmethod
    def of_ndarrays(cls, arrays: Mapping[str, NDArray], buffers: Sequence[str] = ()) -> ArrayTemplate:
        """Return the template of named numpy arrays, some of which may be ``buffers``."""
        constants = {
            name: value.copy()
            for name, value in arrays.items()
            if value.dtype.kind == "f" and not np.isfinite(value).all()
        }
        return cls(
            tuple(arrays),
            tuple(value.dtype.name for value in arrays.values()),
            tuple(value.shape for value in arrays.values()),
            constants,
            tuple(constants),
            tuple(buffers),
        )

    @property
    def parameters(self) -> tuple[int, ...]:
        """Positions of the arrays that training moves, for distances between models and mixtures of them.

        These are the float arrays but BatchNorm's running statistics and those with values that are not finite. A
        float buffer of another kind counts as a parameter: names and shapes do not tell them apart.
        """
        return tuple(
            i
            for i, (name, dtype) in enumerate(zip(self.names, self.dtypes, strict=True))
            if dtype.startswith("float") and not name.endswith(_STATISTICS) and name not in self.constants
        )

    def size(self, *, without: Collection[str] = ()) -> int:
        """Return the number of values in all arrays, or in all but some.

        >>> ArrayTemplate.of_ndarrays({"a": np.zeros((2, 3)), "b": np.zeros(4)}).size(without=["b"])
        6
        """
        return sum(
            math.prod(shape)
            for name, shape in zip(self.names, self.shapes, strict=True)
            if name not in without
        )

    def to_json(self) -> str:
        """Return the template as text, for the handshake."""
        more = [self.not_finite, self.buffers] if self.not_finite or self.buffers else []
        return json.dumps([self.names, self.dtypes, self.shapes, *more])

    @classmethod
    def from_json(cls, text: object) -> ArrayTemplate:
        """Read :meth:`to_json`'s text.

        Raises
        ------
        PayloadError
            If it is anything else.
        """
        if isinstance(text, str) and len(text) > _LONGEST_TEMPLATE:
            raise PayloadError(f"'arrays' has {len(text)} characters, more than {_LONGEST_TEMPLATE}")
        try:
            names, dtypes, shapes, *more = json.loads(text)  # type: ignore[arg-type]
            not_finite, buffers = (*more, (), ())[:2]
            template = cls(
                tuple(str(name) for name in names),
                tuple(str(dtype) for dtype in dtypes),
                tuple(tuple(int(size) for size in shape) for shape in shapes),
                not_finite=tuple(str(name) for name in not_finite),
                buffers=tuple(str(name) for name in buffers),
            )
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise PayloadError(f"'arrays' is not a list of names, dtypes and shapes ({error})") from None
        if not len(template.names) == len(template.dtypes) == len(template.shapes):
            raise PayloadError("'arrays' has lists of different lengths")
        if unknown := sorted(set(template.dtypes) - set(DTYPES)):
            raise PayloadError(f"'arrays' has dtypes {str(unknown)[:80]}, allowed are {', '.join(DTYPES)}")
        return template

    def difference(self, other: ArrayTemplate) -> str | None:
        """Say in one line how another model differs in names or shapes; None where it does not.

        The order of the names does not matter: arrays are matched by name.
        """
        return self.difference_in_shapes(dict(zip(other.names, other.shapes, strict=True)))

    def difference_in_shapes(self, theirs: Mapping[str, tuple[int, ...]]) -> str | None:
        """Return the same as :meth:`difference` for the shapes of named arrays."""
        mine = dict(zip(self.names, self.shapes, strict=True))
        missing, extra = sorted(mine.keys() - theirs.keys()), sorted(theirs.keys() - mine.keys())
        if missing or extra:
            return f"arrays missing {missing[:3]}, not expected {extra[:3]}"
        for name, shape in mine.items():
            if theirs[name] != shape:
                return f"array {name!r} has shape {list(theirs[name])}, expected {list(shape)}"
        return None

    def record(self, arrays: Sequence[NDArray]) -> ArrayRecord:
        """Name the arrays, with the constants, so that ``to_torch_state_dict()`` of the record loads."""
        named = zip(self.names, self.restored(arrays), strict=True)
        return ArrayRecord({name: as_record_array(array) for name, array in named})

    def finite(self, arrays: Sequence[NDArray]) -> list[NDArray]:
        """Return the arrays with 0 in place of the constants that are not finite, for maths on whole models."""
        return [
            np.where(np.isfinite(own), array, array.dtype.type(0)) if own is not None else array
            for array, own in self._with_constants(arrays)
        ]

    def restored(self, arrays: Sequence[NDArray]) -> list[NDArray]:
        """Return the arrays with the constants in their places; the counterpart of :meth:`finite`."""
        return [
            np.where(np.isfinite(own), array, own) if own is not None else array
            for array, own in self._with_constants(arrays)
        ]

    def _with_constants(self, arrays: Sequence[NDArray]) -> list[tuple[NDArray, NDArray | None]]:
        return [(array, self.constants.get(name)) for name, array in zip(self.names, arrays, strict=True)]

    def in_order(self, arrays: Sequence[NDArray], names: Sequence[str]) -> list[NDArray]:
        """Return named arrays in the template's order.

        Raises
        ------
        PayloadError
            If the names are others.
        """
        named = dict(zip(names, arrays, strict=True))
        if named.keys() != set(self.names):
            missing, extra = sorted(set(self.names) - named.keys()), sorted(named.keys() - set(self.names))
            raise PayloadError(
                f"arrays missing {missing[:3]}, not expected {[name[:80] for name in extra[:3]]}"
            )
        return [named[name] for name in self.names]

    def check(self, arrays: Sequence[NDArray]) -> list[NDArray]:
        """Check a reply's arrays and bring them to the template's dtypes and shapes.

        A counter that comes back with shape ``(1,)`` or as a whole float is corrected; any other difference is
        refused.

        Raises
        ------
        PayloadError
            If number, shapes or kinds differ, a float is not finite and no constant, or a running variance is
            negative.
        """
        if len(arrays) != len(self.names):
            raise PayloadError(f"{len(arrays)} arrays came back, expected {len(self.names)}")
        return [self._fit(i, array) for i, array in enumerate(arrays)]

    def _fit(self, index: int, array: NDArray) -> NDArray:
        name, dtype, shape = self.names[index], np.dtype(self.dtypes[index]), self.shapes[index]
        if array.shape != shape and not (shape == () and array.shape == (1,)):
            raise PayloadError(f"array {name!r} has shape {list(array.shape)}, expected {list(shape)}")
        if array.dtype.kind not in "fiub":
            raise PayloadError(f"array {name!r} has dtype {array.dtype.name}, expected {dtype.name}")
        array = array.reshape(shape)
        if array.dtype.kind == "f":
            self._check_finite(name, array)
        cast = array if array.dtype == dtype else _cast(name, array, dtype)
        # BatchNorm takes its root: one client's negative variance would make the mean's outputs NaN.
        if name.endswith(VARIANCE) and dtype.kind == "f" and (cast < 0).any():
            raise PayloadError(
                f"array {name!r} has negative values, down to {cast.min():g}; it holds variances"
            )
        return cast

    def _check_finite(self, name: str, array: NDArray) -> None:
        finite, own = np.isfinite(array), self.constants.get(name)
        if own is None:
            if not finite.all():
                raise PayloadError(f"array {name!r} has values that are not finite")
            return
        same = (array == own) | (np.isnan(array) & np.isnan(own))
        if not (same | (finite & np.isfinite(own))).all():
            raise PayloadError(
                f"array {name!r} has values that are not finite, or not those of the server's array"
            )


def _cast(name: str, array: NDArray, dtype: np.dtype[Any]) -> NDArray:
    with np.errstate(over="ignore", invalid="ignore"):
        cast = array.astype(dtype)
    if dtype.kind in "iub" and not np.array_equal(cast, array):
        raise PayloadError(f"array {name!r} has values that are not whole, expected {dtype.name}")
    if dtype.kind == "f" and not np.array_equal(np.isfinite(cast), np.isfinite(array)):
        raise PayloadError(f"array {name!r} has values beyond {dtype.name}")
    return cast


def plain_name(name: str) -> str:
    """Return the name that an array of a model has without ``torch.compile``.

    >>> plain_name("_orig_mod.head._orig_mod.weight")
    'head.weight'
    """
    return name.replace(_COMPILED, "")


class GivenNames:
    """The names that a caller's arrays have, for what is handed back: those of a compiled model, where it is one.

    Examples
    --------
    >>> compiled = ArrayRecord({"_orig_mod.bias": as_record_array(np.zeros(2))})
    >>> names = GivenNames(compiled)
    >>> list(names.plain(compiled)), list(names.given(names.plain(compiled)))
    (['bias'], ['_orig_mod.bias'])
    """

    def __init__(self, arrays: ArrayRecord) -> None:
        self._names = {plain_name(name): name for name in arrays if _COMPILED in name}

    def plain(self, arrays: ArrayRecord) -> ArrayRecord:
        """Return a record of the same arrays, by their names without ``torch.compile``."""
        return ArrayRecord({plain_name(name): value for name, value in arrays.items()})

    def given(self, arrays: ArrayRecord) -> ArrayRecord:
        """Return arrays by the names that the caller's have."""
        if not self._names:
            return arrays
        return ArrayRecord({self._names.get(name, name): value for name, value in arrays.items()})

    def for_caller(self, function: Callable[[int, ArrayRecord], T]) -> Callable[[int, ArrayRecord], T]:
        """Return a caller's function of a round and its arrays, which gets them by the caller's names."""
        return lambda server_round, arrays: function(server_round, self.given(arrays))
