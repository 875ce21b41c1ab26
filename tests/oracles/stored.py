"""Maths on models through a store, as functions of lists of arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flwr_kd.server.model_store import ModelStore
from flwr_kd.transport.template import ArrayTemplate

Arrays = Sequence[np.ndarray[Any, Any]]


def stored(models: Sequence[Arrays], **options: Any) -> ModelStore:
    """Return a store of models, with their positions as keys."""
    template = ArrayTemplate.of_ndarrays({str(i): array for i, array in enumerate(models[0])})
    store = ModelStore(template, **options)
    for key, model in enumerate(models):
        store.put(key, model)
    return store


def gram(models: Sequence[Arrays]) -> Tensor:
    """Return the inner products of models."""
    return torch.from_numpy(stored(models).products(range(len(models))))


def personal_models(coefficients: Tensor, models: Sequence[Arrays]) -> list[list[np.ndarray[Any, Any]]]:
    """Return the mixture of models of each row."""
    rows = dict(enumerate(coefficients.double().numpy()))
    mixed = stored(models).mixed(rows, range(len(models)))
    return [[array.copy() for array in mixed.get(key)] for key in mixed.keys]
