"""What a strategy writes after a round, so that a run that was broken off can go on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from flwr.app import Array, ArrayRecord
from safetensors import safe_open
from safetensors.numpy import save

from .config import ConfigError
from .state import write_atomically

__all__ = ["CHECKPOINT", "Checkpoint"]

NDArray = npt.NDArray[Any]
CHECKPOINT = "checkpoint.safetensors"
_VERSION = "1"


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
    """

    strategy: str
    server_round: int
    config: Mapping[str, Any]
    seed: int
    arrays: ArrayRecord
    state: Mapping[str, NDArray]

    def save(self, folder: Path) -> Path:
        """Write the checkpoint, all of it or nothing, and return its file."""
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
        }
        path = folder / CHECKPOINT
        write_atomically(path, save(tensors, metadata=metadata))
        return path

    @classmethod
    def load(cls, folder: Path, strategy: str) -> Self | None:
        """Read a strategy's checkpoint; None if there is none.

        Raises
        ------
        ConfigError
            If it was written by another method or version.
        """
        path = folder / CHECKPOINT
        if not path.exists():
            return None
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        found = (metadata.get("strategy"), metadata.get("version"))
        if found != (strategy, _VERSION):
            raise ConfigError(f"{path} is of {found[0]} (version {found[1]}), expected {strategy}")
        arrays = {name: Array(tensors[f"arrays/{name}"]) for name in json.loads(metadata["names"])}
        state = {n.removeprefix("state/"): v for n, v in tensors.items() if n.startswith("state/")}
        return cls(
            strategy,
            int(metadata["round"]),
            json.loads(metadata["config"]),
            int(metadata["seed"]),
            ArrayRecord(arrays),
            state,
        )
