"""Reads samples of a data set by their keys, as a user's loader would: with its workers, options and collate_fn."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, default_collate

from flwr_kd.learning.sources import loader_options
from flwr_kd.seeding import PrivateRandomness

__all__ = ["Reader"]


class _Chunks:
    """Batches of keys, which a loader with persistent workers is given anew for each pass."""

    def __init__(self) -> None:
        self.now: list[list[Any]] = []

    def __iter__(self) -> Iterator[list[Any]]:
        return iter(self.now)

    def __len__(self) -> int:
        return len(self.now)


class Reader:
    """Batches of one data set, in any order.

    With workers, each pass starts them anew, with seeds that follow from the pass's seed. Workers that the user's
    loader keeps (``persistent_workers``) stay until :meth:`close`, and draw on.

    Parameters
    ----------
    dataset
        Map-style.
    loader : DataLoader, optional
        The user's.
    """

    def __init__(self, dataset: Any, loader: DataLoader[Any] | None) -> None:
        self._dataset = dataset
        self._options = {"collate_fn": default_collate, **loader_options(loader)}
        self._kept: DataLoader[Any] | None = None
        self._busy = False

    def read(self, chunks: list[list[Any]], seed: int, *, few: bool = False) -> Iterator[Any]:
        """Yield one batch per chunk of keys.

        Parameters
        ----------
        chunks : list of list
            Keys of the data set's samples.
        seed : int
            Decides what the data set draws from global generators.
        few : bool
            Read without workers, or with one where the user has a function that prepares them.
        """
        options = self._options
        if few and options.get("num_workers"):
            workers = 1 if options["worker_init_fn"] is not None else 0
            options = _with_workers(options, workers)
        if not options.get("num_workers"):
            yield from self._read_here(chunks, seed, options)
        elif options["persistent_workers"] and not self._busy:
            yield from self._read_by_kept_workers(chunks, seed)
        else:
            yield from _loader(self._dataset, chunks, seed, {**options, "persistent_workers": False})

    def close(self) -> None:
        """End workers that were kept."""
        # The loader's only reference: its iterator ends the processes when it is deleted.
        self._kept = None

    def _read_here(self, chunks: list[list[Any]], seed: int, options: dict[str, Any]) -> Iterator[Any]:
        randomness = PrivateRandomness(seed)
        batches = iter(_loader(self._dataset, chunks, seed, options))
        for _ in chunks:
            # Between two batches the model is trained, which draws numbers of its own.
            with randomness.active():
                batch = next(batches)
            yield batch

    def _read_by_kept_workers(self, chunks: list[list[Any]], seed: int) -> Iterator[Any]:
        if self._kept is None:
            self._kept = _loader(self._dataset, _Chunks(), seed, self._options)
        self._kept.batch_sampler.now = chunks  # type: ignore[union-attr]
        self._busy = True
        try:
            yield from self._kept
        finally:
            self._busy = False


def _loader(dataset: Any, chunks: Any, seed: int, options: dict[str, Any]) -> DataLoader[Any]:
    # Without a generator, DataLoader draws its workers' seed from the global one.
    generator = torch.Generator().manual_seed(seed)
    return DataLoader(dataset, batch_sampler=chunks, generator=generator, **options)


def _with_workers(options: dict[str, Any], workers: int) -> dict[str, Any]:
    if workers:
        return {**options, "num_workers": workers, "persistent_workers": False}
    of_workers = ("num_workers", "timeout", "worker_init_fn", "multiprocessing_context", "prefetch_factor")
    return {name: value for name, value in options.items() if name not in (*of_workers, "persistent_workers")}
