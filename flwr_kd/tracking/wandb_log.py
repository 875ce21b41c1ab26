"""Runs in Weights & Biases."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, ClassVar

from flwr_kd.checks import ConfigError
from flwr_kd.server.callbacks import RunInfo
from flwr_kd.server.records import KDResult, RoundStats
from flwr_kd.tracking.run_log import RunLog, numbers_of, settings_of
from flwr_kd.wording import option

__all__ = ["WandbLog"]


class WandbLog(RunLog):
    """Sends each run to Weights & Biases, or keeps it on this machine with ``WANDB_MODE=offline``.

    A run that is resumed goes on in its own W&B run.

    Parameters
    ----------
    project : str
        W&B's project. If empty, ``WANDB_PROJECT``, else ``flwr-kd``.
    group : str
        W&B's group, for example the name of a comparison; none if empty.
    folder : path, optional
        Where W&B keeps its files, made if it does not exist; W&B's own choice if None: ``WANDB_DIR``, else
        ``wandb/`` in the working directory.

    Raises
    ------
    ConfigError
        If W&B is not installed, or there is no API key for runs that are sent.
    """

    package: ClassVar[str] = "wandb"

    def __init__(self, project: str = "", group: str = "", folder: Path | None = None) -> None:
        self.check_package()
        import wandb

        self._project = project or os.environ.get("WANDB_PROJECT", "") or "flwr-kd"
        self._group, self._folder = group or None, folder
        self._offline = wandb.setup().settings.mode != "online"
        if not self._offline and not wandb.login(prompt=False, verify=False):
            raise ConfigError(
                f"{option('log', 'wandb')} has no API key: run `wandb login`, or set WANDB_MODE=offline to keep "
                "the runs on this machine"
            )
        self._run: Any = None

    @property
    def place(self) -> str:
        """The project; for runs on this machine, the command that sends them."""
        sent = f"project {self._project}"
        return f"{sent}, offline: wandb sync sends the runs" if self._offline else sent

    def on_start(self, run: RunInfo) -> None:
        """Begin a run in W&B, or go on with that of a resumed run."""
        import wandb

        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=self._project,
            group=self._group,
            name=f"{run.name}, seed {run.seed}",
            job_type=run.name,
            id=run.key,
            resume="allow",
            reinit="create_new",
            config=settings_of(run),
            dir=None if self._folder is None else str(self._folder),
            # The command's bar and table are no part of a run.
            settings=wandb.Settings(console="off"),
        )

    def on_round(self, stats: RoundStats) -> None:
        """Hand over a round's numbers."""
        self._run.log(numbers_of(stats), step=stats.server_round)

    def on_end(self, result: KDResult, error: BaseException | None) -> None:
        """Wait until everything is sent or written."""
        self._run.finish(exit_code=0 if error is None else 1)
