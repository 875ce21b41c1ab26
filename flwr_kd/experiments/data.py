"""An experiment's data, loaded once per process: workers answer many messages.

Data is kept under one key, the experiment's :class:`~flwr_kd.experiments.options.DataOptions` and its seed.
"""

from __future__ import annotations

import functools
import hashlib
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch

from flwr_kd.checks import ConfigError, DataError
from flwr_kd.data import (
    ArrayDataset,
    Bundle,
    DataSpec,
    Selection,
    holds_back,
    load,
    load_public,
    long_tail,
    natural,
    partition,
    public_name,
    split,
)
from flwr_kd.experiments.options import DataOptions
from flwr_kd.learning.device import placed, resolve_device
from flwr_kd.seeding import derive_seed
from flwr_kd.wording import option

if TYPE_CHECKING:
    from flwr_kd.experiments.experiment import Experiment

__all__ = [
    "Splits",
    "bundle_of",
    "client_splits",
    "digest_of",
    "public_of",
    "public_on_device",
    "samples_before_split",
    "selection_of",
    "test_on_device",
    "training_on_device",
]

Splits: TypeAlias = list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]
"""Each client's rows of the training part: those that it trains on, and its test split."""
_VALIDATION_SHARE = 0.2


def public_of(experiment: Experiment) -> ArrayDataset:
    """Return an experiment's public data, in the form of the clients' inputs."""
    options, seed = DataOptions.part_of(experiment), experiment.seed
    if experiment.own is not None:
        return _public(options, seed, experiment.own)
    return _padded_public(options, seed)


def _padded_public(options: DataOptions, seed: int) -> ArrayDataset:
    if options.image_size is None:
        return _public(options, seed, None)
    unpadded = replace(options, image_size=None)
    samples = replace(_bundle(unpadded, seed), train=_public(unpadded, seed, None))
    return samples.padded(options.image_size).train


def selection_of(options: DataOptions) -> Selection:
    """Return which samples of the data set an experiment uses.

    Raises
    ------
    DataError
        If an option is not allowed.
    """
    return Selection(
        classes=options.classes,
        class_limit=options.class_limit,
        merge_test=options.merge_test,
        held=options.hold_back,
    )


def samples_before_split(count: int, test_fraction: float) -> int:
    """Return the smallest number of samples of a client, of which this number are left without its test split.

    >>> samples_before_split(500, 0.25), samples_before_split(375, 0.25), samples_before_split(500, 0.0)
    (667, 500, 500)
    """
    size = count
    while size - math.floor(size * test_fraction + 0.5) < count:
        size += 1
    return size


def client_splits(experiment: Experiment) -> Splits:
    """Return each client's training and test rows; the same for all methods of a comparison.

    Raises
    ------
    ConfigError
        If the clients have data of their own.
    DataError
        If the data cannot be loaded or divided.
    """
    if experiment.own is not None:
        raise ConfigError(
            "the clients have data of their own (own=...), so there is no data set to divide among them"
        )
    options = DataOptions.part_of(experiment)
    found = len(_bundle(replace(options, image_size=None), experiment.seed).train)
    if experiment.client_samples is not None and found < (experiment.limit or 0):
        raise DataError(
            f"client-samples={experiment.client_samples} needs {experiment.limit} training samples for "
            f"clients={experiment.clients} and their test splits, but there are {found}: take fewer clients or "
            "samples"
        )
    return _splits(
        options, experiment.seed, experiment.partition, experiment.clients, experiment.test_fraction
    )


def bundle_of(experiment: Experiment) -> Bundle:
    """Return an experiment's data set.

    Raises
    ------
    DataError
        If the data cannot be loaded, or ``augment`` does not fit it.
    """
    if experiment.own is not None:
        return experiment.own.bundle()
    bundle = _bundle(DataOptions.part_of(experiment), experiment.seed)
    if experiment.augment != "none" and len(bundle.input_shape) != 3:
        raise DataError(
            f"augment={experiment.augment} is for images, {bundle.name} has {list(bundle.input_shape)}"
        )
    return bundle


def training_on_device(experiment: Experiment) -> ArrayDataset:
    """Return the samples that are divided among the clients, on their device if it has memory for them.

    See :func:`flwr_kd.learning.device.placed`.
    """
    bundle, device = bundle_of(experiment), resolve_device(experiment.device)
    if device.type == "cpu" or experiment.own is not None:
        return bundle.train
    return _training_on(DataOptions.part_of(experiment), experiment.seed, device, experiment.workers)


