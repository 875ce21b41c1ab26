"""FedAlign's maths a second time: NumPy, one sample at a time, with the matrix G written out."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def pooled(maps: Array, height: int, width: int) -> Array:
    """Return maps ``[C, H, W]`` averaged over the windows that adaptive pooling has.

    >>> pooled(np.array([[[1.0, 3.0], [5.0, 7.0]]]), 1, 2).tolist()
    [[[3.0, 5.0]]]
    """
    channels, rows, columns = maps.shape
    out = np.zeros((channels, height, width))
    for i in range(height):
        for j in range(width):
            top, bottom = i * rows // height, -(-(i + 1) * rows // height)
            left, right = j * columns // width, -(-(j + 1) * columns // width)
            out[:, i, j] = maps[:, top:bottom, left:right].mean(axis=(1, 2))
    return out


def transmitting_matrix(inputs: Array, outputs: Array) -> Array:
    """Return G of one sample, ``[C_in, C_out]``; vectors are maps of one pixel.

    >>> transmitting_matrix(np.array([1.0, 2.0]), np.array([3.0])).tolist()
    [[3.0], [6.0]]
    """
    if inputs.ndim == 1:
        inputs, outputs = inputs[:, None, None], outputs[:, None, None]
    height, width = outputs.shape[1:]
    inputs = pooled(inputs, height, width)
    g = np.zeros((len(inputs), len(outputs)))
    for a in range(len(inputs)):
        for b in range(len(outputs)):
            g[a, b] = sum(inputs[a, i, j] * outputs[b, i, j] for i in range(height) for j in range(width))
    return g / (height * width)


def by_power_iterations(g: Array, iterations: int = 10) -> float:
    """Return the square root of the last norm of the iterations of G Gᵀ from a vector of ones; 0 for G = 0.

    >>> float(by_power_iterations(np.array([[3.0, 0.0], [0.0, 0.0]])))
    3.0
    """
    k = g @ g.T
    v = np.ones(len(k))
    norm = 0.0
    for _ in range(iterations):
        product = k @ v
        norm = float(np.linalg.norm(product))
        if norm == 0:
            return 0.0
        v = product / norm
    return float(np.sqrt(norm))


def lipschitz_difference(student: list[float], teacher: list[float]) -> float:
    """Return the mean of the squared differences; a sample with a 0 counts as 0.

    >>> lipschitz_difference([1.0, 0.0], [3.0, 5.0])
    2.0
    """
    pairs = zip(student, teacher, strict=True)
    return sum((a - b) ** 2 if a and b else 0.0 for a, b in pairs) / len(student)
