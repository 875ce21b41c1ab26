"""Training batches one after another, for methods that count steps."""

from __future__ import annotations

from itertools import islice

import torch
from flwr.app import Context, RecordDict
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from flwr_kd.client.client import KDClient
from flwr_kd.client.stream import endless_batches
from flwr_kd.client.task import Task
from flwr_kd.config import MethodConfig

TASK: Task[MethodConfig] = Task(1, "train", 5, (), [], None, MethodConfig(batch_size=4))


def shifted(x: Tensor, generator: torch.Generator) -> Tensor:
    return x + 100 * torch.rand((), generator=generator)


def client_of(count: int, **options: object) -> KDClient:
    data = TensorDataset(torch.arange(float(count)).reshape(count, 1), torch.zeros(count, dtype=torch.int64))
    context = Context(1, 7, {"partition-id": 0}, RecordDict(), {})
    return KDClient(nn.Linear(1, 2), data, context=context, **options)  # type: ignore[arg-type]


def rows(client: KDClient, batches: int, purpose: str = "order") -> list[list[int]]:
    stream = islice(endless_batches(client, TASK, purpose), batches)
    return [[int(value) for value in x.flatten()] for x, _ in stream]


def test_each_epoch_has_every_sample_in_an_order_of_its_own() -> None:
    found = rows(client_of(10), 9)
    assert [len(batch) for batch in found] == [4, 4, 2] * 3
    epochs = [[row for batch in found[i : i + 3] for row in batch] for i in (0, 3, 6)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert found == rows(client_of(10), 9)
    assert found != rows(client_of(10), 9, "personal")


def test_one_sample_is_a_batch_again_and_again() -> None:
    assert rows(client_of(1), 3) == [[0]] * 3


def test_batches_are_augmented_each_in_its_own_way() -> None:
    found = [x.min().item() for x, _ in islice(endless_batches(client_of(4, augment=shifted), TASK), 3)]
    assert len(set(found)) == 3
    assert min(found) > 0
