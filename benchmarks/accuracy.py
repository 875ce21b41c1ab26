"""The methods side by side: digits and Fashion-MNIST, three partitions, 3 seeds, the same local training for all.

Partitions: inner-dirichlet:0.1 (FedHKD's and FedHyb's; clients of equal size), dirichlet:0.1 (FedDKC's and
FedHEAD's), ktpfl-2 (KT-pFL's, two classes per client). 10 clients, all of them in each round, 5 local epochs
with Adam (learning rate 0.001, batches of 32); clients that distil public data do so with the same rate.
Everything else is each method's default, so its paper's. FedGKT and FedDKC have their own models, the others
the MLP on digits and LeNet on Fashion-MNIST.

A round's ``seconds`` here are CPU seconds of one thread that does the clients' and the server's work in turn,
so that other work on the machine counts little; before a method's first run comes a round that is not counted.
Time and bytes to a target are those of the rounds until the mean local accuracy reaches it for the first time; a
method that does not has none.

Usage: python benchmarks/accuracy.py [--parts NAME,...] [--methods NAME,...] [--seeds N,...] [--out FOLDER]

Finished (method, seed) pairs are not run again. The whole takes some 80 minutes of one core.
"""

from __future__ import annotations

import argparse
import logging
import shlex
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from flwr_kd import registry
from flwr_kd.experiments.experiment import Experiment
from flwr_kd.experiments.resumption import Unfinished
from flwr_kd.experiments.runner import run
from flwr_kd.results import provenance, schema, table
from flwr_kd.results.schema import Comparison

METHODS = tuple(name for name, method in registry.methods().items() if "accuracy" in method.benchmarks)
SETTINGS = (
    "local-epochs=5",
    "batch-size=32",
    "optimizer=adam",
    "learning-rate=0.001",
    "lr-decay=1",
    "weight-decay=0",
    "public-samples=500",
    # Its default is meant for SGD.
    "distill-learning-rate=0.001",
)
DIGITS: dict[str, Any] = {"dataset": "digits", "rounds": 20}
FASHION: dict[str, Any] = {
    "dataset": "fashion-mnist",
    "rounds": 10,
    "limit": 1500,
    # The committed results have this test set.
    "test_limit": 250,
    "model": "lenet",
}
PARTS: dict[str, dict[str, Any]] = {
    "digits-inner-dirichlet": {**DIGITS, "partition": "inner-dirichlet:0.1"},
    "digits-dirichlet": {**DIGITS, "partition": "dirichlet:0.1"},
    "digits-two-classes": {**DIGITS, "partition": "ktpfl-2:50"},
    "fashion-mnist-inner-dirichlet": {**FASHION, "partition": "inner-dirichlet:0.1"},
    "fashion-mnist-dirichlet": {**FASHION, "partition": "dirichlet:0.1"},
    "fashion-mnist-two-classes": {**FASHION, "partition": "ktpfl-2:60"},
}
TARGET = 0.85
"""Local accuracy to which time and bytes are counted; chosen before anything was run."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--out", type=Path, default=Path("runs/accuracy"), help="folder of the results")
    options = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.ERROR)
    methods, seeds = options.methods.split(","), [int(seed) for seed in options.seeds.split(",")]
    for part in options.parts.split(","):
        comparison = compared(part, methods, seeds, options.out / part)
        Console(width=100).print(part, *table.fitting(comparison, 100))


def compared(part: str, names: list[str], seeds: list[int], folder: Path) -> Comparison:
    """Run what is not finished of a part, and return the whole."""
    experiment = Experiment(
        clients=10, backend="inline", workers=1, device="cpu", public_limit=1000, **PARTS[part]
    )
    methods = [registry.get(name) for name in names]
    # Those that split the model elsewhere have their own, which take no other's place.
    experiments = {
        method.name: replace(experiment, model=None) if "resnet2" in str(method.model) else experiment
        for method in methods
    }
    models = {method.name: str(experiments[method.name].of(method).model) for method in methods}
    configs = {
        method.name: method.config([each for each in SETTINGS if _has(method, each)]) for method in methods
    }
    shared: dict[str, Any] = {
        "config": experiment.shared(),
        "versions": provenance.versions(),
        "command": shlex.join(["python", "benchmarks/accuracy.py", "--parts", part]),
    }
    unfinished = Unfinished(
        folder,
        models=models,
        hyperparameters={name: config.to_wire() for name, config in configs.items()},
        **shared,
    )
    unfinished.begin(resume=True, force=False)
    warm = set()
    for seed in seeds:
        for method in methods:
            if unfinished.find(method.name, seed) is None:
                print(f"{part}: {method.name}, seed {seed}", file=sys.stderr, flush=True)
                mine = replace(experiments[method.name], seed=seed)
                if method.name not in warm:
                    # What is loaded and compiled at its first use would else count as the first method's.
                    timed(method, replace(mine, rounds=1), configs[method.name])
                    warm.add(method.name)
                unfinished.add(timed(method, mine, configs[method.name]))
    runs = tuple(run for seed in seeds for name in names if (run := unfinished.find(name, seed)) is not None)
    config = {**shared["config"], "model": models, "seeds": seeds, "seconds": "CPU seconds of one thread"}
    comparison = Comparison(**{**shared, "config": config}, runs=runs)
    unfinished.finish(comparison)
    return comparison


def _has(method: registry.Method, setting: str) -> bool:
    name = setting.partition("=")[0].replace("-", "_")
    return name in method.config_class.field_types() and name not in method.fixed


def timed(method: registry.Method, experiment: Experiment, config: Any) -> schema.RunResult:
    """Run once; a round's seconds are CPU seconds. Each client's own accuracies are left out: no table has them."""
    ends = [time.process_time()]
    result = run(method, experiment, config, on_round=lambda _: ends.append(time.process_time()))
    rounds = [
        replace(each, seconds=later - earlier, clients={})
        for each, earlier, later in zip(result.rounds, ends, ends[1:], strict=False)
    ]
    return replace(result, rounds=tuple(rounds))


if __name__ == "__main__":
    main()
