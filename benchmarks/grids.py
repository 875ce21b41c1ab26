"""Grids of settings, each cell with the same seeds: searches on validation data, and claims of the pages.

`fedhyb-server`: FedHyb's epochs and learning rate at the server, on validation data (a fifth of the training part
that no client has) and seeds that no table uses, at the reported round.

`fedhkd`: FedHKD's λ, γ, ν and noise, on validation data and seeds that no table uses, at the reported round.

`fedhkd-controls-ALPHA`: what the search found, on the test set, beside the same without knowledge.

`batchnorm-MODEL`: BatchNorm of the student (`distill-batchnorm`) in FedDF, FedHEAD and FedHEAD+, with ResNet8 and
with an MLP. Accuracies on validation data, which decide the default, and those of the same models on the whole test
set.

`decay-MODEL`: both readings of FedHEAD's "weight decay 1e-4": an L2 penalty, and Keras' decay of the learning rate,
which is scaled so that a round here lets the rate fall as far as one of the paper's.

`feddf-average`: FedDF with both averages.

`fedhyb-digits`: FedHyb and FedHyb³ with their defaults, on the test set, with the CNN of the searches.

`fedhyb-search`: FedHyb's other hyper-parameters, one changed at a time, on validation data and seeds that no table
uses, at the reported round. The server's values with FedHyb³, the clients' with FedHyb²: each part is seen alone.

`feddkc-order`: the server's order and features in 16 bits, with FedGKT and KKR and the light models.

`ktpfl-groups`: KT-pFL where clients are in two groups with opposite class mixes, beside FedMD, clients that train
alone, and an oracle: the coefficient matrix of someone who knows the groups.

`ktpfl-rate`: how far KT-pFL on weights goes towards its mixtures, beside FedAvg and clients that train alone, in
the small version of the paper's Table 2 with 10 clients.

`ktpfl-precision`: soft predictions in 32, 16 and 8 bits, in the setting of `ktpfl-groups`.

`pfedhn-steps`: how low a client of pFedHN falls in a round, with smaller steps of the hypernetwork.

`text-rate`: the learning rate of FedAvg, FedDF, FedHEAD and FedHEAD+ in the small version of FedHEAD's table 3, on
validation data and seeds that no table uses, at the reported round.

`settings-PARTITION`: the methods that the papers compare with, each with its defaults and with other settings, on
20 clients.

Usage: python benchmarks/grids.py NAME --out FILE [--cells NAME,...] [--data-dir FOLDER]
       (times of one core: see GRIDS; FOLDER has 20 Newsgroups, for `text-rate`)

The file is written after each run, and runs that it has are not run again.
"""

from __future__ import annotations

import argparse
import functools
import json
import logging
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flwr_kd import registry
from flwr_kd.config import KNOWLEDGE
from flwr_kd.distillation.config import AVERAGES, BATCHNORMS
from flwr_kd.experiments.data import bundle_of
from flwr_kd.experiments.evaluation import evaluator
from flwr_kd.experiments.experiment import Experiment
from flwr_kd.experiments.runner import run
from flwr_kd.files import write_atomically
from flwr_kd.results.provenance import versions
from flwr_kd.results.schema import RunResult
from flwr_kd.server.checkpoint import Checkpoint
from flwr_kd.server.records import Reply
from flwr_kd.strategies.ktpfl import KTpFL, personal_targets

VALUES = ("global_accuracy", "local_accuracy", "trained_accuracy", "common_accuracy", "server_accuracy")
"""What is kept of a run's last round, as far as it was measured."""
UNSETTLED = 3
"""Rounds at the start that do not count for the lowest accuracy of a client."""

SHORT = (
    "local-epochs=5",
    "batch-size=32",
    "lr-decay=1",
    "weight-decay=1e-4",
    "sector-epochs=10",
    "server-epochs=10",
)
"""FedHEAD's settings in its paper, with fewer epochs and smaller batches."""
SEEDS = (0, 1, 2, 3, 4)
"""Those of the tables, on the test set."""


