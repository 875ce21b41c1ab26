"""Loss and accuracies of a client's model on test data, and the client's reply to an evaluate message."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from flwr_kd.client.adaptation import measured_before_and_after
from flwr_kd.client.task import Measured, Task, metrics_of
from flwr_kd.learning.batches import Batches
from flwr_kd.learning.passes import pass_size
from flwr_kd.transport import flower_records

if TYPE_CHECKING:
    from flwr_kd.client.client import KDClient

__all__ = ["evaluation", "measured_on"]

Scalars = dict[str, bool | int | float | str | bytes]


@torch.no_grad()
def measured_on(
    client: KDClient[Any], batches: Batches | None, batch_size: int, generator: torch.Generator
) -> Measured | None:
    """Return the model's loss and accuracies on samples, in eval mode; None without samples.

    Parameters
    ----------
    client : KDClient
        The owner of the model.
    batches : Batches or None
        The samples.
    batch_size : int
        That of the training; see :func:`flwr_kd.learning.passes.pass_size`.
    generator : torch.Generator
        What the data set draws from.
    """
    if batches is None or not len(batches):
        return None
    client.model.eval()
    sums: list[Tensor] = []
    count, several = 0, client.num_classes > 5
    for x, y in batches.ordered(pass_size(client.device, batch_size), generator=generator):
        logits, y = client.model(client.to_device(x)), client.to_device(y)
        loss = F.cross_entropy(logits, y, reduction="sum")
        right = (logits.argmax(dim=1) == y).sum()
        near = (logits.topk(5, dim=1).indices == y[:, None]).sum() if several else right
        # Fetched together in the end: the host would wait for a GPU with each number.
        sums.append(torch.stack([loss, right.to(loss.dtype), near.to(loss.dtype)]))
        count += len(y)
    loss, right, near = (sum(column) / count for column in zip(*torch.stack(sums).tolist(), strict=True))
    return Measured(loss, right, near if several else None)


def evaluation(client: KDClient[Any], task: Task[Any]) -> tuple[float, int, Scalars]:
    """Return loss, number of samples and metrics of the loaded model; see :meth:`flwr_kd.KDClient.evaluate`."""
    size = task.config.batch_size
    metrics: dict[str, float] = {}
    if task.phase == flower_records.PERSONALIZE:
        measured, metrics = measured_before_and_after(client, task)
    else:
        measured = client.measure(size)
        if task.phase == flower_records.MEASURE:
            common = client.measure_common(size)
            metrics = metrics_of(local=measured, common=common)
            measured = measured or common
            metrics[flower_records.STORED] = float(client.has_own)
        elif measured is not None:
            top5 = {} if measured.top5 is None else {flower_records.TOP5: measured.top5}
            metrics = {flower_records.ACCURACY: measured.accuracy, **top5}
    if measured is None:
        return 0.0, 0, {}
    number = next(len(batches) for batches in (client.test_batches, client.common_test_batches) if batches)
    return measured.loss, number, {**metrics}
