"""Runs of FedHEAD that its tests share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import hierarchy as oracle
import numpy as np
import torch
from ensemble_rounds import CLASSES, FEATURES, N_G, N_L, RATE, REFERENCE, data, reference
from ensembles import close
from flwr.app import ArrayRecord, Context
from flwr.clientapp import ClientApp
from hierarchy import Linear, Samples
from torch import nn
from torch.utils.data import TensorDataset

from flwr_kd.client.task import Answer, Task
from flwr_kd.server.records import KDResult
from flwr_kd.strategies.fedhead import (
    FedHEAD,
    FedHEADClient,
    FedHEADConfig,
    FedHEADPlus,
)
from flwr_kd.transport.inline_grid import InlineGrid

SIZES = (5, 9, 14, 7, 11, 4)
SECTORS = ("east", "west", "east", "south", "east", "west")
N_S = 4


def oracle_data(sizes: Sequence[int] = SIZES) -> dict[int, Samples]:
    return {i: oracle.samples(x.numpy(), y.numpy()) for i, (x, y) in enumerate(map(data, range(99), sizes))}


def net(classes: int = CLASSES, hidden: int = 0) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = [nn.Linear(FEATURES, hidden), nn.ReLU()] if hidden else []
        return nn.Sequential(nn.Flatten(), *layers, nn.Linear(hidden or FEATURES, classes))


def linear(arrays: ArrayRecord | Mapping[str, Any]) -> Linear:
    values = {name: value.numpy() for name, value in arrays.items()}
    return oracle.linear(values["1.weight"], values["1.bias"])


@dataclass
class Call:
    """A message that a client received."""

    server_round: int
    phase: str
    partition: int
    names: tuple[str, ...]
    arrays: list[np.ndarray]
    payload: bytes | None


class Run:
    """A federation of linear models on the inline grid, and all that its clients were asked."""

    def __init__(
        self,
        kind: type[FedHEAD] = FedHEAD,
        *,
        sizes: Sequence[int] = SIZES,
        named: Sequence[str | int] | None = SECTORS,
        options: dict[str, Any] | None = None,
        hidden: int = 0,
        **config: Any,
    ) -> None:
        self.sizes, self.hidden = sizes, hidden
        self.node_configs = None if named is None else [{"sector": sector} for sector in named]
        values = {"local_epochs": N_L, "batch_size": 64, "optimizer": "sgd", "learning_rate": RATE}
        values |= {"weight_decay": 0.0, "validation_share": 0.0, "sector_epochs": N_S, "server_epochs": N_G}
        values |= {"assignment": "random" if named is None else "client"} | config
        given: dict[str, Any] = {"min_available_nodes": len(sizes)}
        if kind is FedHEADPlus:
            public = TensorDataset(reference())
            given |= {"model": net(hidden=hidden), "public_set": public, "device": "cpu"}
        self.calls: list[Call] = []
        self.leaders: list[dict[Any, int]] = []
        self.models: list[Linear] = []
        self.strategy = kind(FedHEADConfig(**values), **given | (options or {}))
        self.strategy.on_round = self._note

    def _note(self, _: Any) -> None:
        self.leaders.append({sector: node.key for sector, node in self.strategy.leaders.items()})

    def app(self) -> ClientApp:
        run = self

        class Watched(FedHEADClient):
            def phase_train(self, task: Task) -> Answer:
                run.note(self, task)
                return super().phase_train(task)

            def phase_distill(self, task: Task) -> Answer:
                run.note(self, task)
                return super().phase_distill(task)

        def client_fn(context: Context) -> Any:
            index = int(context.node_config["partition-id"])
            train = TensorDataset(*data(index, self.sizes[index]))
            return Watched(net(hidden=self.hidden), train, context=context, device="cpu").to_client()

        return ClientApp(client_fn=client_fn)

    def note(self, client: FedHEADClient, task: Task) -> None:
        partition = int(client.context.node_config["partition-id"])
        arrays = [array.copy() for array in task.arrays]
        self.calls.append(Call(task.server_round, task.phase, partition, task.names, arrays, task.payload))

    def grid(self, **options: Any) -> InlineGrid:
        return InlineGrid(self.app(), len(self.sizes), node_configs=self.node_configs, **options)

    def start(
        self, rounds: int = 1, *, grid: InlineGrid | None = None, timeout: float = 20.0, **options: Any
    ) -> KDResult:
        initial = ArrayRecord(net(hidden=self.hidden).state_dict())

        def keep(server_round: int, arrays: ArrayRecord) -> None:
            if not self.hidden:
                self.models.append(linear(arrays))

        grid = grid or self.grid(**options)
        return self.strategy.start(grid, initial, rounds, timeout, evaluate_fn=keep)

    @property
    def sectors(self) -> dict[Any, list[int]]:
        members: dict[Any, list[int]] = {}
        for key, sector in sorted(self.strategy.sectors.items()):
            members.setdefault(sector, []).append(key)
        return members

    def asked(self, phase: str, server_round: int = 1) -> list[int]:
        return [c.partition for c in self.calls if (c.phase, c.server_round) == (phase, server_round)]

    def check(
        self,
        server_round: int,
        *,
        leaders: Mapping[Any, int | None] | None = None,
        sectors: Mapping[Any, Sequence[int]] | None = None,
        plus: bool = False,
    ) -> oracle.Round:
        """Compare one round's global model with the oracle's, which begins where the round began."""
        done = oracle.fedhead(
            self.models[server_round - 1],
            oracle_data(self.sizes),
            sectors or self.sectors,
            leaders or self.leaders[server_round - 1],
            rate=RATE,
            n_l=N_L,
            n_s=N_S,
        )
        expected = done.model
        if plus:
            rows = oracle.samples(reference().numpy(), np.zeros(REFERENCE)).x
            expected = oracle.fedhead_plus(done, rows, rate=RATE, n_g=N_G, average="probabilities")
        close(self.models[server_round], expected)
        return done
