"""Grids of toy clients, and of real ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from flwr.app import Context
from flwr.clientapp import ClientApp
from torch import nn

from flwr_kd.client.client import KDClient
from flwr_kd.strategies.fedavg import FedAvgClient
from tests.server.federations import Net, ToyClient, Watched


@pytest.fixture
def toy(make_blobs: Callable[..., Any]) -> Callable[..., tuple[Watched, list[tuple[Any, ...]]]]:
    def build(clients: int = 4, **options: Any) -> tuple[Watched, list[tuple[Any, ...]]]:
        seen: list[tuple[Any, ...]] = []

        def client_fn(context: Context) -> Any:
            client = ToyClient(Net(), make_blobs(8, 0), context=context, device="cpu", seen=seen)
            return client.to_client()

        return Watched(ClientApp(client_fn=client_fn), clients, **options), seen

    return build


@pytest.fixture
def grid_of(make_blobs: Callable[..., Any]) -> Callable[..., Watched]:
    """A grid of real clients."""

    def build(
        kind: type[KDClient] = FedAvgClient,
        clients: int = 3,
        *,
        model: Callable[[int], nn.Module] = lambda index: Net(),
        grid: dict[str, Any] | None = None,
        **options: Any,
    ) -> Watched:
        def client_fn(context: Context) -> Any:
            index = int(context.node_config["partition-id"])
            client = kind(
                model(index), make_blobs(16 + 4 * index, index), make_blobs(4 + index, 50), context=context,
                device="cpu", **options,
            )  # fmt: skip
            return client.to_client()

        return Watched(ClientApp(client_fn=client_fn), clients, **(grid or {}))

    return build
