"""Evaluation of the global model at the server."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from flwr.app import ArrayRecord, MetricRecord
from torch import Tensor, nn

from flwr_kd.data import Bundle
from flwr_kd.learning.device import placed, resolve_device

__all__ = ["evaluator"]

_BATCH_SIZE, _DEVICE_BATCH_SIZE = 128, 1024
"""Small batches stay in a processor's caches; a GPU needs more samples at a time."""


def evaluator(
    build: Callable[[], nn.Module],
    bundle: Bundle,
    batch_size: int | None = None,
    *,
    threads: int = 1,
    device: str | torch.device = "cpu",
) -> Callable[[int, ArrayRecord], MetricRecord | None]:
    """Return an ``evaluate_fn``: the global model's accuracy and loss on the common test set, in eval mode.

    Parameters
    ----------
    build : callable
        Returns the model.
    bundle : Bundle
        The model is evaluated on its test set.
    batch_size : int, optional
        Samples at a time; 128 on the CPU and 1,024 on other devices if None.
    threads : int
        Number of batches at the same time. Each uses one thread, so the numbers do not depend on it. In a
        simulation the workers are idle during the evaluation. Without effect on other devices than the CPU.
    device : str or torch.device
        Where the model is evaluated; ``"auto"``: CUDA, else MPS, else CPU. The test set stays there if it is small
        enough; see :func:`flwr_kd.learning.device.placed`.

    Raises
    ------
    ConfigError
        If the device is unknown or not available.
    """
    where = resolve_device(device)
    on_cpu = where.type == "cpu"
    size = batch_size or (_BATCH_SIZE if on_cpu else _DEVICE_BATCH_SIZE)
    threads = threads if on_cpu else 1
    model = build().to(where)
    x, y = placed((bundle.test.x, bundle.test.y), where)

    @torch.no_grad()
    def measure(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        inputs, labels = (part.to(where, non_blocking=True) for part in batch)
        logits = model(inputs)
        loss = nn.functional.cross_entropy(logits, labels, reduction="sum")
        return (logits.argmax(dim=1) == labels).sum(), loss

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        model.load_state_dict(arrays.to_torch_state_dict())
        model.eval()
        batches = zip(torch.split(x, size), torch.split(y, size), strict=True)
        if threads == 1:
            measured = list(map(measure, batches))
        else:
            with ThreadPoolExecutor(threads, thread_name_prefix="flwr-kd-evaluate") as pool:
                measured = list(pool.map(measure, batches))
        # Stacked on the device, so that the host waits for it once.
        correct, losses = (torch.stack(column).tolist() for column in zip(*measured, strict=True))
        return MetricRecord({"accuracy": sum(correct) / len(y), "loss": sum(losses) / len(y)})

    return evaluate
