"""Typed messages to bytes and back: what clients and server send each other besides weights.

A payload is a frozen dataclass of named arrays and scalars. Its bytes are a `safetensors` file (no pickle),
whose metadata holds the message's name and schema version. Decoding trusts nothing: name, version, fields,
dtypes and shapes must be what the receiver expects, and floats must be finite.

Examples
--------
>>> import numpy as np
>>> @dataclass(frozen=True, eq=False)
... class SoftPredictions(Payload, schema="example.soft-predictions", version=1):
...     probabilities: np.ndarray = array("float32", "N C")
...     temperature: float = 1.0
>>> sent = SoftPredictions(np.full((2, 4), 0.25, dtype=np.float32))
>>> received = SoftPredictions.from_bytes(sent.to_bytes(), dims={"C": 4})
>>> received == sent
True
>>> SoftPredictions.from_bytes(sent.to_bytes(), dims={"C": 10})
Traceback (most recent call last):
flwr_kd.PayloadError: example.soft-predictions: field 'probabilities' has shape [2, 4], expected [N=2, C=10]
"""

from __future__ import annotations

import dataclasses
import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, deserialize
from safetensors.numpy import save
from typing_extensions import TypeVar

__all__ = [
    "LIMIT",
    "MAX_PAYLOAD_BYTES",
    "SAFETENSORS_DTYPES",
    "ArraySpec",
    "Payload",
    "PayloadError",
    "PayloadT",
    "array",
    "check_magnitude",
    "magnitude",
    "read_metadata",
]

MAX_PAYLOAD_BYTES = 256 * 1024**2
"""Default of the largest payload in bytes. Flower chunks arrays, but not config records."""
DTYPES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64"),
)
_POSITIONS = 2**31
_ONES = np.array([bin(byte).count("1") for byte in range(256)], dtype=np.uint8)
SAFETENSORS_DTYPES = {
    **{"BOOL": "bool", "F16": "float16", "F32": "float32", "F64": "float64"},
    **{f"I{bits}": f"int{bits}" for bits in (8, 16, 32, 64)},
    **{f"U{bits}": f"uint{bits}" for bits in (8, 16, 32, 64)},
}
"""numpy's names of the dtypes of :data:`DTYPES`, by those of safetensors."""
LIMIT = 65504.0
"""Largest absolute value of a feature, prototype or representation: float16's."""


class PayloadError(ValueError):
    """A message, or something in it, is not what the receiver expects or the sender may send."""


@dataclass(frozen=True)
class ArraySpec:
    """Expected dtype and shape of an array field.

    Parameters
    ----------
    dtype : str
        Name of a numpy dtype (one of bool, int8-64, uint8-64, float16-64), several joined by ``|``, or ``"*"``
        for any of these.
    shape : tuple of str
        One entry per axis: a number, or a letter that must mean the same size in all fields of the message.
        A last entry ``"..."`` admits any further axes.
    positions : bool
        Whether the values are positions, ``[K]``, ascending from 0, each once. They travel as a bit for each place
        up to the last, an eighth of a byte where the array itself has eight bytes for each value.
    """

    dtype: str
    shape: tuple[str, ...]
    positions: bool = False

    def describe(self, dims: Mapping[str, int]) -> str:
        """Return the shape for an error message, with the sizes that are known."""
        return "[" + ", ".join(f"{d}={dims[d]}" if d in dims else d for d in self.shape) + "]"


def array(dtype: str, shape: str, *, positions: bool = False) -> Any:
    """Declare an array field of a :class:`Payload`, for example ``array("float32", "N C")``.

    For ``positions`` see :class:`ArraySpec`.
    """
    axes = tuple(shape.split())
    if positions and (dtype != "int64" or len(axes) != 1):
        raise TypeError(f"positions must be int64 with one axis, got {dtype!r} and {shape!r}")
    if dtype != "*" and not set(dtype.split("|")) <= set(DTYPES):
        raise TypeError(f"dtype must be '*' or one of {', '.join(DTYPES)}, got {dtype!r}")
    return dataclasses.field(metadata={"array": ArraySpec(dtype, axes, positions)})


