"""A client's data sets, as samples to train on, to extract knowledge from, and to test on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from flwr_kd.checks import checked
from flwr_kd.learning.batches import Batches, DatasetError
from flwr_kd.transport.flower_records import CLASS_COUNTS
from flwr_kd.wording import warn_once

__all__ = ["DataSets"]

_READ_TOGETHER = 256
_SHARE = "share-histogram"
Source = Dataset[Any] | DataLoader[Any]


class DataSets:
    """A client's batches. A loader's sampler without fixed rows decides only what is trained on.

    Parameters
    ----------
    train_set, test_set, knowledge_set, common_test_set : Dataset or DataLoader
        See :class:`flwr_kd.KDClient`.
    **options
        See :class:`flwr_kd.Batches`.

    Attributes
    ----------
    train, knowledge : Batches
        The training samples, and those that knowledge is extracted from.
    test, common_test : Batches or None
        The client's own test samples, and those of the common test set.

    Raises
    ------
    DatasetError
        If a data set does not give what training needs.
    """

    def __init__(
        self,
        train_set: Source,
        test_set: Source | None,
        knowledge_set: Source | None,
        common_test_set: Source | None = None,
        **options: Any,
    ) -> None:
        sources = {
            "train_set": train_set,
            "test_set": test_set,
            "knowledge_set": knowledge_set,
            "common_test_set": common_test_set,
        }
        given = {name: Batches(data, **options) for name, data in sources.items() if data is not None}
        if "train_set" not in given:
            raise DatasetError("train_set is None: a client needs training samples")
        self.train = given["train_set"]
        if not len(self.train):
            raise DatasetError("train_set is empty: a client needs at least one training sample")
        self.knowledge = given.get("knowledge_set", self.train).whole()
        self.test = given["test_set"].whole() if "test_set" in given else None
        self.common_test = given["common_test_set"].whole() if "common_test_set" in given else None
        self._free = {name: batches.free_sampler for name, batches in given.items() if batches.free_sampler}

    def warn_of_samplers(self) -> None:
        """Say, once in a run, which samplers decide only what is trained on."""
        if self._free:
            warn_once(
                "%s: the sampler has no fixed rows, so it is used for training only; counts, knowledge and tests "
                "are of the whole data set. To pick rows, give torch.utils.data.Subset",
                ", ".join(f"{name} ({sampler})" for name, sampler in self._free.items()),
            )

    def shared_counts(self, node_config: Mapping[str, Any], num_classes: int) -> dict[str, str]:
        """Return the property with the training samples of each class, if the client's node config shares them.

        All samples are read once for it. A sample with several labels counts as of its first. Without
        ``share-histogram=true`` there is no property.

        Raises
        ------
        ConfigError
            If the value is not true or false.
        """
        if not checked(_SHARE, node_config.get(_SHARE, False), bool, {}):
            return {}
        counts = torch.zeros(num_classes, dtype=torch.int64)
        for _, labels in self.train.ordered(_READ_TOGETHER):
            classes = labels.argmax(dim=1) if self.train.multi_label else labels
            counts += torch.bincount(classes.cpu(), minlength=num_classes)
        return {CLASS_COUNTS: json.dumps(counts.tolist())}

    def close(self) -> None:
        """End the workers that loaders with ``persistent_workers`` have kept."""
        for batches in (self.train, self.knowledge, self.test, self.common_test):
            if batches is not None:
                batches.close()
