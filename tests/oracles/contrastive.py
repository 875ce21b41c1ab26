"""MOON's loss a second time: plain Python floats and loops, from the paper's equation 3."""

from __future__ import annotations

import math
from collections.abc import Sequence

Rows = Sequence[Sequence[float]]


def cosine(a: Sequence[float], b: Sequence[float]) -> float:
    """Return the cosine of two vectors; 0 where one of them is zero.

    >>> cosine([3.0, 4.0], [4.0, 3.0]), cosine([0.0, 0.0], [1.0, 0.0])
    (0.96, 0.0)
    """
    lengths = math.sqrt(sum(x * x for x in a)) * math.sqrt(sum(x * x for x in b))
    return sum(x * y for x, y in zip(a, b, strict=True)) / lengths if lengths else 0.0


def contrastive_loss(z: Rows, z_global: Rows, z_previous: Sequence[Rows], temperature: float) -> float:
    """Return the mean of -log(e^g / (e^g + Σ e^p)), with g and p the cosines over τ.

    A representation that is the global model's, and at a right angle to the previous one's: with τ = 1/2 it is
    log(1 + e^-2).

    >>> round(contrastive_loss([[1.0, 0.0]], [[2.0, 0.0]], [[[0.0, 3.0]]], 0.5), 12)
    0.126928011043
    """
    total = 0.0
    for i, row in enumerate(z):
        positive = math.exp(cosine(row, z_global[i]) / temperature)
        negative = sum(math.exp(cosine(row, other[i]) / temperature) for other in z_previous)
        total -= math.log(positive / (positive + negative))
    return total / len(z)
