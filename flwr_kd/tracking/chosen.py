"""The trackers that a user names: ``tensorboard[:DIR]``, ``mlflow[:URI]``, ``wandb[:PROJECT]``."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from flwr_kd.checks import ConfigError
from flwr_kd.text import unknown_name
from flwr_kd.tracking.mlflow_log import MLflowLog
from flwr_kd.tracking.run_log import RunLog
from flwr_kd.tracking.tensorboard_log import TensorBoardLog
from flwr_kd.tracking.wandb_log import WandbLog

__all__ = ["LogChoice", "chosen_logs", "open_logs"]

_KINDS: dict[str, type[RunLog]] = {"tensorboard": TensorBoardLog, "mlflow": MLflowLog, "wandb": WandbLog}
_COMMA = re.compile(rf",\s*(?=(?:{'|'.join(_KINDS)})\s*(?::|,|$))")
"""A comma between two trackers, and not one inside of a path."""


class LogChoice(NamedTuple):
    """A tracker that is asked for.

    Attributes
    ----------
    kind : str
        ``tensorboard``, ``mlflow`` or ``wandb``.
    target : str
        Folder, URI or project; empty for the default.
    """

    kind: str
    target: str


def chosen_logs(texts: Iterable[str]) -> list[LogChoice]:
    """Read the trackers that a user names, and check that their packages are installed.

    Parameters
    ----------
    texts : iterable of str
        Each a tracker, or several separated by commas.

    Returns
    -------
    list of LogChoice
        Each once.

    Raises
    ------
    ConfigError
        If there is no such tracker, or its package is missing.

    Examples
    --------
    >>> chosen_logs([])
    []
    >>> chosen_logs(["tensorbord"])
    Traceback (most recent call last):
    flwr_kd.ConfigError: unknown log 'tensorbord' (did you mean 'tensorboard'?); valid: tensorboard, mlflow, wandb
    """
    choices = []
    for part in (part for text in texts for part in _COMMA.split(text)):
        kind, _, target = part.partition(":")
        kind = kind.strip()
        if kind not in _KINDS:
            raise ConfigError(unknown_name("log", kind, _KINDS))
        _KINDS[kind].check_package()
        choices.append(LogChoice(kind, target.strip()))
    return list(dict.fromkeys(choices))


def open_logs(choices: Sequence[LogChoice], folder: Path, home: Path | None = None) -> list[RunLog]:
    """Return the callbacks of trackers.

    Parameters
    ----------
    choices : sequence of LogChoice
        From :func:`chosen_logs`.
    folder : Path
        The result's. TensorBoard's files go into ``tensorboard/`` in it, or, in the DIR that is given, into a
        folder of its name below ``runs/`` or the working directory (of its whole path if it is elsewhere), so that
        results with one last name do not meet.
    home : Path, optional
        Where MLflow's database and W&B's files go if the user names no place. None: into the working directory, as
        these packages do by themselves.

    Raises
    ------
    ConfigError
        If MLflow's URI cannot be used, or W&B has no API key.
    """
    return [_open(choice, folder, home) for choice in choices]


def _open(choice: LogChoice, folder: Path, home: Path | None) -> RunLog:
    if choice.kind == "tensorboard":
        target = Path(choice.target) / _below(folder, home) if choice.target else folder / "tensorboard"
        return TensorBoardLog(target)
    if choice.kind == "mlflow":
        uri = choice.target
        if home is not None and not uri and not os.environ.get("MLFLOW_TRACKING_URI"):
            home.mkdir(parents=True, exist_ok=True)
            uri = f"sqlite:///{home / 'mlflow.db'}"
        return MLflowLog(uri)
    return WandbLog(choice.target, group=folder.name, folder=home)


def _below(folder: Path, home: Path | None) -> Path:
    """Return a result's folder without what it shares with those beside it."""
    folder, here = folder.absolute(), Path.cwd()
    for base in ([home.absolute() / "runs"] if home else []) + [here / "runs", here]:
        if folder != base and folder.is_relative_to(base):
            return folder.relative_to(base)
    return folder.relative_to(folder.anchor)
