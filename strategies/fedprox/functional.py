"""FedProx's client half: the proximal term.

Source: Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

__all__ = ["proximal_term"]


def proximal_term(parameters: Iterable[Tensor], reference: Iterable[Tensor], mu: float) -> Tensor:
    r"""Return :math:`\frac{\mu}{2} \| w - w_t \|^2`, summed over all parameters.

    The norm is squared: its gradient is μ(w - w_t). Buffers take no part.

    Parameters
    ----------
    parameters : iterable of Tensor
        The weights that are trained.
    reference : iterable of Tensor
        The round's global weights, constant, in the same order. To be used again in the next batch it must
        be a list: a generator is empty from then on, which is refused here.
    mu : float
        μ, at least 0.

    Returns
    -------
    Tensor
        A scalar.

    Raises
    ------
    ValueError
        If the two do not hold the same number of tensors, or none.

    Examples
    --------
    >>> proximal_term([torch.tensor([3.0, 4.0])], [torch.zeros(2)], mu=0.1)
    tensor(1.2500)
    """
    squares = [(w - w_t.detach()).square().sum() for w, w_t in zip(parameters, reference, strict=True)]
    if not squares:
        raise ValueError("no parameters: pass lists, a generator is empty after the first batch")
    return mu / 2 * torch.stack(squares).sum()
