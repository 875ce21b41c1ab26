"""Random distributions and comparisons that KT-pFL's tests share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

repeatable = settings(max_examples=60, deadline=None, derandomize=True)
Arrays = list[np.ndarray]
REDUCTIONS = ["sum", "mean"]
sizes = st.integers(1, 5)
seeds = st.integers(0, 999)


def tensor(values: Any, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor(np.asarray(values), dtype=dtype)


def same(actual: Tensor, expected: Any, atol: float = 1e-10, rtol: float = 1e-10) -> None:
    np.testing.assert_allclose(actual.detach().numpy(), expected, rtol=rtol, atol=atol)


def distributions(rng: np.random.Generator, *shape: int, scale: float = 1.0) -> np.ndarray:
    """Draw distributions over the last axis; with a large scale some numbers are next to nothing."""
    logits = rng.normal(scale=scale, size=shape)
    e = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def problem(
    seed: int, clients: int, samples: int = 3, classes: int = 4
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Draw coefficients, predictions and shares, none of them near 0."""
    rng = np.random.default_rng(seed)
    c = distributions(rng, clients, clients)
    return c, distributions(rng, clients, samples, classes), rng.dirichlet(np.full(clients, 3.0))


def tensors(
    seed: int, clients: int, samples: int = 3, classes: int = 4, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor]:
    c, s, p = problem(seed, clients, samples, classes)
    return tensor(c, dtype), tensor(s, dtype), tensor(p, dtype)


def draw_models(seed: int, clients: int, dtype: Any = np.float32) -> list[Arrays]:
    """Models of several arrays, among them BatchNorm's counter and a number without dimensions."""
    rng = np.random.default_rng(seed)
    return [
        [
            rng.normal(size=(3, 2)).astype(dtype),
            np.array(17 * n + 5, dtype=np.int64),
            rng.normal(size=2).astype(dtype),
            np.array(rng.normal(), dtype=dtype),
            rng.normal(size=(2, 1, 2)).astype(dtype),
        ]
        for n in range(clients)
    ]


def equal(a: Sequence[np.ndarray], b: Sequence[np.ndarray]) -> bool:
    return len(a) == len(b) and all(
        x.dtype == y.dtype and x.shape == y.shape and np.array_equal(x, y) for x, y in zip(a, b, strict=True)
    )


def sparse(seed: int, clients: int, free: bool = False) -> np.ndarray:
    """Rows with zeros in them, some with a single weight; free ones sum to anything."""
    rng = np.random.default_rng(seed)
    c = rng.random((clients, clients)) * (rng.random((clients, clients)) < 0.5)
    c[np.arange(clients), rng.integers(clients, size=clients)] += 0.1
    c /= c.sum(axis=1, keepdims=True)
    return c * rng.uniform(0.2, 3.0, size=(clients, 1)) if free else c