class Payload:
    """Base of all messages; see the module's example for how one is written.

    Subclasses are declared with ``@dataclass(frozen=True, eq=False)`` and the class arguments ``schema`` (the
    message's name, unique) and ``version`` (raised when fields change). Fields are arrays, made by
    :func:`array`, and scalars of type int, float, bool or str. :meth:`check` may add rules of its own.

    Raises
    ------
    PayloadError
        At construction, encoding and decoding alike, if a field is not of its declared kind.
    """

    schema: ClassVar[str] = ""
    version: ClassVar[int] = 1
    hint: ClassVar[str] = ""
    """What would make the message smaller; shown when it is too large."""

    def __init_subclass__(cls, schema: str = "", version: int = 1, hint: str = "") -> None:
        cls.schema, cls.version, cls.hint = schema, version, hint

    def __post_init__(self) -> None:
        self._validate({})

    def check(self) -> None:
        """Raise :class:`PayloadError` where fields contradict each other; nothing to check by default."""

    @property
    def nbytes(self) -> int:
        """Size of the encoded message in bytes."""
        return len(self.to_bytes(max_bytes=None))

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        assert isinstance(other, Payload)
        return all(_same(a, b) for a, b in zip(self._values(), other._values(), strict=True))

    __hash__ = None  # type: ignore[assignment]

    def to_bytes(self, *, max_bytes: int | None = MAX_PAYLOAD_BYTES) -> bytes:
        """Encode the message.

        Parameters
        ----------
        max_bytes : int or None
            Largest size allowed; None for no limit.

        Raises
        ------
        PayloadError
            If the message is larger; the text names the size, the largest field and what would help.
        """
        arrays = {
            n: _bits(getattr(self, n))
            if spec.positions
            else np.ascontiguousarray(getattr(self, n)).reshape(np.shape(getattr(self, n)))
            for n, spec in _specs(type(self)).items()
        }
        size = sum(value.nbytes for value in arrays.values())
        if max_bytes is not None and size > max_bytes:
            largest = max(arrays, key=lambda name: arrays[name].nbytes)
            raise PayloadError(
                f"{self.schema}: {size / 1024**2:.1f} MiB is more than max_payload_bytes = "
                f"{max_bytes / 1024**2:.1f} MiB; largest field {largest!r} {list(arrays[largest].shape)} has "
                f"{arrays[largest].nbytes / 1024**2:.1f} MiB" + (f"; {self.hint}" if self.hint else "")
            )
        scalars = {name: getattr(self, name) for name in _scalars(type(self))}
        metadata = {"schema": self.schema, "version": str(self.version), "scalars": json.dumps(scalars)}
        return save(arrays, metadata=metadata)

    @classmethod
    def max_nbytes(cls, dims: Mapping[str, int], *, others: int) -> int | None:
        """Return the largest number of bytes that the arrays can have; None if that is not fixed.

        Parameters
        ----------
        dims : mapping of str to int
            Sizes that are known, by the letters of the array fields' shapes.
        others : int
            Largest size of an axis that is not in ``dims``.
        """
        total = 0
        for item in dataclasses.fields(cls):  # type: ignore[arg-type]
            spec = item.metadata.get("array")
            if spec is None:
                continue
            if "..." in spec.shape:
                return None
            kinds = DTYPES if spec.dtype == "*" else spec.dtype.split("|")
            sizes = [int(axis) if axis.isdigit() else dims.get(axis, others) for axis in spec.shape]
            total += max(np.dtype(kind).itemsize for kind in kinds) * math.prod(sizes)
        return total

    @classmethod
    def from_bytes(
        cls,
        data: bytes,
        *,
        dims: Mapping[str, int] | None = None,
        max_bytes: int | None = MAX_PAYLOAD_BYTES,
    ) -> Self:
        """Decode and check a message.

        Parameters
        ----------
        data : bytes
            The output of :meth:`to_bytes`, or anything else that a peer may have sent.
        dims : mapping of str to int, optional
            Sizes that the receiver knows, by the letters of the array fields' shapes.
        max_bytes : int or None
            Largest size accepted.

        Raises
        ------
        PayloadError
            If the bytes are anything but this message with the expected dtypes, shapes and finite floats.
        """
        if not isinstance(data, bytes | bytearray):
            raise PayloadError(f"{cls.schema}: payload must be bytes, got {type(data).__name__}")
        if max_bytes is not None and len(data) > max_bytes + 1024**2:
            raise PayloadError(
                f"{cls.schema}: {len(data)} bytes is more than max_payload_bytes = {max_bytes}"
            )
        try:
            tensors = deserialize(bytes(data))  # type: ignore[no-untyped-call]
            metadata = read_metadata(bytes(data))
        except (SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise PayloadError(f"{cls.schema}: payload is not a safetensors message ({error})") from None
        if metadata.get("schema") != cls.schema:
            raise PayloadError(
                f"{cls.schema}: expected this message, got {str(metadata.get('schema'))[:80]!r}"
            )
        if metadata.get("version") != str(cls.version):
            raise PayloadError(
                f"{cls.schema}: expected schema version {cls.version}, got {str(metadata.get('version'))[:20]}; "
                "client and server need the same version of flwr-kd"
            )
        values: dict[str, Any] = {}
        for name, tensor in tensors:
            dtype = SAFETENSORS_DTYPES.get(tensor["dtype"])
            if dtype is None:
                raise PayloadError(
                    f"{cls.schema}: field {name[:80]!r} has dtype {tensor['dtype']}, not supported"
                )
            try:
                values[name] = np.frombuffer(tensor["data"], dtype=dtype).reshape(tensor["shape"])
            except (ValueError, OverflowError) as error:
                raise PayloadError(
                    f"{cls.schema}: field {name[:80]!r} has an impossible shape ({error})"
                ) from None
        for name, spec in _specs(cls).items():
            if spec.positions and name in values:
                values[name] = _of_bits(cls.schema, name, values[name], _size_of(spec.shape[0], cls, values))
        try:
            scalars = json.loads(metadata.get("scalars", "{}"))
        except (ValueError, RecursionError):
            scalars = None
        if not isinstance(scalars, dict) or set(scalars) & set(values):
            raise PayloadError(f"{cls.schema}: scalars are not a mapping of their own")
        values.update(scalars)
        expected = {item.name for item in dataclasses.fields(cls)}  # type: ignore[arg-type]
        if set(values) != expected:
            missing, extra = sorted(expected - set(values)), sorted(set(values) - expected)
            raise PayloadError(f"{cls.schema}: fields missing {missing}, not expected {str(extra)[:200]}")
        message = cls(**values)
        message._validate(dims or {})
        return message

    def _values(self) -> list[Any]:
        return [getattr(self, item.name) for item in dataclasses.fields(self)]  # type: ignore[arg-type]

    def _validate(self, dims: Mapping[str, int]) -> None:
        sizes = dict(dims)
        for name, spec in _specs(type(self)).items():
            _check_array(self.schema, name, getattr(self, name), spec, sizes)
        for name, kind in _scalars(type(self)).items():
            value = getattr(self, name)
            if kind is float and type(value) is int:
                try:
                    value = float(value)
                except OverflowError:
                    raise PayloadError(f"{self.schema}: field {name!r} is beyond float's range") from None
                object.__setattr__(self, name, value)
            if type(value) is not kind:
                raise PayloadError(
                    f"{self.schema}: field {name!r} must be {kind.__name__}, got {type(value).__name__}"
                )
            if isinstance(value, int) and not -(2**63) <= value < 2**63:
                raise PayloadError(f"{self.schema}: field {name!r} is beyond int64's range")
            if isinstance(value, float) and not math.isfinite(value):
                raise PayloadError(f"{self.schema}: field {name!r} must be finite, got {value}")
        self.check()


# Covariant like flwr_kd.config.ConfigT, and for the same reason.
PayloadT = TypeVar("PayloadT", bound=Payload | None, default=Payload, covariant=True)
"""The class of a method's payloads from clients to the server."""


def _specs(cls: type[Payload]) -> dict[str, ArraySpec]:
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]
    return {item.name: item.metadata["array"] for item in fields if "array" in item.metadata}