@dataclass(frozen=True)
class Cell:
    """One setting of a grid: a method, its hyper-parameters, and what differs from the grid's experiment.

    Attributes
    ----------
    oracle : bool
        Whether KT-pFL's matrix is the one of who knows the groups.
    """

    method: str
    settings: tuple[str, ...] = ()
    experiment: dict[str, Any] = field(default_factory=dict)
    oracle: bool = False


@dataclass(frozen=True)
class Grid:
    """Cells by name, which are measured with the same seeds.

    Attributes
    ----------
    control : str
        The cell with which the others are compared, seed by seed.
    tested : bool
        Whether the last global models are also measured on the whole test set, where ``experiment`` measures on
        validation data.
    """

    control: str
    cells: dict[str, Cell]
    seeds: tuple[int, ...]
    experiment: dict[str, Any]
    settings: tuple[str, ...] = ()
    tested: bool = False


def searched(cells: dict[str, Cell]) -> Grid:
    """Return a search for FedHyb, beside FedAvg."""
    experiment = {"dataset": "digits", "model": "cnn", "partition": "inner-dirichlet:0.5", "validation": True}
    cells = {"fedavg": Cell("fedavg", ("lr-decay=1",)), **cells}
    return Grid("fedavg", cells, (10, 11), experiment, ("local-epochs=5", "batch-size=16"))


def fedhyb_server() -> Grid:
    """Epochs and learning rate of the server's distillation; ten rounds, as in the tables. Some 13 minutes."""
    tried = {
        1: ("1e-5", "3e-5", "1e-4", "3e-4", "1e-3"),
        5: ("1e-5", "3e-5", "1e-4", "1e-3"),
        20: ("1e-5", "1e-4", "1e-3"),
    }
    cells = {}
    for epochs, rates in tried.items():
        for rate in rates:
            settings = (f"server-epochs={epochs}", f"server-learning-rate={rate}")
            cells[f"epochs-{epochs}-rate-{rate}"] = Cell("fedhyb-3", settings)
    return searched(cells)


def fedhyb_search() -> Grid:
    """All of FedHyb's values but the server's epochs and rate; ten rounds, as in the tables. Some 20 minutes."""
    server = {"logits-weight": ("0", "0.1", "10"), "feature-weight": ("0", "0.01", "1", "10")}
    client = {"self-weight": ("0", "0.03", "0.3", "1"), "min-width": ("0.25", "0.8")}
    cells = {}
    for method, values in (("fedhyb-3", server), ("fedhyb-2", client)):
        cells[method] = Cell(method)
        for name, tried in values.items():
            cells |= {f"{method}-{name}-{value}": Cell(method, (f"{name}={value}",)) for value in tried}
    views = {"5": ("0.95", "1.05"), "30": ("0.7", "1.4")}
    for degrees, (least, most) in views.items():
        settings = (f"degrees={degrees}", f"min-scale={least}", f"max-scale={most}")
        cells[f"fedhyb-2-degrees-{degrees}"] = Cell("fedhyb-2", settings)
    for name in ("detach-target", "detach-weight"):
        cells[f"fedhyb-2-{name}-false"] = Cell("fedhyb-2", (f"{name}=false",))
    return searched(cells)


def fedhkd() -> Grid:
    """FedHKD's weights λ and γ, threshold ν and noise; twenty rounds. Some three minutes per seed."""
    cells = {"fedavg": Cell("fedavg")}
    for noise, threshold, classifier, gamma in fedhkd_settings():
        settings = (
            f"noise={noise}",
            f"threshold={threshold}",
            f"classifier-weight={classifier}",
            f"gamma={gamma}",
        )
        cells[fedhkd_cell(noise, threshold, classifier, gamma)] = Cell("fedhkd", settings)
    experiment = {"dataset": "digits", "partition": "inner-dirichlet:0.1", "rounds": 20, "validation": True}
    return Grid("fedavg", cells, (10, 11), experiment)


