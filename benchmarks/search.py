"""Searches for settings of `accuracy.py`, for methods whose defaults learn next to nothing in its few steps.

Per-FedAvg and pFedMe fix plain SGD, and their papers' rates are meant for hundreds of rounds. Per-FedAvg's two
rates are one value here. In pFedMe the client's own model goes nine tenths of the way to the personal one after
each batch (η λ = 0.9), and one local epoch with 5 steps on each batch has as many steps as the 5 epochs of the
others. Fine-tuned FedAvg with plain SGD is what both are compared with besides.

A search has one seed that no table uses, and one partition of each data set. It looks at no test sample: each
client's training part is divided once more, the client trains on three quarters of it, and the rest measures
its personal model. The best mean over both data sets is chosen. Where the best value is at an edge of its grid,
a wider grid has to follow.

Usage: python benchmarks/search.py [--rows NAME,...] --out FILE

The file is written after each run, and runs that it has are not run again.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import logging
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from accuracy import BASELINES_PARTS, RATES, entry, options_of

from flwr_kd.data import split
from flwr_kd.experiments import runner
from flwr_kd.experiments.data import Splits, bundle_of, client_splits
from flwr_kd.experiments.experiment import Experiment
from flwr_kd.files import write_atomically
from flwr_kd.results.provenance import versions
from flwr_kd.seeding import derive_seed

GRIDS: dict[str, tuple[tuple[str, ...], ...]] = {
    "fedavg-ft-sgd": (("0.03", "0.1", "0.3", "1"),),
    "per-fedavg": (("0.03", "0.1", "0.3", "1"),),
    "pfedme": (("0.01", "0.03", "0.1", "0.3", "1"), ("0.1", "0.3", "1")),
}
"""By row, the values of each axis in increasing order: the rate; λ and η_p."""


def cells(row: str) -> Iterator[tuple[tuple[str, ...], list[str]]]:
    """Yield a row's cells: a value of each axis, and the settings that they make."""
    for values in itertools.product(*GRIDS[row]):
        if row == "pfedme":
            weight, rate = values
            own = [f"proximal-lambda={weight}", f"learning-rate={0.9 / float(weight):.3g}"]
            yield values, ["local-epochs=1", *own, f"personal-learning-rate={rate}"]
        elif row == "fedavg-ft-sgd":
            yield values, [f"learning-rate={values[0]}"]
        else:
            yield values, [f"learning-rate={values[0]}", f"alpha={values[0]}"]


PARTS = ("digits-inner-dirichlet", "letters-pathological")
SEED = 10


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", default=",".join(GRIDS))
    parser.add_argument("--out", type=Path, required=True, help="file of the result, JSON")
    options = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.ERROR)
    document = json.loads(options.out.read_text("utf-8")) if options.out.exists() else {"cells": []}
    document |= {"command": "python benchmarks/search.py", "versions": versions(), "seed": SEED}
    for row, part in itertools.product(options.rows.split(","), PARTS):
        for _, settings in cells(row):
            cell = {"row": row, "settings": settings, "part": part}
            if any(cell.items() <= found.items() for found in document["cells"]):
                continue
            print(f"{part}: {row}, {' '.join(settings)}", file=sys.stderr, flush=True)
            document["cells"].append({**cell, "validation_accuracy": validated(part, row, settings)})
            document["best"] = best(document["cells"])
            write_atomically(options.out, (json.dumps(document, indent=2) + "\n").encode())
    print(json.dumps(document.get("best"), indent=2))


def validated(part: str, row: str, settings: Sequence[str]) -> float | None:
    """Run once; return the mean accuracy of the clients' personal models on their validation parts."""
    shared = BASELINES_PARTS[part]
    planned = entry(row, RATES[shared["dataset"]], settings)
    experiment = planned.of(Experiment.from_options(options_of(shared), SEED))
    # The clients' test splits, and what is measured on them, are those that the runner asks for.
    with mock.patch.object(runner, "client_splits", held_out):
        return runner.run(planned.method, experiment, planned.config).last["local_accuracy"]


@functools.cache
def held_out(experiment: Experiment) -> Splits:
    """Return each client's training rows, divided once more in place of its test split."""
    labels = bundle_of(experiment).train.y
    return [
        split(labels, train, seed=derive_seed(experiment.seed, "search", client))
        for client, (train, _) in enumerate(client_splits(experiment))
    ]


def best(found: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return each row's best cell, and whether its value is the first or the last of an axis."""
    chosen = {}
    for row, axes in GRIDS.items():
        means = []
        for values, settings in cells(row):
            measured = [
                each["validation_accuracy"]
                for each in found
                if (each["row"], each["settings"]) == (row, settings)
            ]
            if len(measured) == len(PARTS):
                edge = any(value in (axis[0], axis[-1]) for value, axis in zip(values, axes, strict=True))
                means.append((statistics.fmean(measured), settings, edge))
        if means:
            mean, settings, edge = max(means, key=lambda each: each[0])
            chosen[row] = {"settings": settings, "mean": mean, "at_an_edge": edge}
    return chosen


if __name__ == "__main__":
    main()
