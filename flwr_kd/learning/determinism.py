"""How CUDA is set so that a run gives the same numbers each time; processors need nothing of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch

__all__ = ["be_deterministic", "deterministic"]

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
_SIZES = ":4096:8"


def be_deterministic(device: torch.device) -> Callable[[], None]:
    """Let CUDA choose algorithms that give the same numbers each time, in this process; return what restores it.

    It takes PyTorch's deterministic algorithms where there are some, and warns where there are none. cuDNN does not
    search for its fastest algorithm. Products are computed in float32, and not in TF32, which keeps 10 bits of 23.
    ``CUBLAS_WORKSPACE_CONFIG`` is set unless it is set already. Nothing is done for other devices than CUDA's.
    """
    undo: list[Callable[[], Any]] = []
    if device.type != "cuda":
        return lambda: None
    before = torch.are_deterministic_algorithms_enabled()
    warned = torch.is_deterministic_algorithms_warn_only_enabled()
    undo.append(partial(torch.use_deterministic_algorithms, before, warn_only=warned))
    torch.use_deterministic_algorithms(True, warn_only=True)
    for place, name, value in (
        (torch.backends.cudnn, "benchmark", False),
        (torch.backends.cudnn, "allow_tf32", False),
        (torch.backends.cuda.matmul, "allow_tf32", False),
        # Otherwise each new tensor is filled with NaN first.
        (torch.utils.deterministic, "fill_uninitialized_memory", False),
    ):
        # PyTorch refuses to read the flags of TF32 where a user has set its newer ones: these then stay.
        with suppress(RuntimeError):
            undo.append(partial(setattr, place, name, getattr(place, name)))
            setattr(place, name, value)
    if _WORKSPACE not in os.environ:
        os.environ[_WORKSPACE] = _SIZES
        undo.append(partial(os.environ.pop, _WORKSPACE, None))
    return partial(_call_all, undo)


@contextmanager
def deterministic(device: torch.device) -> Iterator[None]:
    """Set CUDA as :func:`be_deterministic` does inside the block."""
    restore = be_deterministic(device)
    try:
        yield
    finally:
        restore()


def _call_all(functions: list[Callable[[], Any]]) -> None:
    for function in functions:
        function()
