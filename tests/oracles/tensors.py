"""Random tensors and comparisons, for the tests of pure functions."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

both_dtypes = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
LABEL_DTYPES = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float64, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(shape, generator=generator(seed), dtype=torch.float64).to(dtype)


def random_labels(size: int, num_classes: int, seed: int) -> Tensor:
    return torch.randint(num_classes, (size,), generator=generator(seed))


def probabilities(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.softmax(normal(*shape, seed=seed, scale=2.0), -1).to(dtype)


def assert_close(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    rtol, atol = (1e-12, 1e-13) if dtype == torch.float64 else (3e-5, 3e-6)
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol)


def assert_gradient_close(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Compare gradients, less strictly: the unit vector of a short difference keeps few of float32's digits."""
    rtol, atol = (1e-9, 1e-12) if dtype == torch.float64 else (1e-3, 1e-4)
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol)


def gradient_of(loss: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    """Return the gradient of a loss, also where it is a constant without a graph."""
    leaf = at.detach().clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(leaf) + 0.0 * leaf.sum(), leaf)
    return gradient
