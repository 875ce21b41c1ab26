"""The copy of a user's model with which a server computes."""

from __future__ import annotations

from typing import Any

import torch

from flwr_kd.checks import ConfigError
from flwr_kd.models import as_feature_model
from flwr_kd.models.given import Model, check_dtypes, plain_model, private_copy

__all__ = ["own_copy"]


def own_copy(model: Model, device: torch.device, *, called: str = "model") -> Any:
    """Return a copy of a model with ``features`` and ``classify``, on a device.

    Raises
    ------
    ConfigError
        If the model cannot be used; the text begins with ``called``.
    """
    try:
        own = as_feature_model(private_copy(plain_model(model))).to(device)
        check_dtypes(own.state_dict())
        return own
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{called} cannot be used: {error}") from None
