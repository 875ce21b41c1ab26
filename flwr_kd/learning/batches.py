"""Batches of a user's own data: any map-style PyTorch data set or DataLoader, of pairs or of dicts.

Inputs are a tensor, or several by name for models such as Hugging Face's; see :mod:`flwr_kd.inputs`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence, Sized
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from flwr_kd.checks import DataError
from flwr_kd.inputs import Inputs, NamedInputs, changed
from flwr_kd.learning.reader import Reader
from flwr_kd.learning.sources import DatasetError, Sampling, batch_options, check_data_set, is_row
from flwr_kd.seeding import seed_of_state

__all__ = ["Batches", "DatasetError", "into_batches", "normalize_labels", "several_labels"]

Keys = list[Any] | Tensor
_LABEL_KEYS = ("label", "labels", "y", "target", "targets", "fine_label", "class")
_INPUT_KEYS = ("image", "img", "pixel_values", "x", "input", "inputs", "features", "data")
_TOKEN_KEYS = ("input_ids", "attention_mask", "token_type_ids")
"""Keys that Hugging Face's tokenizers give; without the first, the others are no inputs."""


class Batches:
    """Batches of inputs and labels from a data set, in a seeded random order or in the set's order.

    Parameters
    ----------
    source : Dataset or DataLoader
        Map-style. Items (or the loader's batches) are pairs ``(x, y)`` or dicts, such as those of Hugging Face's
        data sets. Of a loader, everything is kept but its shuffling, which is replaced by a seeded one. A sampler
        that picks rows decides what the data set is: its rows are the samples, in training and everywhere else. A
        sampler without fixed rows (weighted, with replacement) decides only what an epoch of training has; the rest
        uses the whole data set.
    num_classes : int
        C.
    classes : sequence, optional
        The label values in the order of the model's outputs, where they are not 0..C-1.
    input_key : str or sequence of str, optional
        Key of the inputs in dict items; several keys are several inputs, which the model gets by name. Guessed if
        there is one candidate, and for what a tokenizer returns (``input_ids``, ``attention_mask``,
        ``token_type_ids``). The inputs of pairs may be dicts of tensors; then only several keys have a meaning.
    label_key : str, optional
        Key of the label in dict items; guessed if there is one candidate.
    labelled : bool
        If False, items may also be inputs alone, labels are ignored, and each label is 0.
    multi_label : bool
        Whether a sample has several labels. Its label is then a tensor ``[C]`` of 0 and 1, and a batch's are floats
        ``[B, C]``; ``classes`` has no meaning.
    dtype : torch.dtype, optional
        Inputs of another floating-point dtype are converted to it: the model's.

    Raises
    ------
    DatasetError
        If the source has no length or no index, is something else than a data set, or is empty where samples are
        needed.

    Notes
    -----
    What a data set draws from the global generators of torch, NumPy or Python follows from the generator that a
    pass is given: in this process, and in a loader's workers. The caller's global generators do not change.
    """

    def __init__(
        self,
        source: Dataset[Any] | DataLoader[Any],
        *,
        num_classes: int,
        classes: Sequence[Any] | None = None,
        input_key: str | Sequence[str] | None = None,
        label_key: str | None = None,
        labelled: bool = True,
        multi_label: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.loader = source if isinstance(source, DataLoader) else None
        dataset: Any = source.dataset if isinstance(source, DataLoader) else source
        check_data_set(dataset, labelled=labelled)
        self.num_classes = num_classes
        self.classes = None if classes is None else {_plain(value): i for i, value in enumerate(classes)}
        if self.classes is not None and len(self.classes) != num_classes:
            raise DatasetError(
                f"classes has {len(self.classes)} different values, the model has {num_classes} outputs"
            )
        if multi_label and classes is not None:
            raise DatasetError(
                "classes has no meaning with multi_label=True, where a label is a tensor [C] of 0 and 1"
            )
        self.input_key, self.label_key, self.labelled, self.dtype = input_key, label_key, labelled, dtype
        self.multi_label = multi_label
        self.dataset = dataset
        self._sampling = Sampling.of(self.loader, len(dataset))
        self._rows = None if self._sampling is None else self._sampling.rows
        self._places: dict[int, int] | None = None
        self._reader = Reader(dataset, self.loader)
        self._tensors = _tensors(dataset, labelled=labelled) if self.loader is None else None
        self._labels: Tensor | None = None

    def __len__(self) -> int:
        size: int = len(self.dataset) if self._rows is None else len(self._rows)
        return size

    @property
    def free_sampler(self) -> str | None:
        """Class of the loader's sampler if it has no fixed rows, so that it decides only what is trained on."""
        return None if self._sampling is None or self._rows is not None else self._sampling.name

    def whole(self) -> Batches:
        """Return batches of all samples, without a sampler that has no fixed rows."""
        if self.free_sampler is None:
            return self
        other = copy.copy(self)
        other._sampling, other._reader = None, Reader(self.dataset, self.loader)
        return other

    def as_they_are(self) -> Batches:
        """Return batches of the same samples, whose inputs keep their dtype."""
        other = copy.copy(self)
        other.dtype, other._reader = None, Reader(self.dataset, self.loader)
        return other

    def shuffled(
        self, batch_size: int, generator: torch.Generator, rows: Tensor | None = None
    ) -> Iterator[tuple[Inputs, Tensor]]:
        """Yield one epoch in a random order; with ``rows``, positions ``[n]``, only of these samples.

        Every sample is used, and no batch has a single sample, on which BatchNorm cannot train: a last one joins
        the batch before. The exception is a data set of one sample. With a loader's ``drop_last`` the incomplete
        batch is left out, unless it is the only one. A loader's own batch sampler composes the batches.
        """
        for _, batch in self._epoch(batch_size, generator, rows):
            yield batch

    def indexed(
        self, batch_size: int, generator: torch.Generator, rows: Tensor | None = None
    ) -> Iterator[tuple[Inputs, Tensor, Tensor]]:
        """Yield one epoch as :meth:`shuffled` does, with the samples' positions ``[B]`` last.

        Position i is that of the i-th sample of :meth:`ordered`. With ``rows``, positions ``[n]``, only of these
        samples. Positions are on the device of a data set of tensors, else on the CPU.

        Raises
        ------
        DatasetError
            If positions are unknown: a loader's sampler yields other things than rows, or its ``collate_fn``
            returns another number of samples than it was given. A ``collate_fn`` that changes their order is not
            detected.
        """
        for keys, (x, y) in self._epoch(batch_size, generator, rows):
            if not len(x) == len(y) == len(keys):
                raise DatasetError(
                    f"collate_fn returned {len(x)} inputs and {len(y)} labels of {len(keys)} samples"
                )
            yield x, y, self._positions(keys)

    def _epoch(
        self, batch_size: int, generator: torch.Generator, rows: Tensor | None = None
    ) -> Iterator[tuple[Keys, tuple[Inputs, Tensor]]]:
        seed = seed_of_state(generator)
        size, drop_last = batch_options(self.loader, batch_size)
        sampling = self._sampling
        chunks: Sequence[Keys]
        if rows is None and sampling is not None and (sampling.batches or sampling.rows is None):
            chunks = sampling.epoch(int(torch.randint(2**62, (), generator=generator)))
            if not sampling.batches:
                parts = into_batches(torch.arange(len(chunks)), size, drop_last=drop_last)
                chunks = [[chunks[i] for i in part.tolist()] for part in parts]
        else:
            if rows is None and sampling is not None and sampling.draws is not None:
                rows = torch.tensor(sampling.draws)
            order = torch.randperm(len(self) if rows is None else len(rows), generator=generator)
            if len(order) < 2:
                # Nothing was drawn, and the next epoch must have another seed.
                torch.rand((), generator=generator)
            order = self._beside_samples(order if rows is None else rows[order])
            chunks = [self._keys(chunk) for chunk in into_batches(order, size, drop_last=drop_last)]
        return zip(chunks, self._fetch(chunks, seed), strict=True)

    def ordered(
        self, batch_size: int, rows: Tensor | None = None, *, generator: torch.Generator | None = None
    ) -> Iterator[tuple[Inputs, Tensor]]:
        """Yield every sample once, in the data set's order, or those at positions ``rows`` ``[n]``, in their order.

        The generator's state, which does not change, decides what a data set draws at random. Without a generator
        that is the same in each pass.
        """
        rows = self._beside_samples(torch.arange(len(self)) if rows is None else rows)
        chunks: list[Keys] = (
            [self._keys(chunk) for chunk in torch.split(rows, batch_size)] if len(rows) else []
        )
        yield from self._fetch(chunks, 0 if generator is None else seed_of_state(generator))

    def example(self) -> Inputs:
        """Return the first sample's input as a batch of one; the data set must not be empty."""
        key = 0 if self._rows is None else self._rows[0]
        x, _ = self._split(next(self._reader.read([[key]], 0, few=True)))
        return x

    def close(self) -> None:
        """End the workers that a loader with ``persistent_workers`` has kept."""
        self._reader.close()

    def key_of_label(self, item: Mapping[str, Any]) -> str:
        """Return the key of a dict item's label.

        Raises
        ------
        DatasetError
            If the named key is missing, or the key cannot be guessed.
        """
        return self._key(item, self.label_key, _LABEL_KEYS, "label_key")

    def _beside_samples(self, positions: Tensor) -> Tensor:
        """Return positions where they can be used as an index: one copy to a GPU per pass, and not per batch."""
        return positions if self._tensors is None else positions.to(self._tensors[0].device)

    def _keys(self, positions: Tensor) -> Keys:
        """Return the data set's rows at some positions; a tensor of them where the data set consists of tensors."""
        if self._tensors is not None:
            return positions
        keys: list[int] = positions.tolist()
        return keys if self._rows is None else [self._rows[position] for position in keys]

    def _positions(self, keys: Keys) -> Tensor:
        if isinstance(keys, Tensor):
            return keys
        if self._places is None:
            self._places = {} if self._rows is None else {row: i for i, row in enumerate(self._rows)}
        if not all(map(is_row, keys)):
            raise DatasetError(
                f"samples must be told apart, and the sampler {self.free_sampler} yields {keys[0]!r} in place of a "
                "row; give the data set, or a loader whose sampler yields rows"
            )
        rows = [int(key) % len(self.dataset) for key in keys]
        return torch.tensor(rows if self._rows is None else [self._places[row] for row in rows])

    def _fetch(self, chunks: Sequence[Keys], seed: int) -> Iterator[tuple[Inputs, Tensor]]:
        if self._tensors is not None:
            inputs, labels = self._tensors[0], self._checked_labels()
            for chunk in chunks:
                x = inputs[chunk]
                yield changed(x, self._converted), labels[chunk] if self.labelled else _no_labels(x)
            return
        try:
            lists = [list(chunk) for chunk in chunks]
            yield from map(self._split, self._reader.read(lists, seed))
        except TypeError as error:
            # torch's default_collate raises it, in this process or in a worker.
            if "default_collate" not in str(error):
                raise
            kind = str(error).rpartition("found ")[2] or "something else"
            raise DatasetError(
                f"samples must be of tensors and numbers, got {kind}; {self._remedy()}"
            ) from None

    def _remedy(self) -> str:
        if hasattr(self.dataset, "with_transform"):
            return 'give dataset.with_format("torch"), or for pictures dataset.with_transform(...)'
        return "give the data set a transform, such as torchvision.transforms.ToTensor(), or a collate_fn"

    def _split(self, batch: Any) -> tuple[Inputs, Tensor]:
        y: Any = None
        if isinstance(batch, Mapping):
            x = self._inputs_of(batch)
            if self.labelled:
                y = batch[self.key_of_label(batch)]
        elif not self.labelled and isinstance(batch, Tensor):
            x = batch
        elif isinstance(batch, Sequence) and (len(batch) == 2 or (len(batch) == 1 and not self.labelled)):
            x, y = batch if len(batch) == 2 else (*batch, None)
            if isinstance(x, Mapping):
                x = self._inputs_of(x, of_pair=True)
        else:
            size = f" of {len(batch)}" if isinstance(batch, Sized) else ""
            kinds = "pairs (x, y) or dicts" if self.labelled else "inputs, pairs (x, y) or dicts"
            raise DatasetError(f"items must be {kinds}, got {type(batch).__name__}{size}")
        if not isinstance(x, Tensor | NamedInputs):
            raise DatasetError(f"inputs must be tensors, got {type(x).__name__}; {self._remedy()}")
        x = changed(x, self._converted)
        return x, self._normalized(y) if self.labelled else _no_labels(x)

    def _normalized(self, labels: Any) -> Tensor:
        if self.multi_label:
            return several_labels(labels, self.num_classes)
        return normalize_labels(labels, self.num_classes, self.classes)

    def _inputs_of(self, item: Mapping[str, Any], *, of_pair: bool = False) -> Any:
        """Return the input of a dict item, or its inputs by name; all of them where the dict is that of a pair."""
        key = self.input_key
        if key is None and of_pair:
            keys: Sequence[str] = list(item)
        elif key is None and "input_ids" in item and not any(name in item for name in _INPUT_KEYS):
            # A single input is a tensor, which any model takes.
            found = [name for name in _TOKEN_KEYS if name in item]
            if len(found) == 1:
                return item[found[0]]
            keys = found
        elif key is None or isinstance(key, str):
            return item[self._key(item, key, _INPUT_KEYS, "input_key")]
        else:
            keys = [self._key(item, name, (), "input_key") for name in key]
        return self._named({name: item[name] for name in keys})

    def _named(self, tensors: dict[str, Any]) -> NamedInputs:
        wrong = next((name for name, value in tensors.items() if not isinstance(value, Tensor)), None)
        if wrong is not None:
            kind = type(tensors[wrong]).__name__
            raise DatasetError(f"inputs must be tensors, got {kind} ({wrong!r}); {self._remedy()}")
        try:
            return NamedInputs(tensors)
        except DataError as error:
            raise DatasetError(str(error)) from None

    def _converted(self, x: Tensor) -> Tensor:
        return x if self.dtype is None or not x.is_floating_point() else x.to(self.dtype)

    def _checked_labels(self) -> Tensor:
        """Return all labels of a data set that consists of tensors, checked once; empty if they are ignored."""
        if self._labels is None:
            assert self._tensors is not None
            labels = (
                self._normalized(self._tensors[1]) if self.labelled else torch.zeros(0, dtype=torch.int64)
            )
            self._labels = labels.to(self._tensors[0].device)
        return self._labels

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
        raise DatasetError(
            f"one label per sample expected, [B] or [B, 1], got shape {list(shape)}; for a one-hot code give its "
            "argmax(dim=1), for samples with several labels multi_label=True"
        )
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


def several_labels(labels: Any, num_classes: int) -> Tensor:
    """Return labels of samples that may have several, as floats ``[B, C]`` of 0 and 1.

    Raises
    ------
    DatasetError
        If it is no tensor ``[B, C]``, or another value is in it.

    Examples
    --------
    >>> several_labels(torch.tensor([[0, 1], [1, 1]]), 2)
    tensor([[0., 1.],
            [1., 1.]])
    """
    shape = list(labels.shape) if isinstance(labels, Tensor) else type(labels).__name__
    if not isinstance(labels, Tensor) or labels.ndim != 2 or labels.shape[1] != num_classes:
        raise DatasetError(
            f"with multi_label=True a label must be a tensor of {num_classes} numbers, 0 or 1, one for each output "
            f"of the model, so that a batch is [B, {num_classes}]; got {shape}"
        )
    wrong = labels[(labels != 0) & (labels != 1)]
    if len(wrong):
        raise DatasetError(f"with multi_label=True labels must be 0 or 1, got {wrong[0].item():g}")
    return labels.to(torch.float32)


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value


def _no_labels(x: Inputs) -> Tensor:
    return torch.zeros(len(x), dtype=torch.int64, device=x.device)


def _tensors(dataset: Any, *, labelled: bool) -> tuple[Any, ...] | None:
    """Return the tensors of a data set that consists of tensors only: indexing them per batch is much faster."""
    # A subclass may define other items.
    whole = type(dataset) is TensorDataset or getattr(type(dataset), "items_are_rows_of_tensors", False)
    if whole and (len(dataset.tensors) == 2 or (len(dataset.tensors) == 1 and not labelled)):
        return tuple(dataset.tensors)
    return None
