"""Models, data and runs of FedHyb that its tests share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import hybrid as oracle
import numpy as np
import torch
from flwr.app import ArrayRecord, Context, RecordDict
from hybrid import Net
from hypothesis import settings
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from flwr_kd.client.client import KDClient
from flwr_kd.client.task import Task
from flwr_kd.config import MethodConfig
from flwr_kd.learning.weights import get_weights
from flwr_kd.models import build_model
from flwr_kd.server.records import Node, Reply
from flwr_kd.strategies.fedhyb import (
    FedHyb,
    FedHybClient,
    FedHybConfig,
    FedHybStar,
    train_generator,
)
from flwr_kd.transport.inline_grid import InlineGrid
from flwr_kd.transport.template import ArrayTemplate

CLASSES, SHAPE, FEATURES, HIDDEN = 3, (1, 2, 4), 8, 6
CPU = torch.device("cpu")
repeatable = settings(max_examples=60, deadline=None, derandomize=True)
Arrays = dict[str, np.ndarray]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def data(
    index: int, size: int, shape: Sequence[int] = SHAPE, classes: int = CLASSES
) -> tuple[Tensor, Tensor]:
    draw = generator(index)
    y = torch.randint(classes, (size,), generator=draw)
    x = torch.randn(size, *shape, generator=draw)
    return x + y.view(-1, *[1] * len(shape)), y


def net(seed: int = 0) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers = [nn.Flatten(), nn.Linear(FEATURES, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES)]
        return nn.Sequential(*layers)


def image_net(name: str, seed: int = 0) -> nn.Module:
    return build_model(name, input_shape=(3, 16, 16), num_classes=CLASSES, seed=seed)


def jittered(name: str, seed: int) -> Arrays:
    """Return an image model's weights with running statistics that are not what they were at first."""
    rng = np.random.default_rng(seed)
    weights = get_weights(image_net(name, seed=seed))
    for key, value in weights.items():
        if key.endswith("running_mean"):
            weights[key] = rng.normal(scale=0.2, size=value.shape).astype(np.float32)
        if key.endswith("running_var"):
            weights[key] = rng.uniform(0.5, 2.0, size=value.shape).astype(np.float32)
        if key.endswith("num_batches_tracked"):
            weights[key] = np.array(10 * seed + 4)
    return weights


def to_oracle(arrays: Any) -> Net:
    values = {
        name: value if isinstance(value, np.ndarray) else value.numpy() for name, value in arrays.items()
    }
    return oracle.net(*(values[name] for name in ("1.weight", "1.bias", "3.weight", "3.bias")))


def close(a: Net, b: Net, atol: float = 1e-5) -> None:
    for one, other in zip(a, b, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=atol)


def equal(a: Sequence[np.ndarray], b: Sequence[np.ndarray]) -> bool:
    return len(a) == len(b) and all(np.array_equal(one, other) for one, other in zip(a, b, strict=True))


def tensors(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


def make_client(
    model: nn.Module, train: Any = None, kind: type[KDClient] = FedHybClient, **options: Any
) -> Any:
    context = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config={})
    train = TensorDataset(*data(0, 9)) if train is None else train
    return kind(model, train, context=context, device="cpu", **options)


def trained(
    model: nn.Module,
    config: MethodConfig,
    train: Any = None,
    kind: type[KDClient] = FedHybClient,
    seed: int = 0,
) -> tuple[dict[str, np.ndarray], float]:
    """Train from the model's own weights; return arrays and loss."""
    client = make_client(model, train, kind)
    arrays = [value.copy() for value in get_weights(model).values()]
    answer = client.phase_train(Task(1, "train", seed, (), arrays, None, config))
    return dict(zip(get_weights(model), answer.arrays, strict=True)), answer.metrics["train-loss"]


def plain(config: FedHybConfig) -> MethodConfig:
    """Return what FedAvg takes of a config."""
    return MethodConfig(**{name: getattr(config, name) for name in MethodConfig.field_types()})


def server(model: nn.Module, public: Any, kind: type[FedHyb] = FedHyb, **config: Any) -> Any:
    values: dict[str, Any] = {"optimizer": "sgd", "server_epochs": 3, "server_learning_rate": 0.1}
    given: dict[str, Any] = {"public_set": public} if kind is FedHyb else {"input_shape": public}
    # One core: tests watch the one model.
    strategy = kind(FedHybConfig(**(values | config)), model=model, device="cpu", cores=1, **given)
    strategy.template = ArrayTemplate.of(ArrayRecord(model.state_dict()))
    return strategy


def aggregated(
    strategy: Any, models: Sequence[Arrays], counts: Sequence[int] | None = None, server_round: int = 1
) -> Arrays:
    replies = [
        Reply(Node(100 + i, i), list(model.values()), count, {}, None)
        for i, (model, count) in enumerate(zip(models, counts or [1] * len(models), strict=True))
    ]
    record = strategy.aggregate_phase("train", server_round, replies, None)
    return {name: value.numpy() for name, value in record.items()}


QUICK = ("generator-steps=3", "synthetic-samples=24", "server-epochs=1", "sub-networks=1")


def quick_run(fed: Any, rounds: int, **options: Any) -> tuple[Any, Any]:
    strategy, grid = fed.strategy(*QUICK, **options), InlineGrid(fed.app(), fed.clients)
    result = strategy.start(grid, fed.initial(), num_rounds=rounds, timeout=30.0)
    grid.close()
    return strategy, result


def train(gen: Any, model: nn.Module, teachers: Sequence[Arrays], **changes: Any) -> float:
    options: dict[str, Any] = {"steps": 3, "batch_size": 8, "learning_rate": 1e-2, "draw": generator()}
    options |= {"balance_weight": 1.0, "diversity_weight": 1.0, "batchnorm_weight": 1.0, "device": CPU}
    return train_generator(gen, model, teachers, **(options | changes))


def finite(module: nn.Module) -> bool:
    return all(bool(torch.isfinite(value).all()) for value in module.state_dict().values())


def same(a: nn.Module, b: nn.Module) -> bool:
    left, right = a.state_dict(), b.state_dict()
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def star(model: nn.Module | None = None, shape: Any = (1, 6, 6), **config: Any) -> FedHybStar:
    values = {"generator_steps": 2, "synthetic_samples": 10, "latent_dim": 4, "batch_size": 8} | config
    model = build_model("mlp", input_shape=shape, num_classes=4, seed=0) if model is None else model
    actual: FedHybStar = server(model, shape, FedHybStar, **values)
    return actual
