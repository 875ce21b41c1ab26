"""A client's own copy of the last global model, fine-tuned on its training data, and measured before and after.

Source: Yu, Bagdasaryan and Shmatikov, "Salvaging Federated Learning by Local Adaptation", 2020, section 3.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from flwr_kd.client.task import Task, metrics_of
from flwr_kd.learning.loop import BatchNorms
from flwr_kd.learning.scores import Measured, label_loss
from flwr_kd.models import FeatureModel
from flwr_kd.models.feature import find_head
from flwr_kd.seeding import forked_global_rng

if TYPE_CHECKING:
    from flwr_kd.client.client import KDClient

__all__ = ["fine_tune", "head_of", "measured_before_and_after"]


def fine_tune(client: KDClient[Any], task: Task[Any]) -> None:
    """Minimise cross-entropy for ``personalize-epochs``, with a fresh optimiser and the round's learning rate.

    With ``personalize-part=head`` only the head is trained; the rest is in eval mode, and its running statistics do
    not change.
    """
    model, config = client.model, task.config
    if config.personalize_part == "model":
        client.train(task, lambda x, y: label_loss(model(x), y), epochs=config.adaptation_epochs)
        return
    batchnorms = BatchNorms(model)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        with batchnorms.frozen():
            return label_loss(model.classify(model.features(x)), y)

    with _only_trained(model, head_of(model)):
        client.train(task, loss, epochs=config.adaptation_epochs)


def measured_before_and_after(
    client: KDClient[Any], task: Task[Any]
) -> tuple[Measured | None, dict[str, float]]:
    """Measure the client's model, adapt it, and measure it again.

    Returns
    -------
    measured : Measured or None
        The adapted model's on the client's test data, else on the common test set; None without either, where
        nothing is adapted.
    metrics : dict
        Its accuracies, and ``local-accuracy-before`` where the client has test data.
    """
    size = task.config.batch_size
    before = client.measure(size)
    if before is None and not client.measures_common:
        return None, {}
    with forked_global_rng(task.seed, client.model, client.device):
        client.adapt(task)
    after, common = client.measure(size), client.measure_common(size)
    metrics = metrics_of(local=after, common=common)
    if before is not None:
        metrics["local-accuracy-before"] = before.accuracy
    return after or common, metrics


def head_of(model: nn.Module) -> nn.Module:
    """Return the part of a client's model that maps features to logits.

    Raises
    ------
    ValueError
        If the model has ``features`` and ``classify`` of its own, and names no ``head``.
    """
    head = find_head(model)
    if head is None:
        raise ValueError(
            f"personalize-part=head needs a model with a head, a module; {type(model).__name__} has none: set "
            f"personalize-part=model, or give {FeatureModel.__name__}(extractor, head)"
        )
    return head


@contextmanager
def _only_trained(model: nn.Module, part: nn.Module) -> Iterator[None]:
    chosen = {id(parameter) for parameter in part.parameters()}
    fixed = [p for p in model.parameters() if p.requires_grad and id(p) not in chosen]
    for parameter in fixed:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in fixed:
            parameter.requires_grad_(True)
