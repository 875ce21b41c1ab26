"""Clients are persons: physiotherapy exercises by the motion of a watch, ten persons, seven exercises.

The recordings are real and come inside the package seglearn (Burns et al. 2018), so nothing is downloaded. A sample
is two seconds of a recording: acceleration and rotation, 100 times 6 numbers, standardised per channel.

    pip install "flwr-kd[simulation]" seglearn
    cd examples
    flwr-kd compare fedavg fedproto --dataset watch_persons:watch --partition natural:person --clients 10
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distribution

import numpy as np

from flwr_kd.data import DataError, Samples

WINDOW = 100


def watch() -> Samples:
    """Return the windows of all recordings, the exercises, and each window's person."""
    try:
        path = distribution("seglearn").locate_file("seglearn/data/watch_dataset.npy")
    except PackageNotFoundError:
        raise DataError("the watch data is in the package seglearn: pip install seglearn") from None
    # The file is a pickled dict. It comes from a package that you have installed, whose code could do the same.
    found = np.load(str(path), allow_pickle=True).item()
    return windows(found["X"], found["y"], found["subject"])


def windows(recordings: list[np.ndarray], exercises: np.ndarray, persons: np.ndarray) -> Samples:
    """Cut recordings ``[T, K]`` into windows ``[K, 100]`` that do not overlap; the rest of each is left out."""
    parts = [one[: len(one) // WINDOW * WINDOW].reshape(-1, WINDOW, one.shape[1]) for one in recordings]
    counts = [len(part) for part in parts]
    x = np.concatenate(parts)
    x = (x - x.mean(axis=(0, 1))) / x.std(axis=(0, 1))
    return Samples(
        x.transpose(0, 2, 1),
        np.repeat(exercises, counts),
        columns={"person": np.repeat(persons, counts)},
    )
