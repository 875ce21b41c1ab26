"""Data that a Flower project has as a ``FederatedDataset`` of flwr-datasets, for clients and for comparisons."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from flwr_kd.checks import DataError
from flwr_kd.data._base import AnyArray, ArrayDataset, IntArray, require
from flwr_kd.data._function import Samples
from flwr_kd.data._hub import EXTRA
from flwr_kd.data._hub_columns import Form, form_of, inputs_of, labels_of
from flwr_kd.data._images import ImageSpec, encode_images
from flwr_kd.data._source import Origin
from flwr_kd.data.own import DataSpec
from flwr_kd.data.partitioning import split as split_rows
from flwr_kd.text import unknown_name

__all__ = ["federated_samples", "from_hub", "from_partition"]

_PLACE = "partition"
"""Name of the column of partition ids in :func:`federated_samples`."""
_HERE = Origin()


def from_hub(
    dataset: Any,
    *,
    input_key: str | Sequence[str] | None = None,
    label_key: str | None = None,
    input_shape: Sequence[int] | None = None,
    classes: Sequence[str] | None = None,
) -> ArrayDataset:
    """Return the rows of a ``datasets.Dataset`` as a client's data set.

    Nothing is fitted to the rows, so that all clients get the same form: images are mapped from [0, 1] to [-1, 1],
    columns of numbers are not scaled, and lists or arrays of numbers are used as they are (``input_ids`` as token
    ids). Which columns are inputs and labels is found as by :func:`flwr_kd.data.load` for ``hf:NAME-or-PATH``.

    Parameters
    ----------
    dataset : datasets.Dataset
        For example a partition of a ``FederatedDataset``.
    input_key : str or sequence of str, optional
        The column of the inputs, or several columns of numbers; as found if None.
    label_key : str, optional
        The column of the labels; as found if None.
    input_shape : sequence of int, optional
        ``(channels, height, width)`` to which images are resized. If None, all must have the size of the first.
    classes : sequence of str, optional
        The classes in the order of the model's outputs. Needed for labels that are texts: a client does not know
        the classes of others. If None, numbers of a column of classes are kept, and whole numbers from 0.

    Returns
    -------
    ArrayDataset
        Inputs ``[N, ...]``, float32, or int64 token ids, and labels ``[N]``.

    Raises
    ------
    DataError
        If columns or values cannot be used.

    Examples
    --------
    >>> import datasets
    >>> rows = datasets.Dataset.from_dict({"age": [0.3, 0.5], "weight": [1, 2], "label": [1, 0]})
    >>> from_hub(rows).x.shape, from_hub(rows, input_key="age").y.tolist()
    (torch.Size([2, 2]), [1, 0])
    """
    form = _form(dataset, input_key, label_key)
    labels = _numbered(dataset, form, classes)
    values = inputs_of(dataset, form, _HERE, labels=labels)
    if form.kind != "images":
        x = values if form.tokens else values.astype(np.float32)
        return ArrayDataset(torch.from_numpy(x), torch.from_numpy(labels))
    return ArrayDataset(encode_images(values, _spec(values, input_shape)), torch.from_numpy(labels))


def from_partition(
    federated: Any,
    partition_id: int,
    *,
    split: str = "train",
    test_fraction: float = 0.25,
    seed: int = 0,
    input_key: str | Sequence[str] | None = None,
    label_key: str | None = None,
    input_shape: Sequence[int] | None = None,
    classes: Sequence[str] | None = None,
) -> tuple[ArrayDataset, ArrayDataset]:
    """Return training and test data of one client of a ``FederatedDataset``, with any of its partitioners.

    ::

        fds = FederatedDataset(
            dataset="flwrlabs/femnist", partitioners={"train": NaturalIdPartitioner("writer_id")}
        )

        def client_fn(context: Context):
            train, test = from_partition(fds, context.node_config["partition-id"], label_key="character")
            return FedHKDClient(build_model(), train, test, context=context).to_client()

    Parameters
    ----------
    federated : flwr_datasets.FederatedDataset
        The data set with its partitioners.
    partition_id : int
        The client's.
    split : str
        The split that is partitioned.
    test_fraction : float
        Share of the client's samples that is its test data, with its class mix.
    seed : int
        Determines which samples these are.
    input_key, label_key, input_shape, classes
        As in :func:`from_hub`.

    Returns
    -------
    train, test : ArrayDataset

    Raises
    ------
    DataError
        As :func:`from_hub`; also if there is no such partition.
    """
    rows = from_hub(
        _partition(federated, partition_id, split),
        input_key=input_key,
        label_key=label_key,
        input_shape=input_shape,
        classes=classes,
    )
    train, test = split_rows(rows.y, range(len(rows)), test_fraction=test_fraction, seed=seed)
    return rows.subset(train), rows.subset(test)


def federated_samples(
    federated: Any,
    *,
    split: str = "train",
    test_split: str | None = None,
    input_key: str | Sequence[str] | None = None,
    label_key: str | None = None,
    input_shape: Sequence[int] | None = None,
    classes: Sequence[str] | None = None,
) -> Samples:
    """Return all partitions of a ``FederatedDataset`` for a comparison: its clients are the partitions.

    A function that returns this is a data set for ``--dataset my_project.data:load``, and ``--partition
    natural:partition`` makes the partition of number i the data of client i.

    Parameters
    ----------
    federated : flwr_datasets.FederatedDataset
        The data set with its partitioners.
    split : str
        The split that is partitioned.
    test_split : str, optional
        The split of the common test set; a fifth of the samples if None.
    input_key, label_key, input_shape, classes
        As in :func:`from_hub`. Classes that are texts are found if they are not given.

    Returns
    -------
    Samples
        With the column ``partition``.

    Raises
    ------
    DataError
        As :func:`from_hub`.
    """
    library = require("datasets", EXTRA)
    if split not in federated.partitioners:
        raise DataError(unknown_name("split with a partitioner", split, federated.partitioners))
    # A partitioner has its data from the first partition on, and may know their number only then.
    parts = [_partition(federated, 0, split)]
    count = int(federated.partitioners[split].num_partitions)
    parts += [_partition(federated, i, split) for i in range(1, count)]
    together = library.concatenate_datasets(parts)
    test = None if test_split is None else federated.load_split(test_split)
    form = _form(together, input_key, label_key)
    if classes is None and form.kinds[form.label] == "text":
        classes = labels_of([together, *([] if test is None else [test])], form, _HERE)[1]
    options: dict[str, Any] = {
        "input_key": input_key,
        "label_key": label_key,
        "input_shape": input_shape,
        "classes": classes,
    }
    rows = from_hub(together, **options)
    held = None if test is None else from_hub(test, **options)
    tokens = rows.x.dtype == torch.int64
    largest = max(int(part.x.max()) for part in (rows, held) if part is not None) if tokens else -1
    return Samples(
        rows.x.numpy(),
        rows.y.numpy(),
        columns={_PLACE: np.repeat(np.arange(count), [len(part) for part in parts])},
        test_x=None if held is None else held.x.numpy(),
        test_y=None if held is None else held.y.numpy(),
        vocabulary=largest + 1,
    )


def _partition(federated: Any, partition_id: int, split: str) -> Any:
    try:
        return federated.load_partition(int(partition_id), split)
    # The library's partitioners raise what the data set does.
    except (ValueError, KeyError, IndexError) as error:
        raise DataError(f"partition {partition_id} of split {split!r} cannot be loaded: {error}") from error


def _form(dataset: Any, input_key: str | Sequence[str] | None, label_key: str | None) -> Form:
    if not hasattr(dataset, "features") or not hasattr(dataset, "select_columns"):
        hint = ": take one of its splits" if isinstance(dataset, dict) else ""
        raise DataError(f"a datasets.Dataset is expected, got {type(dataset).__name__}{hint}")
    if not len(dataset):
        raise DataError("the data set has no rows")
    inputs = (input_key,) if isinstance(input_key, str) else tuple(input_key or ())
    return form_of(dataset.features, _HERE, input=inputs, label=label_key or "")


def _numbered(dataset: Any, form: Form, classes: Sequence[str] | None) -> IntArray:
    """Return the labels as numbers that all clients share."""
    kind = form.kinds[form.label]
    (labels,), names = labels_of([dataset], form, _HERE, least=1)
    if classes is not None:
        spec = DataSpec(tuple(classes), (1,))
        numbers = [spec.index(name) for name in names]
        present = sorted(set(labels.tolist()))
        unknown = [names[label] for label in present if numbers[label] is None]
        if unknown:
            raise DataError(f"column {form.label!r}: {unknown_name('class', unknown[0], spec.classes)}")
        return np.asarray([-1 if number is None else number for number in numbers], dtype=np.int64)[labels]
    if kind == "class":
        return labels
    if kind == "text":
        raise DataError(
            f"the labels in {form.label!r} are texts: name the classes, in the same order for all clients, for "
            f"example classes={list(names[:2])!r}"
        )
    values = np.asarray([int(name) if name.isdigit() else -1 for name in names], dtype=np.int64)
    if (values < 0).any():
        raise DataError(
            f"the labels in {form.label!r} must be whole numbers from 0, or classes=[...] names them in their order"
        )
    return values[labels]


def _spec(images: AnyArray, shape: Sequence[int] | None) -> ImageSpec:
    sizes = tuple(int(size) for size in (images[0].decoded().shape if shape is None else shape))
    if len(sizes) != 3 or sizes[0] not in (1, 3) or min(sizes) < 1:
        raise DataError(f"input_shape must be (channels, height, width) with 1 or 3 channels, got {shape!r}")
    half = (0.5,) * sizes[0]
    origin = _HERE if shape is None else None
    return ImageSpec((sizes[0], sizes[1], sizes[2]), 0, half, half, pad=False, unresized=origin)
