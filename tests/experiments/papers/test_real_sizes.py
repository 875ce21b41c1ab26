"""The papers' tables fit the real data sets' sizes: their divisions exist, and what is held back is there.

The sets are not here, but their numbers of samples per class are known.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest

from flwr_kd import ExperimentOptions
from flwr_kd.data import DataError, partition
from flwr_kd.data.selection import chosen_classes
from flwr_kd.experiments.data import samples_before_split
from flwr_kd.experiments.papers import library, reproduction
from flwr_kd.experiments.papers.paper import Paper
from flwr_kd.experiments.papers.schema import PaperExperiment

SIZES = {
    "mnist": [(5421, 892)] * 10,  # The smallest class.
    "fashion-mnist": [(6000, 1000)] * 10,
    "cifar10": [(5000, 1000)] * 10,
    "cifar100": [(500, 100)] * 100,
    "emnist-letters": [(4800, 800)] * 26,
    "emnist-digits": [(24_000, 4000)] * 10,
    "cinic10": [(9000, 9000)] * 10,
    "svhn": list(zip(
        (4948, 13861, 10585, 8497, 7458, 6882, 5727, 5595, 5045, 4659),
        (1744, 5099, 4149, 2882, 2523, 2384, 1977, 2019, 1660, 1595),
        strict=True,
    )),
}  # fmt: skip
"""By class: training and test samples."""
EXPERIMENTS = [
    pytest.param(paper, each, id=f"{paper.id}/{each.id}") for paper, each in library.every() if each.trained
]


def labels(options: ExperimentOptions) -> np.ndarray | None:
    """Return the classes of what is divided among the clients; None for a set whose sizes are not known."""
    if options.dataset not in SIZES:
        return None
    sizes = SIZES[options.dataset]
    chosen = chosen_classes(options.classes, len(sizes)) if options.classes else range(len(sizes))
    counts = np.array([sizes[number][0] + options.merge_test * sizes[number][1] for number in chosen])
    total = int(counts.sum())
    if options.public == options.dataset:
        counts = counts * (total - (options.hold_back or total // 5)) // total
        total = int(counts.sum())
    limit = options.limit or (
        options.client_samples and options.clients * samples_before_split(options.client_samples)
    )
    if limit:
        assert limit <= total, f"{options.dataset} has {total} samples, limit is {limit}"
        counts = counts * limit // total
    return np.repeat(np.arange(len(counts)), counts)


@functools.cache
def divide(dataset: str, spec: str, clients: int, count: tuple[int, ...]) -> None:
    partition(np.repeat(np.arange(len(count)), count), spec, num_clients=clients, seed=0)


@pytest.mark.parametrize(("paper", "experiment"), EXPERIMENTS)
def test_a_table_fits_the_real_sizes(paper: Paper, experiment: PaperExperiment) -> None:
    for job in reproduction.prepare(f"{paper.id}/{experiment.id}").jobs:
        options = job.options
        there = labels(options)
        # The other kinds divide whatever there is.
        if there is not None and options.partition.startswith("ktpfl-"):
            divide(options.dataset, options.partition, options.clients, tuple(np.bincount(there).tolist()))


def test_what_does_not_fit_is_found() -> None:
    options = ExperimentOptions(dataset="emnist-letters", classes="10-19", clients=20, partition="ktpfl-1")
    there = labels(options)
    assert there is not None
    with pytest.raises(DataError, match=r"needs 6000 samples of class 0 for 20 clients, but there are 4800"):
        divide(options.dataset, options.partition, options.clients, tuple(np.bincount(there).tolist()))