def test_on_device(experiment: Experiment) -> ArrayDataset | None:
    """Return the common test set, on the clients' device if it has memory for it; None if it is not measured on."""
    bundle, device = bundle_of(experiment), resolve_device(experiment.device)
    if experiment.measure == "never" or not len(bundle.test):
        return None
    if device.type == "cpu" or experiment.own is not None:
        return bundle.test
    return _test_on(DataOptions.part_of(experiment), experiment.seed, device, experiment.workers)


def public_on_device(experiment: Experiment) -> ArrayDataset:
    """Return an experiment's public data, in the form of the clients' inputs, on the device if there is memory."""
    public, device = public_of(experiment), resolve_device(experiment.device)
    if device.type == "cpu" or experiment.own is not None:
        return public
    return _public_on(DataOptions.part_of(experiment), experiment.seed, device, experiment.workers)


@functools.lru_cache(maxsize=1)
def _training_on(options: DataOptions, seed: int, device: torch.device, processes: int) -> ArrayDataset:
    return _placed(_bundle(options, seed).train, device, processes)


@functools.lru_cache(maxsize=1)
def _test_on(options: DataOptions, seed: int, device: torch.device, processes: int) -> ArrayDataset:
    return _placed(_bundle(options, seed).test, device, processes)


@functools.lru_cache(maxsize=1)
def _public_on(options: DataOptions, seed: int, device: torch.device, processes: int) -> ArrayDataset:
    return _placed(_padded_public(options, seed), device, processes)


def _placed(data: ArrayDataset, device: torch.device, processes: int) -> ArrayDataset:
    return data.like(*placed(data.tensors, device, processes=processes))


def digest_of(experiment: Experiment, *, public: bool = False) -> str:
    """Return the SHA-256 of an experiment's samples and their division among the clients, bit by bit.

    Parameters
    ----------
    experiment : Experiment
        Without data of the clients' own.
    public : bool
        Whether the public samples count as well.

    Raises
    ------
    DataError
        If the data cannot be loaded or divided.
    """
    bundle = bundle_of(experiment)
    parts = [bundle.train, bundle.test, *([public_of(experiment)] if public else [])]
    arrays = [tensor.contiguous().numpy() for part in parts for tensor in part.tensors]
    digest = hashlib.sha256()
    for array in (*arrays, *(rows for both in client_splits(experiment) for rows in both)):
        digest.update(f"{array.dtype} {list(array.shape)} ".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


# For images that are padded, this keeps the padded samples beside those they were made from.
@functools.lru_cache(maxsize=2)
def _bundle(options: DataOptions, seed: int) -> Bundle:
    if options.image_size is not None:
        return _bundle(replace(options, image_size=None), seed).padded(options.image_size)
    dataset, data_dir, public = options.dataset, options.data_dir, options.public
    hold_back = public is not None and public_name(public, dataset=dataset, data_dir=data_dir) == dataset
    if options.hold_back is not None and not (hold_back or holds_back(dataset)):
        raise DataError(
            f"hold-back={options.hold_back} needs {option('public', dataset)}: otherwise {dataset} holds nothing "
            "back"
        )
    limits = {"limit": options.limit, "test_limit": options.test_limit}
    selection = selection_of(options)
    bundle = load(dataset, seed=seed, data_dir=data_dir, **limits, hold_back=hold_back, selection=selection)
    if options.validation:
        rows = np.arange(len(bundle.train))
        split_seed = derive_seed(seed, "validation")
        fit, held = split(bundle.train.y, rows, test_fraction=_VALIDATION_SHARE, seed=split_seed)
        bundle = replace(bundle.with_training(fit), test=bundle.train.subset(held))
    if options.imbalance is None:
        return bundle
    rows = long_tail(bundle.train.y, options.imbalance, seed=seed)
    return bundle.with_training(rows)


@functools.lru_cache(maxsize=1)
def _public(options: DataOptions, seed: int, own: DataSpec | None) -> ArrayDataset:
    return load_public(
        options.public,
        dataset=options.dataset if own is None else own,
        seed=seed,
        data_dir=options.data_dir,
        limit=options.public_limit,
        selection=selection_of(options),
    )


@functools.lru_cache(maxsize=2)
def _splits(options: DataOptions, seed: int, spec: str, clients: int, test_fraction: float) -> Splits:
    bundle = _bundle(replace(options, image_size=None), seed)
    labels = bundle.train.y
    if spec.startswith("natural:"):
        column = spec.partition(":")[2]
        if column in bundle.inputs:
            raise DataError(
                f"partition {spec!r}: the column {column!r} is an input: leave it out of them, for example "
                f"{options.dataset},drop={column}"
            )
        parts = natural(bundle.columns, spec, num_clients=clients)
    else:
        parts = partition(labels, spec, num_clients=clients, seed=seed)
    return [
        split(labels, part, test_fraction=test_fraction, seed=derive_seed(seed, "split", i))
        for i, part in enumerate(parts)
    ]
