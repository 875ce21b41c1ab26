"""Where models are trained, and with how many threads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from flwr_kd.checks import ConfigError
from flwr_kd.text import first_line

__all__ = ["one_thread", "placed", "resolve_device"]

_SHARE = 0.25
"""The share of a GPU's memory that the data of all processes that compute on it may take."""


def resolve_device(device: str | torch.device) -> torch.device:
    """Return a torch device; ``"auto"`` is CUDA, else MPS, else CPU.

    Raises
    ------
    ConfigError
        If the device is unknown or not available.
    """
    if device == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        resolved = torch.device(device)
        torch.empty(0, device=resolved)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        kind = str(device).partition(":")[0]
        # For any other word PyTorch lists all the devices that it has ever had.
        reason = f" ({first_line(error)})" if kind in ("cuda", "mps") else ""
        raise ConfigError(
            f"device must be auto, cpu, cuda[:N] or mps and be there, got {device!r}{reason}"
        ) from None
    return resolved


def placed(tensors: tuple[Tensor, ...], device: torch.device, *, processes: int = 1) -> tuple[Tensor, ...]:
    """Return tensors on a device, where batches can be taken without copies; unchanged if they are too large.

    Parameters
    ----------
    tensors : tuple of Tensor
        For example a data set's inputs and labels.
    device : torch.device
        On a CUDA device they may take a quarter of its memory, divided by ``processes``. Of other devices PyTorch
        does not know the memory, and any size will do.
    processes : int
        Number of processes that share the device, each with a copy.

    Examples
    --------
    >>> x = torch.zeros(3)
    >>> placed((x,), torch.device("cpu"))[0] is x
    True
    """
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    if device.type == "cuda":
        memory: int = torch.cuda.get_device_properties(device).total_memory
        if size > _SHARE * memory / processes:
            return tensors
    return tuple(tensor.to(device) for tensor in tensors)


@contextmanager
def one_thread() -> Iterator[None]:
    """Let PyTorch compute with one thread, and restore the number of threads in the end; also a decorator.

    The order of summation depends on the number of threads. With one, as Ray's workers have, the numbers are the
    same with any backend and on any number of cores.

    Examples
    --------
    >>> with one_thread():
    ...     torch.get_num_threads()
    1
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
