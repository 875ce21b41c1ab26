"""The model that a client trains: a copy of the one it was given."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from flwr.app import Context
from torch import nn

from flwr_kd.checks import ConfigError
from flwr_kd.inputs import Inputs
from flwr_kd.models import SplitModel
from flwr_kd.models.given import Model, plain_model, private_copy
from flwr_kd.models.reused import ModelPool

__all__ = ["LentModel", "feature_shape", "named_size", "own_model"]

_NOT_COPIED: WeakKeyDictionary[nn.Module, tuple[int, int]] = WeakKeyDictionary()
"""Which client (of a run) trains a model that cannot be copied."""


class LentModel:
    """In place of a client's model: one that the process builds once, and lends to one client after the other.

    For clients that live for one message, as those of the runner, and are not asked for their model after it.

    Parameters
    ----------
    pool : ModelPool
        Of the process.
    key : hashable
        Everything that the model depends on.
    build : callable
        Returns a model that no other code has, and that need not be checked.
    """

    def __init__(self, pool: ModelPool, key: Hashable, build: Callable[[], nn.Module]) -> None:
        self._pool, self._key, self._build = pool, key, build

    def lend_to(self, client: object) -> nn.Module:
        """Return a model that is the client's as long as the client is referenced."""
        return self._pool.lend(self._key, self._build, client)


def own_model(model: Model | LentModel, context: Context, client: object) -> Model:
    """Return a client's own copy of a model, so that clients in one process may be given the same object.

    What a user changes in the model between two runs counts, and a run changes nothing in it. A model that cannot
    be copied is trained itself, by one client only.

    Raises
    ------
    ConfigError
        If the model cannot be copied, and another client has it.
    TypeError, ValueError
        If the model cannot be used; see :func:`flwr_kd.models.given.plain_model`.
    """
    if isinstance(model, LentModel):
        return model.lend_to(client)
    model = plain_model(model)
    try:
        return private_copy(model)
    except TypeError as error:
        first = model[0] if isinstance(model, tuple) else model
        client = (context.run_id, context.node_id)
        if _NOT_COPIED.setdefault(first, client) != client:
            raise ConfigError(
                f"{error}. Clients cannot share such a model: build it inside client_fn"
            ) from None
        return model


@torch.no_grad()
def feature_shape(model: nn.Module, example: Callable[[], Inputs], device: torch.device) -> tuple[int, ...]:
    """Return the shape of one sample's features, as the model names it or as one sample shows it.

    Raises
    ------
    ConfigError
        If a model with ``features`` of its own does not name it.
    """
    dim, shape = getattr(model, "feature_dim", None), getattr(model, "feature_shape", None)
    if isinstance(model, SplitModel) and shape is None:
        shape = tuple(model.eval().features(example().to(device)).shape[1:])
    return (named_size(model, "feature_dim"),) if shape is None or dim is not None else tuple(shape)


def named_size(model: nn.Module, name: str) -> int:
    """Return a size that a model names; raise :class:`ConfigError` if it does not."""
    size: Any = getattr(model, name, None)
    if not isinstance(size, int) or size < 1:
        raise ConfigError(f"a model with features() and classify() of its own needs {name}, got {size!r}")
    return size
