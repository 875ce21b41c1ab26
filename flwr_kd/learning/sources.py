"""What a user gives as a data set: what it must be, which rows a loader's sampler picks, and a loader's options."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Sized
from contextlib import suppress
from itertools import chain, islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from flwr_kd.checks import DataError
from flwr_kd.seeding import private_randomness

__all__ = ["DatasetError", "Sampling", "batch_options", "check_data_set", "is_row", "loader_options"]

_TENSORS = "torch.utils.data.TensorDataset(x, y), of tensors"
_LONGEST = 10
"""Without a length, a sampler that yields more than this multiple of the data set's rows is taken for endless."""
_FEW, _TRIALS = 100, 8


class DatasetError(DataError):
    """The data set does not give what training needs; the text names both."""


# ---------------------------------------------------------------------- kinds of data sets


def check_data_set(data: Any, *, labelled: bool) -> None:
    """Refuse what is not a map-style data set, with what to pass instead.

    Parameters
    ----------
    data
        A data set, not a loader.
    labelled : bool
        Whether its items have labels.

    Raises
    ------
    DatasetError
        If it has no length or no index; if it is a dict, a table, an array, a text, or a list of other things than
        samples.
    """
    instead = _instead_of(data, labelled)
    if instead is not None:
        raise DatasetError(f"a data set of samples is expected, got {instead}")
    # Every torch Dataset inherits a __getitem__ that raises, also an iterable one with a length.
    indexed = hasattr(data, "__getitem__") and not isinstance(data, IterableDataset)
    if not isinstance(data, Sized) or not indexed:
        raise DatasetError(
            f"a map-style data set with __len__ and __getitem__ is expected, got {type(data).__name__}"
        )


def _instead_of(data: Any, labelled: bool) -> str | None:
    """Return what was given in place of a data set, and the remedy; None for what may be one."""
    kind = type(data).__name__
    if isinstance(data, Dataset | DataLoader):
        return None
    if isinstance(data, Mapping):
        names = ", ".join(repr(key) for key in list(data)[:5])
        if any(_is_data_set(value) for value in data.values()):
            split = next((repr(key) for key in data if _is_data_set(data[key])), "'train'")
            return f"a {kind} of splits ({names}): pass one of them, for example data[{split}]"
        return f"a {kind} ({names}): pass {_TENSORS}"
    if isinstance(data, str | bytes):
        return f"a {kind}: load the data first, and pass the data set"
    if isinstance(data, nn.Module):
        return f"a model ({kind})"
    if hasattr(data, "iloc") or (hasattr(data, "columns") and not callable(getattr(data, "map", None))):
        return f"a {kind}: pass {_TENSORS} made of its columns, for example torch.tensor(table[names].to_numpy())"
    if labelled and isinstance(data, np.ndarray | Tensor):
        return f"a {kind} without labels: pass {_TENSORS}"
    if isinstance(data, list | tuple) and len(data):
        return _instead_of_list(data, labelled)
    return None


def _instead_of_list(data: Sequence[Any], labelled: bool) -> str | None:
    kind, first = type(data).__name__, data[0]
    if any(_is_data_set(part) for part in data):
        return f"a {kind} of {len(data)} data sets: pass one as train_set and one as test_set"
    arrays = [part for part in data if isinstance(part, np.ndarray | Tensor)]
    pair = len(data) == 2 and len(arrays) > 0 and getattr(arrays[0], "ndim", 0) > 0
    if labelled and (isinstance(first, np.ndarray | Tensor) or pair):
        return f"a {kind} of {len(data)} arrays: pass {_TENSORS}"
    if labelled and isinstance(first, list | tuple) and _is_split(first):
        return f"a {kind} of {len(data)} splits of arrays: pass {_TENSORS}, of one of them"
    if not labelled and isinstance(data, tuple) and len(arrays) == len(data) == 2 and len(arrays[0]) != 2:
        return f"a {kind} of {len(data)} arrays: pass torch.utils.data.TensorDataset(x)"
    return None


