"""Claims beside their controls: a method, what it is compared with, and the same method without knowledge.

A teacher also smooths labels, and a regulariser also regularises, without any knowledge. In a control what is sent
is uniform (all classes alike) or permuted (that of other samples or classes); see `flwr_kd.learning.controls`.

feddkc-*   FedGKT, FedDKC and a server with a uniform teacher, with FedDKC's algorithm 1: 5 clients with the paper's
           five models, digits, Dirichlet 0.5 and 0.1. "light" has pooled features.
fedhkd-*   FedAvg, FedHKD with the paper's settings and with those of the search, and its controls: 10 clients,
           digits.

Usage: python benchmarks/controls.py [--parts NAME,...] [--seeds 0,1,2] [--out FOLDER]
"""

from __future__ import annotations

import argparse
import logging
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from flwr_kd import registry
from flwr_kd.experiments.comparison import Entry, prepare, run, write
from flwr_kd.experiments.options import ExperimentOptions
from flwr_kd.experiments.resumption import FOLDER
from flwr_kd.results import files, table
from flwr_kd.results.schema import Comparison


@dataclass(frozen=True)
class Part:
    """One comparison.

    Attributes
    ----------
    rows : tuple of (str, str, tuple of str)
        Label, method and hyper-parameters of each entry; the others are compared with the first one.
    control : str
        The label of the control that stands beside the claim.
    claims : tuple of str
        The accuracies that the claim is about.
    experiment : dict
        What all entries share.
    settings : tuple of str
        Hyper-parameters that all entries have where their method has them.
    note : str
        What else the page says of the setting.
    """

    rows: tuple[tuple[str, str, tuple[str, ...]], ...]
    control: str
    claims: tuple[str, ...]
    experiment: dict[str, Any]
    settings: tuple[str, ...] = ()
    note: str = ""

    def entries(self) -> list[Entry]:
        return [self._entry(label, name, settings) for label, name, settings in self.rows]

    def _entry(self, label: str, name: str, settings: Sequence[str]) -> Entry:
        method = registry.get(name)
        known = method.config_class.field_types()
        common = [each for each in self.settings if each.partition("=")[0].replace("-", "_") in known]
        return Entry(method, method.config([*common, *settings]), label)


TRANSFER = (
    ("fedgkt", "fedgkt", ()),
    ("feddkc-kkr", "feddkc-kkr", ()),
    ("feddkc-skr", "feddkc-skr", ()),
    ("uniform teacher", "fedgkt", ("server-knowledge=uniform",)),
)
DEEP = ("resnet2", "resnet4", "resnet6", "resnet10", "resnet12")
LIGHT = ",".join(f"{name}-pooled" for name in DEEP)
# Batches of 64 and three epochs: a client has some 200 samples, which are less than one of the paper's batches.
STEPS = ("batch-size=64", "local-epochs=3", "server-epochs=3", "server-order=client-by-client")


def transfer(alpha: float, note: str = "", **changes: Any) -> Part:
    experiment = {"partition": f"dirichlet:{alpha}", "clients": 5, "rounds": 10, **changes}
    claims = ("common_accuracy", "common_top5")
    return Part(TRANSFER, "uniform teacher", claims, experiment, STEPS, note)


FOUND = ("threshold=0.05", "classifier-weight=2", "gamma=0", "noise=none")


def hyper_knowledge(alpha: float) -> Part:
    rows = (
        ("fedavg", "fedavg", ()),
        ("fedhkd", "fedhkd", ()),
        ("fedhkd, searched", "fedhkd", FOUND),
        ("uniform knowledge", "fedhkd", (*FOUND, "client-knowledge=uniform")),
        ("permuted knowledge", "fedhkd", (*FOUND, "client-knowledge=permuted")),
    )
    experiment = {"partition": f"inner-dirichlet:{alpha}", "rounds": 20}
    return Part(rows, "uniform knowledge", ("global_accuracy", "local_accuracy"), experiment)


PARTS: dict[str, Part] = {
    "feddkc-light-0.5": transfer(0.5, ", light models", model=LIGHT),
    "feddkc-light-0.1": transfer(0.1, ", light models", model=LIGHT),
    "feddkc-0.5": transfer(0.5),
    "feddkc-0.1": transfer(0.1),
    "fedhkd-0.1": hyper_knowledge(0.1),
    "fedhkd-0.5": hyper_knowledge(0.5),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--out", type=Path, default=Path("runs/controls"), help="folder of the results")
    options = parser.parse_args()
    seeds = [int(seed) for seed in options.seeds.split(",")]
    for name in options.parts.split(","):
        Console(width=120).print(name, *table.fitting(compared(name, seeds, options.out / name), 120))


def compared(name: str, seeds: Sequence[int], folder: Path) -> Comparison:
    """Run what is not finished of a part, and return the whole."""
    part = PARTS[name]
    options = ExperimentOptions(backend="inline", workers=1, device="cpu", **part.experiment)
    command = shlex.join(["python", "benchmarks/controls.py", "--parts", name])
    begun = (folder / FOLDER).exists() or (folder / files.FILE_NAME).exists()
    plan = prepare(part.entries(), options, seeds=seeds, folder=folder, command=command, resume=begun)

    def announce(entry: Entry, experiment: Any, done: int) -> None:
        logging.getLogger("flwr").setLevel(logging.ERROR)
        if done < experiment.rounds:
            print(f"{name}: {entry.name}, seed {experiment.seed}", file=sys.stderr, flush=True)

    run(plan, keep_arrays=False, on_run=announce)
    return write(plan)[0]


if __name__ == "__main__":
    main()
