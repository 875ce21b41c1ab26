"""Models, data and runs of FedGKT's and FedDKC's tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, Context
from flwr.clientapp import ClientApp
from torch import nn
from torch.utils.data import TensorDataset

from flwr_kd.client.task import Task
from flwr_kd.server.records import KDResult
from flwr_kd.strategies.fedgkt import (
    ClientFeatures,
    FedGKT,
    FedGKTClient,
    FedGKTConfig,
)
from flwr_kd.transport.inline_grid import InlineGrid

CLASSES, FEATURES, SAMPLES, CLIENTS = 3, 5, 20, 4
QUICK: dict[str, Any] = {"batch_size": 8, "min_available_nodes": CLIENTS, "device": "cpu"}


def samples(index: int, size: int = SAMPLES) -> TensorDataset:
    """Return inputs whose first number tells client and sample apart."""
    draw = torch.Generator().manual_seed(index)
    x = torch.randn(size, FEATURES, generator=draw)
    x[:, 0] = index + torch.arange(size) / 1000
    return TensorDataset(x, torch.arange(size) % CLASSES)


def pair(index: int = 0) -> tuple[nn.Module, nn.Module]:
    """Return an extractor that changes nothing, and a small predictor."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(index)
        return nn.Identity(), nn.Linear(FEATURES, CLASSES)


def app(make: Callable[[int, Context], Any]) -> ClientApp:
    return ClientApp(client_fn=lambda c: make(int(c.node_config["partition-id"]), c).to_client())


def plain_client(index: int, context: Context) -> FedGKTClient:
    return FedGKTClient(pair(index), samples(index), samples(index, 6), context=context, device="cpu")


def start(
    strategy: FedGKT, make: Callable[[int, Context], Any] = plain_client, rounds: int = 2, **grid: Any
) -> KDResult:
    inline = InlineGrid(app(make), CLIENTS, **grid)
    try:
        return strategy.start(inline, ArrayRecord(), num_rounds=rounds, timeout=20)
    finally:
        inline.close()


def task(config: FedGKTConfig, server_round: int = 1, payload: bytes | None = None) -> Task:
    return Task(server_round, "train", 0, (), [], payload, config)


def features(**changes: Any) -> ClientFeatures:
    values: dict[str, Any] = {
        "index": np.arange(4),
        "features": np.zeros((4, FEATURES), np.float32),
        "logits": np.zeros((4, CLASSES), np.float32),
        "labels": np.zeros(4, np.int64),
        "test_features": np.zeros((0, FEATURES), np.float32),
        "test_labels": np.zeros(0, np.int64),
    }
    return ClientFeatures(**(values | changes))
