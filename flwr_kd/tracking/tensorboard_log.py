"""Runs in TensorBoard's event files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from flwr_kd.server.callbacks import RunInfo
from flwr_kd.server.records import KDResult, RoundStats
from flwr_kd.tracking.run_log import RunLog, numbers_of, settings_of

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

__all__ = ["TensorBoardLog"]

_RESULTS = ("local_accuracy", "global_accuracy", "common_accuracy", "train_loss", "bytes_up", "bytes_down")
"""Numbers beside which TensorBoard's page of hyper-parameters lists the runs."""


class TensorBoardLog(RunLog):
    """Writes each run to a folder of its own: ``FOLDER/METHOD-seedSEED``.

    A run that begins anew or is resumed hides what the same folder had of its rounds before.

    Parameters
    ----------
    folder : path
        Made if it does not exist.

    Raises
    ------
    ConfigError
        If TensorBoard is not installed.
    """

    package: ClassVar[str] = "tensorboard"

    def __init__(self, folder: str | Path) -> None:
        self.check_package()
        self.folder = Path(folder).absolute()
        self._writer: SummaryWriter | None = None
        self._end: Any = None

    @property
    def place(self) -> str:
        """The folder, and the command that shows it."""
        return f"tensorboard --logdir {self.folder}"

    def on_start(self, run: RunInfo) -> None:
        """Open the run's event file, and write its settings."""
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        folder = self.folder / f"{run.name}-seed{run.seed}"
        self._writer = SummaryWriter(str(folder), purge_step=run.first_round)
        settings = settings_of(run)
        parts = hparams(settings, dict.fromkeys(_RESULTS, 0.0))  # type: ignore[no-untyped-call]
        declared, started, self._end = parts
        for part in (declared, started):
            self._writer._get_file_writer().add_summary(part)  # type: ignore[no-untyped-call]
        lines = [f"{name}: {value}  " for name, value in sorted(settings.items())]
        self._writer.add_text("settings", "\n".join(lines), run.first_round)

    def on_round(self, stats: RoundStats) -> None:
        """Write a round's numbers, at once: the run may be watched."""
        assert self._writer is not None
        for name, value in numbers_of(stats).items():
            self._writer.add_scalar(name, value, stats.server_round)
        self._writer.flush()

    def on_end(self, result: KDResult, error: BaseException | None) -> None:
        """Close the file."""
        writer, self._writer = self._writer, None
        assert writer is not None
        if error is None:
            writer._get_file_writer().add_summary(self._end)  # type: ignore[no-untyped-call]
        writer.close()
