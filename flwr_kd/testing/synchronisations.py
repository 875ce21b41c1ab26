"""A device that is not there: it counts where a GPU would make the host wait, and copies to it and from it.

Tensors of :data:`DEVICE` compute on the CPU, with the same numbers. Otherwise they behave as on a GPU: the host
sees their values only through a copy or a wait, both are counted, and an operation refuses tensors of two devices.
So the code for GPUs runs on a machine without one, and what a training step costs in waits and copies can be
asserted. It says nothing about kernels: whether a GPU has an operation, how fast it is, and its last digits.

>>> with CountingDevice() as device:
...     x = torch.ones(3, device=DEVICE)
...     total = float(x.sum())
>>> total, device.counts
(3.0, Counts(waits=1, to_host=0, to_device=0))
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["DEVICE", "CountingDevice", "Counts"]

# PyTorch knows the name on every machine, initialises nothing for it, and its autograd needs no driver.
DEVICE = torch.device("lazy", 0)
"""The device; tensors of it can be made inside a :class:`CountingDevice`."""

_WAITS = frozenset(
    {
        "_local_scalar_dense",  # item(), float(), int(), bool(), and an if
        "_unique",
        "_unique2",
        "bincount",
        "equal",
        "masked_select",
        "nonzero",
        "unique_consecutive",
        "unique_dim",
    }
)
"""Operations whose result, or its shape, the host must know before it goes on."""
_INDEXED = ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index")
_MAY_MIX = frozenset({*_INDEXED, "_to_copy", "copy_", "_copy_from"})


@dataclass(frozen=True)
class Counts:
    """What has happened so far.

    Attributes
    ----------
    waits : int
        Operations for which the host waits, other than copies.
    to_host : int
        Copies to the host, for which it waits as well.
    to_device : int
        Copies to the device.
    """

    waits: int = 0
    to_host: int = 0
    to_device: int = 0

    def __sub__(self, other: Counts) -> Counts:
        return Counts(
            self.waits - other.waits, self.to_host - other.to_host, self.to_device - other.to_device
        )


class CountingDevice:
    """Makes :data:`DEVICE` usable inside a block, in the thread that enters it, and counts.

    Other threads enter a block of their own, of the same object, for the sums to be shared.

    Attributes
    ----------
    by_operation : Counter
        How often each operation has waited or copied, by its name and the direction.
    """

    def __init__(self) -> None:
        self.by_operation: Counter[tuple[str, str]] = Counter()
        self._lock, self._local = threading.Lock(), threading.local()

    @property
    def counts(self) -> Counts:
        """The sums so far."""
        sums: Counter[str] = Counter()
        for (kind, _), number in self.by_operation.items():
            sums[kind] += number
        return Counts(sums["waits"], sums["to_host"], sums["to_device"])

    def note(self, kind: str, operation: str) -> None:
        """Count one event."""
        with self._lock:
            self.by_operation[kind, operation] += 1

    def __enter__(self) -> Self:
        stack = ExitStack()
        stack.enter_context(_Constants())
        stack.enter_context(_Mode(self))
        self._local.stacks = [*getattr(self._local, "stacks", ()), stack]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._local.stacks.pop().close()


class _Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees the operations that have no tensor of the device yet: those that make one, and copies to it."""

    def __init__(self, device: CountingDevice) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return _run(self.device, func, args, dict(kwargs or {}))


