"""Reads samples of a data set by their keys, as a user's loader would: with its workers, options and collate_fn."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, default_collate

from flwr_kd.learning.sources import loader_options
from flwr_kd.seeding import derive_seed, private_randomness, seed_global_generators

__all__ = ["Reader"]


class _Chunks:
    """Batches of keys, which a loader with persistent workers is given anew for each pass."""

    def __init__(self) -> None:
        self.now: list[list[Any]] = []

    def __iter__(self) -> Iterator[list[Any]]:
        return iter(self.now)

    def __len__(self) -> int:
        return len(self.now)


class _Seeded:
    """A data set that is asked for a seed and some keys at once: any worker draws the same numbers for them.

    Its attributes are the data set's: a ``worker_init_fn`` sees no difference.
    """

    def __init__(self, dataset: Any) -> None:
        object.__setattr__(self, "_dataset", dataset)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, key: Any) -> Any:
        return self._dataset[key]

    def __getitems__(self, keys: list[Any]) -> Any:
        seed, *own = keys
        seed_global_generators(seed)
        many = getattr(self._dataset, "__getitems__", None)
        return many(own) if many else [self._dataset[key] for key in own]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._dataset, name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Seeded, (self._dataset,)


class Reader:
    """Batches of one data set, in any order.

    What is drawn for a batch follows from the pass's seed and the batch's place in the pass, with any number of
    workers. Each pass starts the workers anew; those that the user's loader keeps (``persistent_workers``) stay
    until :meth:`close`.

    Parameters
    ----------
    dataset
        Map-style.
    loader : DataLoader, optional
        The user's.
    """

    def __init__(self, dataset: Any, loader: DataLoader[Any] | None) -> None:
        self._dataset = _Seeded(dataset)
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
        chunks = [[derive_seed(seed, "batch", place), *chunk] for place, chunk in enumerate(chunks)]
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
        batches = iter(_loader(self._dataset, chunks, seed, options))
        for _ in chunks:
            # Between two batches the model is trained, which draws numbers of its own.
            with private_randomness(seed):
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
