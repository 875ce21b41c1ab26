"""Per-FedAvg's maths: the gradient of the loss after one step, and the draws that it needs.

Source: Fallah, Mokhtari, Ozdaglar, "Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic
Meta-Learning Approach", NeurIPS 2020, algorithm 1 and section 5.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

__all__ = ["Gradient", "draw_rows", "meta_gradient", "moved", "with_gradient"]

Gradient = Callable[[Sequence[Tensor], int], Sequence[Tensor]]
"""Gradient of the loss at some weights on one of a step's draws: 0 for B1, 1 for B2, 2 for B3."""


def meta_gradient(
    gradient: Gradient, weights: Sequence[Tensor], *, alpha: float, delta: float | None = None
) -> list[Tensor]:
    r"""Return the gradient of :math:`f(w - \alpha \nabla f(w; B_1); B_2)`, approximated.

    First order: :math:`g = \nabla f(w'; B_2)` with :math:`w' = w - \alpha \nabla f(w; B_1)`. Hessian-free:
    :math:`g - \alpha \frac{\nabla f(w + \delta g; B_3) - \nabla f(w - \delta g; B_3)}{2 \delta}`.

    Parameters
    ----------
    gradient : callable
        Called once for B1, then for B2, and hessian-free twice for B3.
    weights : sequence of Tensor
        w, which does not change.
    alpha : float
        α, at least 0.
    delta : float, optional
        δ, greater than 0; None for the first order.

    Returns
    -------
    list of Tensor
        One for each of the weights.

    Raises
    ------
    ValueError
        If α or δ is out of range.

    Examples
    --------
    With f(w) = a/2 · w² the exact gradient is a (1 - α a)² w.

    >>> def gradient(weights, draw):
    ...     return [2 * w for w in weights]
    >>> w = [torch.tensor(1.0, dtype=torch.float64)]
    >>> [round(float(meta_gradient(gradient, w, alpha=0.25, delta=delta)[0]), 6) for delta in (None, 1e-3)]
    [1.0, 0.5]
    """
    if not alpha >= 0 or (delta is not None and not delta > 0):
        raise ValueError(f"alpha must be at least 0 and delta greater than 0, got {alpha} and {delta}")
    g = list(gradient(moved(weights, gradient(weights, 0), -alpha), 1))
    if delta is None:
        return g
    ahead = gradient(moved(weights, g, delta), 2)
    behind = gradient(moved(weights, g, -delta), 2)
    curvature = [(a - b) / (2 * delta) for a, b in zip(ahead, behind, strict=True)]
    return moved(g, curvature, -alpha)


def moved(weights: Sequence[Tensor], direction: Sequence[Tensor], by: float) -> list[Tensor]:
    """Return ``weights + by · direction``, in new tensors."""
    return [torch.add(w, d, alpha=by) for w, d in zip(weights, direction, strict=True)]


def with_gradient(value: Tensor, parameters: Sequence[Tensor], gradient: Sequence[Tensor]) -> Tensor:
    """Return a scalar that has a value, and whose gradient by the parameters is a given one.

    >>> w = torch.tensor([1.0, 2.0], requires_grad=True)
    >>> loss = with_gradient(torch.tensor(7.0), [w], [torch.tensor([3.0, 4.0])])
    >>> loss.item(), torch.autograd.grad(loss, w)[0]
    (7.0, tensor([3., 4.]))
    """
    parts = [((p - p.detach()) * g).sum() for p, g in zip(parameters, gradient, strict=True)]
    return value.detach() + torch.stack(parts).sum()


def draw_rows(count: int, batch_size: int, steps: int, generator: torch.Generator) -> Tensor:
    """Draw the samples of B1, B2 and B3 of each step, ``[steps, 3, B]``.

    The three batches of a step have no sample in common. A client with fewer samples than three batches draws with
    replacement, so that it takes its steps as well.

    Parameters
    ----------
    count : int
        Number of samples, at least 1.
    batch_size, steps : int
        B and the number of steps.
    generator : torch.Generator
        Decides what is drawn.

    Examples
    --------
    >>> rows = draw_rows(6, 2, 5, torch.Generator().manual_seed(0))
    >>> rows.shape, all(sorted(step.flatten().tolist()) == [0, 1, 2, 3, 4, 5] for step in rows)
    (torch.Size([5, 3, 2]), True)
    >>> draw_rows(1, 2, 1, torch.Generator()).tolist()
    [[[0, 0], [0, 0], [0, 0]]]
    """
    size = 3 * batch_size
    if count < size:
        return torch.randint(count, (steps, 3, batch_size), generator=generator)
    rows = [torch.randperm(count, generator=generator)[:size] for _ in range(steps)]
    return torch.stack(rows).reshape(steps, 3, batch_size)
