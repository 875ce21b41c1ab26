"""The device that models are trained on."""

from __future__ import annotations

import torch

from flwr_kd.checks import ConfigError

__all__ = ["resolve_device"]


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
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"device must be auto, cpu, cuda[:N] or mps and be there, got {device!r} ({reason})"
        ) from None
    return resolved
