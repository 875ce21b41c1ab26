"""What a data set draws at random, and the workers that read it."""

from __future__ import annotations

import multiprocessing
import os
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from flwr_kd.learning.batches import Batches

pytestmark = pytest.mark.long

DRAWS: dict[str, Callable[[], float]] = {
    "torch": lambda: float(torch.rand((), dtype=torch.float64)),
    "numpy": lambda: float(np.random.rand()),  # noqa: NPY002
    "python": random.random,
}


class Noisy(Dataset[Any]):
    """Input i is [i, a random number, the process that read it, what the worker's set-up left]."""

    prepared = 0.0

    def __init__(self, how: str = "torch") -> None:
        self.how = how

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        row = [float(index), DRAWS[self.how](), float(os.getpid()), self.prepared]
        return torch.tensor(row, dtype=torch.float64), index % 2


def prepare(worker: int) -> None:
    info: Any = get_worker_info()
    info.dataset.prepared = 1.0


def column(epoch: Any, number: int) -> list[float]:
    return [value for x, *_ in epoch for value in x[:, number].tolist()]


def states() -> str:
    return repr((torch.get_rng_state().tolist(), np.random.get_state(), random.getstate()))  # noqa: NPY002


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("how", DRAWS)
def test_the_generator_decides_what_is_drawn(how: str, workers: int) -> None:
    source = Batches(DataLoader(Noisy(how), batch_size=2, num_workers=workers), num_classes=2)
    before = states()

    def drawn(seed: int, epochs: int = 2) -> list[list[float]]:
        rng = torch.Generator().manual_seed(seed)
        epoch = source.indexed if seed % 2 else source.shuffled
        return [column(epoch(2, rng), 1) for _ in range(epochs)]

    first, other = drawn(1), drawn(2)
    assert first == drawn(1)
    assert len({value for epoch in (*first, *other) for value in epoch}) == 24
    without = Batches(DataLoader(Noisy(how), batch_size=2), num_classes=2)
    assert first[0] == column(without.shuffled(2, torch.Generator().manual_seed(1)), 1)
    rng = torch.Generator().manual_seed(1)
    test = [column(source.ordered(2, generator=rng), 1) for _ in range(2)]
    assert test[0] == test[1] != column(source.ordered(2), 1)
    assert states() == before


def test_a_single_sample_is_drawn_anew_in_each_epoch() -> None:
    source, rng = Batches(DataLoader(Noisy(), sampler=[3]), num_classes=2), torch.Generator()
    assert len({column(source.shuffled(2, rng), 1)[0] for _ in range(3)}) == 3


def test_training_between_two_batches_changes_nothing() -> None:
    source = Batches(Noisy(), num_classes=2)
    plain = column(source.shuffled(2, torch.Generator()), 1)
    interrupted = []
    for x, _ in source.shuffled(2, torch.Generator()):
        interrupted += x[:, 1].tolist()
        torch.rand(3)
    assert interrupted == plain


def test_options_of_a_loader_are_kept() -> None:
    """In one worker of a spawned process, which has to import this module."""
    loader = DataLoader(
        Noisy(), batch_size=3, num_workers=1, worker_init_fn=prepare, multiprocessing_context="fork",
        prefetch_factor=3, timeout=50,
    )  # fmt: skip
    source = Batches(loader, num_classes=2)
    assert set(column(source.shuffled(3, torch.Generator()), 3)) == {1.0}
    assert source.example()[0, 3] == 1.0
    kept = source._reader._options
    assert (kept["prefetch_factor"], kept["timeout"]) == (3, 50)
    assert kept["multiprocessing_context"].get_start_method() == "fork"


def test_persistent_workers_stay_until_the_end() -> None:
    loader = DataLoader(Noisy(), batch_size=2, num_workers=2, persistent_workers=True)
    source, rng = Batches(loader, num_classes=2), torch.Generator().manual_seed(0)
    epochs = [[x for x, _ in source.shuffled(2, rng)] for _ in range(3)]
    pids = [{int(pid) for x in epoch for pid in x[:, 2].tolist()} for epoch in epochs]
    assert pids[0] == pids[1] == pids[2]
    assert len({float(v) for epoch in epochs for x in epoch for v in x[:, 1]}) == 18
    # Two passes at once cannot share them.
    at_once = zip(source.ordered(2), source.ordered(2), strict=True)
    assert all(torch.equal(a[0][:, 0], b[0][:, 0]) for a, b in at_once)
    source.close()
    assert not pids[0] & {child.pid for child in multiprocessing.active_children()}
