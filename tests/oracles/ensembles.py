"""Small linear and noisy models, for the tests of ensembles: their arrays, and logits in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hierarchy as oracle
import numpy as np
import torch
from hierarchy import Linear
from hypothesis import settings
from torch import Tensor, nn

from flwr_kd.distillation.config import DistillationConfig
from flwr_kd.distillation.student import Distillation, Distilled, distil_ensemble
from flwr_kd.distillation.teachers import soft_labels
from flwr_kd.learning.batches import Batches
from flwr_kd.learning.weights import get_weights
from flwr_kd.transport.template import ArrayTemplate

CPU = torch.device("cpu")
FEATURES, CLASSES = 6, 3
repeatable = settings(max_examples=60, deadline=None, derandomize=True)
Arrays = dict[str, np.ndarray]


def net(features: int = FEATURES, classes: int = CLASSES) -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(features, classes))


def draw(seed: int, features: int = FEATURES, classes: int = CLASSES, scale: float = 1.0) -> Linear:
    """Return a linear model whose numbers float32 has exactly."""
    rng = np.random.default_rng(seed)
    w, b = (rng.normal(size=size, scale=scale) for size in ((classes, features), classes))
    return oracle.linear(w.astype(np.float32), b.astype(np.float32))


def named(model: Linear) -> Arrays:
    return {"1.weight": model.W.astype(np.float32), "1.bias": model.b.astype(np.float32)}


def inputs(size: int, seed: int = 0, features: int = FEATURES) -> Tensor:
    return torch.randn(size, features, generator=torch.Generator().manual_seed(seed))


def split(x: Tensor, size: int) -> Callable[[], list[Tensor]]:
    return lambda: list(torch.split(x, size))


def unlabelled(source: Any) -> Batches:
    return Batches(source, num_classes=0, labelled=False)


def configured(**changes: Any) -> DistillationConfig:
    """Return what the oracle does: full batches, plain SGD, nothing held out."""
    values: dict[str, Any] = {"batch_size": 1000, "optimizer": "sgd", "weight_decay": 0.0}
    return DistillationConfig(**(values | {"validation_share": 0.0} | changes))


def distil(
    model: nn.Module, student: Arrays, teachers: list[Arrays], source: Any, **changes: Any
) -> Distilled:
    """Distil with equal weights, ten epochs, learning rate 0.5 and seed 0, unless `changes` say otherwise."""
    # One core: tests watch the one model.
    options: dict[str, Any] = {"epochs": 10, "learning_rate": 0.5, "seed": 0, "cores": 1}
    options["matching"] = soft_labels(changes.pop("average", "probabilities"))
    weights = changes.pop("weights", [1] * len(teachers))
    options |= {name: changes.pop(name) for name in list(options) if name in changes}
    samples = source if isinstance(source, Batches) else unlabelled(source)
    how = Distillation(configured(**changes), **options)
    return distil_ensemble(model, student, teachers, weights, samples, how, CPU)


def linear_of(model: nn.Module) -> Linear:
    weights = get_weights(model)
    return oracle.linear(weights["1.weight"], weights["1.bias"])


def close(a: Linear, b: Linear, atol: float = 3e-6) -> None:
    np.testing.assert_allclose(a.W, b.W, rtol=0, atol=atol)
    np.testing.assert_allclose(a.b, b.b, rtol=0, atol=atol)


class ForwardLog:
    """Which rows of `x` a model saw, pass by pass, and in which mode."""

    def __init__(self, model: nn.Module, x: Tensor) -> None:
        self.row = {value: i for i, value in enumerate(x.flatten(1)[:, 0].tolist())}
        assert len(self.row) == len(x)
        self.passes: list[tuple[bool, list[int]]] = []
        model.register_forward_hook(self._note)

    def _note(self, model: nn.Module, args: tuple[Tensor], _: Tensor) -> None:
        rows = [self.row[value] for value in args[0].flatten(1)[:, 0].tolist()]
        self.passes.append((model.training, rows))

    def rows(self, training: bool) -> list[int]:
        return [row for mode, rows in self.passes for row in rows if mode == training]


def noisy() -> nn.Sequential:
    """Return a model with running statistics and with dropout."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Flatten(),
            nn.Linear(FEATURES, 8),
            nn.BatchNorm1d(8),
            nn.ReLU(),
            nn.Dropout(0.5),
            nn.Linear(8, CLASSES),
        )


def noisy_weights(seed: int) -> Arrays:
    rng = np.random.default_rng(seed)
    weights = get_weights(noisy())
    for name, value in weights.items():
        if value.dtype.kind == "f":
            weights[name] = rng.normal(size=value.shape).astype(np.float32)
    weights["2.running_var"] = np.abs(weights["2.running_var"]) + np.float32(0.1)
    weights["2.num_batches_tracked"] = np.array(seed + 5)
    return weights


def noisy_logits(x: Tensor, w: Arrays) -> np.ndarray:
    """Evaluate `noisy()` in eval mode, in float64."""
    v = {name: value.astype(np.float64) for name, value in w.items()}
    h = x.double().numpy() @ v["1.weight"].T + v["1.bias"]
    h = (h - v["2.running_mean"]) / np.sqrt(v["2.running_var"] + 1e-5) * v["2.weight"] + v["2.bias"]
    return np.maximum(h, 0) @ v["5.weight"].T + v["5.bias"]


def mixed_logits(x: Tensor, linear: list[Linear], noisy: list[Arrays]) -> list[np.ndarray]:
    return [oracle.logits(x.double().numpy(), m) for m in linear] + [noisy_logits(x, w) for w in noisy]


def template(names: tuple[str, ...] = ("1.weight", "1.bias")) -> ArrayTemplate:
    arrays = named(draw(0))
    return ArrayTemplate.of_ndarrays({name: arrays[name] for name in names})


def listed(model: Linear, names: tuple[str, ...] = ("1.weight", "1.bias")) -> list[np.ndarray]:
    return [named(model)[name] for name in names]
