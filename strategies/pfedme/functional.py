"""pFedMe's maths: what follows the personal model at a client, and the server's step.

Source: T. Dinh, Tran, Nguyen, "Personalized Federated Learning with Moreau Envelopes", NeurIPS 2020, algorithm 1.
The personal model minimises the loss and FedProx's proximal term, with λ for μ, by gradient descent.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

__all__ = ["follow", "mixed"]

NDArray = npt.NDArray[Any]


@torch.no_grad()
def follow(own: Sequence[Tensor], personal: Sequence[Tensor], rate: float) -> None:
    r"""Move :math:`w_i` towards :math:`\theta`, in place: :math:`w_i \leftarrow w_i - \eta \lambda (w_i - \theta)`.

    Parameters
    ----------
    own : sequence of Tensor
        w_i.
    personal : sequence of Tensor
        θ; it does not change.
    rate : float
        η λ.

    Examples
    --------
    >>> own, personal = [torch.tensor([1.0, 2.0])], [torch.tensor([3.0, 2.0])]
    >>> follow(own, personal, 0.25)
    >>> own, personal
    ([tensor([1.5000, 2.0000])], [tensor([3., 2.])])
    """
    for mine, theta in zip(own, personal, strict=True):
        mine.lerp_(theta, rate)


def mixed(
    old: Mapping[str, NDArray], mean: Mapping[str, NDArray], beta: float, *, buffers: Collection[str]
) -> dict[str, NDArray]:
    r"""Return the new global model: :math:`(1 - \beta) w + \beta \cdot \text{mean}`, of buffers the mean.

    Computed in float64, in dtypes of the mean. Whole numbers are the mean as well.

    Parameters
    ----------
    old, mean : mapping of str to ndarray
        The global model, and the mean of the clients' w_i, by name.
    beta : float
        β, greater than 0; it may exceed 1.
    buffers : collection of str
        Names of arrays that are no parameters. Statistics beyond their mean would be meaningless: a variance could
        be negative.

    Examples
    --------
    >>> old, mean = ({name: np.float32([value]) for name in ("w", "running_var")} for value in (1, 0.25))
    >>> mixed(old, mean, 2.0, buffers={"running_var"})
    {'w': array([-0.5], dtype=float32), 'running_var': array([0.25], dtype=float32)}
    """
    return {
        name: value
        if name in buffers or value.dtype.kind != "f"
        else ((1 - beta) * old[name].astype(np.float64) + beta * value).astype(value.dtype)
        for name, value in mean.items()
    }