def _scalars(cls: type[Payload]) -> dict[str, type]:
    fields = [item for item in dataclasses.fields(cls) if "array" not in item.metadata]  # type: ignore[arg-type]
    # Annotations are texts under `from __future__ import annotations`; only these four kinds can travel.
    kinds: dict[Any, type] = {"int": int, "float": float, "bool": bool, "str": str}
    kinds |= {kind: kind for kind in kinds.values()}
    for item in fields:
        if item.type not in kinds:
            raise TypeError(f"{cls.__name__}.{item.name} must be int, float, bool, str or made by array()")
    return {item.name: kinds[item.type] for item in fields}


def _check_array(schema: str, name: str, value: Any, spec: ArraySpec, sizes: dict[str, int]) -> None:
    where = f"{schema}: field {name!r}"
    if not isinstance(value, np.ndarray):
        raise PayloadError(f"{where} must be a numpy array, got {type(value).__name__}")
    if value.dtype.name not in DTYPES or (
        spec.dtype != "*" and value.dtype.name not in spec.dtype.split("|")
    ):
        raise PayloadError(
            f"{where} has dtype {value.dtype.name}, expected {spec.dtype.replace('|', ' or ')}"
        )
    axes = spec.shape
    open_ended = bool(axes) and axes[-1] == "..."
    axes = axes[:-1] if open_ended else axes
    shape = value.shape
    fits = len(shape) >= len(axes) if open_ended else len(shape) == len(axes)
    if fits:
        for axis, size in zip(axes, shape, strict=False):
            fits = fits and size == (int(axis) if axis.isdigit() else sizes.setdefault(axis, size))
    if not fits:
        raise PayloadError(f"{where} has shape {list(shape)}, expected {spec.describe(sizes)}")
    if value.dtype.kind == "f" and not np.isfinite(value).all():
        raise PayloadError(f"{where} has {int((~np.isfinite(value)).sum())} values that are not finite")
    if spec.positions and len(value):
        if not (value[0] >= 0 and (value[1:] > value[:-1]).all()):
            raise PayloadError(f"{where} must ascend from 0, each position once")
        if value[-1] >= _POSITIONS:
            raise PayloadError(f"{where} must be below 2^31, got {value[-1]}")


