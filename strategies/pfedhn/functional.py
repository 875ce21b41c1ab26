r"""pFedHN's maths: sizes, and the step of the hypernetwork.

Source: Shamsian, Navon, Fetaya, Chechik, "Personalized Federated Learning using Hypernetworks", ICML 2021.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

__all__ = ["embedding_size", "gradient_norm_clipped", "hypernetwork_size", "vector_jacobian"]


def embedding_size(clients: int) -> int:
    """Return the size of an embedding with n clients, ⌊1 + n/4⌋.

    >>> [embedding_size(n) for n in (1, 3, 4, 50, 100)]
    [1, 1, 2, 13, 26]
    """
    return int(1 + clients / 4)


def hypernetwork_size(
    target: Iterable[Sequence[int]], *, embedding: int, hidden: int = 100, layers: int = 3
) -> int:
    """Return the number of the hypernetwork's parameters, without the embeddings.

    Parameters
    ----------
    target : iterable of sequence of int
        Shapes of the arrays that it produces.
    embedding, hidden, layers : int
        Size of an embedding, width of the hidden layers, and number of those after the first.

    Examples
    --------
    The layers have 2·3 + 3 and 3·3 + 3 parameters, and the array has (3 + 1)·10:

    >>> hypernetwork_size([(2, 5)], embedding=2, hidden=3, layers=1)
    61
    """
    produced = sum(math.prod(shape) for shape in target)
    return (embedding + 1) * hidden + layers * (hidden + 1) * hidden + (hidden + 1) * produced


def vector_jacobian(produced: Sequence[Tensor], deltas: Sequence[Tensor], *, share: float = 1.0) -> None:
    r"""Add :math:`s \cdot J^\top \Delta` to the gradients of all that a client's parameters were produced from.

    Algorithm 1: with θ = h(v; φ) this adds s·(∇_φ θ)ᵀΔ to the gradient of φ, and s·(∇_v θ)ᵀΔ to that of v.

    Parameters
    ----------
    produced : sequence of Tensor
        θ, as the hypernetwork returned it, with its graph, which is freed.
    deltas : sequence of Tensor
        Δ = θ - θ̃, what the client's training took away; of the same shapes.
    share : float
        s, the weight of this client.

    Raises
    ------
    ValueError
        If the two differ in number or shapes.

    Examples
    --------
    >>> v = torch.tensor([2.0, 3.0], requires_grad=True)
    >>> vector_jacobian([v.square()], [torch.tensor([1.0, 10.0])])
    >>> v.grad
    tensor([ 4., 60.])
    """
    shapes = [[tuple(tensor.shape) for tensor in tensors] for tensors in (produced, deltas)]
    if shapes[0] != shapes[1]:
        raise ValueError(f"deltas must have the shapes of what was produced, got {shapes[1]} for {shapes[0]}")
    torch.autograd.backward(list(produced), [share * delta for delta in deltas])


def gradient_norm_clipped(parameters: Iterable[nn.Parameter], largest: float) -> None:
    """Scale the gradients, taken together as one vector, down to a norm of at most ``largest``.

    Parameters without a gradient are left out: an embedding of a client that sent nothing has none.
    """
    nn.utils.clip_grad_norm_([p for p in parameters if p.grad is not None], largest)
