"""Federated knowledge distillation for Flower.

Each method is a Flower ``Strategy`` with its matching ``NumPyClient``, in ``flwr_kd.strategies``.
"""

import sys

from ._clone import find_strategies
from .client import KDClient
from .config import ConfigError, MethodConfig
from .payload import Payload, PayloadError
from .strategy import KDResult, KDStrategy

__version__ = "0.1.0"

__all__ = [
    "ConfigError",
    "KDClient",
    "KDResult",
    "KDStrategy",
    "MethodConfig",
    "Payload",
    "PayloadError",
    "__version__",
]

find_strategies(sys.modules[__name__])
