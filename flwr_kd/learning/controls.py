"""Controls: knowledge replaced by rows that hold none, to see what knowledge itself adds to a method.

A method that trains on another's predictions also smooths its labels, which alone can raise the accuracy. What is
gained with a uniform teacher is not gained by knowledge.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["controlled", "cyclic_order"]


def controlled(rows: Tensor, kind: str, generator: torch.Generator, *, uniform: float) -> Tensor:
    """Return knowledge, or rows of the same shape without it.

    Parameters
    ----------
    rows : Tensor
        ``[N, C]``, one prediction per sample.
    kind : str
        One of :data:`flwr_kd.config.KNOWLEDGE`. ``"own"``: the rows as they are. ``"uniform"``: the same value
        for all classes. ``"permuted"``: the rows in a random order in which none keeps its place, so that the
        mean and the sharpness of the predictions remain, but not which sample they belong to. A single row keeps
        its place.
    generator : torch.Generator
        On the CPU; drawn from for ``"permuted"`` alone.
    uniform : float
        Each element of a uniform row: ``1 / C`` of probabilities, 0 of logits.

    Returns
    -------
    Tensor
        ``[N, C]``; the same object for ``"own"``.

    Raises
    ------
    ValueError
        If the kind is unknown.

    Examples
    --------
    >>> rows = torch.tensor([[0.9, 0.1], [0.4, 0.6]])
    >>> controlled(rows, "uniform", torch.Generator(), uniform=0.5).tolist()
    [[0.5, 0.5], [0.5, 0.5]]
    >>> torch.equal(controlled(rows, "permuted", torch.Generator(), uniform=0.5), rows.flip(0))
    True
    """
    if kind == "own":
        return rows
    if kind == "uniform":
        return torch.full_like(rows, uniform)
    if kind == "permuted":
        return rows[cyclic_order(len(rows), generator).to(rows.device)]
    raise ValueError(f"kind must be one of own, uniform, permuted, got {kind!r}")


def cyclic_order(count: int, generator: torch.Generator) -> Tensor:
    """Return a random order ``[count]`` of 0..count-1 in which no number keeps its place, if there are two or more.

    >>> cyclic_order(2, torch.Generator()).tolist(), cyclic_order(1, torch.Generator()).tolist()
    ([1, 0], [0])
    """
    drawn = torch.randperm(count, generator=generator)
    order = torch.empty_like(drawn)
    order[drawn] = drawn.roll(1)
    return order
