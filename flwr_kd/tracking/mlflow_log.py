"""Runs in MLflow."""

from __future__ import annotations

import os
import time
from typing import Any, ClassVar

from flwr_kd.checks import ConfigError
from flwr_kd.server.callbacks import RunInfo
from flwr_kd.server.records import KDResult, RoundStats
from flwr_kd.text import first_line
from flwr_kd.tracking.run_log import RunLog, numbers_of, settings_of
from flwr_kd.wording import option

__all__ = ["MLflowLog"]

_KEY = "flwr_kd.run"
_AT_ONCE = 100
"""Largest number of parameters that MLflow takes in one request."""


class MLflowLog(RunLog):
    """Writes each run to an MLflow server or a database. A run that is resumed goes on in its own MLflow run.

    Parameters
    ----------
    uri : str
        The tracking URI, such as ``http://127.0.0.1:5000`` or ``sqlite:///mlflow.db``. If empty, MLflow's own:
        ``MLFLOW_TRACKING_URI``, else a database in the working directory.
    experiment : str
        MLflow's name for the runs that belong together. If empty, ``MLFLOW_EXPERIMENT_NAME``, else ``flwr-kd``.

    Raises
    ------
    ConfigError
        If MLflow is not installed, or the URI cannot be used.
    """

    package: ClassVar[str] = "mlflow"

    def __init__(self, uri: str = "", experiment: str = "") -> None:
        self.check_package()
        from mlflow.tracking import MlflowClient

        experiment = experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME", "") or "flwr-kd"
        try:
            self._client = MlflowClient(uri or None)
            known = self._client.get_experiment_by_name(experiment)
            self._experiment = known.experiment_id if known else self._client.create_experiment(experiment)
        # The errors of databases and of HTTP are of many libraries.
        except Exception as error:
            place = option("log", f"mlflow:{uri}" if uri else "mlflow")
            raise ConfigError(f"{place} cannot be used: {first_line(error)}") from error
        self._run = ""

    @property
    def place(self) -> str:
        """The tracking URI."""
        return f"mlflow ui --backend-store-uri {self._client.tracking_uri}"

    def on_start(self, run: RunInfo) -> None:
        """Begin a run in MLflow, or go on with that of a resumed run."""
        from mlflow.entities import Param

        self._run = self._interrupted(run) if run.first_round > 1 else ""
        if self._run:
            self._client.update_run(self._run, status="RUNNING")
            return
        name = f"{run.name}, seed {run.seed}"
        self._run = self._client.create_run(self._experiment, run_name=name, tags={_KEY: run.key}).info.run_id
        params = [Param(name, str(value)) for name, value in settings_of(run).items()]
        for first in range(0, len(params), _AT_ONCE):
            self._client.log_batch(self._run, params=params[first : first + _AT_ONCE])

    def on_round(self, stats: RoundStats) -> None:
        """Send a round's numbers in one request."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(name, value, now, stats.server_round) for name, value in numbers_of(stats).items()]
        self._client.log_batch(self._run, metrics=metrics)

    def on_end(self, result: KDResult, error: BaseException | None) -> None:
        """Say in MLflow how the run ended."""
        interrupted = isinstance(error, KeyboardInterrupt)
        status = "FINISHED" if error is None else "KILLED" if interrupted else "FAILED"
        self._client.set_terminated(self._run, status)

    def _interrupted(self, run: RunInfo) -> str:
        """Return the id of the MLflow run with which a resumed run goes on; an empty text if there is none."""
        found: Any = self._client.search_runs(
            [self._experiment], f"tags.`{_KEY}` = '{run.key}'", max_results=1
        )
        return str(found[0].info.run_id) if found else ""
