"""What a server holds in memory that averages models by a robust rule, and the seconds that it takes.

Each rule gets models one after another, as from clients, and computes its result. The peak is that of the process,
above what it has before the first model; one model is made anew for each client.

Usage: python benchmarks/aggregation.py [--out FILE] [--clients N] [--size MB]     (some minutes, 5 GB on --folder)
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import peak_memory

from flwr_kd.results.provenance import versions
from flwr_kd.server.aggregation import Rule, new_mean

RULES = (
    "mean",
    "median",
    "trimmed-mean:0.2",
    "krum:20",
    "multi-krum:20:50",
    "geometric-median",
    "norm-bound:1.5",
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="write the numbers as JSON")
    parser.add_argument(
        "--folder", type=Path, default=Path(tempfile.gettempdir()), help="default: %(default)s"
    )
    parser.add_argument("--clients", type=int, default=100, help="default: %(default)s")
    parser.add_argument("--size", type=int, default=45, help="megabytes of a model; default: %(default)s")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measured(options.one, options.clients, options.size, options.folder)))
        return
    rows = []
    for rule in RULES:
        words = [sys.executable, __file__, "--folder", str(options.folder), "--clients", str(options.clients)]
        words += ["--size", str(options.size), "--one", rule]
        rows.append(json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout))
        print(rows[-1], flush=True)
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        document = {"versions": versions(), "rules": rows}
        options.out.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def measured(rule: str, clients: int, size: int, folder: Path) -> dict[str, object]:
    """Return the peak, and the seconds of adding the models and of computing the result."""
    rng = np.random.default_rng(0)
    # A layer of a fifth of the model, as the largest of a ResNet18.
    sizes = [size * 10**6 // 4 // 5] * 5
    first = [rng.normal(size=count).astype(np.float32) for count in sizes]
    before = peak_memory.begin()
    mean = new_mean(Rule.parse(rule), reference=first, folder=folder)
    added = 0.0
    for client in range(clients):
        model = [array + np.float32(client) for array in first]
        begun = time.perf_counter()
        mean.add(model, 1)
        added += time.perf_counter() - begun
        del model
    begun = time.perf_counter()
    result = mean.result()
    seconds = time.perf_counter() - begun
    assert [array.size for array in result] == sizes
    return {
        "rule": rule,
        "clients": clients,
        "model_mb": size,
        "peak_mb": round((peak_memory.peak() - before) / 1e6),
        "seconds_adding": round(added, 1),
        "seconds": round(seconds, 1),
    }


if __name__ == "__main__":
    main()
