"""FedProx's maths: the proximal term.

Source: Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

__all__ = ["proximal_term"]


def proximal_term(parameters: Iterable[Tensor], reference: Iterable[Tensor], mu: float) -> Tensor:
    r"""Return :math:`\frac{\mu}{2} \| w - w_t \|^2`, summed over all parameters.

    The norm is squared: its gradient is μ(w - w_t). Buffers are not included.

    Parameters
    ----------
    parameters : iterable of Tensor
        The trained weights.
    reference : iterable of Tensor
        The round's global weights, constant, in the same order. It must be a list to be used for several batches:
        a generator is empty after the first one, which is an error here.
    mu : float
        μ, at least 0.

    Returns
    -------
    Tensor
        A scalar.

    Raises
    ------
    ValueError
        If the two differ in number or shapes, there are none, or μ is out of range.

    Examples
    --------
    >>> proximal_term([torch.tensor([3.0, 4.0])], [torch.zeros(2)], mu=0.1)
    tensor(1.2500)
    """
    if not (math.isfinite(mu) and mu >= 0):
        raise ValueError(f"mu must be finite and at least 0, got {mu}")
    trained, fixed = list(parameters), list(reference)
    shapes = [[tuple(tensor.shape) for tensor in tensors] for tensors in (trained, fixed)]
    if not trained or shapes[0] != shapes[1]:
        raise ValueError(
            f"parameters and reference must have the same shapes, got {len(trained)} and {len(fixed)} tensors; "
            "pass the reference as a list: a generator is empty after the first batch"
        )
    squares = [(w - w_t.detach()).square().sum() for w, w_t in zip(trained, fixed, strict=True)]
    return mu / 2 * torch.stack(squares).sum()
