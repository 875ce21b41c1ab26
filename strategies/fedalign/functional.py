"""FedAlign's maths: the spectral norm of a block's transmitting matrix, and the loss that aligns two of them.

Source: Mendieta et al., "Local Learning Matters: Rethinking Data Heterogeneity in Federated Learning", CVPR 2022,
section 4, and the authors' code where it differs.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from flwr_kd.learning.losses import safe_norm

__all__ = ["alignment_loss", "largest_singular_values", "lipschitz_difference"]

ITERATIONS = 10
_SMALLEST = 1e-12


def largest_singular_values(inputs: Tensor, outputs: Tensor, iterations: int = ITERATIONS) -> Tensor:
    r"""Return for each sample the largest singular value of a block's transmitting matrix, by power iterations.

    The matrix is :math:`G = F_{in} F_{out}^T / HW`, with a row for each channel of the input and a column for each
    of the output; the input is first average-pooled to the output's size. The value is the square root of the last
    norm of the iterations :math:`v \leftarrow G G^T v / \| G G^T v \|` from a vector of ones. Vectors are maps of
    one pixel, for which it is :math:`\| F_{in} \| \| F_{out} \|`.

    Parameters
    ----------
    inputs, outputs : Tensor
        Of the block: maps ``[B, C, H, W]`` and ``[B, C', H', W']``, or vectors ``[B, D]`` and ``[B, D']``.
    iterations : int
        Number of iterations, at least 1. Gradients pass through them.

    Returns
    -------
    Tensor
        ``[B]``, in float32 for maps in reduced precision; 0, with gradient 0, where G is 0.

    Raises
    ------
    ValueError
        If the two are neither maps nor vectors of the same samples.

    Examples
    --------
    >>> largest_singular_values(torch.tensor([[3.0, 4.0]]), torch.tensor([[0.0, 2.0, 0.0]]))
    tensor([10.])
    """
    if inputs.ndim != outputs.ndim or inputs.ndim not in (2, 4) or len(inputs) != len(outputs):
        shapes = f"{list(inputs.shape)} and {list(outputs.shape)}"
        raise ValueError(f"inputs and outputs must be maps [B, C, H, W] or vectors [B, D], got {shapes}")
    wide = torch.promote_types(outputs.dtype, torch.float32)
    inputs, outputs = inputs.to(wide), outputs.to(wide)
    if inputs.ndim == 4 and inputs.shape[2:] != outputs.shape[2:]:
        inputs = F.adaptive_avg_pool2d(inputs, (int(outputs.shape[2]), int(outputs.shape[3])))
    rows, columns = (maps.reshape(*maps.shape[:2], -1) for maps in (inputs, outputs))
    pixels = rows.shape[2]
    v = torch.ones_like(rows[:, :, :1])
    norm = torch.zeros_like(rows[:, :1, :1])
    for _ in range(iterations):
        # G and G Gᵀ are not built: with few pixels they are much larger than the maps.
        back = columns @ (rows.mT @ v) / pixels
        v = rows @ (columns.mT @ back) / pixels
        norm = safe_norm(v, dim=1)[:, None]
        v = v / norm.masked_fill(norm == 0, 1.0)
    zero = norm == 0
    # The gradient of the square root at 0 is infinite.
    return norm.masked_fill(zero, 1.0).sqrt().masked_fill(zero, 0.0)[:, 0, 0]


def lipschitz_difference(student: Tensor, teacher: Tensor) -> Tensor:
    """Return the mean over samples of the squared difference of two singular values ``[B]``.

    A sample with a value of 0 counts as 0, without a gradient: a map of zeros has no direction to grow in. The
    teacher is constant.

    Examples
    --------
    >>> lipschitz_difference(torch.tensor([1.0, 0.0]), torch.tensor([3.0, 5.0]))
    tensor(2.)
    """
    teacher = teacher.detach()
    counted = (student != 0) & (teacher != 0)
    return (student - teacher).square().masked_fill(~counted, 0.0).sum() / max(len(student), 1)


def alignment_loss(cross_entropy: Tensor, difference: Tensor, mu: float) -> Tensor:
    r"""Return :math:`CE + \mu \, sg(CE / L) \, L`, where L is the difference and sg stops gradients.

    Its value is (1 + μ) · CE; only the gradient depends on L. Where L is below 1e-12, it is CE alone.

    Parameters
    ----------
    cross_entropy, difference : Tensor
        Scalars; the difference is that of :func:`lipschitz_difference`.
    mu : float
        μ.

    Examples
    --------
    >>> cross_entropy = torch.tensor(2.0)
    >>> [float(alignment_loss(cross_entropy, torch.tensor(value), 0.5)) for value in (0.1, 0.0)]
    [3.0, 2.0]
    """
    tiny = difference < _SMALLEST
    balance = (cross_entropy / difference.masked_fill(tiny, 1.0)).detach()
    return cross_entropy + mu * (balance * difference).masked_fill(tiny, 0.0)