def _is_split(pair: Sequence[Any]) -> bool:
    """Whether a pair is all inputs and all labels, not one sample."""
    arrays = [part for part in pair if isinstance(part, np.ndarray | Tensor) and part.ndim > 0]
    return len(arrays) == len(pair) == 2 and len(arrays[0]) == len(arrays[1]) > 1


def _is_data_set(value: Any) -> bool:
    """Whether a value is a data set of torch or Hugging Face, or a loader."""
    known = isinstance(value, Dataset | DataLoader)
    return known or (hasattr(value, "column_names") and hasattr(value, "__getitem__"))


# ---------------------------------------------------------------------- samplers


class Sampling:
    """Which rows of its data set a loader's sampler picks.

    A sampler that yields the same rows whenever it is iterated has fixed rows: these are the data set. One that
    yields others each time (weighted, with replacement, a random part, or endless) has none.

    Parameters
    ----------
    loader : DataLoader
        Its global and own random generators are as before at the end.
    size : int
        Number of rows of its data set.

    Attributes
    ----------
    name : str
        The sampler's class.
    rows : list of int or None
        The fixed rows, each once: in the sampler's order where that does not change, else ascending.
    draws : list of int or None
        Positions in ``rows`` that an epoch has, where rows are repeated.
    batches : bool
        Whether the sampler composes the batches itself.

    Raises
    ------
    DatasetError
        If the sampler yields a row that the data set does not have.
    """

    def __init__(self, loader: DataLoader[Any], size: int) -> None:
        batches: Any = loader.batch_sampler
        self.batches = batches is not None and type(batches) is not BatchSampler
        self._source: Any = batches if self.batches else _sampler_of(loader)
        self._size, self.name = size, type(self._source).__name__
        self._generators = list(_generators_of(loader))
        self.rows: list[int] | None = None
        self.draws: list[int] | None = None
        if type(self._source) is SubsetRandomSampler:
            self._fix([self._rows_of(self._source.indices)])
            return
        known = _varies(self._source)
        # One that is known to vary is iterated once all the same, to see what it yields.
        with private_randomness(0, self._generators):
            first = self._iterate()
            trials = 1 if known else _TRIALS if len(first) <= _FEW else 2
            others = [self._iterate() for _ in range(trials - 1)]
        self.batches = self.batches or any(isinstance(key, list | tuple) for key in first)
        flat = [self._flat(keys) for keys in (first, *others)]
        numbers = [self._rows_of(keys) for keys in flat if keys is not None]
        same = len(numbers) == len(flat) and all(sorted(n) == sorted(numbers[0]) for n in numbers)
        if same and not known and not self._endless(flat[0]):
            self._fix(numbers)

    @staticmethod
    def of(loader: DataLoader[Any] | None, size: int) -> Sampling | None:
        """Return a loader's sampling; None where it picks every row once, as without a loader."""
        if loader is None:
            return None
        plain = type(loader.batch_sampler) is BatchSampler or loader.batch_sampler is None
        sampler = _sampler_of(loader)
        usual = type(sampler) in (RandomSampler, SequentialSampler) and len(sampler.data_source) == size
        if plain and usual and not _varies(sampler) and len(sampler) == size:
            return None
        return Sampling(loader, size)

    def epoch(self, seed: int) -> list[Any]:
        """Return what the sampler yields in one epoch, rows or batches of them; the seed decides which."""
        with private_randomness(seed, self._generators):
            keys = self._iterate()
        if self._endless(keys):
            keys = keys[: max(1, self._size // len(keys[0])) if self.batches else self._size]
        return [list(batch) for batch in keys if len(batch)] if self.batches else keys

    def _iterate(self) -> list[Any]:
        return list(islice(iter(self._source), self._most() + 1))

    def _most(self) -> int:
        length = 0
        with suppress(TypeError, NotImplementedError):
            length = len(self._source)
        return max(length, _LONGEST * max(self._size, 1))

    def _endless(self, keys: Sequence[Any] | None) -> bool:
        return keys is not None and len(keys) > self._most()

    def _flat(self, keys: list[Any]) -> list[Any] | None:
        """Return the rows that were yielded; None if they are other keys than whole numbers."""
        flat = list(chain.from_iterable(keys)) if self.batches else keys
        return flat if all(is_row(key) for key in flat) else None

    def _rows_of(self, keys: Sequence[Any]) -> list[int]:
        numbers = [int(key) for key in keys]
        wrong = next((n for n in numbers if not -self._size <= n < self._size), None)
        if wrong is not None:
            raise DatasetError(f"{self.name} yields row {wrong}, the data set has {self._size} rows")
        return [n % self._size for n in numbers]

    def _fix(self, trials: list[list[int]]) -> None:
        first = trials[0]
        stable = all(trial == first for trial in trials)
        self.rows = list(dict.fromkeys(first if stable else sorted(first)))
        if len(self.rows) < len(first):
            place = {row: position for position, row in enumerate(self.rows)}
            self.draws = [place[row] for row in first]


def _sampler_of(loader: DataLoader[Any]) -> Any:
    """Return what picks the rows: that of a batch sampler that a user made of it, else the loader's."""
    return loader.sampler if loader.batch_sampler is None else getattr(loader.batch_sampler, "sampler", None)


def _varies(sampler: Any) -> bool:
    """Whether a sampler is known to yield other rows each time."""
    if getattr(sampler, "replacement", False) is True:
        return True
    if type(sampler) is RandomSampler:
        return sampler.num_samples % max(len(sampler.data_source), 1) != 0
    if type(sampler) is WeightedRandomSampler:
        return sampler.num_samples != int(torch.count_nonzero(sampler.weights))
    nested = getattr(sampler, "sampler", None)
    return nested is not None and nested is not sampler and _varies(nested)


def is_row(key: Any) -> bool:
    """Whether a sampler's key is a whole number, of any type."""
    if isinstance(key, Tensor | np.ndarray):
        return key.ndim == 0 and "int" in str(key.dtype)
    return isinstance(key, int | np.integer) and not isinstance(key, bool)


def _generators_of(loader: DataLoader[Any]) -> Iterator[torch.Generator]:
    """Yield torch's generators that a loader and its samplers hold, each once."""
    pending: list[Any] = [loader.generator, loader.batch_sampler, loader.sampler]
    seen: set[int] = set()
    while pending:
        part = pending.pop()
        if part is None or id(part) in seen:
            continue
        seen.add(id(part))
        if isinstance(part, torch.Generator):
            yield part
        elif (
            hasattr(part, "__iter__") and hasattr(part, "__dict__") and not isinstance(part, Dataset | Tensor)
        ):
            # A sampler, which may hold a generator and other samplers.
            pending += [v for v in vars(part).values() if not isinstance(v, list | tuple | dict | str)]


# ---------------------------------------------------------------------- loaders


def batch_options(loader: DataLoader[Any] | None, batch_size: int) -> tuple[int, bool]:
    """Return a loader's batch size, else the given one, and whether incomplete batches are left out."""
    if loader is None:
        return batch_size, False
    plain: Any = loader.batch_sampler if type(loader.batch_sampler) is BatchSampler else loader
    return plain.batch_size or batch_size, bool(plain.drop_last)


def loader_options(loader: DataLoader[Any] | None) -> dict[str, Any]:
    """Return the options of a user's loader that say how samples are read, for a loader of flwr-kd's own.

    Its batches, its sampler and its generator are not among them.
    """
    if loader is None:
        return {}
    options: dict[str, Any] = {"pin_memory": loader.pin_memory}
    # Without batches, the loader's collate_fn converts single samples.
    if loader.batch_size is not None or loader.batch_sampler is not None:
        options["collate_fn"] = loader.collate_fn
    if loader.num_workers:
        kept = ("num_workers", "timeout", "worker_init_fn", "multiprocessing_context", "prefetch_factor")
        options |= {name: getattr(loader, name) for name in (*kept, "persistent_workers")}
    # in_order came with torch 2.6.
    for name in ("in_order", "pin_memory_device"):
        value = getattr(loader, name, "")
        if value not in ("", True):
            options[name] = value
    return options