WEIGHTS = ("0.05", "0.2", "0.5", "1", "2", "5", "10")
"""FedHKD's λ and γ; the first is the paper's, the last for λ alone."""


def fedhkd_settings() -> Iterator[tuple[str, str, str, str]]:
    """Yield noise, ν, λ and γ: both weights alike, and without noise also each of them alone."""
    for noise in ("none", "representations"):
        for threshold in ("0.25", "0.05"):
            yield from ((noise, threshold, weight, weight) for weight in WEIGHTS[:-1])
    for weight in WEIGHTS[1:]:
        yield "none", "0.05", weight, "0"
    for weight in WEIGHTS[1:-1]:
        yield "none", "0.05", "0", weight


def fedhkd_cell(noise: str, threshold: str, classifier: str, gamma: str) -> str:
    """Return a cell's name."""
    weights = classifier if classifier == gamma else f"{classifier}-{gamma}"
    return f"noise-{noise}-threshold-{threshold}-weights-{weights}"


FOUND = {
    "lambda-2": ("classifier-weight=2", "gamma=0"),
    "both-0.5": ("classifier-weight=0.5", "gamma=0.5"),
}
"""FedHKD's weights that the search found: λ alone, and both."""
CONTROLS = KNOWLEDGE[1:]


ALPHAS = ("0.1", "0.5")


def fedhkd_controls(alpha: str) -> Grid:
    """FedHKD's settings of the search and their controls; twenty rounds. Some four minutes."""
    cells = {name: Cell(name) for name in ("fedavg", "fedhkd")}
    for name, weights in FOUND.items():
        settings = ("noise=none", "threshold=0.05", *weights)
        cells[name] = Cell("fedhkd", settings)
        for control in CONTROLS:
            cells[f"{name}-{control}"] = Cell("fedhkd", (*settings, f"client-knowledge={control}"))
    experiment = {"dataset": "digits", "partition": f"inner-dirichlet:{alpha}", "rounds": 20}
    return Grid("fedavg", cells, SEEDS, experiment)


def batchnorm(model: str) -> Grid:
    """The student's BatchNorm; some 5 minutes with the MLP, and 40 with ResNet8."""
    cells = {"fedavg": Cell("fedavg")}
    for method in ("feddf", "fedhead", "fedhead-plus"):
        for mode in BATCHNORMS:
            cells[f"{method}-{mode}"] = Cell(method, (f"distill-batchnorm={mode}",))
    experiment = {"dataset": "digits", "model": model, "partition": "dirichlet:0.1", "validation": True}
    return Grid("fedavg", cells, SEEDS, experiment, SHORT, tested=True)


def decay(model: str) -> Grid:
    """Both readings of "weight decay", and neither; 20 epochs as in the paper. Some 10 minutes with the MLP.

    In the paper a round has some 8,000 steps (20 clients, 20 epochs of 20 batches), so that the rate falls to 1/1.8
    in the first one. Here it has some 800, and a tenfold decay does the same.
    """
    readings = {
        "none": ("weight-decay=0",),
        "l2": ("weight-decay=1e-4",),
        "keras": ("weight-decay=0", "step-decay=1e-3"),
    }
    cells = {
        f"{method}-{name}": Cell(method, settings)
        for name, settings in readings.items()
        for method in ("fedavg", "fedhead")
    }
    settings = ("local-epochs=20", "batch-size=32", "lr-decay=1", "sector-epochs=20", "server-epochs=20")
    experiment = {"dataset": "digits", "model": model, "partition": "dirichlet:0.1"}
    return Grid("fedavg-l2", cells, SEEDS, experiment, settings)


