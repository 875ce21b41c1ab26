"""Batches of a user's own data: any map-style PyTorch data set or DataLoader, of pairs or of dicts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    default_collate,
)

from flwr_kd.checks import DataError

__all__ = ["Batches", "DatasetError", "into_batches", "normalize_labels"]

_LABEL_KEYS = ("label", "labels", "y", "target", "targets", "fine_label", "class")
_INPUT_KEYS = ("image", "img", "pixel_values", "x", "input", "inputs", "features", "data")


class DatasetError(DataError):
    """The data set does not give what training needs; the text names both."""


class Batches:
    """Batches of inputs and labels from a data set, in a seeded random order or in the set's order.

    Parameters
    ----------
    source : Dataset or DataLoader
        Map-style. Items (or the loader's batches) are pairs ``(x, y)`` or dicts, such as those of Hugging Face's
        data sets. A loader's batch size, ``collate_fn``, ``num_workers`` and ``drop_last`` are kept; its shuffling
        is replaced by a seeded one, unless it has a sampler of its own.
    num_classes : int
        C.
    classes : sequence, optional
        The label values in the order of the model's outputs, where they are not 0..C-1.
    input_key, label_key : str, optional
        Keys of dict items; guessed if there is one candidate.
    labelled : bool
        If False, items may also be inputs alone, labels are ignored, and each label is 0.

    Raises
    ------
    DatasetError
        If the source has no length or no index, or is empty where samples are needed.
    """

    def __init__(
        self,
        source: Dataset[Any] | DataLoader[Any],
        *,
        num_classes: int,
        classes: Sequence[Any] | None = None,
        input_key: str | None = None,
        label_key: str | None = None,
        labelled: bool = True,
    ) -> None:
        self.loader = source if isinstance(source, DataLoader) else None
        self.dataset: Any = self.loader.dataset if self.loader is not None else source
        # Every torch Dataset inherits a __getitem__ that raises, also an iterable one with a length.
        indexed = hasattr(self.dataset, "__getitem__") and not isinstance(self.dataset, IterableDataset)
        if not isinstance(self.dataset, Sized) or not indexed:
            raise DatasetError(
                f"a map-style data set with __len__ and __getitem__ is expected, got {type(self.dataset).__name__}"
            )
        self.num_classes = num_classes
        self.classes = None if classes is None else {_plain(value): i for i, value in enumerate(classes)}
        if self.classes is not None and len(self.classes) != num_classes:
            raise DatasetError(
                f"classes has {len(self.classes)} different values, the model has {num_classes} outputs"
            )
        self.input_key, self.label_key, self.labelled = input_key, label_key, labelled

    def __len__(self) -> int:
        size: int = len(self.dataset)
        return size

    def shuffled(self, batch_size: int, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield one epoch in a random order.

        Every sample is used, and no batch has a single sample, on which BatchNorm cannot train: a last one joins
        the batch before. The exception is a data set of one sample. With a loader's ``drop_last`` the incomplete
        batch is left out, unless it is the only one.
        """
        if self.loader is not None and self.has_own_sampler:
            yield from map(self._split, self.loader)
            return
        for _, batch in self._epoch(batch_size, generator):
            yield batch

    def indexed(
        self, batch_size: int, generator: torch.Generator, rows: Tensor | None = None
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield one epoch as :meth:`shuffled` does, with the samples' positions in the data set ``[B]`` last.

        With ``rows``, positions ``[n]``, only of these samples.

        Raises
        ------
        DatasetError
            If positions are unknown: the loader has a sampler of its own, or its ``collate_fn`` returns another
            number of samples than it was given. A ``collate_fn`` that changes their order is not detected.
        """
        if self.has_own_sampler:
            raise DatasetError(
                "samples must be told apart, which a loader's own sampler prevents; give the data set, or a "
                "loader without one"
            )
        for chunk, (x, y) in self._epoch(batch_size, generator, rows):
            if not len(x) == len(y) == len(chunk):
                raise DatasetError(
                    f"collate_fn returned {len(x)} inputs and {len(y)} labels of {len(chunk)} samples"
                )
            yield x, y, chunk

    def _epoch(
        self, batch_size: int, generator: torch.Generator, rows: Tensor | None = None
    ) -> Iterator[tuple[Tensor, tuple[Tensor, Tensor]]]:
        drop_last = False
        if self.loader is not None:
            batch_size, drop_last = self.loader.batch_size or batch_size, self.loader.drop_last
        order = torch.randperm(len(self) if rows is None else len(rows), generator=generator)
        order = order if rows is None else rows[order]
        chunks = into_batches(order, batch_size, drop_last=drop_last)
        return zip(chunks, self._fetch([chunk.tolist() for chunk in chunks]), strict=True)

    def ordered(self, batch_size: int, rows: Tensor | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield every sample once, in the data set's order, or those at ``rows`` ``[n]``, in their order."""
        rows = torch.arange(len(self)) if rows is None else rows
        yield from self._fetch(
            [chunk.tolist() for chunk in torch.split(rows, batch_size)] if len(rows) else []
        )

    def example(self) -> Tensor:
        """Return the first sample's input as a batch of one; the data set must not be empty."""
        x, _ = next(self._fetch([[0]], workers=0))
        return x

    def key_of_label(self, item: Mapping[str, Any]) -> str:
        """Return the key of a dict item's label.

        Raises
        ------
        DatasetError
            If the named key is missing, or the key cannot be guessed.
        """
        return self._key(item, self.label_key, _LABEL_KEYS, "label_key")

    @property
    def has_own_sampler(self) -> bool:
        """Whether the source is a loader with a sampler of its own, which decides an epoch's samples."""
        loader = self.loader
        if loader is None:
            return False
        plain = type(loader.batch_sampler) is BatchSampler or loader.batch_sampler is None
        return not plain or type(loader.sampler) not in (RandomSampler, SequentialSampler)

    def _fetch(self, chunks: list[list[int]], workers: int | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        tensors = _tensors(self.dataset) if self.loader is None else None
        if tensors is not None and (len(tensors) == 2 or not self.labelled):
            for chunk in chunks:
                yield self._split(tuple(tensor[chunk] for tensor in tensors))
            return
        collate: Callable[[list[Any]], Any] = default_collate
        if workers is None:
            workers = 0 if self.loader is None else self.loader.num_workers
        if self.loader is not None and (
            self.loader.batch_size is not None or self.loader.batch_sampler is not None
        ):
            collate = self.loader.collate_fn
        # Without a generator, DataLoader draws its workers' seed from the global one.
        seeded = torch.Generator().manual_seed(0)
        loader = DataLoader(
            self.dataset, batch_sampler=chunks, collate_fn=collate, num_workers=workers, generator=seeded
        )
        yield from map(self._split, loader)

    def _split(self, batch: Any) -> tuple[Tensor, Tensor]:
        y: Any = None
        if isinstance(batch, Mapping):
            x = batch[self._key(batch, self.input_key, _INPUT_KEYS, "input_key")]
            if self.labelled:
                y = batch[self.key_of_label(batch)]
        elif not self.labelled and isinstance(batch, Tensor):
            x = batch
        elif not self.labelled and isinstance(batch, Sequence) and len(batch) == 1:
            (x,) = batch
        elif isinstance(batch, Sequence) and len(batch) == 2:
            x, y = batch
        else:
            size = f" of {len(batch)}" if isinstance(batch, Sized) else ""
            kinds = "pairs (x, y) or dicts" if self.labelled else "inputs, pairs (x, y) or dicts"
            raise DatasetError(f"items must be {kinds}, got {type(batch).__name__}{size}")
        if not isinstance(x, Tensor):
            raise DatasetError(
                f"inputs must be tensors, got {type(x).__name__}; give the data set a transform or a collate_fn"
            )
        if not self.labelled:
            return x, torch.zeros(len(x), dtype=torch.int64)
        return x, normalize_labels(y, self.num_classes, self.classes)

    @staticmethod
    def _key(batch: Mapping[str, Any], given: str | None, usual: tuple[str, ...], option: str) -> str:
        if given is not None:
            if given not in batch:
                raise DatasetError(f"{option} {given!r} is not among the item's keys {sorted(batch)}")
            return given
        candidates = [key for key in usual if key in batch]
        if len(candidates) != 1:
            raise DatasetError(f"which key to use is not clear: name {option}, one of {sorted(batch)}")
        return candidates[0]


def into_batches(order: Tensor, batch_size: int, *, drop_last: bool = False) -> list[Tensor]:
    """Split an order of samples ``[N]`` into batches; a last single sample joins the batch before.

    BatchNorm needs two samples per batch.

    >>> [chunk.tolist() for chunk in into_batches(torch.arange(5), 2)]
    [[0, 1], [2, 3, 4]]
    """
    chunks: list[Tensor] = list(torch.split(order, batch_size)) if len(order) else []
    if len(chunks) > 1 and drop_last and len(chunks[-1]) < batch_size:
        chunks.pop()
    elif len(chunks) > 1 and len(chunks[-1]) == 1:
        chunks[-2:] = [torch.cat(chunks[-2:])]
    return chunks


def normalize_labels(labels: Any, num_classes: int, classes: Mapping[Any, int] | None = None) -> Tensor:
    """Return labels as int64 ``[B]`` in 0..C-1.

    Parameters
    ----------
    labels : Tensor or sequence
        ``[B]``, ``[B, 1]`` or 0-dimensional, of any integer type, whole floats, or anything hashable if
        ``classes`` is given.
    num_classes : int
        C.
    classes : mapping, optional
        Index of each label value.

    Raises
    ------
    DatasetError
        If a label is not a whole number or not one of the classes, or there are several per sample.

    Examples
    --------
    >>> normalize_labels(torch.tensor([3, 7, 3], dtype=torch.uint8), 2, {3: 0, 7: 1})
    tensor([0, 1, 0])
    """
    shape = tuple(getattr(labels, "shape", ()))
    if math.prod(shape[1:]) != 1:
        raise DatasetError(f"one label per sample expected, [B] or [B, 1], got shape {list(shape)}")
    if classes is not None:
        values = labels.reshape(-1).tolist() if isinstance(labels, Tensor) else list(labels)
        unknown = [value for value in values if _plain(value) not in classes]
        if unknown:
            raise DatasetError(f"label {unknown[0]!r} is not one of the classes {list(classes)[:20]}")
        return torch.tensor([classes[_plain(value)] for value in values], dtype=torch.int64)
    try:
        y = torch.as_tensor(labels)
    except (TypeError, ValueError, RuntimeError):
        raise DatasetError(
            f"labels must be whole numbers, got {type(labels).__name__}; pass classes=[...]"
        ) from None
    y = y.reshape(-1)
    if y.is_complex() or (y.is_floating_point() and not torch.equal(y, y.round())):
        raise DatasetError(f"labels must be whole numbers, got {y[:3].tolist()}")
    y = y.to(torch.int64)
    if y.numel() and not (int(y.min()) >= 0 and int(y.max()) < num_classes):
        wrong = y[(y < 0) | (y >= num_classes)][0]
        raise DatasetError(
            f"label {int(wrong)} is not in 0..{num_classes - 1}; pass classes=[...] with the label values in the "
            "order of the model's outputs"
        )
    return y


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value


def _tensors(dataset: Any) -> tuple[Tensor, ...] | None:
    """Return the tensors of a data set that consists of tensors only: indexing them per batch is much faster."""
    # A subclass may define other items.
    whole = type(dataset) is TensorDataset or getattr(type(dataset), "items_are_rows_of_tensors", False)
    if whole and len(dataset.tensors) in (1, 2):
        return tuple(dataset.tensors)
    return None
