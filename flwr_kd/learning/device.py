"""Where models are trained, and with how many threads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from flwr_kd.checks import ConfigError
from flwr_kd.text import first_line

__all__ = ["one_thread", "resolve_device"]


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