def feddf_average() -> Grid:
    """Probabilities, weighted by samples, and logits, unweighted; reference data of the clients' own set."""
    cells = {"fedavg": Cell("fedavg")}
    for average in AVERAGES:
        cells[f"feddf-{average}"] = Cell("feddf", (f"average={average}",))
    experiment = {"dataset": "digits", "model": "mlp", "partition": "dirichlet:0.1"}
    return Grid("fedavg", cells, SEEDS, experiment, SHORT)


def fedhyb_digits() -> Grid:
    """Some 10 minutes."""
    settings = ("local-epochs=5", "batch-size=16", "lr-decay=1", "weight-decay=0")
    cells = {name: Cell(name) for name in ("fedavg", "fedhyb-3", "fedhyb")}
    experiment = {
        "dataset": "digits",
        "model": "cnn",
        "partition": "inner-dirichlet:0.5",
        "public_limit": 500,
    }
    return Grid("fedavg", cells, SEEDS, experiment, settings)


LIGHT = ",".join(f"resnet{depth}-pooled" for depth in (2, 4, 6, 10, 12))
# Batches of 64 and three epochs: a client has some 200 samples, which are less than one of the paper's batches.
STEPS = ("batch-size=64", "local-epochs=3", "server-epochs=3", "server-order=client-by-client")


def feddkc_order() -> Grid:
    """Both orders at the server, and the features' precision; 20 rounds of 3 epochs. Some 25 minutes."""
    cells = {}
    for method in ("fedgkt", "feddkc-kkr"):
        for order in ("pooled", "client-by-client"):
            cells[f"{method}-{order}"] = Cell(method, (f"server-order={order}",))
        cells[f"{method}-pooled-float16"] = Cell(method, ("server-order=pooled", "feature-dtype=float16"))
    experiment = {
        "dataset": "digits",
        "model": LIGHT,
        "partition": "dirichlet:0.5",
        "clients": 5,
        "rounds": 20,
    }
    return Grid("fedgkt-pooled", cells, SEEDS, experiment, STEPS)


GROUPS = {"dataset": "digits", "model": "mlp", "partition": "ktpfl-1:15"}
"""Two groups of five clients with 15 and 5 images per class, a quarter of them for the test."""
ON_PREDICTIONS = (
    "local-epochs=10",
    "batch-size=32",
    "optimizer=sgd",
    "learning-rate=0.05",
    "public-samples=300",
)


def ktpfl_groups() -> Grid:
    """What a better choice of teachers gives; some 3 minutes."""
    cells = {}
    for temperature, rate in (("10", "0.01"), ("1", "0.001")):
        settings = (f"temperature={temperature}", f"distill-learning-rate={rate}")
        for method in ("fedmd", "topk-pfl", "ktpfl"):
            cells[f"{method}-t{temperature}"] = Cell(method, settings)
        cells[f"oracle-t{temperature}"] = Cell("ktpfl", settings, oracle=True)
    cells["alone"] = Cell("ktpfl", ("distill-epochs=0",))
    return Grid("fedmd-t10", cells, SEEDS, GROUPS, ON_PREDICTIONS)


def ktpfl_precision() -> Grid:
    """The bits of a soft prediction; some 2 minutes."""
    cells = {name: Cell("ktpfl", (f"precision={name}",)) for name in ("float32", "float16", "uint8")}
    return Grid("float32", cells, SEEDS, GROUPS, ON_PREDICTIONS)


RATES = ("0.01", "0.03", "0.1", "0.3", "0.5")
"""η₂ of KT-pFL on weights: from the paper's to the one that replaces a model by its mixture."""