def _bits(positions: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
    """Return a bit for each place up to the last position, the first in the lowest bit."""
    places = np.zeros(int(positions[-1]) + 1 if len(positions) else 0, dtype=bool)
    places[positions] = True
    return np.packbits(places, bitorder="little")


def _of_bits(schema: str, name: str, bits: npt.NDArray[Any], count: int | None) -> npt.NDArray[np.int64]:
    """Return the positions that :func:`_bits` packed; ``count`` is the expected number, if it is known.

    Raises
    ------
    PayloadError
        If the number differs. This is checked before unpacking: one byte of bits may become 64 bytes of positions.
    """
    where = f"{schema}: field {name!r}"
    if bits.dtype != np.uint8 or bits.ndim != 1:
        raise PayloadError(
            f"{where} came as {bits.dtype.name} {list(bits.shape)}, expected bits, uint8 [bytes]"
        )
    total = int(_ONES[bits].sum())
    if count is not None and total != count:
        raise PayloadError(f"{where} has {total} positions, expected {count}")
    return np.flatnonzero(np.unpackbits(bits, bitorder="little")).astype(np.int64)


def _size_of(axis: str, cls: type[Payload], values: Mapping[str, Any]) -> int | None:
    """Return the size of an axis in the other arrays of a message; None if no other has it."""
    for name, spec in _specs(cls).items():
        if not spec.positions and axis in spec.shape and name in values:
            place, shape = spec.shape.index(axis), values[name].shape
            return shape[place] if place < len(shape) else None
    return None


def magnitude(values: npt.NDArray[Any]) -> float:
    """Return the largest absolute value, without a copy of the values; 0 without any, NaN if one is NaN.

    >>> magnitude(np.array([[1.0, -3.0], [2.0, 0.0]])), magnitude(np.zeros((0, 2)))
    (3.0, 0.0)
    """
    return float(max(values.max(initial=0), -values.min(initial=0)))


def check_magnitude(where: str, values: npt.NDArray[Any]) -> None:
    """Refuse features, prototypes and representations beyond :data:`LIMIT`, whose squares and sums may overflow.

    Raises
    ------
    PayloadError
        The message names ``where``, the limit and the largest value.
    """
    largest = magnitude(values)
    if largest > LIMIT:
        raise PayloadError(f"{where} must be within ±{LIMIT:g}, got {largest:g}")


def read_metadata(data: bytes) -> dict[str, Any]:
    """Return an encoded message's metadata: its name, version and scalars.

    Raises
    ------
    ValueError, KeyError, TypeError
        If it has none; see :meth:`Payload.from_bytes`.
    """
    (length,) = struct.unpack("<Q", data[:8])
    metadata = json.loads(data[8 : 8 + length]).get("__metadata__", {})
    if not isinstance(metadata, dict):
        raise ValueError("metadata is not a mapping")
    return metadata


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray):
        return bool(a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes())
    return bool(a == b)
