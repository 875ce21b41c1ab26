"""What a strategy writes after a round, so that a run that was broken off can go on."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from logging import WARNING
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from flwr.app import Array, ArrayRecord
from flwr.common.logger import log
from safetensors import SafetensorError, safe_open

from flwr_kd.checks import ConfigError, read_whole_number
from flwr_kd.files import write_atomically
from flwr_kd.server.records import Node
from flwr_kd.server.tensor_file import pieces, read_tensors, write_tensors
from flwr_kd.text import first_line
from flwr_kd.transport.payload import PayloadError
from flwr_kd.transport.template import ArrayTemplate

__all__ = ["CHECKPOINT", "Checkpoint", "CheckpointWriter", "partitions_of"]

NDArray = npt.NDArray[Any]
CHECKPOINT = "checkpoint.safetensors"
"""Name of the file of a checkpoint in its folder."""
_VERSION = "2"
"""Version of the file's names and metadata. flwr-kd 0.1 wrote version 1."""
_SHARE = 0.05
"""Largest share of the time that is spent on writing checkpoints, where they need not follow each round."""


@dataclass(frozen=True)
class Checkpoint:
    """A round's end.

    Attributes
    ----------
    strategy : str
        The strategy's class.
    server_round : int
        The last round that was finished.
    config : mapping
        The hyper-parameters, as on the wire.
    seed : int
        The run's.
    arrays : ArrayRecord
        The global arrays; empty where there are none.
    state : mapping
        The method's own state, named arrays.
    run : str
        Under which name clients keep what is theirs; the same in a resumed run.
    trained : mapping
        The last round in which each client trained, by the client's key.
    partitions : int
        Number of parts into which the clients' data are divided; 0 if not known.
    """

    strategy: str
    server_round: int
    config: Mapping[str, Any]
    seed: int
    arrays: ArrayRecord
    state: Mapping[str, NDArray]
    run: str = ""
    trained: Mapping[int, int] = field(default_factory=dict)
    partitions: int = 0
    steps: int = 0

    @staticmethod
    def prepare(folder: Path) -> None:
        """Make the folder, see that it can be written to, and remove what a broken-off write left.

        Raises
        ------
        ConfigError
            If it cannot be made or written to.
        """
        try:
            write_atomically(folder / f"{CHECKPOINT}.probe", b"probe")
            (folder / f"{CHECKPOINT}.probe").unlink()
            for left in folder.glob(f".{CHECKPOINT}.*"):
                left.unlink()
        except OSError as error:
            raise ConfigError(f"checkpoint_dir must be a folder that can be written to: {error}") from None

    def save(self, folder: Path) -> Path:
        """Write the checkpoint, all of it or nothing, and return its file.

        Arrays that are in a file themselves pass through memory in pieces.
        """
        arrays = {name: value.numpy() for name, value in self.arrays.items()}
        tensors = {f"arrays/{name}": np.ascontiguousarray(a).reshape(a.shape) for name, a in arrays.items()}
        tensors |= {f"state/{name}": np.asarray(value) for name, value in self.state.items()}
        metadata = {
            "version": _VERSION,
            "strategy": self.strategy,
            "round": str(self.server_round),
            "names": json.dumps(list(arrays)),
            "config": json.dumps(dict(self.config)),
            "seed": str(self.seed),
            "run": self.run,
            "trained": json.dumps(list(self.trained.items())),
            "partitions": str(self.partitions),
            "steps": str(self.steps),
            "infinite": json.dumps(_infinities(tensors)),
        }
        path = folder / CHECKPOINT
        write_tensors(path, tensors, metadata)
        return path

    @staticmethod
    def last_round(folder: Path) -> int:
        """Return the round of a folder's checkpoint, and read nothing else; 0 if there is none that can be read."""
        try:
            with safe_open(folder / CHECKPOINT, framework="numpy") as file:
                return int((file.metadata() or {}).get("round", 0))
        except (SafetensorError, OSError, ValueError):
            return 0

    @classmethod
    def load(cls, folder: Path, strategy: str) -> Self | None:
        """Read a strategy's checkpoint; None if there is none.

        The arrays of the state stay in the file until they are looked at, and cannot be written to.

        Raises
        ------
        ConfigError
            If it was written by another method or version, cannot be read, or has values that cannot be.
        """
        path = folder / CHECKPOINT
        if not path.exists():
            return None
        try:
            metadata, tensors = read_tensors(path)
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{path} cannot be read: {error}") from None
        version, writer = metadata.get("version"), metadata.get("strategy")
        if version != _VERSION:
            raise ConfigError(
                f"{path} is {f'a checkpoint of version {version}' if version else 'no checkpoint'}, expected "
                f"version {_VERSION}: end its run with the flwr-kd that wrote it (0.1 writes version 1), or begin "
                "anew with another checkpoint_dir"
            )
        if writer != strategy:
            raise ConfigError(f"{path} is a checkpoint of {writer}, expected one of {strategy}")
        try:
            arrays = {name: Array(tensors[f"arrays/{name}"]) for name in json.loads(metadata["names"])}
            state = {n.removeprefix("state/"): v for n, v in tensors.items() if n.startswith("state/")}
            server_round = read_whole_number("its round", metadata["round"], 1)
            _check_finite(tensors, json.loads(metadata.get("infinite", "{}")))
            trained = {int(key): int(last) for key, last in json.loads(metadata.get("trained", "[]"))}
            if any(not 0 <= last <= server_round for last in trained.values()):
                raise ConfigError(f"a client has trained after its round, {server_round}")
            return cls(
                strategy,
                server_round,
                json.loads(metadata["config"]),
                int(metadata["seed"]),
                ArrayRecord(arrays),
                state,
                run=metadata.get("run", ""),
                trained=trained,
                partitions=read_whole_number("its number of clients", metadata.get("partitions", "0"), 0),
                steps=read_whole_number("its number of steps", metadata.get("steps", "0"), 0),
            )
        except ConfigError as error:
            raise ConfigError(f"{path} is damaged: {error}") from None
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{path} lacks {first_line(error)}, or has it in another form") from None

    def global_arrays(self, template: ArrayTemplate, path: Path) -> ArrayRecord | None:
        """Return the global arrays, checked and in the template's order; None if there are none.

        Raises
        ------
        ConfigError
            If they are not those of ``initial_arrays``, or have values that cannot be.
        """
        difference = template.difference(ArrayTemplate.of(self.arrays))
        if difference is not None:
            raise ConfigError(f"{path} does not fit initial_arrays: {difference}")
        if not self.arrays:
            return None
        try:
            checked = template.check([self.arrays[name].numpy() for name in template.names])
        except PayloadError as error:
            raise ConfigError(f"{path} is damaged: {error}") from None
        return template.record(checked)