def ktpfl_rate() -> Grid:
    """The rate η₂ of KT-pFL on weights; ten rounds of ten epochs of the CNN. Some ten minutes."""
    cells = {"alone": Cell("ktpfl-weights", ("distill-steps=0",)), "fedavg": Cell("fedavg")}
    cells |= {f"rate-{rate}": Cell("ktpfl-weights", (f"distill-learning-rate={rate}",)) for rate in RATES}
    experiment = {"dataset": "digits", "model": "cnn", "partition": "ktpfl-1:12"}
    common = ("local-epochs=10", "batch-size=8", "optimizer=sgd", "learning-rate=0.05", "lr-decay=1")
    return Grid("alone", cells, SEEDS, experiment, common)


def pfedhn_steps() -> Grid:
    """Learning rate and momentum of pFedHN's server; ten rounds, as in the methods' tables. Some two minutes."""
    cells = {
        "fedavg-ft": Cell("fedavg-ft"),
        "pfedhn": Cell("pfedhn"),
        "pfedhn-rate-0.003": Cell("pfedhn", ("server-learning-rate=0.003",)),
        "pfedhn-momentum-0": Cell("pfedhn", ("server-momentum=0",)),
    }
    settings = ("local-epochs=5", "batch-size=32", "optimizer=adam", "lr-decay=1", "weight-decay=0")
    experiment = {"dataset": "digits", "partition": "inner-dirichlet:0.1"}
    return Grid("fedavg-ft", cells, SEEDS, experiment, (*settings, "learning-rate=0.003"))


def text_rate() -> Grid:
    """The learning rate where a client has few texts; ten rounds of five epochs. Some 16 minutes."""
    cells = {
        f"{method}-{rate}": Cell(method, (f"learning-rate={rate}",))
        for rate in ("0.001", "0.003", "0.01", "0.03")
        for method in ("fedavg", "feddf", "fedhead", "fedhead-plus")
    }
    experiment = {
        "dataset": "20newsgroups",
        "classes": "1,14",
        "limit": 1000,
        "public": "20newsgroups",
        "public_limit": 300,
        "partition": "dirichlet:0.1",
        "clients": 20,
        "model": "mlp",
        "test_fraction": 0.0,
        "measure": "never",
        "validation": True,
    }
    settings = ("local-epochs=5", "batch-size=32", "lr-decay=1", "weight-decay=1e-4")
    return Grid(
        "fedavg-0.001", cells, (10, 11), experiment, (*settings, "sector-epochs=5", "server-epochs=5")
    )


PERSONAL: dict[str, tuple[str, ...]] = {
    "fedavg": ("fedavg",),
    "fedavg-ft": ("fedavg-ft",),
    "fedavg-ft-head": ("fedavg-ft", "personalize-part=head"),
    "fedavg-ft-sgd-0.05": ("fedavg-ft", "optimizer=sgd", "lr-decay=1", "learning-rate=0.05"),
    "fedavg-ft-sgd-0.1": ("fedavg-ft", "optimizer=sgd", "lr-decay=1", "learning-rate=0.1"),
    "fedamp": ("fedamp",),
    "fedamp-cosine-1000": ("fedamp", "cosine-scale=1000"),
    "fedamp-distance": ("fedamp", "attention=distance"),
    "fedfomo": ("fedfomo",),
    "fedfomo-unhelped-own": ("fedfomo", "unhelped=own"),
    "per-fedavg": ("per-fedavg",),
    "per-fedavg-0.05": ("per-fedavg", "learning-rate=0.05", "alpha=0.05"),
    "per-fedavg-hf-0.05": ("per-fedavg-hf", "learning-rate=0.05", "alpha=0.05"),
    "per-fedavg-0.1-5-steps": ("per-fedavg", "learning-rate=0.1", "alpha=0.1", "personalize-steps=5"),
}
"""Methods whose clients get models of their own, and their settings, by cell."""
FURTHER: dict[str, tuple[str, ...]] = {
    "pfedme": ("pfedme",),
    "pfedme-0.05": ("pfedme", "learning-rate=0.05"),
    "pfedhn": ("pfedhn",),
    "pfedhn-rate-0.003": ("pfedhn", "server-learning-rate=0.003"),
    "pfedhn-momentum-0": ("pfedhn", "server-momentum=0"),
    "pfedhn-steps-round": ("pfedhn", "server-steps=round"),
    "pfedhn-steps-as-sent": ("pfedhn", "server-steps=reply-as-sent"),
    "pfedhn-pc": ("pfedhn-pc",),
    "dafkd": ("dafkd",),
    "fedhkd": ("fedhkd",),
    "fedhkd-dafkd": ("fedhkd-dafkd",),
    "fedgen": ("fedgen",),
    # The control: its generator learns nothing of the clients.
    "fedgen-without-clients": ("fedgen", "ensemble-weight=0"),
    "fedgen-head": ("fedgen-head",),
}
"""Likewise the others, on one of the two partitions."""


