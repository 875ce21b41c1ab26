"""Seconds and memory of simulations with 10 to 10,000 virtual clients, of which a tenth trains per round.

Fashion-MNIST, 20 images per client (6 with 10,000 clients; a quarter of them is the test split), the MLP or the
method's own model, one local epoch, 5 rounds, 2 workers. With 10 clients, two train. Each run is a process of its
own. ``server`` is that process: the peak of its resident memory, above what it had before the run. ``worker`` is
the largest resident memory of a worker after a round, PyTorch included; pages that forked workers share with the
server count in each. The second table is 50 rounds with 100 clients: resident memory of server and workers after
round 25 and after round 50, since what grows with rounds would end a long run.

Usage: python benchmarks/scale.py [--methods NAME,...] [--clients N,...] [--backends NAME,...] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from flwr_kd import registry
from flwr_kd.experiments import runner
from flwr_kd.experiments.experiment import Experiment
from flwr_kd.results.provenance import versions

METHODS = tuple(name for name, method in registry.methods().items() if "scale" in method.benchmarks)
CLIENTS = (10, 100, 1000, 10_000)
IMAGES = 60_000
BACKENDS = ("processes", "ray")
RAY_AT = 1000
"""Ray is measured beside the other backend with this number of clients, and FedAvg."""
PER_CLIENT, FRACTION, ROUNDS, LONG = 20, 0.1, 5, 50
LATER = 25
"""A long run's memory is compared with that after this round, when all workers have warmed up."""
SETTINGS = {"server_epochs": "server-epochs=1", "public_samples": "public-samples=100"}
"""By the field of those methods that have it."""

Rows = list[list[str]]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--clients", default=",".join(map(str, CLIENTS)))
    parser.add_argument("--backends", default=",".join(BACKENDS))
    parser.add_argument("--long", type=int, default=LONG, help="rounds of the long runs; 0 leaves them out")
    parser.add_argument(
        "--out", type=Path, help="write the numbers as JSON; what is there already is not run again"
    )
    parser.add_argument(
        "--one", nargs=4, metavar=("METHOD", "CLIENTS", "ROUNDS", "BACKEND"), help=argparse.SUPPRESS
    )
    options = parser.parse_args()
    if options.one:
        method, clients, rounds, backend = options.one
        print(json.dumps(run(method, int(clients), int(rounds), backend)))
        return
    now = versions()
    config = {"fraction_train": FRACTION, "images_per_client": PER_CLIENT, "workers": 2, "settings": SETTINGS}
    document: dict[str, Any] = {"config": config, "versions": now, "runs": []}
    if options.out and options.out.exists():
        earlier = json.loads(options.out.read_text(encoding="utf-8"))
        if earlier["versions"] == now and earlier["config"] == config:
            document = earlier
    methods, backends = options.methods.split(","), options.backends.split(",")
    counts = [int(count) for count in options.clients.split(",")]
    wanted: list[tuple[str, int, int, str]] = []
    if "processes" in backends:
        wanted += [(name, count, ROUNDS, "processes") for name in methods for count in counts]
        wanted += [(name, 100, options.long, "processes") for name in methods if options.long]
    if "ray" in backends and RAY_AT in counts and "fedavg" in methods:
        wanted.append(("fedavg", RAY_AT, ROUNDS, "ray"))
    done = {tuple(run[key] for key in ("method", "clients", "rounds", "backend")) for run in document["runs"]}
    for key in wanted:
        if key not in done:
            print("{}, {} clients, {} rounds, {}".format(*key), file=sys.stderr)
            document["runs"].append(apart(*key))
            if options.out:
                options.out.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    show(document["runs"], options.long)


def apart(method: str, clients: int, rounds: int, backend: str) -> dict[str, Any]:
    """Run in a process of its own: the peak is a whole process's."""
    done = subprocess.run(
        [sys.executable, __file__, "--one", method, str(clients), str(rounds), backend],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    return dict(json.loads(done.stdout.splitlines()[-1]))


def run(method: str, clients: int, rounds: int, backend: str) -> dict[str, Any]:
    logging.getLogger("flwr").setLevel(logging.ERROR)
    entry = registry.get(method)
    images = min(PER_CLIENT * clients, IMAGES)
    experiment = Experiment(
        dataset="fashion-mnist",
        partition="iid",
        clients=clients,
        rounds=rounds,
        limit=images,
        test_limit=max(1, round(images / 6)),
        fraction_train=FRACTION if clients > 10 else 0.2,
        backend=backend,
        workers=2,
        device="cpu",
        public_limit=500,
        model=None if entry.model else "mlp",
    )
    known = entry.config_class.field_types()
    config = entry.config(["local-epochs=1", *(text for name, text in SETTINGS.items() if name in known)])
    seconds: list[float] = []
    server: list[int] = []
    workers: list[int] = []
    begun = time.monotonic()
    before = resident()

    def on_round(stats: Any) -> None:
        seconds.append(stats.seconds)
        server.append(resident())
        workers.append(max(worker_memory(), default=0))

    runner.run(entry, experiment, config, on_round=on_round)
    peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "method": method,
        "clients": clients,
        "rounds": rounds,
        "backend": backend,
        "seconds": round(time.monotonic() - begun, 2),
        "seconds_of_rounds": [round(each, 3) for each in seconds],
        "server_peak": peak,
        "server_peak_above_start": peak - before,
        "worker_peak": max(workers),
        "server_resident": server,
        "worker_resident": workers,
    }


def resident() -> int:
    """Return the bytes of this process that are in memory now."""
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def worker_memory() -> list[int]:
    """Return the resident bytes of this process's workers: all children, or those of Ray that run clients."""
    sizes = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            line = " ".join(process.cmdline())
            if "ray" not in line or line.startswith("ray::"):
                sizes.append(process.memory_info().rss)
    return sizes


def sizes(runs: Iterable[Mapping[str, Any]]) -> Rows:
    """Return seconds and peaks of the short runs, the header first; the pages show the same."""
    header = [
        "method",
        "clients",
        "backend",
        "whole run, s",
        "round, s",
        "server above start, MB",
        "worker, MB",
    ]
    return [
        header,
        *(
            [
                run["method"],
                f"{run['clients']:,}",
                run["backend"],
                f"{run['seconds']:.0f}",
                f"{statistics.median(run['seconds_of_rounds']):.2f}",
                f"{run['server_peak_above_start'] / 1e6:.0f}",
                f"{run['worker_peak'] / 1e6:.0f}",
            ]
            for run in runs
            if run["rounds"] == ROUNDS
        ),
    ]


def growth(runs: Iterable[Mapping[str, Any]], rounds: int = LONG) -> Rows:
    """Return what was in memory after :data:`LATER` and after all rounds of the runs that have that many."""
    early = min(LATER, rounds)
    last = f"round {rounds}, MB"
    return [
        ["method", f"server, round {early}, MB", last, f"worker, round {early}, MB", last],
        *(
            [
                run["method"],
                *(
                    f"{run[kind][at - 1] / 1e6:.0f}"
                    for kind in ("server_resident", "worker_resident")
                    for at in (early, rounds)
                ),
            ]
            for run in runs
            if run["rounds"] == rounds
        ),
    ]


def show(runs: list[dict[str, Any]], long: int) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(width=120)
    for header, *rows in (sizes(runs), *([growth(runs, long)] if long else [])):
        table = Table(box=box.SIMPLE_HEAD)
        for name in header:
            table.add_column(name, justify="left" if name == "method" else "right")
        for row in rows:
            table.add_row(*row)
        console.print(table)


if __name__ == "__main__":
    main()
