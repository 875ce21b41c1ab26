"""The server's distillation on several cores: the same bits on any number, and the same models left out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from flwr_kd.distillation.config import DistillationConfig
from flwr_kd.distillation.server import Group, ServerDistiller, distil_groups
from flwr_kd.distillation.student import Distillation
from flwr_kd.distillation.teachers import Matching, soft_labels
from flwr_kd.learning.device import one_thread
from flwr_kd.learning.divided import is_divisible
from flwr_kd.learning.weights import get_weights
from flwr_kd.models import build_model
from flwr_kd.strategies.fedhyb import FedHybConfig
from flwr_kd.strategies.fedhyb.strategy import predictions_and_features
from flwr_kd.transport.template import ArrayTemplate

pytestmark = pytest.mark.long

IMAGE, CLASSES, SAMPLES = (1, 28, 28), 10, 200
COUNTS = (1, 2, 3)
Arrays = list[np.ndarray]


def zoo(name: str, seed: int = 0) -> nn.Module:
    return build_model(name, input_shape=IMAGE, num_classes=CLASSES, seed=seed)


def tapped(seed: int = 0) -> nn.Module:
    """Return a model whose features are read by a hook."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Conv2d(1, 32, 5), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(128, 10)
        )


def group(
    build: Callable[[int], nn.Module], distiller: ServerDistiller | None = None, *, models: int = 3
) -> Group:
    """Return random models, whose mean is to be distilled on random images."""
    if distiller is None:
        draw = torch.Generator().manual_seed(1)
        images = TensorDataset(torch.randn(SAMPLES, *IMAGE, generator=draw))
        distiller = ServerDistiller(build(0), images, device="cpu")
    else:
        distiller = distiller.beside(build(0), "models[1]")
    arrays = [list(get_weights(build(seed)).values()) for seed in range(models)]
    template = ArrayTemplate.of_ndarrays(get_weights(build(0)))
    return Group(distiller, template, arrays, [1, 2, 5][:models], [f"node {k}" for k in range(models)])


def distil(groups: list[Group], cores: int, matching: Matching, **changes: Any) -> list[Arrays | None]:
    config = DistillationConfig(**{"batch_size": 64, "validation_share": 0.5, **changes})
    how = Distillation.in_round(config, 1, epochs=2, seed=0, matching=matching, cores=cores)
    with one_thread():
        return distil_groups(groups, how, server_round=1)


def equal(one: list[Arrays | None], other: list[Arrays | None]) -> bool:
    return all(
        (a is None and b is None) or (a is not None and b is not None and all(map(np.array_equal, a, b)))
        for a, b in zip(one, other, strict=True)
    )


def shift(model: Arrays) -> None:
    model[0] = np.full_like(model[0], np.nan)


@pytest.mark.parametrize(
    ("build", "matching", "batchnorm", "divided"),
    [
        (lambda seed: zoo("mlp", seed), soft_labels(), "train", False),
        (lambda seed: zoo("lenet", seed), soft_labels("logits"), "train", True),
        (lambda seed: zoo("resnet8", seed), soft_labels(), "train", False),
        (lambda seed: zoo("resnet8", seed), soft_labels(), "re-estimated", True),
        (lambda seed: zoo("resnet8", seed), predictions_and_features(FedHybConfig()), "eval", True),
        (lambda seed: zoo("resnet8", seed), predictions_and_features(FedHybConfig()), "train", False),
        (tapped, predictions_and_features(FedHybConfig()), "eval", True),
    ],
    ids=["mlp", "lenet", "resnet8", "re-estimated", "features", "features-train", "tapped-features"],
)
def test_the_same_bits_on_any_number_of_cores(
    build: Callable[[int], nn.Module], matching: Matching, batchnorm: str, divided: bool
) -> None:
    modes = {"training": matching.training, "batchnorm": batchnorm == "train"}
    assert is_divisible(build(0), torch.zeros(1, *IMAGE), **modes) == divided
    settings = {"keep": "best", "distill_batchnorm": batchnorm}
    results = [distil([group(build)], count, matching, **settings) for count in COUNTS]
    assert all(equal(results[0], result) for result in results[1:])


def test_groups_of_several_architectures() -> None:
    def run(count: int) -> list[Arrays | None]:
        first = group(lambda seed: zoo("lenet", seed))
        return distil([first, group(lambda seed: zoo("mlp", seed), first.distiller)], count, soft_labels())

    results = [run(count) for count in COUNTS]
    assert all(equal(results[0], result) for result in results[1:])


@pytest.mark.parametrize("count", COUNTS)
def test_models_without_finite_outputs_are_left_out(count: int, flower_log: list[str]) -> None:
    broken, whole = group(lambda seed: zoo("lenet", seed)), group(lambda seed: zoo("lenet", seed))
    shift(broken.models[1])
    kept = Group(
        *whole[:2],
        [whole.models[0], whole.models[2]],
        [whole.weights[0], whole.weights[2]],
        ["node 0", "node 2"],
    )
    assert equal(distil([broken], count, soft_labels()), distil([kept], 1, soft_labels()))
    assert sum("node 1 has outputs that are not finite" in line for line in flower_log) == 1


@pytest.mark.parametrize("count", COUNTS)
def test_a_distillation_that_is_not_finite_leaves_the_mean(count: int, flower_log: list[str]) -> None:
    models = group(lambda seed: zoo("lenet", seed))
    (result,) = distil([models], count, soft_labels(), learning_rate=1e30, optimizer="sgd")
    assert equal([result], [models.mean()])
    assert any("the server's distillation is left out" in line for line in flower_log)


@pytest.mark.parametrize("count", COUNTS)
def test_an_error_of_a_model_is_raised(count: int) -> None:
    class Failing(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if len(x) > 40:
                raise ZeroDivisionError("not with so many")
            return super().forward(x)  # type: ignore[no-any-return]

    def build(seed: int) -> nn.Module:
        return Failing(nn.Flatten(), nn.Linear(784, CLASSES))

    with pytest.raises(ZeroDivisionError, match="not with so many"):
        distil([group(build)], count, soft_labels())


def test_models_that_draw_in_eval_mode_draw_in_one_order() -> None:
    class Noisy(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + torch.randn(len(x), 1)  # type: ignore[no-any-return]

    def build(seed: int) -> nn.Module:
        return Noisy(nn.Flatten(), nn.Linear(784, CLASSES))

    def average(seed: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return build(seed)

    results = [distil([group(average)], count, soft_labels()) for count in COUNTS]
    assert all(equal(results[0], result) for result in results[1:])