def other_settings(partition: str, *cells: dict[str, tuple[str, ...]]) -> Grid:
    """Defaults and other settings; 20 rounds on batches of 20. Some 25 and 50 minutes."""
    rows = {name: Cell(method, tuple(own)) for part in cells for name, (method, *own) in part.items()}
    experiment = {"dataset": "digits", "partition": partition, "clients": 20, "rounds": 20}
    return Grid("fedavg-ft", rows, SEEDS, experiment, ("batch-size=20",))


@contextmanager
def knowing_the_groups() -> Iterator[None]:
    """Let KT-pFL's targets be the means over a client's own group; those of `ktpfl-1` are halves of the clients."""

    def targets(self: KTpFL, server_round: int, replies: list[Reply], predictions: Tensor) -> Tensor:
        clients = [reply.node.key for reply in replies]
        group = torch.tensor(
            [2 * client >= reply.node.num_partitions for client, reply in zip(clients, replies, strict=True)]
        )
        same = (group[:, None] == group).double()
        weights = same / same.sum(dim=1, keepdim=True)
        self.matrix.admit(clients)
        self.matrix.replace(clients, weights)
        return personal_targets(weights, predictions)

    plain = KTpFL.targets
    KTpFL.targets = targets  # type: ignore[method-assign]
    try:
        yield
    finally:
        KTpFL.targets = plain  # type: ignore[method-assign]


GRIDS = {
    "fedhyb-server": fedhyb_server,
    "fedhyb-search": fedhyb_search,
    "fedhkd": fedhkd,
    **{f"fedhkd-controls-{alpha}": functools.partial(fedhkd_controls, alpha) for alpha in ALPHAS},
    "batchnorm-resnet8": functools.partial(batchnorm, "resnet8"),
    "batchnorm-mlp": functools.partial(batchnorm, "mlp-bn"),
    "feddf-average": feddf_average,
    "fedhyb-digits": fedhyb_digits,
    "decay-mlp": functools.partial(decay, "mlp-bn"),
    "feddkc-order": feddkc_order,
    "ktpfl-groups": ktpfl_groups,
    "ktpfl-rate": ktpfl_rate,
    "ktpfl-precision": ktpfl_precision,
    "pfedhn-steps": pfedhn_steps,
    "text-rate": text_rate,
    "settings-inner-dirichlet": functools.partial(other_settings, "inner-dirichlet:0.1", PERSONAL, FURTHER),
    "settings-pathological": functools.partial(other_settings, "pathological:2", PERSONAL),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=GRIDS)
    parser.add_argument("--out", type=Path, required=True, help="file of the result, JSON")
    parser.add_argument("--cells", help="only these, separated by commas")
    parser.add_argument("--data-dir", help="folder of data files, for sets that are not installed")
    options = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.ERROR)
    grid = GRIDS[options.name]()
    names = options.cells.split(",") if options.cells else list(grid.cells)
    document = begun(options.out, options.name, grid)
    for name, seed in missing(document, grid, names):
        print(f"{options.name}: {name}, seed {seed}", file=sys.stderr, flush=True)
        values = measured(grid, grid.cells[name], seed, options.data_dir)
        document["cells"][name]["seeds"][str(seed)] = values
        write_atomically(options.out, (json.dumps(document, indent=2) + "\n").encode())
    print(json.dumps(document, indent=2))


