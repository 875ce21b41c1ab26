"""An experiment's data, loaded once per process."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from flwr_kd.checks import ConfigError
from flwr_kd.data import (
    ArrayDataset,
    Bundle,
    DataError,
    DataSpec,
    load,
    load_public,
    long_tail,
    partition,
    public_name,
    split,
)
from flwr_kd.seeding import derive_seed

if TYPE_CHECKING:
    from flwr_kd.experiments.experiment import Experiment

__all__ = ["bundle_of", "client_splits", "public_of"]


def public_of(experiment: Experiment) -> ArrayDataset:
    """Return an experiment's public data, in the form of the clients' inputs."""
    if experiment.own is not None:
        form, data_dir, limit = experiment.own, experiment.data_dir, experiment.public_limit
        return _public(experiment.public, form, experiment.seed, data_dir, limit)
    dataset, seed, data_dir, *_ = key = _key(experiment)
    public = _public(experiment.public, dataset, seed, data_dir, experiment.public_limit)
    if experiment.image_size is None:
        return public
    return replace(_loaded(*key), train=public).padded(experiment.image_size).train


def client_splits(experiment: Experiment) -> list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
    """Return each client's training and test rows; the same for all methods of a comparison."""
    if experiment.own is not None:
        raise ConfigError(
            "data of the clients' own (own=...) is at the clients: there is nothing to divide here"
        )
    return _splits(experiment.partition, experiment.clients, experiment.seed, _key(experiment))


def bundle_of(experiment: Experiment) -> Bundle:
    """Return an experiment's data, loaded once per process: workers answer many messages."""
    if experiment.own is not None:
        return experiment.own.bundle()
    side, key = experiment.image_size, _key(experiment)
    bundle = _loaded(*key) if side is None else _padded(key, side)
    if experiment.augment != "none" and len(bundle.input_shape) != 3:
        raise DataError(
            f"augment={experiment.augment} is for images, {bundle.name} has {list(bundle.input_shape)}"
        )
    return bundle


_Key = tuple[str, int, str | None, int | None, float | None, bool, bool]


def _key(experiment: Experiment) -> _Key:
    """Return what decides which samples there are."""
    dataset, data_dir = experiment.dataset, experiment.data_dir
    public = experiment.public
    hold_back = public is not None and public_name(public, dataset=dataset, data_dir=data_dir) == dataset
    cuts = experiment.limit, experiment.imbalance, experiment.validation
    return dataset, experiment.seed, data_dir, *cuts, hold_back


@functools.lru_cache(maxsize=2)
def _loaded(
    dataset: str,
    seed: int,
    data_dir: str | None,
    limit: int | None,
    imbalance: float | None,
    validation: bool,
    hold_back: bool,
) -> Bundle:
    bundle = load(dataset, seed=seed, data_dir=data_dir, limit=limit, hold_back=hold_back)
    if validation:
        rows = np.arange(len(bundle.train))
        fit, held = split(bundle.train.y, rows, test_fraction=0.2, seed=derive_seed(seed, "validation"))
        bundle = replace(bundle, train=bundle.train.subset(fit), test=bundle.train.subset(held))
    if imbalance is None:
        return bundle
    return replace(bundle, train=bundle.train.subset(long_tail(bundle.train.y, imbalance, seed=seed)))


@functools.lru_cache(maxsize=1)
def _public(
    name: str | None, dataset: str | DataSpec, seed: int, data_dir: str | None, limit: int
) -> ArrayDataset:
    return load_public(name, dataset=dataset, seed=seed, data_dir=data_dir, limit=limit)


@functools.lru_cache(maxsize=1)
def _padded(key: _Key, side: int) -> Bundle:
    return _loaded(*key).padded(side)


@functools.lru_cache(maxsize=2)
def _splits(
    spec: str, clients: int, seed: int, key: _Key
) -> list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
    labels = _loaded(*key).train.y
    parts = partition(labels, spec, num_clients=clients, seed=seed)
    return [split(labels, part, seed=derive_seed(seed, "split", i)) for i, part in enumerate(parts)]
