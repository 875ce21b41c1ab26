"""Where a client's personal model, and what else a method keeps at a client, lives between rounds.

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
"""Largest size in bytes of all that is kept in ``context.state``."""
_LONGEST_RUN, _EVER = 64, 2**63


class StateError(RuntimeError):
    """A client's personal model cannot be kept or read back."""


class PersonalState:
    """Save and load sets of named tensors of one client and one run.

    A set has a name; that of the personal model is empty. A ``state-dir`` keeps at most three rounds of each: the
    last one, and the last two from which the server could be resumed, of which it may have written one only. A
    resumed server repeats later rounds, which must begin where they began the first time.

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
        """Check that ``size`` bytes can be kept, of all sets together.

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
            kept = self._folder.glob(f"{glob.escape(self._stem().removesuffix('round-'))}*.safetensors")
            free = shutil.disk_usage(self._folder).free + sum(file.stat().st_size for file in kept)
        except OSError as error:
            raise StateError(f"state-dir must be a folder that can be written to: {error}") from None
        if free < 2 * size:
            raise StateError(
                f"state-dir {self._folder} has {free / 1e6:.0f} MB free; a personal model of {size / 1e6:.0f} MB "
                "needs twice its size"
            )

    def save(self, tensors: dict[str, Tensor], name: str = "") -> None:
        """Keep the tensors until the next round.

        Parameters
        ----------
        tensors : dict
            They take the place of the set's earlier ones.
        name : str
            The set: letters and digits; empty for the personal model.

        Raises
        ------
        StateError
            If there is no ``state-dir`` and all sets together are larger than :data:`MAX_STATE_BYTES`, or the file
            cannot be written; what was kept earlier stays.
        """
        tensors = {key: tensor.detach().cpu().contiguous().clone() for key, tensor in tensors.items()}
        if self._folder is None:
            self.check(size_of(tensors) + self._others(name))
            self._context.state[self._key(name)] = ArrayRecord(tensors)
            self._context.state[self._key(name, self._WHEN)] = ConfigRecord({"run": self._run})
            return
        try:
            write_atomically(self._file(self._round, name), save(tensors), sync=self._sync)
            files = self._files(name)
            needed = (max((r for r in files if r <= last), default=self._round) for last in self._needed)
            kept = {self._round, *needed}
            broken_off = self._folder.glob(f".{glob.escape(self._stem(name))}*")
            for file in (*(files[r] for r in files.keys() - kept), *broken_off):
                file.unlink(missing_ok=True)
        except OSError as error:
            raise StateError(f"cannot keep the {_called(name)} in {self._folder}: {error}") from error

    def load(self, name: str = "") -> dict[str, Tensor] | None:
        """Return what was saved last in this run, or None; from a ``state-dir``, up to the last round that counts.

        Parameters
        ----------
        name : str
            The set; empty for the personal model.

        Raises
        ------
        StateError
            If the file exists and cannot be read.
        """
        if self._folder is not None:
            rounds = [r for r in self._files(name) if r <= self._known]
            if not rounds:
                return None
            file = self._file(max(rounds), name)
            try:
                return dict(load_file(file))
            except (SafetensorError, OSError) as error:
                raise StateError(f"cannot read the {_called(name)} in {file}: {error}") from error
        record = self._context.state.array_records.get(self._key(name))
        when = self._context.state.config_records.get(self._key(name, self._WHEN))
        # Callers that did not name a run (for example inspection) get whatever is stored.
        if record is None or (self._known < _EVER and (when is None or when["run"] != self._run)):
            return None
        return {key: torch.from_numpy(value.numpy().copy()) for key, value in record.items()}

    def _key(self, name: str, key: str = _KEY) -> str:
        return f"{key}.{name}" if name else key

    def _others(self, name: str) -> int:
        """Return the size of the other sets in Flower's context."""
        return sum(
            len(array.data)
            for key, record in self._context.state.array_records.items()
            if key.partition(".personal")[0] == "flwr-kd" and key != self._key(name)
            for array in record.values()
        )

    def _file(self, server_round: int, name: str = "") -> Path:
        assert self._folder is not None
        return self._folder / f"{self._stem(name)}{server_round}.safetensors"

    def _stem(self, name: str = "") -> str:
        return f"run-{self._run}-node-{self._node}-{f'{name}-' if name else ''}round-"

    def _files(self, name: str = "") -> dict[int, Path]:
        """Return a set's files of this run and node, by round."""
        assert self._folder is not None
        files = {}
        stem = self._stem(name)
        for file in self._folder.glob(f"{glob.escape(stem)}*.safetensors"):
            number = file.name.removeprefix(stem).removesuffix(".safetensors")
            if number.isdecimal():
                files[int(number)] = file
        return files


def _called(name: str) -> str:
    return f"set {name!r} of a client's state" if name else "personal model"
