"""Outputs of many batches, brought from a device to the host in few copies."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["Fetched"]

_BYTES = 256 * 1024**2


class Fetched:
    """Collects tensors batch by batch, and returns them as one tensor each, on the CPU.

    The host waits for a GPU with each copy, so batches stay where they are until a bound is reached.

    Parameters
    ----------
    limit : int
        Bytes that may stay on a device.

    Examples
    --------
    >>> rows = Fetched()
    >>> rows.add(torch.zeros(2), torch.tensor([1, 2]))
    >>> rows.add(torch.ones(1), torch.tensor([3]))
    >>> rows.tensors()
    (tensor([0., 0., 1.]), tensor([1, 2, 3]))
    """

    def __init__(self, limit: int = _BYTES) -> None:
        self._limit, self._size = limit, 0
        self._here: list[tuple[Tensor, ...]] = []
        self._there: list[tuple[Tensor, ...]] = []

    def add(self, *parts: Tensor) -> None:
        """Add a batch; the first axis of each tensor is that of the samples."""
        self._there.append(parts)
        self._size += sum(part.nbytes for part in parts if part.device.type != "cpu")
        if self._size >= self._limit:
            self._fetch()

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the tensors, one for each that a batch has; at least one batch must have been added."""
        if self._there:
            self._fetch()
        return self._here[0] if len(self._here) == 1 else _joined(self._here)

    def _fetch(self) -> None:
        self._here.append(tuple(part.cpu() for part in _joined(self._there)))
        self._there, self._size = [], 0


def _joined(batches: list[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    return tuple(torch.cat(column) for column in zip(*batches, strict=True))
