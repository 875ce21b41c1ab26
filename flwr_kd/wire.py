"""The only place that knows Flower's record keys.

The server speaks Flower's Message API, the client is a ``NumPyClient``; both meet in the records that
``ClientApp(client_fn=...)`` understands (``flwr/compat/common/recorddict_compat.py`` is the reference).
What comes from a client is untrusted: every reader here raises :class:`PayloadError` and nothing else.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

from .payload import DTYPES, PayloadError

__all__ = [
    "ArrayTemplate",
    "EvaluateReply",
    "TrainReply",
    "evaluate_message",
    "forget",
    "nbytes",
    "properties_message",
    "read_evaluate_reply",
    "read_properties",
    "read_train_reply",
    "train_message",
]

NDArray = npt.NDArray[Any]
PAYLOAD, PHASE, ROUND, SEED, NAMES, MAX_BYTES, RUN, TRAINED, KNOWN, SAVED, STATE_LOST, REFUSAL = (
    "payload",
    "phase",
    "server-round",
    "seed",
    "array-names",
    "max-payload-bytes",
    "run-key",
    "trained-round",
    "known-round",
    "saved-round",
    "state-lost",
    "refusal",
)
VARIANCE = "running_var"
"""How the names of BatchNorm's variances end."""
_EMPTY = "_empty"
_MAX_EXAMPLES = 2**53
_LONGEST_TEMPLATE = 4 * 10**6
"""Characters: some 40,000 arrays."""
_LARGEST = 1e300
"""Of a metric: sums of clients' metrics stay finite."""


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
    """

    names: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def of(cls, record: ArrayRecord) -> ArrayTemplate:
        """Read the template of the caller's own arrays.

        Raises
        ------
        PayloadError
            If an array's bytes are not a numpy array.
        """
        arrays = {name: _ndarray(name, value) for name, value in record.items() if name != _EMPTY}
        return cls.of_ndarrays(arrays)

    @classmethod
    def of_ndarrays(cls, arrays: Mapping[str, NDArray]) -> ArrayTemplate:
        """Return the template of named numpy arrays."""
        return cls(
            tuple(arrays),
            tuple(value.dtype.name for value in arrays.values()),
            tuple(value.shape for value in arrays.values()),
        )

    def to_json(self) -> str:
        """Return the template as text, for the handshake."""
        return json.dumps([self.names, self.dtypes, self.shapes])

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
            names, dtypes, shapes = json.loads(text)  # type: ignore[arg-type]
            template = cls(
                tuple(str(name) for name in names),
                tuple(str(dtype) for dtype in dtypes),
                tuple(tuple(int(size) for size in shape) for shape in shapes),
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
        mine, theirs = (dict(zip(t.names, t.shapes, strict=True)) for t in (self, other))
        missing, extra = sorted(mine.keys() - theirs.keys()), sorted(theirs.keys() - mine.keys())
        if missing or extra:
            return f"arrays missing {missing[:3]}, not expected {extra[:3]}"
        for name, shape in mine.items():
            if theirs[name] != shape:
                return f"array {name!r} has shape {list(theirs[name])}, expected {list(shape)}"
        return None

    def record(self, arrays: Sequence[NDArray]) -> ArrayRecord:
        """Name the arrays, so that ``to_torch_state_dict()`` of the record loads."""
        return ArrayRecord({n: Array(np.asarray(a)) for n, a in zip(self.names, arrays, strict=True)})

    def check(self, arrays: Sequence[NDArray]) -> list[NDArray]:
        """Check a reply's arrays and bring them to the template's dtypes and shapes.

        A counter that comes back as shape ``(1,)`` or as a whole float is put right; anything else that
        differs is refused.

        Raises
        ------
        PayloadError
            If number, shapes or kinds differ, a float is not finite, or a running variance is negative.
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
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise PayloadError(f"array {name!r} has values that are not finite")
        with np.errstate(over="ignore", invalid="ignore"):
            cast = array.reshape(shape).astype(dtype, copy=False)
        if dtype.kind in "iub" and not np.array_equal(cast, array.reshape(shape)):
            raise PayloadError(f"array {name!r} has values that are not whole, expected {dtype.name}")
        if dtype.kind == "f" and not np.isfinite(cast).all():
            raise PayloadError(f"array {name!r} has values beyond {dtype.name}")
        # BatchNorm takes its root: one client's negative variance would make the mean's outputs NaN.
        if name.endswith(VARIANCE) and dtype.kind == "f" and (cast < 0).any():
            raise PayloadError(
                f"array {name!r} has negative values, down to {cast.min():g}; it holds variances"
            )
        return cast


