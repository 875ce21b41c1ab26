"""A client's answer in the form in which Flower takes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from flwr_kd.client.flower_mods import CLIPPING, active_mods, check_mods
from flwr_kd.client.private_update import private_update
from flwr_kd.transport import flower_records

if TYPE_CHECKING:
    from flwr_kd.client.client import KDClient
    from flwr_kd.client.task import Answer, Task

__all__ = ["reply_of"]

NDArray = npt.NDArray[Any]


def reply_of(
    client: KDClient[Any],
    task: Task[Any],
    answer: Answer,
    *,
    phases: Sequence[str],
    lost_state: bool,
) -> tuple[list[NDArray], int, dict[str, bool | int | float | str | bytes]]:
    """Return arrays, number of samples and metrics, with the update's privacy and the payload's bytes.

    Parameters
    ----------
    client : KDClient
        After the phase.
    task : Task
        What the server asked.
    answer : Answer
        What the phase returned.
    phases : sequence of str
        All of the client's phases.
    lost_state : bool
        Whether what the client kept was not there.

    Raises
    ------
    ConfigError
        If a mod of Flower's cannot work on the arrays, or ``dp-clip`` has nothing from which an update counts.
    """
    arrays = private_update(client, task, answer.arrays)
    metrics: dict[str, bool | int | float | str | bytes] = {
        name: float(value) for name, value in answer.metrics.items()
    }
    if lost_state:
        metrics[flower_records.STATE_LOST] = 1.0
    mods = active_mods()
    check_mods(mods, phases, task.arrays, arrays)
    if answer.payload is not None:
        if CLIPPING.intersection(mods):
            metrics[flower_records.UNCOVERED] = 1.0
        metrics[flower_records.PAYLOAD] = answer.payload.to_bytes(max_bytes=task.max_payload_bytes)
    return arrays, answer.num_examples, metrics
