"""The names that can be listed without PyTorch are those that the code accepts."""

from __future__ import annotations

import re

import numpy as np
import pytest

from flwr_kd import catalogue
from flwr_kd.data import DataError, load, loading, partition
from flwr_kd.models.networks import ARCHITECTURES, PREDICTORS, SPLIT_MODELS


def test_the_names_are_those_of_the_code() -> None:
    assert list(catalogue.DATASETS) == [
        *loading._LOADERS,
        "csv:PATH",
        "hf:NAME-or-PATH",
        "package.module:function",
    ]
    assert list(catalogue.MODELS) == sorted([*ARCHITECTURES, *SPLIT_MODELS])
    assert list(catalogue.PREDICTORS) == list(PREDICTORS)
    labels = np.repeat(np.arange(4), 600)
    values = {"ALPHA": "0.5", "K": "2", "[:MANY]": "", "[:EACH]": ":30"}
    for form in sorted(set(catalogue.PARTITIONS) - {"natural:COLUMN"}):
        spec = re.sub(r"ALPHA|K$|\[:.*\]", lambda match: values[match[0]], form)
        assert len(partition(labels, spec, num_clients=2, seed=0)) == 2


@pytest.mark.parametrize(
    "names",
    [
        catalogue.DATASETS,
        catalogue.FEATURE_LAYERS,
        catalogue.MODELS,
        catalogue.MODEL_FORMS,
        catalogue.PARTITIONS,
        catalogue.PREDICTORS,
    ],
)
def test_each_name_has_one_short_line(names: dict[str, str]) -> None:
    assert all(text and "\n" not in text and len(text) <= 90 for text in names.values())


def test_the_lines_have_the_shapes_and_classes_of_the_data_sets() -> None:
    for name, spec in loading._images.SPECS.items():
        shape = "×".join(map(str, spec.shape))
        assert catalogue.DATASETS[name].startswith(f"images {shape}, {spec.num_classes} classes")
    for name, architecture in ARCHITECTURES.items():
        assert f" {architecture.feature_dim} features" in catalogue.MODELS[name]


def test_a_mistyped_name_has_a_suggestion() -> None:
    with pytest.raises(DataError, match=r"unknown data set 'cifar-10' \(did you mean 'cifar10'\?\)"):
        load("cifar-10")
    with pytest.raises(
        DataError, match=r"unknown partition 'dirichlet' \(did you mean 'dirichlet:ALPHA'\?\)"
    ):
        partition([0, 1], "dirichlet", num_clients=1, seed=0)
