"""Attacks on the labels that a malicious client trains on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from flwr_kd.checks import ConfigError
from flwr_kd.data import ArrayDataset
from flwr_kd.experiments.attacks.attack import Attack
from flwr_kd.learning.batches import Batches, DatasetError, normalize_labels
from flwr_kd.seeding import numpy_generator

__all__ = ["LabelFlip"]


@dataclass(frozen=True)
class LabelFlip(Attack):
    """All training labels become ``target``; if that is None, they are permuted without a fixed point."""

    target: int | None = 0

    def check_classes(self, num_classes: int) -> None:
        """Refuse a target that is no class, and a permutation of a single class."""
        if self.target is None and num_classes < 2:
            raise ConfigError(
                f"attack 'label-flip:permute' needs at least 2 classes, there are {num_classes}"
            )
        if self.target is not None and not 0 <= self.target < num_classes:
            raise ConfigError(
                f"attack 'label-flip:{self.target}': TARGET must be in 0..{num_classes - 1}, the classes, "
                f"got {self.target}"
            )

    def mapping(self, num_classes: int, seed: int) -> npt.NDArray[np.int64]:
        """Return the new label of each class, ``[C]``.

        >>> LabelFlip(1).mapping(3, seed=0).tolist()
        [1, 1, 1]
        >>> bool((LabelFlip(None).mapping(3, seed=0) == np.arange(3)).any())
        False
        """
        self.check_classes(num_classes)
        if self.target is not None:
            return np.full(num_classes, self.target, dtype=np.int64)
        rng = numpy_generator(seed, "label-flip")
        # More than a third of all permutations have no fixed point; drawing again keeps them equally likely.
        while True:
            permutation = rng.permutation(num_classes).astype(np.int64)
            if (permutation != np.arange(num_classes)).all():
                return permutation

    def poison(
        self, dataset: Dataset[Any], num_classes: int, seed: int, *, label_key: str | None = None
    ) -> Dataset[Any]:
        """Return the data set with other labels; see :meth:`Attack.poison`."""
        mapping = torch.from_numpy(self.mapping(num_classes, seed))
        if isinstance(dataset, ArrayDataset):
            labels = normalize_labels(dataset.y, num_classes)
            return ArrayDataset(dataset.x, mapping.to(labels.device)[labels])
        return _Relabelled(dataset, mapping, label_key)


class _Relabelled(Dataset[Any]):
    """A view of a map-style data set of pairs or dicts with other labels."""

    def __init__(self, dataset: Dataset[Any], mapping: Tensor, label_key: str | None) -> None:
        # Batches checks the data set, and guesses the labels' key.
        source = Batches(dataset, num_classes=len(mapping), label_key=label_key)
        if source.loader is not None:
            raise DatasetError("a map-style data set is expected, got a DataLoader; give the data set in it")
        self._source, self._mapping = source, mapping

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> Any:
        item = self._source.dataset[index]
        if isinstance(item, Mapping):
            key = self._source.key_of_label(item)
            return {**item, key: self._flipped(item[key])}
        if isinstance(item, Sequence) and len(item) == 2:
            return item[0], self._flipped(item[1])
        raise DatasetError(f"items must be pairs (x, y) or dicts, got {type(item).__name__}")

    def _flipped(self, label: Any) -> Any:
        """Return the new label in the old one's form, so that it collates as that did."""
        tensor = torch.as_tensor(label)
        flat = normalize_labels(tensor.reshape(-1), len(self._mapping))
        flipped = self._mapping[flat].reshape(tensor.shape)
        if isinstance(label, Tensor):
            return flipped.to(label.dtype)
        return int(flipped) if isinstance(label, int) else flipped.numpy().astype(np.asarray(label).dtype)
