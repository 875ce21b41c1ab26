"""What all trackers have in common: which numbers and settings they get, and the check for their package."""

from __future__ import annotations

import importlib.util
import math
from dataclasses import fields
from typing import ClassVar

from flwr_kd.checks import ConfigError, Scalar
from flwr_kd.server.callbacks import Callback, RunInfo
from flwr_kd.server.records import RoundStats
from flwr_kd.wording import option

__all__ = ["RunLog", "numbers_of", "settings_of"]

_NO_MEASURE = ("server_round", "measured")


class RunLog(Callback):
    """Base of the trackers: one run of a tracker per method and seed.

    A tracker gets the hyper-parameters and shared settings when a run begins, and after each round all numbers that
    were measured, with the round as the step.
    """

    package: ClassVar[str]
    """The Python package that it needs, which is also the name of flwr-kd's extra."""

    @classmethod
    def check_package(cls) -> None:
        """Check that the package is installed, without importing it.

        Raises
        ------
        ConfigError
            If it is not; the message has the command that installs it.
        """
        spec = importlib.util.find_spec(cls.package)
        # A folder of this name, such as W&B's own, is no package: it has no file.
        if spec is None or spec.origin is None:
            raise ConfigError(
                f"{option('log', cls.package)} needs the package {cls.package}, which is not installed: "
                f'pip install "flwr-kd[{cls.package}]"'
            )

    @property
    def place(self) -> str:
        """Where the runs are, in words for the user."""
        raise NotImplementedError


def numbers_of(stats: RoundStats) -> dict[str, float]:
    """Return a round's numbers by name: those that were measured and are finite.

    >>> numbers = numbers_of(RoundStats(3, local_accuracy=0.5, train_loss=float("nan"), bytes_up=100))
    >>> numbers["local_accuracy"], numbers["bytes_up"], "train_loss" in numbers, "global_accuracy" in numbers
    (0.5, 100.0, False, False)
    """
    values = {each.name: getattr(stats, each.name) for each in fields(stats) if each.name not in _NO_MEASURE}
    return {
        name: float(value)
        for name, value in values.items()
        if isinstance(value, int | float) and math.isfinite(value)
    }


def settings_of(run: RunInfo) -> dict[str, Scalar]:
    """Return what a tracker keeps as a run's parameters: shared settings, hyper-parameters, method and seed.

    Settings without a value are left out, and lists become texts. A setting with the name of a hyper-parameter,
    such as FedMD's ``precision``, becomes ``shared.NAME``.
    """
    own = dict(run.hyperparameters)
    shared = {f"shared.{name}" if name in own else name: value for name, value in run.settings.items()}
    values: dict[str, Scalar] = {
        name: value if isinstance(value, bool | int | float | str) else str(value)
        for name, value in {**shared, **own}.items()
        if value is not None
    }
    return {**values, "method": run.name, "seed": run.seed, "rounds": run.num_rounds, "clients": run.clients}
