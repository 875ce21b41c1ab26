"""Small federations that need no Ray."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, Context
from flwr.clientapp import ClientApp

from flwr_kd import registry
from flwr_kd.data import ArrayDataset
from flwr_kd.experiments.attacks import MaliciousClient, parse_attack
from flwr_kd.models import build_model
from flwr_kd.server.records import KDResult
from flwr_kd.server.strategy import KDStrategy
from flwr_kd.transport.inline_grid import InlineGrid

pytest_plugins = ("tests.tiers",)

CLASSES = 4
SHAPE = (1, 4, 4)


def blobs(size: int, seed: int, classes: int = CLASSES) -> ArrayDataset:
    """Return a data set that can be learnt: one noisy pattern per class."""
    generator = torch.Generator().manual_seed(1)
    patterns = torch.randn(classes, *SHAPE, generator=generator)
    generator.manual_seed(seed)
    y = torch.arange(size) % classes
    return ArrayDataset(patterns[y] + 0.5 * torch.randn(size, *SHAPE, generator=generator), y)


def small_model(name: str = "mlp", seed: int = 0) -> torch.nn.Module:
    return build_model(name, input_shape=SHAPE, num_classes=CLASSES, seed=seed, feature_dim=8)


class Federation:
    """Clients of one method on the inline grid, some of them malicious."""

    def __init__(
        self, name: str, clients: int = 4, *, attack: str | None = None, attackers: Collection[int] = ()
    ) -> None:
        self.method, self.clients = registry.get(name), clients
        self.attack, self.attackers = None if attack is None else parse_attack(attack), attackers
        self.models = ["mlp"] * clients

    def client_fn(self, context: Context) -> Any:
        index = int(context.node_config["partition-id"])
        attack = self.attack if index in self.attackers else None
        train: Any = blobs(24 + index, index)
        client: Any = self.method.client(
            small_model(self.models[index]),
            train if attack is None else attack.poison(train, CLASSES, index),
            blobs(8, 100 + index),
            context=context,
            device="cpu",
            **self.method.client_options,
            **({"public_set": blobs(32, 200)} if self.method.public_at == "clients" else {}),
        )
        if attack is not None:
            client = MaliciousClient(client, attack, partition=index)
        return client.to_client()

    def app(self) -> ClientApp:
        def client_fn(context: Context) -> Any:
            return self.client_fn(context)

        return ClientApp(client_fn=client_fn)

    def strategy(self, *settings: str, **options: Any) -> KDStrategy:
        options.setdefault("min_available_nodes", self.clients)
        if self.method.public_at == "server":
            models: dict[str, Any] = {"model": small_model()}
            if self.method.heterogeneous:
                models = {"models": [small_model(name) for name in dict.fromkeys(self.models)]}
            options = {**models, "public_set": blobs(32, 200), "device": "cpu", **options}
        if self.method.public_at == "synthetic":
            options = {"model": small_model(), "input_shape": SHAPE, "device": "cpu", **options}
        quick = ["local-epochs=1", "batch-size=8", "optimizer=adam", "learning-rate=0.005"]
        return self.method.strategy(self.method.config([*quick, *settings]), **options)

    def initial(self) -> ArrayRecord:
        return ArrayRecord(small_model().state_dict())

    def run(
        self, rounds: int = 2, *, grid: dict[str, Any] | None = None, timeout: float = 30.0, **options: Any
    ) -> tuple[KDStrategy, KDResult]:
        strategy = self.strategy(**options)
        inline = InlineGrid(self.app(), self.clients, **(grid or {}))
        try:
            return strategy, strategy.start(inline, self.initial(), num_rounds=rounds, timeout=timeout)
        finally:
            inline.close()


@pytest.fixture
def flower_log() -> Iterator[list[str]]:
    """Give Flower's warnings, whose logger does not pass them on to pytest's."""
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("flwr")
    logger.addHandler(handler)
    yield lines
    logger.removeHandler(handler)


@pytest.fixture
def federation() -> Callable[..., Federation]:
    return Federation


@pytest.fixture
def make_blobs() -> Callable[..., ArrayDataset]:
    return blobs


@pytest.fixture
def make_model() -> Callable[..., torch.nn.Module]:
    return small_model


@pytest.fixture
def numbers() -> Callable[[KDResult], list[tuple[Any, ...]]]:
    """Return what must be the same in two equal runs: everything but the time."""

    def read(result: KDResult) -> list[tuple[Any, ...]]:
        arrays = [(name, value.data) for name, value in result.arrays.items()]
        rounds = [
            (
                r.local_accuracy,
                r.global_accuracy,
                r.train_loss,
                r.bytes_up,
                r.bytes_down,
                r.participants,
                r.failures,
            )
            for r in result.rounds
        ]
        return [*rounds, *arrays]

    return read
