"""Loss and accuracies of a client's model on test data, and the client's reply to an evaluate message."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from flwr_kd.client.adaptation import measured_before_and_after
from flwr_kd.client.task import Task, metrics_of
from flwr_kd.learning.batches import Batches
from flwr_kd.learning.passes import pass_size
from flwr_kd.learning.scores import Measured, Scores
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
    scores = [
        Scores.of(client.model(client.to_device(x)), client.to_device(y))
        for x, y in batches.ordered(pass_size(client.device, batch_size), generator=generator)
    ]
    return Scores.together(scores)


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
            metrics = measured.accuracies()
    if measured is None:
        return 0.0, 0, {}
    number = next(len(batches) for batches in (client.test_batches, client.common_test_batches) if batches)
    return measured.loss, number, {**metrics}