@dataclass(frozen=True)
class TrainReply:
    """What a client answered to a train message, read but not yet checked against a template."""

    arrays: list[NDArray] = field(default_factory=list)
    num_examples: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    payload: bytes | None = None
    nbytes: int = 0


@dataclass(frozen=True)
class EvaluateReply:
    """What a client answered to an evaluate message."""

    loss: float = 0.0
    num_examples: int = 0
    metrics: dict[str, float] = field(default_factory=dict)


def train_message(
    node_id: int,
    *,
    arrays: ArrayRecord | None,
    config: Mapping[str, Any],
    payload: bytes | None = None,
    ttl: float | None = None,
    group_id: str = "",
) -> Message:
    """Return one train message; its config is a record of its own, so that clients cannot share changes."""
    return _instruction("fitins", "train", node_id, arrays, config, payload, ttl, group_id)


def evaluate_message(
    node_id: int,
    *,
    arrays: ArrayRecord | None,
    config: Mapping[str, Any],
    ttl: float | None = None,
    group_id: str = "",
) -> Message:
    """Return one evaluate message."""
    return _instruction("evaluateins", "evaluate", node_id, arrays, config, None, ttl, group_id)


def properties_message(node_id: int, *, config: Mapping[str, Any], ttl: float | None = None) -> Message:
    """Return the handshake's question."""
    content = RecordDict({"getpropertiesins.config": ConfigRecord(dict(config))})
    return Message(content, dst_node_id=node_id, message_type="get_properties", ttl=ttl)


def read_train_reply(message: Message) -> TrainReply:
    """Read a train reply.

    Raises
    ------
    PayloadError
        If records are missing, of the wrong kind, or hold values that cannot be.
    """
    content = _content(message)
    record = _record(content.array_records, "fitres.parameters")
    arrays = [_ndarray(name, value) for name, value in record.items() if name != _EMPTY]
    config = _record(content.config_records, "fitres.metrics")
    payload = config.get(PAYLOAD)
    if payload is not None and not isinstance(payload, bytes):
        raise PayloadError(f"metric 'payload' must be bytes, got {type(payload).__name__}")
    return TrainReply(arrays, _num_examples(content, "fitres"), _metrics(config), payload, nbytes(content))


def read_evaluate_reply(message: Message) -> EvaluateReply:
    """Read an evaluate reply.

    Raises
    ------
    PayloadError
        As :func:`read_train_reply`.
    """
    content = _content(message)
    loss = _record(content.metric_records, "evaluateres.loss").get("loss")
    if not isinstance(loss, int | float) or not _finite(loss):
        raise PayloadError(f"loss must be a finite number within ±{_LARGEST:g}, got {shown(loss)}")
    config = _record(content.config_records, "evaluateres.metrics")
    return EvaluateReply(float(loss), _num_examples(content, "evaluateres"), _metrics(config))


def read_properties(message: Message) -> dict[str, Any]:
    """Read the handshake's answer.

    Raises
    ------
    PayloadError
        If the record is missing.
    """
    return dict(_record(_content(message).config_records, "getpropertiesres.properties"))


