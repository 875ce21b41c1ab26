r"""Differential privacy of the weights that a client sends: its update is clipped, and noise is added.

A client sends weights w. Its update is their difference to weights :math:`w_0` that its data of this phase did not
decide. What it sends in place of w is

.. math:: w_0 + u \cdot \min(1, C / \|u\|) + \mathcal{N}(0, (\sigma C)^2), \qquad u = w - w_0

with :math:`C` = ``dp-clip`` and :math:`\sigma` = ``dp-noise``. The norm is that of all arrays together.

**Where an update begins** (:attr:`flwr_kd.KDClient.update_from`):

================  ===================================================================================
``received``      the arrays that the client received in this phase, by default
``last``          what the client itself sent last, for personal models that the server does not return
``zero``          nothing, where the client sends a difference already
================  ===================================================================================

Where nothing was received or sent yet, it begins at the model as the client was built, which no data have changed.

**What is covered** are all arrays of floating point but frozen parameters, which no training changes. Buffers such
as BatchNorm's running statistics are part of the update; a noisy variance below 0 is set to 0. Arrays of whole
numbers, such as BatchNorm's ``num_batches_tracked``, are sent as they are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from flwr_kd.checks import ConfigError, number
from flwr_kd.secret_noise import noisy_update

if TYPE_CHECKING:
    from flwr_kd.client.client import KDClient
    from flwr_kd.client.task import Task

__all__ = [
    "LAST",
    "RECEIVED",
    "ZERO",
    "UpdateStart",
    "clipping_factor",
    "noise_refusal",
    "noisy",
    "private_update",
]

NDArray = npt.NDArray[Any]
Doubles = npt.NDArray[np.float64]
RECEIVED, LAST, ZERO = "received", "last", "zero"
"""Values of ``update_from``: what an update is the difference to."""
_LEAST = "least-dp-noise"
_STATE = "sent"
"""Name of the set of the client's state that has what it sent last."""
_SLACK = 1 - 2.0**-40
"""Keeps the norm of a clipped update below the bound in spite of rounding."""


def clipping_factor(updates: Sequence[Doubles], bound: float) -> float:
    """Return the factor that brings the joint L2 norm of arrays down to a bound; 1 if it is not above it.

    Parameters
    ----------
    updates : sequence of ndarray
        Of any shapes, float64.
    bound : float
        In (0, ∞).

    Raises
    ------
    FloatingPointError
        If the norm is not finite.

    Examples
    --------
    >>> round(clipping_factor([np.array([3.0]), np.array([[4.0]])], 1.0), 6)
    0.2
    >>> clipping_factor([np.array([3.0, 4.0])], 10.0)
    1.0
    """
    norm = math.sqrt(sum(float(np.square(update).sum()) for update in updates))
    if not math.isfinite(norm):
        raise FloatingPointError(
            f"the update of the weights has the norm {norm}, which cannot be clipped: try a smaller learning-rate"
        )
    return 1.0 if norm <= bound else bound / norm * _SLACK


def noisy(update: Doubles, std: float, generator: torch.Generator | None) -> Doubles:
    """Return an array with Gaussian noise of a standard deviation on each element.

    Parameters
    ----------
    update : ndarray
        Of any shape, finite.
    std : float
        In (0, ∞).
    generator : torch.Generator or None
        On the CPU. None: the noise is secret, see :func:`flwr_kd.secret_noise.noisy_update`.
    """
    if generator is None:
        return noisy_update(update, std)
    drawn: Doubles = torch.randn(update.shape, generator=generator, dtype=torch.float64).numpy()
    return np.asarray(update + drawn * std)


def noise_refusal(node_config: Mapping[str, Any], config: Any) -> str | None:
    """Return why a client's owner does not let it send weights with the noise that a config asks for; None if so.

    Parameters
    ----------
    node_config : mapping
        ``least-dp-noise`` is the owner's own least ``dp-noise``.
    config : MethodConfig
        The server's hyper-parameters.

    Raises
    ------
    ConfigError
        If ``least-dp-noise`` is no number of at least 0.

    Examples
    --------
    >>> from flwr_kd.config import MethodConfig
    >>> noise_refusal({"least-dp-noise": 2.0}, MethodConfig(dp_clip=1.0, dp_noise=1.0))
    'its node config asks for least-dp-noise=2, and the run has dp-noise=1'
    """
    least = number(_LEAST, node_config.get(_LEAST, 0.0), 0)
    if config.dp_noise >= least:
        return None
    return f"its node config asks for {_LEAST}={least:g}, and the run has dp-noise={config.dp_noise:g}"


