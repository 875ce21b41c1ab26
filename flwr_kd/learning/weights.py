"""A model's weights as named numpy arrays, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

__all__ = ["get_weights", "has_finite_weights", "load_weights", "size_of"]

NDArray = npt.NDArray[Any]


def get_weights(model: nn.Module) -> dict[str, NDArray]:
    """Return copies of all that a model's ``state_dict`` holds.

    >>> {name: value.shape for name, value in get_weights(nn.Linear(2, 3)).items()}
    {'weight': (3, 2), 'bias': (3,)}
    """
    return {name: value.detach().cpu().numpy().copy() for name, value in model.state_dict().items()}


def load_weights(model: nn.Module, weights: Mapping[str, NDArray]) -> None:
    """Give a model other weights, by name; names and shapes must be its own."""
    model.load_state_dict({name: torch.from_numpy(np.array(value)) for name, value in weights.items()})


def has_finite_weights(model: nn.Module) -> bool:
    """Say whether all that a model's ``state_dict`` holds is finite.

    >>> has_finite_weights(nn.Linear(2, 3))
    True
    """
    return all(bool(torch.isfinite(value).all()) for value in model.state_dict().values())


def size_of(tensors: Mapping[str, Tensor]) -> int:
    """Return how many bytes named tensors have, such as a ``state_dict``.

    >>> size_of(nn.Linear(2, 3).state_dict())
    36
    """
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