def begun(path: Path, name: str, grid: Grid) -> dict[str, Any]:
    """Return the document so far; its cells that are no longer of this grid are left out."""
    before = json.loads(path.read_text(encoding="utf-8"))["cells"] if path.exists() else {}
    cells = {}
    for key, cell in grid.cells.items():
        said = {
            "method": cell.method,
            "settings": [*own_settings(grid, cell)],
            "experiment": {**grid.experiment, **cell.experiment},
            **({"oracle": True} if cell.oracle else {}),
        }
        old = before.get(key, {})
        same = all(old.get(what) == value for what, value in said.items())
        cells[key] = {**said, "seeds": old["seeds"] if same else {}}
    return {
        "command": f"python benchmarks/grids.py {name}",
        "versions": versions(),
        "control": grid.control,
        "seeds": list(grid.seeds),
        "cells": cells,
    }


def own_settings(grid: Grid, cell: Cell) -> Iterator[str]:
    """Yield the settings that the cell's method has; a cell's own win over the grid's."""
    known = registry.get(cell.method).config_class.field_types()
    chosen = {setting.partition("=")[0] for setting in cell.settings}
    for setting in grid.settings:
        name = setting.partition("=")[0]
        if name not in chosen and name.replace("-", "_") in known:
            yield setting
    yield from cell.settings


def missing(document: dict[str, Any], grid: Grid, names: list[str]) -> list[tuple[str, int]]:
    """Return the runs to make, seed by seed, so that what is interrupted has the same seeds in most cells."""
    cells = document["cells"]
    return [(name, seed) for seed in grid.seeds for name in names if str(seed) not in cells[name]["seeds"]]


def measured(grid: Grid, cell: Cell, seed: int, data_dir: str | None = None) -> dict[str, Any]:
    """Run once, and return the last round's accuracies, in [0, 1], and the global ones of all rounds."""
    method = registry.get(cell.method)
    experiment = Experiment(
        **{"backend": "inline", "workers": 1, "device": "cpu", **grid.experiment, **cell.experiment}
    )
    experiment = replace(experiment, seed=seed, data_dir=data_dir)
    oracle = knowing_the_groups() if cell.oracle else nullcontext()
    with tempfile.TemporaryDirectory() as folder, oracle:
        keep = Path(folder) / "arrays" if grid.tested else None
        result = run(method, experiment, method.config([*own_settings(grid, cell)]), keep=keep)
        values = {name: getattr(result.rounds[-1], name, None) for name in VALUES}
        if keep is not None:
            values["test_accuracy"] = on_test_set(method, experiment, keep)
    values["lowest_accuracy"] = lowest(result)
    if values["global_accuracy"] is not None:
        values["rounds"] = [each.global_accuracy for each in result.rounds]
    return {name: value for name, value in values.items() if value is not None}


def lowest(result: RunResult) -> float | None:
    """Return the lowest accuracy of a client on its own test split, in rounds that are not the first ones."""
    clients = [own for later in result.rounds[UNSETTLED:] for own in later.clients.values()]
    return min((own["local_accuracy"] for own in clients if own["local_accuracy"] is not None), default=None)


def on_test_set(method: registry.Method, experiment: Experiment, folder: Path) -> float:
    """Return the accuracy of a run's last global model on the whole test set."""
    kept = Checkpoint.load(folder, method.strategy.__name__)
    assert kept is not None
    own = experiment.of(method)
    evaluate = evaluator(own.build_model, bundle_of(replace(own, validation=False)))
    metrics = evaluate(own.rounds, kept.arrays)
    assert metrics is not None
    return float(metrics["accuracy"])


if __name__ == "__main__":
    main()
