"""What training is computed in."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from flwr_kd.checks import checked

__all__ = ["PRECISIONS", "computed_in", "named_precision"]

PRECISIONS = ("float32", "bfloat16")
"""What a client's training may be computed in."""
_SHORT = {"fp32": "float32", "bf16": "bfloat16"}


def named_precision(name: object) -> str:
    """Return the name of a precision in full; ``bf16`` and ``fp32`` are short forms.

    Raises
    ------
    ConfigError
        If there is no such precision.

    Examples
    --------
    >>> named_precision("bf16"), named_precision("float32")
    ('bfloat16', 'float32')
    """
    full = _SHORT.get(name, name) if isinstance(name, str) else name
    return str(checked("precision", full, str, {"choices": PRECISIONS}))


def computed_in(
    precision: str, device: torch.device, objective: Callable[..., Tensor]
) -> Callable[..., Tensor]:
    """Return a loss that is computed in a precision: in bfloat16 under :class:`torch.autocast`."""
    if precision == "float32":
        return objective

    def loss(*batch: Tensor) -> Tensor:
        with torch.autocast(device.type, dtype=torch.bfloat16):
            return objective(*batch)

    return loss
