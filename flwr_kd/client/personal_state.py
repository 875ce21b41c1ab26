"""Where a client's personal model lives between rounds.

Flower keeps ``context.state`` in memory, per run. A SuperNode drops a large one without any error: in a trial
250 MB were lost, 200 MB were kept. So there are two places: ``context.state`` up to a limit, or a file in the
``state-dir`` that the node config names.
"""

from __future__ import annotations

import glob
import shutil
import tempfile
from pathlib import Path

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from flwr_kd.files import write_atomically
from flwr_kd.learning.weights import size_of

__all__ = ["MAX_STATE_BYTES", "PersonalState", "StateError"]

MAX_STATE_BYTES = 150 * 10**6
"""Size in bytes of the largest personal model that is kept in ``context.state``."""
_LONGEST_RUN, _EVER = 64, 2**63


class StateError(RuntimeError):
    """A client's personal model cannot be kept or read back."""


class PersonalState:
    """Save and load named tensors of one client and one run.

    A ``state-dir`` keeps at most three rounds: the last one, and the last two from which the server could be
    resumed, of which it may have written one only. A resumed server repeats later rounds, which must begin where
    they began the first time.

    Parameters
    ----------
    context : Context
        Flower's context of the client. ``context.node_config["state-dir"]``, where given, is a folder. With
        ``state-sync`` false its files outlive the process, but not always the machine, and cost less time.
    """

    _KEY, _WHEN = "flwr-kd.personal", "flwr-kd.personal-of"

    def __init__(self, context: Context) -> None:
        self._context = context
        folder = context.node_config.get("state-dir")
        self._folder = Path(str(folder)) if folder else None
        # A SuperNode's partition id outlives its node id, which a restart may change.
        self._node = context.node_config.get("partition-id", context.node_id)
        self._run, self._round, self._known = str(context.run_id), 0, _EVER
        self._needed: tuple[int, ...] = ()
        self._sync = bool(context.node_config.get("state-sync", True))

    def at(self, run: str, server_round: int, *, known: int, saved: int, whole: int = 0) -> None:
        """Set the run and the round for loading and saving.

        Parameters
        ----------
        run : str
            The server's name of the run, which a resumed one keeps: letters and digits. Flower's run id if empty.
        server_round : int
            From 1.
        known : int
            The last round that counts. A model of a later one is not loaded: it is left from a server that was
            interrupted.
        saved : int
            The last round from which the server could be resumed. The last model up to that round is kept.
        whole : int
            A later round from which it could be if it ended now, of which the same is kept.

        Raises
        ------
        StateError
            If ``run`` could lead elsewhere as part of a file's name.
        """
        if run and not (run.isascii() and run.isalnum() and len(run) <= _LONGEST_RUN):
            raise StateError(f"run-key must be at most {_LONGEST_RUN} letters and digits, got {run[:80]!r}")
        self._run = run or str(self._context.run_id)
        self._round, self._known, self._needed = server_round, known, (saved, whole)

    def check(self, size: int) -> None:
        """Check that ``size`` bytes can be kept.

        Raises
        ------
        StateError
            If there is no ``state-dir`` and they are more than :data:`MAX_STATE_BYTES`, or the ``state-dir`` cannot
            be written to, or has no space for two models of that size.
        """
        if self._folder is None:
            if size > MAX_STATE_BYTES:
                raise StateError(
                    f"a personal model of {size / 1e6:.0f} MB is more than the {MAX_STATE_BYTES / 1e6:.0f} MB that "
                    "Flower keeps between rounds; name a folder for it: --node-config 'state-dir=\"/path\"'"
                )
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self._folder):
                pass
            free = shutil.disk_usage(self._folder).free + sum(
                f.stat().st_size for f in self._files().values()
            )
        except OSError as error:
            raise StateError(f"state-dir must be a folder that can be written to: {error}") from None
        if free < 2 * size:
            raise StateError(
                f"state-dir {self._folder} has {free / 1e6:.0f} MB free; a personal model of {size / 1e6:.0f} MB "
                "needs twice its size"
            )

    def save(self, tensors: dict[str, Tensor]) -> None:
        """Keep the tensors until the next round.

        Raises
        ------
        StateError
            If there is no ``state-dir`` and the tensors are larger than :data:`MAX_STATE_BYTES`, or the file cannot
            be written; what was kept earlier stays.
        """
        tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
        if self._folder is None:
            self.check(size_of(tensors))
            self._context.state[self._KEY] = ArrayRecord(tensors)
            self._context.state[self._WHEN] = ConfigRecord({"run": self._run})
            return
        try:
            write_atomically(self._file(self._round), save(tensors), sync=self._sync)
            files = self._files()
            needed = (max((r for r in files if r <= last), default=self._round) for last in self._needed)
            kept = {self._round, *needed}
            broken_off = self._folder.glob(f".{glob.escape(self._stem)}*")
            for file in (*(files[r] for r in files.keys() - kept), *broken_off):
                file.unlink(missing_ok=True)
        except OSError as error:
            raise StateError(f"cannot keep the personal model in {self._folder}: {error}") from error

    def load(self) -> dict[str, Tensor] | None:
        """Return what was saved last in this run, or None; from a ``state-dir``, up to the last round that counts.

        Raises
        ------
        StateError
            If the file exists and cannot be read.
        """
        if self._folder is not None:
            rounds = [r for r in self._files() if r <= self._known]
            if not rounds:
                return None
            file = self._file(max(rounds))
            try:
                return dict(load_file(file))
            except (SafetensorError, OSError) as error:
                raise StateError(f"cannot read the personal model in {file}: {error}") from error
        record = self._context.state.array_records.get(self._KEY)
        when = self._context.state.config_records.get(self._WHEN)
        # Callers that did not name a run (for example inspection) get whatever is stored.
        if record is None or (self._known < _EVER and (when is None or when["run"] != self._run)):
            return None
        return {name: torch.from_numpy(value.numpy().copy()) for name, value in record.items()}

    def _file(self, server_round: int) -> Path:
        assert self._folder is not None
        return self._folder / f"{self._stem}{server_round}.safetensors"

    @property
    def _stem(self) -> str:
        return f"run-{self._run}-node-{self._node}-round-"

    def _files(self) -> dict[int, Path]:
        """Return the files of this run and node, by round."""
        assert self._folder is not None
        files = {}
        for file in self._folder.glob(f"{glob.escape(self._stem)}*.safetensors"):
            number = file.name.removeprefix(self._stem).removesuffix(".safetensors")
            if number.isdecimal():
                files[int(number)] = file
        return files
