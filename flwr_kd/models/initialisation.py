"""Random initial weights that do not use torch's global generator."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

__all__ = ["DrawFrom"]


class DrawFrom(TorchFunctionMode):
    """Within the block, layers initialise themselves with their own code, but from a given generator.

    Layers do not accept a generator, and forking the global one would not separate threads. A mode belongs to
    its thread.

    Examples
    --------
    >>> with DrawFrom(torch.Generator().manual_seed(0)):
    ...     first = torch.nn.Linear(2, 1)
    >>> with DrawFrom(torch.Generator().manual_seed(0)):
    ...     torch.equal(torch.nn.Linear(2, 1).weight, first.weight)
    True
    """

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.generator = generator

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        # Functions of nn.init arrive whole, and always name their generator, here None.
        draws = "generator" in kwargs or func in (Tensor.uniform_, Tensor.normal_)
        if draws and kwargs.get("generator") is None:
            kwargs["generator"] = self.generator
        return func(*args, **kwargs)
