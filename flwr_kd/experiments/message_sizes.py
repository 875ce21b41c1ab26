"""What the letters of a method's formula of bytes are for a client, from data and model alone."""

from __future__ import annotations

import math

from torch import nn

from flwr_kd.formulas import Situation
from flwr_kd.models import as_feature_model, count_parameters
from flwr_kd.models.feature import find_head
from flwr_kd.registry import Method

__all__ = ["sizes_of"]


def sizes_of(method: Method, network: nn.Module, situation: Situation) -> dict[str, int]:
    """Return what the letters of :data:`flwr_kd.formulas.LETTERS` are, from data and model alone.

    Parameters
    ----------
    method : Method
        From the registry.
    network : Module
        The client's model.
    situation : Situation
        The hyper-parameters, the client, its data and the direction.
    """
    counts, client = situation.counts, situation.client
    shape = getattr(network, "feature_shape", None)
    features: tuple[int, ...] = tuple(shape) if shape else (int(str(getattr(network, "feature_dim", 0))),)
    buffers = list(network.buffers())
    parameters, head = count_parameters(network), find_head(as_feature_model(network))
    return {
        "W": parameters,
        "E": parameters - (0 if head is None else count_parameters(head)),
        "C": len(counts[client]),
        "D": math.prod(features),
        "N": sum(counts[client]),
        "B": sum(b.numel() for b in buffers if b.is_floating_point()),
        "L": sum(b.numel() for b in buffers if not b.is_floating_point()),
        **method.letters(situation),
    }
