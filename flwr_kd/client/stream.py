"""Training batches one after another, for methods that count steps instead of epochs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from torch import Tensor

from flwr_kd.client.task import Task
from flwr_kd.inputs import Inputs

if TYPE_CHECKING:
    from flwr_kd.client.client import KDClient

__all__ = ["endless_batches", "prepared"]


def endless_batches(
    client: KDClient[Any], task: Task[Any], purpose: str = "order"
) -> Iterator[tuple[Inputs, Tensor]]:
    """Yield training batches, epoch after epoch, each in an order of its own, until an epoch has none.

    Parameters
    ----------
    client : KDClient
        Its training data, augmentation and device are used.
    task : Task
        Its config has the batch size, and its seed decides the order.
    purpose : str
        Batches for another purpose in the same phase have other orders.
    """

    def epochs() -> Iterator[tuple[Inputs, Tensor]]:
        order, empty = task.generator(purpose), False
        while not empty:
            empty = True
            for batch in client.train_batches.shuffled(task.config.batch_size, order):
                empty = False
                yield batch

    return prepared(client, task, epochs(), purpose)


def prepared(
    client: KDClient[Any], task: Task[Any], batches: Iterable[tuple[Inputs, Tensor]], purpose: str = "order"
) -> Iterator[tuple[Inputs, Tensor]]:
    """Yield batches on the client's device, augmented; see :func:`endless_batches`."""
    views = task.generator(f"augment-{purpose}")
    for x, y in batches:
        x = client.to_device(x)
        yield x if client.augment is None else client.augment(x, views), client.to_device(y)
