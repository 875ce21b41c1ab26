"""Where a client's personal model lives between rounds.

Flower keeps ``context.state`` in memory, per run; a SuperNode drops a large one without a word (250 MB were
lost in a trial, 200 MB were kept). So there are two places: ``context.state`` up to a limit, or, where the
node config names a ``state-dir``, a file there.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import torch
from flwr.app import ArrayRecord, Context
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

__all__ = ["MAX_STATE_BYTES", "PersonalState", "StateError", "write_atomically"]

MAX_STATE_BYTES = 150 * 10**6
"""Largest personal model in bytes that is kept in ``context.state``."""


class StateError(RuntimeError):
    """A client's personal model cannot be kept or read back."""


class PersonalState:
    """Save and load named tensors of one client and one run.

    Parameters
    ----------
    context : Context
        Flower's context of the client. ``context.node_config["state-dir"]``, where given, is a folder.
    """

    _KEY = "flwr-kd.personal"

    def __init__(self, context: Context) -> None:
        self._context = context
        folder = context.node_config.get("state-dir")
        self._file: Path | None = None
        if folder:
            # A SuperNode's partition id outlives its node id, which a restart may change.
            node = context.node_config.get("partition-id", context.node_id)
            self._file = Path(str(folder)) / f"run-{context.run_id}-node-{node}.safetensors"

    def save(self, tensors: dict[str, Tensor]) -> None:
        """Keep the tensors until the next round.

        Raises
        ------
        StateError
            If there is no ``state-dir`` and the tensors are larger than :data:`MAX_STATE_BYTES`.
        """
        tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
        if self._file is not None:
            write_atomically(self._file, save(tensors))
            return
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        if size > MAX_STATE_BYTES:
            raise StateError(
                f"a personal model of {size / 1e6:.0f} MB is more than the {MAX_STATE_BYTES / 1e6:.0f} MB that "
                "Flower keeps between rounds; name a folder for it: --node-config 'state-dir=\"/path\"'"
            )
        self._context.state[self._KEY] = ArrayRecord(tensors)

    def load(self) -> dict[str, Tensor] | None:
        """Return what was saved last in this run, or None.

        Raises
        ------
        StateError
            If the file exists and cannot be read.
        """
        if self._file is not None:
            if not self._file.exists():
                return None
            try:
                return dict(load_file(self._file))
            except (SafetensorError, OSError) as error:
                raise StateError(f"cannot read the personal model in {self._file}: {error}") from error
        record = self._context.state.array_records.get(self._KEY)
        if record is None:
            return None
        return {name: torch.from_numpy(value.numpy().copy()) for name, value in record.items()}


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file so that a reader, or a crash, sees the old or the new one and nothing between."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
