"""The model that a client trains: a copy of the one it was given."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from flwr.app import Context
from torch import nn

from flwr_kd.checks import ConfigError
from flwr_kd.models.given import Model, plain_model, private_copy

__all__ = ["own_model"]

_NOT_COPIED: WeakKeyDictionary[nn.Module, tuple[int, int]] = WeakKeyDictionary()
"""Which client (of a run) trains a model that cannot be copied."""


def own_model(model: Model, context: Context) -> Model:
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
