"""FedFomo's client in float64, from the paper: losses, weights, the mixture; models are dicts of arrays."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

Arrays = Mapping[str, np.ndarray[Any, Any]]


def loaded(net: nn.Module, arrays: Arrays) -> nn.Module:
    model = copy.deepcopy(net).double().eval()
    model.load_state_dict({name: torch.from_numpy(np.array(value)) for name, value in arrays.items()})
    return model


def loss(net: nn.Module, arrays: Arrays, x: torch.Tensor, y: torch.Tensor) -> float:
    """Mean cross-entropy of a model with its own buffers, in eval mode."""
    return float(F.cross_entropy(loaded(net, arrays)(x.double()), y).detach())


def flat(arrays: Arrays, names: Sequence[str]) -> np.ndarray[Any, Any]:
    return np.concatenate([arrays[name].astype(np.float64).ravel() for name in names])


def deltas(
    net: nn.Module, previous: Arrays, models: Sequence[Arrays], x: torch.Tensor, y: torch.Tensor
) -> list[float]:
    names = [name for name, _ in net.named_parameters()]
    before, values = loss(net, previous, x, y), []
    for model in models:
        distance = float(np.linalg.norm(flat(model, names) - flat(previous, names)))
        values.append((before - loss(net, model, x, y)) / distance if distance else 0.0)
    return values


def mixture(
    net: nn.Module, previous: Arrays, own: Arrays, models: Sequence[Arrays], values: Sequence[float]
) -> dict[str, Any]:
    """Where training begins; the first of ``models`` is the client's own, whose buffers it has."""
    positive = [max(value, 0.0) for value in values]
    total = sum(positive)
    mixed = dict(own)
    for name, _ in net.named_parameters():
        first = previous[name].astype(np.float64)
        moved = [p * (m[name] - first) / total for p, m in zip(positive, models, strict=True) if p]
        mixed[name] = (first + sum(moved)).astype(np.float32)
    return mixed
