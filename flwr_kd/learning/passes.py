"""How many samples a pass in eval mode computes at a time."""

from __future__ import annotations

import torch

__all__ = ["pass_size"]

_CPU_SIZE, _DEVICE_SIZE = 128, 1024
"""Layers' outputs of small batches stay in a processor's caches; a GPU needs more samples at a time."""
_MORE_THAN_TRAINING = 4
"""Without gradients no layer's output is kept, so that a pass needs less memory per sample than a training step."""


def pass_size(device: torch.device, batch_size: int | None = None) -> int:
    """Return the number of samples that a pass without training computes at a time.

    It is 128 on the CPU and 1,024 on other devices, but at most four times the batch size of the training, which
    the user chooses by the memory that the inputs need. On other devices it is at least that batch size.

    Parameters
    ----------
    device : torch.device
        The model's.
    batch_size : int, optional
        That of the training, if there is one.

    Examples
    --------
    >>> cpu = torch.device("cpu")
    >>> pass_size(cpu), pass_size(cpu, 64), pass_size(cpu, 8), pass_size(cpu, 500)
    (128, 128, 32, 128)
    >>> pass_size(torch.device("cuda"), 64), pass_size(torch.device("cuda"), 5000)
    (256, 5000)
    """
    on_cpu = device.type == "cpu"
    size = _CPU_SIZE if on_cpu else _DEVICE_SIZE
    if batch_size is None:
        return size
    size = min(size, _MORE_THAN_TRAINING * batch_size)
    return size if on_cpu else max(size, batch_size)