def partitions_of(nodes: Sequence[Node], before: int, folder: Path | None) -> int:
    """Return the number of parts into which the clients' data are divided, as most name it; 0 if they name none.

    Parameters
    ----------
    nodes : sequence of Node
        The clients.
    before : int
        That number in the checkpoint that is resumed; 0 if it is not known.
    folder : Path, optional
        The checkpoint's.

    Raises
    ------
    ConfigError
        If the data of the run that is resumed were divided among another number of clients.
    """
    counts = Counter(node.num_partitions for node in nodes)
    now = counts.most_common(1)[0][0] if counts else 0
    if folder is not None and before and now and before != now:
        raise ConfigError(
            f"{folder / CHECKPOINT} is of a run with {before} clients, and the data are now divided among {now} "
            "(num-partitions): resume with as many, or use another checkpoint_dir"
        )
    return now


def _infinities(tensors: Mapping[str, NDArray]) -> dict[str, int]:
    """Return how many infinite values each array has, such as a mask with -inf; without those that have none."""
    counts = {
        name: sum(int(np.isinf(piece).sum()) for piece in pieces(value))
        for name, value in tensors.items()
        if value.dtype.kind == "f"
    }
    return {name: count for name, count in counts.items() if count}


def _check_finite(tensors: Mapping[str, NDArray], infinite: Mapping[str, int]) -> None:
    """Raise :class:`ConfigError` if an array has NaN, or other infinities than when it was written."""
    counts: dict[str, int] = {}
    for name, value in tensors.items():
        if value.dtype.kind != "f":
            continue
        for piece in pieces(value):
            if np.isfinite(piece).all():
                continue
            if np.isnan(piece).any():
                raise ConfigError(f"array {name!r} has values that are not finite")
            counts[name] = counts.get(name, 0) + int(np.isinf(piece).sum())
    if counts != dict(infinite):
        changed = sorted(counts.items() ^ dict(infinite).items())
        raise ConfigError(f"array {changed[0][0]!r} has other infinite values than when it was written")


class CheckpointWriter:
    """Writes a run's checkpoints, each of them or as many as the time allows.

    Parameters
    ----------
    folder : Path, optional
        Nothing is kept without one.
    seconds : float
        Minimum number of seconds between two checkpoints; 0 writes each.

    Attributes
    ----------
    saved : int
        The last round that was written; 0 if there is none.
    """

    def __init__(self, folder: Path | None, seconds: float) -> None:
        self.folder, self.seconds = folder, seconds
        self.saved = 0
        self._waiting: Checkpoint | None = None
        self._due = time.monotonic() + seconds

    @property
    def whole(self) -> int:
        """The last round that was written or can still be."""
        return self.saved if self._waiting is None else self._waiting.server_round

    def offer(self, checkpoint: Checkpoint) -> None:
        """Keep a checkpoint in memory, and write it once the time has come."""
        self._waiting = checkpoint
        if time.monotonic() >= self._due:
            self.flush()

    def flush(self) -> None:
        """Write the checkpoint that is only in memory, if there is one.

        If that fails, for example on a full disk, there is a warning, and the checkpoint of an earlier round stays.
        """
        checkpoint = self._waiting
        if checkpoint is None or self.folder is None:
            return
        begun = time.monotonic()
        try:
            checkpoint.save(self.folder)
            self.saved = checkpoint.server_round
        except OSError as error:
            log(
                WARNING,
                "round %d: no checkpoint could be written (%s); the run goes on, the one of before stays",
                checkpoint.server_round,
                error,
            )
        # Not before: what interrupts the writing is followed by another flush.
        self._waiting = None
        now = time.monotonic()
        self._due = now + max(self.seconds, (now - begun) / _SHARE if self.seconds else 0.0)