def forget(message: Message) -> None:
    """Drop what a message holds, once it has been read.

    Flower's records refer to themselves: without this their bytes stay until the garbage collector runs, and
    what was decoded from them is a second copy.
    """
    if message.has_content():
        for records in (message.content.array_records, message.content.config_records):
            for record in records.values():
                record.clear()


def nbytes(content: RecordDict) -> int:
    """Return the size of a message's arrays and byte values.

    The scalars beside them are not counted; with Flower's envelope they are a few kilobytes per message.
    """
    arrays = sum(len(a.data) for record in content.array_records.values() for a in record.values())
    values = (value for record in content.config_records.values() for value in record.values())
    return arrays + sum(len(value) for value in values if isinstance(value, bytes))


def _instruction(
    ins: str,
    message_type: str,
    node_id: int,
    arrays: ArrayRecord | None,
    config: Mapping[str, Any],
    payload: bytes | None,
    ttl: float | None,
    group_id: str,
) -> Message:
    values = dict(config)
    if payload is not None:
        values[PAYLOAD] = payload
    content = RecordDict(
        {
            f"{ins}.parameters": ArrayRecord() if arrays is None else arrays,
            f"{ins}.config": ConfigRecord(values),
        }
    )
    return Message(content, dst_node_id=node_id, message_type=message_type, ttl=ttl, group_id=group_id)


def _content(message: Message) -> RecordDict:
    if not message.has_content():
        raise PayloadError("the reply has no content")
    return message.content


def _record(records: Mapping[str, Any], key: str) -> Any:
    if key not in records:
        there = [name[:40] for name in sorted(records)[:5]]
        raise PayloadError(f"record {key!r} is missing, the reply has {there}")
    return records[key]


def _num_examples(content: RecordDict, res: str) -> int:
    value = _record(content.metric_records, f"{res}.num_examples").get("num_examples")
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _MAX_EXAMPLES:
        raise PayloadError(f"num_examples must be a whole number from 0, got {shown(value)}")
    return value


def _metrics(config: Mapping[str, Any]) -> dict[str, float]:
    numbers = {k: v for k, v in config.items() if isinstance(v, int | float) and not isinstance(v, bool)}
    for name, value in numbers.items():
        if not _finite(value):
            raise PayloadError(
                f"metric {name[:80]!r} must be finite and within ±{_LARGEST:g}, got {shown(value)}"
            )
    return {name: float(value) for name, value in numbers.items()}


def shown(value: object) -> str:
    """Return a client's value for an error message, short."""
    if value is None or isinstance(value, bool | float | str):
        return repr(value)[:80]
    if isinstance(value, int):
        return repr(value) if abs(value) < 2**64 else f"a number of {value.bit_length()} bits"
    return f"a {type(value).__name__}"


def _finite(value: float) -> bool:
    try:
        return math.isfinite(value) and abs(value) <= _LARGEST
    except OverflowError:  # a whole number beyond float's range
        return False


def _ndarray(name: str, value: Array) -> NDArray:
    """Read an array without allocating more than came: numpy's own reader trusts the header's shape."""
    stream = io.BytesIO(value.data)
    try:
        major = np.lib.format.read_magic(stream)
        read_header = {
            (1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0,
        }[major]
        shape, fortran, dtype = read_header(stream)
        if dtype.hasobject:
            raise ValueError("Python objects are not allowed")
        # Not the stream's own buffer, which would be a copy.
        body = memoryview(value.data)[stream.tell() :]
        if len(body) != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"{len(body)} bytes for shape {shape} of {dtype}")
        flat = np.frombuffer(body, dtype=dtype, count=math.prod(shape))
        return flat.reshape(shape, order="F" if fortran else "C")
    except Exception as error:  # numpy's header parser lets IndexError, TokenError and others out
        text = str(error).splitlines()[0][:120] if str(error) else type(error).__name__
        raise PayloadError(f"array {name[:80]!r} is not a numpy array ({text})") from None
