"""What a server holds in memory that keeps a model for each client, and the CPU seconds that each step takes.

The models are kept, compared (products and distances of all pairs), mixed for all clients, written to a checkpoint
and restored from it. The peak is that of the process, above what it has before the first model. CPU seconds do not
depend on what else the machine does; they leave out what the disk makes the process wait.

Usage: python benchmarks/model_store.py [--out FILE]     (some minutes, and 20 GB on the disk of --folder)
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import peak_memory
from flwr.app import ArrayRecord

from flwr_kd.results.provenance import versions
from flwr_kd.server.checkpoint import Checkpoint
from flwr_kd.server.model_store import ModelStore
from flwr_kd.server.tensor_file import pieces
from flwr_kd.transport.template import ArrayTemplate

CASES = ((100, 1), (1000, 1), (10, 45), (100, 45))
"""Clients, and megabytes of a model."""
MEMORY = 64
"""Megabytes of models that are kept in memory."""
STEPS = {
    "put": "keep",
    "products": "products",
    "distances": "distances",
    "mix": "mix",
    "write": "write checkpoint",
    "restore": "restore",
}
"""The steps as :func:`measured` names them, with the titles of their columns."""
HEADER = (
    "clients",
    "MB of a model",
    "MB of all models",
    "peak, MB",
    *(f"{title}, s" for title in STEPS.values()),
)
"""Titles of the columns of :func:`rows_for_page`."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="write the numbers as JSON")
    parser.add_argument(
        "--folder", type=Path, default=Path(tempfile.gettempdir()), help="default: %(default)s"
    )
    parser.add_argument("--one", nargs=3, type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measured(*options.one, options.folder)))
        return
    rows = []
    for clients, size in CASES:
        words = [sys.executable, __file__, "--folder", str(options.folder), "--one"]
        done = subprocess.run(
            [*words, str(clients), str(size), str(MEMORY)], check=True, capture_output=True, text=True
        )
        rows.append(json.loads(done.stdout))
        print(rows[-1], flush=True)
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        document = {"versions": versions(), "memory_mb": MEMORY, "cases": rows}
        options.out.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def measured(clients: int, size: int, memory: int, folder: Path) -> dict[str, object]:
    """Return the peak and the CPU seconds of each step."""
    seconds: dict[str, float] = {}

    @contextmanager
    def timed(name: str) -> Iterator[None]:
        begun = time.process_time()
        yield
        seconds[name] = round(time.process_time() - begun, 2)

    rng = np.random.default_rng(0)
    width = size * 10**6 // 4 // 1000
    arrays = {"w": rng.normal(size=(1000, width - 1)).astype(np.float32), "b": np.zeros(1000, np.float32)}
    keys = list(range(clients))
    with tempfile.TemporaryDirectory(dir=folder) as name:
        before = peak_memory.begin()
        store = ModelStore(ArrayTemplate.of_ndarrays(arrays), memory=memory * 10**6, folder=Path(name))
        with timed("put"):
            for key in keys:
                arrays["w"][0] = key
                store.put(key, list(arrays.values()))
        with timed("products"):
            store.products(keys)
        with timed("distances"):
            store.squared_distances(keys)
        weights = rng.dirichlet(np.ones(clients), size=clients)
        with timed("mix"):
            mixed = store.mixed(dict(zip(keys, weights, strict=True)), keys)
        state = mixed.state_arrays()
        with timed("write"):
            Checkpoint("None", 1, {}, 0, ArrayRecord(), state).save(Path(name))
        with timed("restore"):
            read = Checkpoint.load(Path(name), "None")
            assert read is not None
            restored = ModelStore.from_state(read.state, memory=memory * 10**6, folder=Path(name))
        grown = peak_memory.peak() - before
        same = all(
            np.array_equal(one, other)
            for key, value in restored.state_arrays().items()
            for one, other in zip(pieces(value), pieces(state[key]), strict=True)
        )
        assert same
    return {"clients": clients, "model_mb": size, "peak_mb": round(grown / 1e6), "seconds": seconds}


def rows_for_page(cases: Iterable[Mapping[str, Any]]) -> list[list[str]]:
    """Return cells for a table, as many as :data:`HEADER` has, a row per case.

    Parameters
    ----------
    cases : iterable of mapping
        What :func:`measured` returned; seconds, and megabytes of 10⁶ bytes.
    """
    return [
        [
            *(f"{case[name]:,}" for name in ("clients", "model_mb")),
            f"{case['clients'] * case['model_mb']:,}",
            f"{case['peak_mb']:,}",
            *(f"{case['seconds'][step]:.1f}" for step in STEPS),
        ]
        for case in cases
    ]


if __name__ == "__main__":
    main()
