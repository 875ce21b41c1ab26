"""Models of other packages, and of a user's own function, by name."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flwr_kd.checks import ConfigError
from flwr_kd.experiments.experiment import Experiment
from flwr_kd.models.named import build_named, check_named, is_named
from flwr_kd.registry import get

SOURCE = """
import random

import torch
from torch import nn


def build(input_shape, num_classes):
    size = torch.Size(input_shape).numel()
    return nn.Sequential(nn.Flatten(), nn.Linear(size, 5), nn.ReLU(), nn.Linear(5, num_classes))


def pair(num_classes, **others):
    assert sorted(others) == ["input_shape", "seed", "vocabulary"]
    return nn.Flatten(), nn.Linear(64, num_classes)


def drawn(num_classes):
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes))
    model[1].bias.data = torch.randn(num_classes) + random.random()
    return model


def tokens(num_classes, vocabulary):
    return nn.Sequential(nn.Embedding(vocabulary, 4), nn.Flatten(), nn.Linear(12, num_classes))


def narrow(num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(63, num_classes))


def other_classes():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 7))


def probabilities(num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes), nn.Softmax(dim=1))


def failing():
    raise RuntimeError("no model today")
"""


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_models_of_test.py").write_text(SOURCE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "own_models_of_test", raising=False)


def built(name: str, shape: tuple[int, ...] = (1, 8, 8), seed: int = 0, vocabulary: int = 0) -> Any:
    return build_named(name, input_shape=shape, num_classes=4, seed=seed, vocabulary=vocabulary)


class TestFunctions:
    def test_gets_shape_and_classes(self) -> None:
        model = built("own_models_of_test:build")
        assert (model.feature_dim, model.num_classes, model.training) == (5, 4, True)
        assert model(torch.zeros(2, 1, 8, 8)).shape == (2, 4)

    def test_may_return_a_pair(self) -> None:
        assert built("own_models_of_test:pair").feature_dim == 64

    def test_token_ids(self) -> None:
        assert built("own_models_of_test:tokens", (3,), vocabulary=9).feature_dim == 12

    def test_weights_follow_from_the_seed_and_no_global_state_changes(self) -> None:
        before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()  # noqa: NPY002
        first, same, other = (built("own_models_of_test:drawn", seed=seed).state_dict() for seed in (0, 0, 1))
        assert all(torch.equal(first[name], same[name]) for name in first)
        assert not torch.equal(first["1.bias"], other["1.bias"])
        assert torch.equal(torch.get_rng_state(), before[0])
        assert random.getstate() == before[1]
        assert np.array_equal(np.random.get_state()[1], before[2])  # noqa: NPY002

    @pytest.mark.parametrize(
        ("function", "text"),
        [
            ("narrow", r"does not take samples of shape \[1, 8, 8\]: mat1 and mat2"),
            ("other_classes", r"must return logits \[B, 4\], got \[1, 7\]"),
            ("probabilities", "cannot be built .ValueError: Sequential ends in Softmax"),
            ("failing", "cannot be built .RuntimeError: no model today"),
        ],
    )
    def test_what_cannot_be_used(self, function: str, text: str) -> None:
        with pytest.raises(ConfigError, match=f"model own_models_of_test:{function} {text}"):
            built(f"own_models_of_test:{function}")

    def test_a_missing_function_is_refused_before_work_starts(self) -> None:
        with pytest.raises(ConfigError, match="has no function biuld"):
            Experiment(model="own_models_of_test:biuld")


class TestTorchvision:
    @pytest.mark.parametrize("channels", [1, 3])
    def test_channels_and_classes_are_the_datas(self, channels: int) -> None:
        model = built("torchvision:resnet18", (channels, 32, 32))
        assert (model.feature_dim, model.num_classes) == (512, 4)
        assert model.state_dict()["conv1.weight"].shape == (64, channels, 7, 7)

    def test_with_three_channels_it_is_torchvisions_own(self) -> None:
        from torchvision.models import resnet18

        from flwr_kd.seeding import private_randomness

        with private_randomness(3):
            expected = resnet18(num_classes=4).state_dict()
        actual = built("torchvision:resnet18", (3, 32, 32), seed=3).state_dict()
        assert list(actual) == list(expected)
        assert all(torch.equal(actual[name], expected[name]) for name in expected)

    def test_a_mistyped_name_has_a_suggestion(self) -> None:
        with pytest.raises(
            ConfigError, match=r"unknown model of torchvision 'resnet-18' .did you mean 'resnet18'"
        ):
            check_named("torchvision:resnet-18")
        with pytest.raises(ConfigError, match="unknown model of torchvision"):
            Experiment(model="torchvision:fcn_resnet50")  # it labels pixels

    def test_a_model_whose_output_is_no_linears(self) -> None:
        with pytest.raises(ConfigError, match=r"squeezenet1_1 cannot be built .ValueError: .*nn.Linear"):
            built("torchvision:squeezenet1_1", (3, 32, 32))


class TestTimm:
    def test_without_the_package(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "timm", None)
        with pytest.raises(ConfigError, match=r"needs the package timm, .*pip install timm"):
            Experiment(model="timm:resnet10t")

    @pytest.mark.long
    def test_channels_and_classes_are_the_datas(self) -> None:
        pytest.importorskip("timm")
        model = built("timm:resnet10t", (1, 32, 32))
        assert (model.feature_dim, model.num_classes) == (512, 4)
        assert model(torch.zeros(2, 1, 32, 32)).shape == (2, 4)
        with pytest.raises(ConfigError, match="unknown model of timm 'no_such'"):
            check_named("timm:no_such")


class TestExperiments:
    def test_initial_weights_are_the_same_for_all_clients(self) -> None:
        experiment = Experiment(model="own_models_of_test:drawn, own_models_of_test:build", limit=100)
        first, other, again = (experiment.build_model(i).state_dict() for i in (0, 1, 2))
        assert list(first) != list(other)
        assert all(torch.equal(first[name], again[name]) for name in first)

    def test_features_of_own_size_are_refused(self) -> None:
        with pytest.raises(ConfigError, match="feature-dim is for flwr-kd's own models"):
            Experiment(model="own_models_of_test:build", feature_dim=8)

    def test_one_model_for_methods_that_need_one(self) -> None:
        with pytest.raises(ConfigError, match="fedavg needs one model for all clients"):
            Experiment(model="own_models_of_test:build,mlp").of(get("fedavg"))

    def test_an_unknown_name_lists_the_forms(self) -> None:
        with pytest.raises(ConfigError, match=r"unknown model 'lenett' .*torchvision:NAME, timm:NAME"):
            Experiment(model="lenett")


def test_names() -> None:
    assert all(is_named(name) for name in ("timm:a", "torchvision:b", "c:d"))
    assert not any(is_named(name) for name in ("mlp", "resnet8", "lenet"))
