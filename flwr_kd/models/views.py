"""Reshaping in a narrow pass: a model's code may name the numbers of channels that it has at full width."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

__all__ = ["ADVICE", "NarrowViews"]

ADVICE = "if its code names a number of channels, as x.view(-1, 16 * 5 * 5) does, write x.flatten(1)"
"""What to change in a model that fails with slices of its channels, for error messages."""
_RESHAPES = (Tensor.view, Tensor.reshape, torch.reshape)


class NarrowViews(TorchFunctionMode):
    """Let ``x.view(-1, D)`` flatten each sample, where D is the size of a sample at full width.

    It applies to maps ``[B, K, ...]`` with fewer channels than such a view expects: ``D`` is ``C`` times the size
    of a map, where ``K`` is about ``width · C``. Other reshaping is left as it is.

    Parameters
    ----------
    width
        Share of the channels, below 1.

    Examples
    --------
    >>> with NarrowViews(0.5):
    ...     torch.zeros(2, 3, 5, 5).view(-1, 6 * 5 * 5).shape
    torch.Size([2, 75])
    """

    def __init__(self, width: float) -> None:
        super().__init__()
        self._width = width

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a function of torch."""
        if func in _RESHAPES and args and self._flattens_more(args[0], _sizes(args[1:], kwargs or {})):
            return args[0].flatten(1)
        return func(*args, **(kwargs or {}))

    def _flattens_more(self, x: Any, sizes: tuple[Any, ...]) -> bool:
        """Whether a view asks for one vector per sample, of the size that it has at full width."""
        if x.dim() < 3 or len(sizes) != 2 or not isinstance(sizes[1], int) or sizes[0] not in (-1, len(x)):
            return False
        channels, rest = divmod(sizes[1], math.prod(x.shape[2:]))
        # Each part of a concatenation has its channels rounded up.
        rounding = 1 + channels / 16
        near = abs(x.shape[1] - self._width * channels) < rounding
        return rest == 0 and channels > x.shape[1] and bool(near)


def _sizes(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    given = args or tuple(kwargs.values())
    return tuple(given[0]) if len(given) == 1 and isinstance(given[0], tuple | list) else tuple(given)
