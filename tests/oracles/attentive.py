"""FedAMP in plain Python: the weights of each client's mixture, the mixture, and its clients' training."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

Rows = list[list[float]]


def dot(a: Sequence[float], b: Sequence[float]) -> float:
    return math.fsum(x * y for x, y in zip(a, b, strict=True))


def cosine_rows(models: Sequence[Sequence[float]], scale: float) -> Rows:
    """HeurFedAMP.

    >>> [[round(x, 3) for x in row] for row in cosine_rows([[1, 0], [2, 0], [0, 1]], 1.0)]
    [[0.333, 0.487, 0.179], [0.487, 0.333, 0.179], [0.333, 0.333, 0.333]]
    """
    rows: Rows = []
    for i, own in enumerate(models):
        others = {
            j: math.exp(scale * dot(own, model) / math.sqrt(dot(own, own) * dot(model, model)))
            for j, model in enumerate(models)
            if j != i
        }
        share = (1 - 1 / len(models)) / sum(others.values())
        rows.append([1 / len(models) if j == i else share * others[j] for j in range(len(models))])
    return rows


def squared(a: Sequence[float], b: Sequence[float]) -> float:
    return math.fsum((x - y) ** 2 for x, y in zip(a, b, strict=True))


def distance_rows(models: Sequence[Sequence[float]], alpha: float) -> tuple[Rows, int]:
    """FedAMP with distances: the rows, and how many were scaled; for models that all differ.

    >>> distance_rows([[0.0], [1.0]], math.e)[0]
    [[0.0, 1.0], [1.0, 0.0]]
    """
    count = len(models)
    sigma = statistics.median(squared(models[i], models[j]) for j in range(count) for i in range(j))
    rows, scaled = [], 0
    for i in range(count):
        row = [
            0.0
            if i == j
            else (alpha or sigma / count) * math.exp(-squared(models[i], models[j]) / sigma) / sigma
            for j in range(count)
        ]
        if sum(row) > 1 + 1e-12:
            row, scaled = [x / sum(row) for x in row], scaled + 1
        row[i] = 1 - sum(row)
        rows.append(row)
    return rows, scaled


def trained(
    model: nn.Module, batches: Sequence[tuple[Any, Any]], *, rate: float, mu: float
) -> dict[str, np.ndarray]:
    """Plain gradient descent on F(w) + μ/2 ‖w - u‖² from u, the model as it is; the gradient by its formula."""
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    model.train()
    for x, y in batches:
        model.zero_grad()
        F.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            for name, p in model.named_parameters():
                assert p.grad is not None
                p -= rate * (p.grad + mu * (p - start[name]))
    return {name: value.detach().numpy().copy() for name, value in model.state_dict().items()}
