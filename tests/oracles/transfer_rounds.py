"""Runs of KT-pFL that its tests share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from flwr.app import ArrayRecord
from torch import nn
from watched import Party, party

FAST: dict[str, Any] = {"coefficient_learning_rate": 0.3, "rho": 0.4}


def initial(run: Party, model: nn.Module | None = None) -> ArrayRecord:
    return ArrayRecord((model or run.models[0]).state_dict())


def weights_party(**config: Any) -> Party:
    return party("ktpfl-weights", **{"alike": True, **config})


def same(actual: Sequence[Any], expected: Sequence[Any]) -> None:
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-6)
