"""Evaluation of the global model at the server."""

from __future__ import annotations

from collections.abc import Callable

import torch
from flwr.app import ArrayRecord, MetricRecord
from torch import Tensor, nn

from flwr_kd.data import Bundle
from flwr_kd.learning.cores import Cores
from flwr_kd.learning.device import placed, resolve_device
from flwr_kd.learning.passes import pass_size
from flwr_kd.learning.scores import Scores

__all__ = ["evaluator"]


def evaluator(
    build: Callable[[], nn.Module],
    bundle: Bundle,
    batch_size: int | None = None,
    *,
    threads: int = 1,
    device: str | torch.device = "cpu",
) -> Callable[[int, ArrayRecord], MetricRecord | None]:
    """Return an ``evaluate_fn``: the global model's accuracy and loss on the common test set.

    The model is in eval mode. With more than five classes the accuracy of the five likeliest is there as well, as
    ``top5``; where samples have several labels, AUROC, as ``auroc``. See :class:`flwr_kd.Measured`.

    Parameters
    ----------
    build : callable
        Returns the model.
    bundle : Bundle
        The model is evaluated on its test set.
    batch_size : int, optional
        Samples at a time; :func:`flwr_kd.learning.passes.pass_size` if None.
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
    size = batch_size or pass_size(where)
    model = build().to(where)
    x, y = placed(bundle.test.tensors, where)

    @torch.no_grad()
    def measure(batch: tuple[Tensor, Tensor]) -> Scores:
        inputs, labels = (part.to(where, non_blocking=True) for part in batch)
        return Scores.of(model(inputs), labels)

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        model.load_state_dict(arrays.to_torch_state_dict())
        model.eval()
        batches = zip(torch.split(x, size), torch.split(y, size), strict=True)
        with Cores(threads if where.type == "cpu" else 1) as cores:
            measured = Scores.together(list(cores.map(measure, batches)))
        return MetricRecord({**measured.accuracies(), "loss": measured.loss})

    return evaluate
