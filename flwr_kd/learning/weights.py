"""A model's weights as named numpy arrays, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

__all__ = [
    "buffer_names",
    "by_prefix",
    "check_finite_weights",
    "get_weights",
    "load_weights",
    "size_of",
    "with_prefix",
]

NDArray = npt.NDArray[Any]
V = TypeVar("V")


def get_weights(model: nn.Module) -> dict[str, NDArray]:
    """Return copies of all arrays in a model's ``state_dict``.

    >>> {name: value.shape for name, value in get_weights(nn.Linear(2, 3)).items()}
    {'weight': (3, 2), 'bias': (3,)}
    """
    return {name: value.detach().cpu().numpy().copy() for name, value in model.state_dict().items()}


def buffer_names(model: nn.Module) -> list[str]:
    """Return the names of a model's arrays that are no parameters.

    >>> buffer_names(nn.BatchNorm1d(2))
    ['running_mean', 'running_var', 'num_batches_tracked']
    """
    values = model.state_dict(keep_vars=True).items()
    return [name for name, value in values if not isinstance(value, nn.Parameter)]


def load_weights(model: nn.Module, weights: Mapping[str, NDArray]) -> None:
    """Load named arrays into a model; names and shapes must be the model's."""
    model.load_state_dict({name: _as_tensor(value) for name, value in weights.items()})


def _as_tensor(value: NDArray) -> Tensor:
    """Return a tensor to read from, of the array's own memory; torch warns of arrays that cannot be written to."""
    value = np.asarray(value)
    if not value.flags.writeable and value.size:
        value = np.asarray(_Writable(value))
    return torch.from_numpy(value)


class _Writable:
    """An array as numpy sees another's memory, without the mark that it cannot be written to."""

    def __init__(self, value: NDArray) -> None:
        interface = value.__array_interface__
        self.__array_interface__ = {**interface, "data": (interface["data"][0], False)}
        self._value = value


def check_finite_weights(
    model: nn.Module, what: str = "the weights", *, option: str = "learning-rate"
) -> None:
    """Refuse a model whose ``state_dict`` holds a value that is not finite.

    Infinite values of buffers are allowed, except BatchNorm's statistics: a mask has them, and is not trained.

    Parameters
    ----------
    model : nn.Module
        The model, after training.
    what : str
        Subject of the error's text.
    option : str
        The hyper-parameter whose reduction the text suggests.

    Raises
    ------
    FloatingPointError
        If there is such a value.

    Examples
    --------
    >>> model = nn.Linear(2, 3)
    >>> check_finite_weights(model)
    >>> _ = nn.init.constant_(model.bias, torch.nan)
    >>> check_finite_weights(model, "the student's weights")
    Traceback (most recent call last):
    FloatingPointError: the student's weights are no longer finite: try a smaller learning-rate
    """
    masks = {
        id(buffer)
        for module in model.modules()
        if not isinstance(module, _NormBase)
        for buffer in module.buffers(recurse=False)
    }
    fine = [
        (~torch.isnan(value) if id(value) in masks else torch.isfinite(value)).all()
        for value in model.state_dict(keep_vars=True).values()
    ]
    # One answer for all arrays: the host waits for a GPU once.
    if fine and not bool(torch.stack([one.to(fine[0].device) for one in fine]).all()):
        raise FloatingPointError(f"{what} are no longer finite: try a smaller {option}")


def size_of(tensors: Mapping[str, Tensor]) -> int:
    """Return the size in bytes of named tensors, such as a ``state_dict``.

    >>> size_of(nn.Linear(2, 3).state_dict())
    36
    """
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def with_prefix(prefix: str, arrays: Mapping[str, V]) -> dict[str, V]:
    """Return arrays under ``prefix/name``, so that several models fit into one mapping.

    >>> with_prefix("z", {"bias": 1})
    {'z/bias': 1}
    """
    return {f"{prefix}/{name}": value for name, value in arrays.items()}


def by_prefix(arrays: Mapping[str, V]) -> dict[str, dict[str, V]]:
    """Return the arrays of each prefix; the counterpart of :func:`with_prefix`.

    >>> by_prefix({"z/bias": 1, "0/bias": 2, "0/norm/weight": 3})
    {'z': {'bias': 1}, '0': {'bias': 2, 'norm/weight': 3}}
    """
    parts: dict[str, dict[str, V]] = {}
    for key, value in arrays.items():
        prefix, _, name = key.partition("/")
        parts.setdefault(prefix, {})[name] = value
    return parts
