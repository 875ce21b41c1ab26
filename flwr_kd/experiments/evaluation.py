"""Evaluation of the global model at the server."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from flwr.app import ArrayRecord, MetricRecord
from torch import Tensor, nn

from flwr_kd.data import Bundle

__all__ = ["evaluator"]


def evaluator(
    build: Callable[[], nn.Module], bundle: Bundle, batch_size: int = 128, *, threads: int = 1
) -> Callable[[int, ArrayRecord], MetricRecord | None]:
    """Return an ``evaluate_fn``: the global model's accuracy and loss on the common test set, in eval mode.

    Parameters
    ----------
    build : callable
        Returns the model.
    bundle : Bundle
        The model is evaluated on its test set.
    batch_size : int
        Samples at a time; small batches stay in the processor's caches.
    threads : int
        Number of batches at the same time. Each uses one thread, so the numbers do not depend on it. In a
        simulation the workers are idle during the evaluation.
    """
    model = build()

    @torch.no_grad()
    def measure(batch: tuple[Tensor, Tensor]) -> tuple[int, float]:
        x, y = batch
        logits = model(x)
        loss = nn.functional.cross_entropy(logits, y, reduction="sum")
        return int((logits.argmax(dim=1) == y).sum()), float(loss)

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        model.load_state_dict(arrays.to_torch_state_dict())
        model.eval()
        test = bundle.test
        batches = zip(torch.split(test.x, batch_size), torch.split(test.y, batch_size), strict=True)
        if threads == 1:
            measured = list(map(measure, batches))
        else:
            with ThreadPoolExecutor(threads, thread_name_prefix="flwr-kd-evaluate") as pool:
                measured = list(pool.map(measure, batches))
        correct, losses = zip(*measured, strict=True)
        return MetricRecord({"accuracy": sum(correct) / len(test), "loss": sum(losses) / len(test)})

    return evaluate
