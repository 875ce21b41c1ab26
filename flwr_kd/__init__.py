"""Federated knowledge distillation for Flower.

Each method is a Flower ``Strategy`` with its matching ``NumPyClient``, in ``flwr_kd.strategies``. The names that
users need stand here. Each is imported when it is first used, so that ``import flwr_kd`` is quick.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from flwr_kd._clone import find_strategies
from flwr_kd.lazy import exports

if TYPE_CHECKING:
    from flwr_kd.checks import ConfigError, DataError
    from flwr_kd.client.client import KDClient
    from flwr_kd.client.personal_state import PersonalState, StateError
    from flwr_kd.client.task import Answer, Task
    from flwr_kd.config import MethodConfig, hyper
    from flwr_kd.experiments.experiment import Experiment
    from flwr_kd.experiments.runner import SimulationError, run
    from flwr_kd.learning.batches import Batches, DatasetError
    from flwr_kd.results.schema import Comparison, ResultError, RoundResult, RunResult
    from flwr_kd.server.records import (
        HandshakeError,
        KDResult,
        Node,
        Outgoing,
        Reply,
        RoundStats,
        VoidRoundsError,
    )
    from flwr_kd.server.strategy import KDStrategy
    from flwr_kd.transport.inline_grid import InlineGrid
    from flwr_kd.transport.payload import Payload, PayloadError, array
    from flwr_kd.transport.template import ArrayTemplate

__version__ = "0.2.0"

__all__ = [
    "Answer",
    "ArrayTemplate",
    "Batches",
    "Comparison",
    "ConfigError",
    "DataError",
    "DatasetError",
    "Experiment",
    "HandshakeError",
    "InlineGrid",
    "KDClient",
    "KDResult",
    "KDStrategy",
    "MethodConfig",
    "Node",
    "Outgoing",
    "Payload",
    "PayloadError",
    "PersonalState",
    "Reply",
    "ResultError",
    "RoundResult",
    "RoundStats",
    "RunResult",
    "SimulationError",
    "StateError",
    "Task",
    "VoidRoundsError",
    "__version__",
    "array",
    "hyper",
    "run",
]

__getattr__, __dir__ = exports(
    __name__,
    {
        "checks": ("ConfigError", "DataError"),
        "client.client": ("KDClient",),
        "client.personal_state": ("PersonalState", "StateError"),
        "client.task": ("Answer", "Task"),
        "config": ("MethodConfig", "hyper"),
        "experiments.experiment": ("Experiment",),
        "experiments.runner": ("SimulationError", "run"),
        "learning.batches": ("Batches", "DatasetError"),
        "results.schema": ("Comparison", "ResultError", "RoundResult", "RunResult"),
        "server.records": (
            "HandshakeError",
            "KDResult",
            "Node",
            "Outgoing",
            "Reply",
            "RoundStats",
            "VoidRoundsError",
        ),
        "server.strategy": ("KDStrategy",),
        "transport.inline_grid": ("InlineGrid",),
        "transport.payload": ("Payload", "PayloadError", "array"),
        "transport.template": ("ArrayTemplate",),
    },
)

find_strategies(sys.modules[__name__])
