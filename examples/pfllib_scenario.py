"""A scenario of PFLlib or HtFLlib: the clients' files that its ``dataset/generate_NAME.py`` has written.

PFLlib divides all samples of a data set among the clients, and a quarter of each client's samples are its test
split. So does this command, with the same clients, except that it draws the test splits anew, and that 100 samples
are held back as public data, for the methods that need some:

    pip install "flwr-kd[simulation]"
    cd examples
    export SCENARIO=/path/to/PFLlib/dataset/MNIST
    flwr-kd compare fedavg-ft fedproto --dataset pfllib_scenario:load --partition natural:client --clients 20 \
        --merge-test --hold-back 100
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from flwr_kd.data import DataError, Samples


def load() -> Samples:
    """Return the samples of all clients of the folder in the environment variable SCENARIO."""
    folder = Path(os.environ.get("SCENARIO", ""))
    clients = sorted(int(file.stem) for file in folder.glob("train/*.npz") if file.stem.isdigit())
    if "SCENARIO" not in os.environ or not clients:
        raise DataError("SCENARIO must be the folder of a PFLlib data set, with train/0.npz, test/0.npz, …")
    x, y, client = [], [], []
    for number in clients:
        for part in ("train", "test"):
            inputs, labels = read(folder / part / f"{number}.npz")
            x.append(inputs)
            y.append(labels)
            client.append(np.full(len(labels), number))
    return Samples(np.concatenate(x), np.concatenate(y), columns={"client": np.concatenate(client)})


def read(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Read one client's inputs ``[N, ...]`` and labels ``[N]``, as PFLlib's ``read_client_data`` does."""
    # The file is a pickled dict, which could run code when it is read: read only files that you have made yourself.
    with np.load(path, allow_pickle=True) as file:
        samples = file["data"].item()
    return np.asarray(samples["x"], dtype=np.float32), np.asarray(samples["y"], dtype=np.int64)
