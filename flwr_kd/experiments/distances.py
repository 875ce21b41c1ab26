"""How far a run's global models are from its last one: FedHyb's figure 5.

The paper draws the expectation of ``||Omega_t - Omega*||^2`` by rounds t, with ``Omega*`` the optimum, and does not
say how it was found. What is known of a run is where it ended: ``Omega*`` is here the run's own global model after
its last round. The distance then says how long a run still moves, and nothing of how good the end is.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from flwr.app import ArrayRecord

from flwr_kd.results.schema import RoundResult

__all__ = ["Trajectory"]

_BLOCK = 2**22
"""Numbers whose differences are in memory at a time."""


class Trajectory:
    """The global models of a run's rounds, one file for each, which are gone when the distances are known.

    Parameters
    ----------
    folder : Path, optional
        Made for the first model. It holds as many models as there are rounds. If None it is a temporary one, which
        ends with this object.
    parameters : sequence of str
        Names of the arrays that count: trained parameters, not BatchNorm's statistics.
    """

    def __init__(self, folder: Path | None, parameters: Sequence[str]) -> None:
        self._temporary = None
        if folder is None:
            self._temporary = tempfile.TemporaryDirectory(
                prefix="flwr-kd-models-", ignore_cleanup_errors=True
            )
            folder = Path(self._temporary.name)
        self.folder = folder
        self.parameters = tuple(parameters)

    def keep(self, server_round: int, arrays: ArrayRecord) -> None:
        """Write the global model after a round, in place of one of the same round; of round 0 nothing."""
        if server_round < 1:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        numbers = [np.asarray(arrays[name].numpy(), dtype=np.float32).ravel() for name in self.parameters]
        np.save(self._file(server_round), np.concatenate(numbers))

    def squared_distances(self, rounds: Sequence[int]) -> dict[int, float]:
        """Return the squared Euclidean distance of the rounds' models to that of the last of them.

        Rounds without a model are left out: void ones, and those before a run was resumed without them.

        Parameters
        ----------
        rounds : sequence of int
            The run's, ascending.
        """
        there = [number for number in rounds if self._file(number).exists()]
        if not there or there[-1] != rounds[-1]:
            return {}
        last = np.load(self._file(there[-1]), mmap_mode="r")
        distances = {}
        for number in there:
            model = np.load(self._file(number), mmap_mode="r")
            distances[number] = sum(
                float(
                    np.square(
                        model[start : start + _BLOCK] - last[start : start + _BLOCK], dtype=np.float64
                    ).sum()
                )
                for start in range(0, len(last), _BLOCK)
            )
        return distances

    def measured(self, rounds: Sequence[RoundResult]) -> tuple[RoundResult, ...]:
        """Return a run's rounds with their distances, and remove the models."""
        distances = self.squared_distances([each.round for each in rounds])
        self.remove()
        return tuple(replace(each, distance_to_last=distances.get(each.round)) for each in rounds)

    def remove(self) -> None:
        """Remove the models."""
        if self._temporary is not None:
            self._temporary.cleanup()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _file(self, server_round: int) -> Path:
        return self.folder / f"{server_round}.npy"