class _Constants(TorchFunctionMode):
    """Makes tensors of Python's numbers on the CPU and copies them, as happens for a GPU."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        device = options.get("device")
        if func in (torch.tensor, torch.as_tensor) and device is not None:
            options["device"] = None
            return func(*args, **options).to(device)
        return func(*args, **options)


class _DeviceTensor(Tensor):
    """A tensor of the device; ``held`` is the tensor on the CPU that has its numbers."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=DEVICE,
        )

    def __init__(self, held: Tensor) -> None:
        self.held = held

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"tensor(..., shape={tuple(self.shape)}, device='{DEVICE}')"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is Tensor.tolist:
            return args[0].cpu().tolist()
        if func in (Tensor.numpy, Tensor.__array__):
            raise TypeError(f"can't convert a tensor of {DEVICE} to numpy: copy it by .cpu() first")
        if func in (Tensor.__getitem__, Tensor.__setitem__):
            # PyTorch would make a tensor of a list by the device's own kernels.
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            index = tuple(torch.tensor(part) if isinstance(part, list) else part for part in index)
            args = (args[0], index, *args[2:])
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        # Outside a block: for example a tensor that is printed or freed after it. Nothing is counted.
        return _run(CountingDevice(), func, args, dict(kwargs or {}))


def _run(device: CountingDevice, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run an operation on the values, count it, and return tensors of the device where a GPU would."""
    name = func._schema.name.rpartition("::")[2]
    tensors: list[Tensor] = []

    def held(tensor: Tensor) -> Tensor:
        tensors.append(tensor)
        return tensor.held if isinstance(tensor, _DeviceTensor) else tensor

    values, options = _mapped(held, tuple(args)), _mapped(held, kwargs)
    here = any(isinstance(tensor, _DeviceTensor) for tensor in tensors)
    result_here = here
    if kwargs.get("device") is not None:
        result_here = torch.device(kwargs["device"]).type == DEVICE.type
        options["device"] = torch.device("cpu") if result_here else kwargs["device"]
    elif name == "copy_":
        result_here = isinstance(args[0], _DeviceTensor)
    if here and name not in _MAY_MIX:
        _refuse_two_devices(name, tensors)
    if result_here and isinstance(kwargs.get("generator"), torch.Generator):
        raise RuntimeError(f"{name}: a generator of the CPU cannot draw on {DEVICE}")
    _count(device, name, args, kwargs, here, result_here)
    out = func(*values, **options)
    if not result_here:
        return out
    # An operation that changes a tensor in place returns that tensor.
    wrappers = {id(tensor.held): tensor for tensor in tensors if isinstance(tensor, _DeviceTensor)}

    def on_device(tensor: Tensor) -> _DeviceTensor:
        return wrappers[id(tensor)] if id(tensor) in wrappers else _DeviceTensor(tensor)

    return _mapped(on_device, out)


def _mapped(function: Callable[[Tensor], Any], value: Any) -> Any:
    """Apply a function to all tensors in lists, tuples and dicts; PyTorch's tree_map takes much longer."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, list | tuple):
        return type(value)([_mapped(function, part) for part in value])
    if isinstance(value, dict):
        return {key: _mapped(function, part) for key, part in value.items()}
    return value


def _count(
    device: CountingDevice,
    name: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    here: bool,
    result_here: bool,
) -> None:
    if name in ("_to_copy", "copy_", "_copy_from"):
        source = args[1] if name == "copy_" else args[0]
        if isinstance(source, _DeviceTensor) != result_here:
            device.note("to_device" if result_here else "to_host", name)
    elif not here:
        return
    elif name in _WAITS or (name == "repeat_interleave" and kwargs.get("output_size") is None):
        device.note("waits", name)
    elif name in _INDEXED and isinstance(args[0], _DeviceTensor):
        for index in args[1]:
            if index is None:
                continue
            if not isinstance(index, _DeviceTensor):
                device.note("to_device", name)
            if index.dtype in (torch.bool, torch.uint8):
                device.note("waits", name)


def _refuse_two_devices(name: str, tensors: Sequence[Tensor]) -> None:
    """Raise what PyTorch raises; a tensor without axes may be on the CPU, as a scalar."""
    if any(not isinstance(tensor, _DeviceTensor) and tensor.ndim for tensor in tensors):
        raise RuntimeError(
            f"{name}: expected all tensors to be on the same device, but found at least two, {DEVICE} and cpu"
        )
