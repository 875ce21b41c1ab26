"""Runs in TensorBoard, MLflow and Weights & Biases, by callbacks: ``--log``, the key ``log`` of apps, or Python.

Examples
--------
::

    from flwr_kd.tracking import MLflowLog, TensorBoardLog

    strategy = FedHKD(callbacks=[TensorBoardLog("runs/tensorboard"), MLflowLog("sqlite:///mlflow.db")])
"""

from flwr_kd.tracking.chosen import LogChoice, chosen_logs, open_logs
from flwr_kd.tracking.mlflow_log import MLflowLog
from flwr_kd.tracking.round_lines import RoundLines, accuracies, round_line
from flwr_kd.tracking.run_log import RunLog, numbers_of, settings_of
from flwr_kd.tracking.tensorboard_log import TensorBoardLog
from flwr_kd.tracking.wandb_log import WandbLog

__all__ = [
    "LogChoice",
    "MLflowLog",
    "RoundLines",
    "RunLog",
    "TensorBoardLog",
    "WandbLog",
    "accuracies",
    "chosen_logs",
    "numbers_of",
    "open_logs",
    "round_line",
    "settings_of",
]
