"""Federated knowledge distillation for Flower.

Each method is a Flower ``Strategy`` with its matching client, in ``flwr_kd.strategies``. The names that
users need stand here. Each is imported when it is first used, so that ``import flwr_kd`` is quick.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from flwr_kd._clone import find_strategies
from flwr_kd.lazy import exports

if TYPE_CHECKING:
    from flwr_kd.checks import ConfigError as ConfigError
    from flwr_kd.checks import DataError as DataError
    from flwr_kd.client.client import KDClient as KDClient
    from flwr_kd.client.message_app import client_app as client_app
    from flwr_kd.client.personal_state import PersonalState as PersonalState
    from flwr_kd.client.personal_state import StateError as StateError
    from flwr_kd.client.task import Answer as Answer
    from flwr_kd.client.task import Task as Task
    from flwr_kd.config import MethodConfig as MethodConfig
    from flwr_kd.config import hyper as hyper
    from flwr_kd.data.own import DataSpec as DataSpec
    from flwr_kd.data.own import load_own as load_own
    from flwr_kd.data.own import load_samples as load_samples
    from flwr_kd.experiments.comparison import compare as compare
    from flwr_kd.experiments.errors import SimulationError as SimulationError
    from flwr_kd.experiments.evaluation import evaluator as evaluator
    from flwr_kd.experiments.experiment import Experiment as Experiment
    from flwr_kd.experiments.options import ExperimentOptions as ExperimentOptions
    from flwr_kd.experiments.runner import run as run
    from flwr_kd.learning.batches import Batches as Batches
    from flwr_kd.learning.batches import DatasetError as DatasetError
    from flwr_kd.learning.scores import Measured as Measured
    from flwr_kd.registry import Method as Method
    from flwr_kd.results.errors import ResultError as ResultError
    from flwr_kd.results.errors import ResultExistsError as ResultExistsError
    from flwr_kd.results.schema import Comparison as Comparison
    from flwr_kd.results.schema import RoundResult as RoundResult
    from flwr_kd.results.schema import RunResult as RunResult
    from flwr_kd.server.callbacks import Callback as Callback
    from flwr_kd.server.callbacks import Callbacks as Callbacks
    from flwr_kd.server.callbacks import PhaseStats as PhaseStats
    from flwr_kd.server.callbacks import RunInfo as RunInfo
    from flwr_kd.server.records import HandshakeError as HandshakeError
    from flwr_kd.server.records import KDResult as KDResult
    from flwr_kd.server.records import Node as Node
    from flwr_kd.server.records import Outgoing as Outgoing
    from flwr_kd.server.records import Reply as Reply
    from flwr_kd.server.records import RoundStats as RoundStats
    from flwr_kd.server.records import VoidRoundsError as VoidRoundsError
    from flwr_kd.server.strategy import KDStrategy as KDStrategy
    from flwr_kd.transport.inline_grid import InlineGrid as InlineGrid
    from flwr_kd.transport.payload import Payload as Payload
    from flwr_kd.transport.payload import PayloadError as PayloadError
    from flwr_kd.transport.payload import array as array
    from flwr_kd.transport.template import ArrayTemplate as ArrayTemplate

__version__ = "0.2.0"

# A type checker reads the imports above, Python this list; a test holds both equal.
_HOMES = {
    "checks": ("ConfigError", "DataError"),
    "client.client": ("KDClient",),
    "client.message_app": ("client_app",),
    "client.personal_state": ("PersonalState", "StateError"),
    "client.task": ("Answer", "Task"),
    "config": ("MethodConfig", "hyper"),
    "data.own": ("DataSpec", "load_own", "load_samples"),
    "experiments.comparison": ("compare",),
    "experiments.errors": ("SimulationError",),
    "experiments.evaluation": ("evaluator",),
    "experiments.experiment": ("Experiment",),
    "experiments.options": ("ExperimentOptions",),
    "experiments.runner": ("run",),
    "learning.batches": ("Batches", "DatasetError"),
    "learning.scores": ("Measured",),
    "registry": ("Method",),
    "results.errors": ("ResultError", "ResultExistsError"),
    "results.schema": ("Comparison", "RoundResult", "RunResult"),
    "server.callbacks": ("Callback", "Callbacks", "PhaseStats", "RunInfo"),
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
}

__all__ = ["__version__", *(name for names in _HOMES.values() for name in names)]
__getattr__, __dir__ = exports(__name__, _HOMES)

find_strategies(sys.modules[__name__])
