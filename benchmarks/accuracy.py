"""The methods side by side, five seeds, the same local training for all.

The group `baselines` has the methods that the papers compare with: all digits and 2,000 letters,
`inner-dirichlet:0.1` (clients of equal size) and `pathological`, with two classes per client on digits and five
on letters, which have 26; 10 rounds, with the learning rates of RATES. The group `sgd` repeats those of them that
fix plain SGD, beside fine-tuned FedAvg with plain SGD. The group `papers` has the papers' own methods: digits (20
rounds) and Fashion-MNIST (10), `inner-dirichlet:0.1` (FedHKD's and FedHyb's), `dirichlet:0.1` (FedDKC's and
FedHEAD's), `ktpfl-2` (KT-pFL's, two classes per client); a learning rate of 0.001. Beside them stand fine-tuned
FedAvg, and clients that train alone, and in the first part all other methods. There FedGKT and FedDKC have their
own models. All others have the MLP, on Fashion-MNIST LeNet.

All of the 10 clients take part in each round, with 5 local epochs of Adam and batches of 32; clients that
distil public data do so with the same rate. A method keeps what it fixes, such as SGD. Settings of a row's own
that differ from its defaults are in SETTINGS_OF; `search.py` has chosen them on validation data. All else is
each method's default, so its paper's.

A round's ``seconds`` here are CPU seconds of one thread that does the clients' and the server's work in turn,
so that other work on the machine counts little; before a row's first run comes a round that is not counted.
Time and bytes to a target are those of the rounds until the mean local accuracy reaches it for the first time;
a method that does not has none.

Usage: python benchmarks/accuracy.py [--group NAME] [--parts NAME,...] [--rows NAME,...] [--seeds N,...]
       [--out FOLDER]

Finished (row, seed) pairs are not run again.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from flwr_kd import registry
from flwr_kd.experiments import comparison
from flwr_kd.experiments.comparison import ALONE_BY, ALONE_SETTINGS, Entry
from flwr_kd.experiments.experiment import Experiment
from flwr_kd.experiments.options import ExperimentOptions
from flwr_kd.experiments.resumption import FOLDER
from flwr_kd.experiments.runner import run
from flwr_kd.results import files, schema, table
from flwr_kd.results.clients import ALONE
from flwr_kd.results.schema import Comparison

METHODS = tuple(name for name, method in registry.methods().items() if "accuracy" in method.benchmarks)
PAPERS = (
    *("fedavg", "fedprox", "feddf", "fedhkd", "fedhead", "fedhead-plus", "fedhyb", "fedproto", "fedmd"),
    *("ktpfl", "pfeddf", "fedgkt", "feddkc-kkr", "feddkc-skr"),
    *("fedavg-ft", ALONE),
)
"""The rows of the group `papers`."""
VARIANTS = {
    "fedgen-head": ("fedgen-head",),
    "per-fedavg-hf": ("per-fedavg-hf",),
    # Fine-tuned FedAvg takes several steps to a personal model, Per-FedAvg by default one.
    "per-fedavg-5-steps": ("per-fedavg", "personalize-steps=5"),
    # FedAMP's default is HeurFedAMP's attention, which has no row of its own.
    "fedamp-distance": ("fedamp", "attention=distance"),
    "pfedhn-pc": ("pfedhn-pc",),
    # Beside them stand the methods that fix plain SGD.
    "fedavg-ft-sgd": ("fedavg-ft", "optimizer=sgd"),
    # Each client trains its own model: prototypes without a weight.
    ALONE: (ALONE_BY, *(f"{name}={value:g}" for name, value in ALONE_SETTINGS.items())),
    # As many steps as `pfedme`, each on the next batch.
    "pfedme-1-step": ("pfedme", "inner-steps=1"),
}
"""Rows besides the methods' own: name, method, settings."""
BASELINES = (
    *("fedavg", "fedavg-ft", "moon", "fedalign", "fedgen", "fedgen-head", "dafkd", "fedhkd-dafkd"),
    *(
        "per-fedavg",
        "per-fedavg-hf",
        "per-fedavg-5-steps",
        "pfedme",
        "fedamp",
        "fedamp-distance",
        "fedfomo",
        "pfedhn",
        "pfedhn-pc",
    ),
)
"""The rows of the group `baselines`: the methods that the papers compare with, and their variants."""
SETTINGS = (
    "local-epochs=5",
    "batch-size=32",
    "optimizer=adam",
    "lr-decay=1",
    "weight-decay=0",
    "public-samples=500",
)
_PER_FEDAVG = ("learning-rate=0.1", "alpha=0.1")
_PFEDME = ("proximal-lambda=0.03", "learning-rate=30", "personal-learning-rate=0.3")
SETTINGS_OF: dict[str, Sequence[str]] = {
    **dict.fromkeys(("per-fedavg", "per-fedavg-hf", "per-fedavg-5-steps"), _PER_FEDAVG),
    "pfedme": ("local-epochs=1", *_PFEDME),
    "pfedme-1-step": _PFEDME,
    "fedavg-ft-sgd": ("learning-rate=0.3",),
}
"""By row, settings that `search.py` chose on validation data."""
RATES = {"digits": "0.003", "letters": "0.005"}
"""Learning rates of the group `baselines`, whose runs are shorter."""
DIGITS: dict[str, Any] = {"dataset": "digits", "rounds": 20}
SHORT_DIGITS: dict[str, Any] = {"dataset": "digits", "rounds": 10}
LETTERS: dict[str, Any] = {"dataset": "letters", "rounds": 10, "limit": 2000}
FASHION: dict[str, Any] = {
    "dataset": "fashion-mnist",
    "rounds": 10,
    "limit": 1500,
    "model": "lenet",
}
PAPERS_PARTS: dict[str, dict[str, Any]] = {
    "digits-inner-dirichlet": {**DIGITS, "partition": "inner-dirichlet:0.1"},
    "digits-dirichlet": {**DIGITS, "partition": "dirichlet:0.1"},
    "digits-two-classes": {**DIGITS, "partition": "ktpfl-2:50"},
    "fashion-mnist-inner-dirichlet": {**FASHION, "partition": "inner-dirichlet:0.1"},
    "fashion-mnist-dirichlet": {**FASHION, "partition": "dirichlet:0.1"},
    "fashion-mnist-two-classes": {**FASHION, "partition": "ktpfl-2:60"},
}
BASELINES_PARTS: dict[str, dict[str, Any]] = {
    "digits-inner-dirichlet": {**SHORT_DIGITS, "partition": "inner-dirichlet:0.1"},
    "digits-pathological": {**SHORT_DIGITS, "partition": "pathological:2"},
    "letters-inner-dirichlet": {**LETTERS, "partition": "inner-dirichlet:0.1"},
    "letters-pathological": {**LETTERS, "partition": "pathological:5"},
}
EVERYTHING = {
    "digits-inner-dirichlet": (*PAPERS, *(name for name in registry.methods() if name not in PAPERS))
}
"""Parts of the group `papers` with more rows: all methods."""
SGD = ("fedavg-ft-sgd", "per-fedavg-5-steps", "per-fedavg-hf", "pfedme", "pfedme-1-step")
"""The rows of the group `sgd`, which has the parts of `baselines`."""
GROUPS = {
    "baselines": (BASELINES_PARTS, BASELINES),
    "papers": (PAPERS_PARTS, PAPERS),
    "sgd": (BASELINES_PARTS, SGD),
}
"""By group, its parts and their rows."""
LIGHT = ",".join(f"resnet{depth}-pooled" for depth in (2, 4, 6, 10, 12))
"""The clients' models of FedGKT and FedDKC, with features a quarter as large as the paper's."""
TARGET = 0.85
"""Local accuracy to which time and bytes are counted; chosen before anything was run."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--group", choices=GROUPS, default="baselines")
    parser.add_argument("--parts", help="by default all of the group")
    parser.add_argument("--rows", help="names of methods and variants, by default those of the group")
    parser.add_argument("--seeds", default="0,1,2,3,4", help="by default %(default)s")
    parser.add_argument("--out", type=Path, help="folder of the results, by default runs/GROUP")
    options = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.ERROR)
    parts, rows = GROUPS[options.group]
    seeds = [int(seed) for seed in options.seeds.split(",")]
    for part in options.parts.split(",") if options.parts else parts:
        shown = EVERYTHING.get(part, rows) if options.group == "papers" else rows
        shown = options.rows.split(",") if options.rows else shown
        folder = (options.out or Path("runs") / options.group) / part
        words = ["--group", options.group, "--parts", part, "--rows", ",".join(shown)]
        command = shlex.join(["python", "benchmarks/accuracy.py", *words])
        rate = RATES[parts[part]["dataset"]] if options.group != "papers" else "0.001"
        result = compared(parts[part], shown, seeds, folder, command, rate)
        Console(width=100).print(part, *table.fitting(result, 100))


def options_of(part: Mapping[str, Any]) -> ExperimentOptions:
    """Return what the rows of a part share."""
    shared = {"clients": 10, "backend": "inline", "workers": 1, "device": "cpu", "public_limit": 1000}
    return ExperimentOptions(**{**shared, **part})


def has_own_models(method: registry.Method) -> bool:
    """Return whether a method splits the model elsewhere, so that it cannot have the models of the others."""
    return "resnet2" in str(method.model)


def entry(row: str, rate: str, own: Sequence[str]) -> Entry:
    """Return a row's method with the settings of all, the row's, and the given ones, which win."""
    name, *fixed = VARIANTS.get(row, (row,))
    method = registry.get(name)
    # The default rate of distillation is meant for SGD.
    rates = [f"learning-rate={rate}"]
    if method.public_at == "clients":
        rates.append(f"distill-learning-rate={rate}")
    shared = [each for each in (*SETTINGS, *rates) if _has(method, each)]
    config = method.config([*shared, *fixed, *own])
    # Those that split the model elsewhere have models of their own, which take no other's place: the light ones.
    split = LIGHT if has_own_models(method) else None
    return Entry(method, config, row, split)


def compared(
    part: Mapping[str, Any],
    rows: Sequence[str],
    seeds: Sequence[int],
    folder: Path,
    command: str,
    rate: str,
) -> Comparison:
    """Run what is not finished of a part, and return the whole."""
    options = options_of(part)
    plan = comparison.prepare(
        [entry(row, rate, SETTINGS_OF.get(row, ())) for row in rows],
        options,
        seeds=seeds,
        folder=folder,
        command=command,
        resume=(folder / FOLDER).exists() or (folder / files.FILE_NAME).exists(),
    )
    warm = set()
    for row, experiment in plan.runs():
        if plan.unfinished.find(row.name, experiment.seed) is not None:
            continue
        print(f"{folder.name}: {row.name}, seed {experiment.seed}", file=sys.stderr, flush=True)
        if row.name not in warm:
            # What is loaded and compiled at its first use would else count as the first row's.
            timed(row, replace(experiment, rounds=1))
            warm.add(row.name)
        plan.unfinished.add(timed(row, experiment))
    return comparison.write(plan)[0]


def _has(method: registry.Method, setting: str) -> bool:
    name = setting.partition("=")[0].replace("-", "_")
    return name in method.config_class.field_types() and name not in method.fixed


def timed(row: Entry, experiment: Experiment) -> schema.RunResult:
    """Run once; a round's seconds are CPU seconds. Clients' own accuracies are kept of the last round only."""
    ends = [time.process_time()]
    mine = row.of(experiment)
    result = run(row.method, mine, row.config, on_round=lambda _: ends.append(time.process_time()))
    seconds = [later - earlier for earlier, later in itertools.pairwise(ends)]
    rounds = [
        replace(each, seconds=cost, clients=each.clients if index == len(result.rounds) else {})
        for index, (each, cost) in enumerate(zip(result.rounds, seconds, strict=True), start=1)
    ]
    return replace(result, rounds=tuple(rounds), label=row.label)


if __name__ == "__main__":
    main()
