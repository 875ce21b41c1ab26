"""Federated knowledge distillation for Flower.

Each method is a Flower ``Strategy`` with its matching ``NumPyClient``, in ``flwr_kd.strategies``.
"""

from pathlib import Path

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

# An installation has the strategies inside this package, a clone beside it. Whoever installs, and then works in the
# clone, gets the clone's package: Python and Ray's workers look into the working directory first.
_clone = Path(__file__).parents[1]
if not Path(__file__).with_name("strategies").is_dir() and (_clone / "strategies" / "fedavg").is_dir():
    __path__.append(str(_clone))