class UpdateStart:
    """Where the update of what a client sends begins; see the module's docstring.

    It holds no reference to its client, whose model is lent to the next one when nobody refers to the client.

    Attributes
    ----------
    arrays : list of ndarray
        Of the current phase, in the order of what is sent; empty without ``dp-clip``.
    """

    def __init__(self) -> None:
        self._as_built: dict[str, NDArray] | None = None
        self.arrays: list[NDArray] = []

    def before(self, client: KDClient[Any], task: Task[Any]) -> None:
        """Note where a client's update begins, before anything is loaded for a task."""
        clip = task.config.dp_clip
        if self._as_built is None:
            # Only a client that has done nothing yet has the model as it was built.
            mine = client.named_arrays() if clip and not task.arrays else {}
            self._as_built = {name: array.copy() for name, array in mine.items()}
        self.arrays = self._found(client, task, self._as_built) if clip else []

    @staticmethod
    def _found(client: KDClient[Any], task: Task[Any], built: Mapping[str, NDArray]) -> list[NDArray]:
        kind = client.update_from
        if kind == LAST and (last := client.state.load(_STATE)) is not None:
            return [last[str(place)].numpy() for place in range(len(last))]
        # Several models that came together are not where a personal model begins.
        if task.arrays and (kind == RECEIVED or len(task.arrays) == len(client.named_arrays())):
            return list(task.arrays)
        return [built[name] for name in (task.names or built) if name in built]

    def of(self, client: KDClient[Any], arrays: Sequence[NDArray]) -> list[NDArray]:
        """Return where the update of a client's arrays begins.

        Raises
        ------
        ConfigError
            If nothing of their shapes was received, sent or built.
        """
        if client.update_from == ZERO:
            return [np.zeros(array.shape, array.dtype) for array in arrays]
        # A leader's own model is the first of those that it received.
        starts = self.arrays[: len(arrays)]
        if [array.shape for array in starts] != [array.shape for array in arrays]:
            raise ConfigError(
                f"dp-clip needs the {len(arrays)} arrays from which the client's update counts, and there are "
                f"{len(starts)}, or of other shapes: build the client anew for each run, or set dp-clip=0"
            )
        return starts


def private_update(client: KDClient[Any], task: Task[Any], arrays: list[NDArray]) -> list[NDArray]:
    """Return what is sent in place of a client's arrays; themselves without ``dp-clip``.

    Raises
    ------
    ConfigError
        If there are no arrays from which the update counts, or the client's owner asks for more noise.
    FloatingPointError
        If the update is not finite.
    """
    clip = float(task.config.dp_clip)
    if not arrays:
        return arrays
    # Also here: what the handshake asked may have been another config.
    refusal = noise_refusal(client.context.node_config, task.config)
    if refusal is not None:
        raise ConfigError(refusal)
    if not clip:
        return arrays
    starts, sent = client.start.of(client, arrays), list(arrays)
    names = task.names or tuple(client.named_arrays())
    names = names if len(names) == len(arrays) else ("",) * len(arrays)
    covered = _covered(client, names, arrays)
    updates = [_difference(arrays[place], starts[place]) for place in covered]
    factor, std = clipping_factor(updates, clip), task.config.dp_noise * clip
    generator = task.generator("dp-noise") if client.reproducible_noise else None
    for place, update in zip(covered, updates, strict=True):
        update *= factor
        if std:
            update[...] = noisy(update, std, generator)
        update += starts[place]
        if std and names[place].endswith("running_var"):
            update.clip(min=0, out=update)
        sent[place] = update.astype(arrays[place].dtype)
    if client.update_from == LAST:
        client.state.save({str(i): torch.from_numpy(array) for i, array in enumerate(sent)}, _STATE)
    return sent


def _covered(client: KDClient[Any], names: Sequence[str], arrays: Sequence[NDArray]) -> list[int]:
    """Return the places of arrays that training may change, and that are of floating point."""
    values = client.model.state_dict(keep_vars=True)
    frozen = {name for name, v in values.items() if isinstance(v, nn.Parameter) and not v.requires_grad}
    return [i for i, name in enumerate(names) if arrays[i].dtype.kind == "f" and name not in frozen]


def _difference(array: NDArray, start: NDArray) -> Doubles:
    """Return an update in float64; constants such as the -inf of a mask, the same in both, have none."""
    both: Doubles = np.zeros(array.shape, dtype=np.float64)
    np.subtract(array, start, out=both, where=np.isfinite(start), dtype=np.float64)
    return both
