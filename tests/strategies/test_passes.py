"""How often a client's samples pass its model: knowledge costs one pass of the training data, and nothing else."""

from __future__ import annotations

import pytest
import torch
from flwr.app import ArrayRecord, Context
from flwr.clientapp import ClientApp
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from flwr_kd import registry
from flwr_kd.transport.inline_grid import InlineGrid

TRAIN, TEST, EPOCHS = 150, 40, 3


def data(count: int, seed: int) -> TensorDataset:
    draw = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(count, 8, generator=draw), torch.arange(count) % 3)


@pytest.mark.parametrize(
    ("name", "extracted"), [("fedavg", 0), ("fedprox", 0), ("fedhkd", 1), ("fedhkd-star", 1), ("fedproto", 1)]
)
def test_samples_that_pass_the_model(name: str, extracted: int) -> None:
    method = registry.get(name)
    trained, evaluated, sizes = [0], [0], []

    def note(layer: nn.Module, args: tuple[Tensor, ...]) -> None:
        counts = trained if torch.is_grad_enabled() else evaluated
        counts[0] += len(args[0])
        if counts is evaluated:
            sizes.append(len(args[0]))

    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))
        model[0].register_forward_pre_hook(note)
        return model

    def client_fn(context: Context):  # type: ignore[no-untyped-def]
        client = method.client(build(), data(TRAIN, 0), data(TEST, 1), context=context, device="cpu")
        return client.to_client()

    strategy = method.strategy(local_epochs=EPOCHS, batch_size=50, min_available_nodes=1)
    arrays = ArrayRecord(build().state_dict()) if strategy.sends_weights else ArrayRecord()
    grid = InlineGrid(ClientApp(client_fn=client_fn), 1)
    strategy.start(grid, arrays, num_rounds=2, timeout=60)
    grid.close()
    assert trained == [2 * EPOCHS * TRAIN]
    assert evaluated == [2 * (extracted * TRAIN + TEST)]
    # In larger batches than those of the training.
    assert max(sizes) == (128 if extracted else TEST)
