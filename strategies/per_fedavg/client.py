"""Per-FedAvg's client half: steps that make the model good one step later."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from flwr_kd.client.adaptation import head_of
from flwr_kd.client.client import KDClient, Objective
from flwr_kd.client.stream import endless_batches, prepared
from flwr_kd.client.task import Answer, Task
from flwr_kd.inputs import Inputs
from flwr_kd.learning.loop import BatchNorms, fit
from flwr_kd.learning.scores import label_loss
from flwr_kd.models import count_parameters
from flwr_kd.seeding import derive_seed, forked_global_rng

from .config import HESSIAN_FREE, PerFedAvgConfig
from .functional import draw_rows, meta_gradient, moved, with_gradient


class PerFedAvgClient(KDClient[PerFedAvgConfig]):
    """Takes steps down the gradient of the loss that the model has after one step on the client's data.

    What is measured is the personal model: a copy, one step further on a training batch. It is not sent.
    """

    config_class = PerFedAvgConfig
    takes_multi_label = True

    def held_parameters(self, config: PerFedAvgConfig) -> int:
        """Return the parameters before and after the step to the personal model."""
        return 2 * count_parameters(self.model)

    def phase_train(self, task: Task[PerFedAvgConfig]) -> Answer:
        """Train, return the model, and measure a copy that took the step to the personal model."""
        self.load(task)
        config = task.config
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        rate = config.learning_rate_at(task.server_round)
        optimizer = torch.optim.SGD(parameters, lr=rate)
        objective = self.objective(task)
        loss = fit(self.model, optimizer, lambda: self._draws(task), objective, epochs=1)
        arrays = self.arrays(task.names)
        self.adapt(task)
        return Answer(
            arrays=arrays,
            num_examples=len(self.train_batches),
            metrics={"train-loss": loss, **self.local_metrics(config.batch_size)},
        )

    def objective(self, task: Task[PerFedAvgConfig]) -> Objective:
        """Return the loss after a step, with the gradient that the config names; it takes two or three batches."""
        config, model = task.config, self.model
        parameters = [p for p in model.parameters() if p.requires_grad]
        batchnorms, forward = BatchNorms(model), self._gradient(task)
        delta = config.delta if config.meta_gradient == HESSIAN_FREE else None
        steps = itertools.count()

        def loss(*tensors: Any) -> Tensor:
            batches = list(zip(tensors[::2], tensors[1::2], strict=True))
            start = [p.detach().clone() for p in parameters]
            values: list[Tensor] = []
            seed = derive_seed(task.seed, "difference", next(steps))

            def gradient(weights: Sequence[Tensor], draw: int) -> list[Tensor]:
                _put(parameters, weights)
                # BatchNorm's statistics are those of B2 alone.
                kept = nullcontext() if draw == 1 else batchnorms.statistics_kept()
                # Both sides of the difference need the same dropout, or its noise is divided by δ.
                same = forked_global_rng(seed, model, self.device) if draw == 2 else nullcontext()
                with kept, same:
                    value, slope = forward(parameters, *batches[draw])
                values.append(value)
                return slope

            found = meta_gradient(gradient, start, alpha=config.alpha, delta=delta)
            _put(parameters, start)
            return with_gradient(values[1], parameters, found)

        return loss

    def adapt(self, task: Task[PerFedAvgConfig]) -> None:
        """Take the steps of rate α to the personal model, each on one training batch."""
        config, model = task.config, self.model
        head = config.personalize_part == "head"
        part = head_of(model) if head else model
        parameters = [p for p in part.parameters() if p.requires_grad]
        batchnorms, forward = BatchNorms(model), self._gradient(task)
        count = config.adaptation_steps(len(self.train_batches))
        model.train()
        for x, y in itertools.islice(endless_batches(self, task, "personal"), count):
            alone = head or len(x) == 1
            with batchnorms.frozen() if alone else batchnorms.statistics_kept():
                _, slope = forward(parameters, x, y)
            _put(parameters, moved([p.detach() for p in parameters], slope, -config.alpha))
        model.eval()

    def _gradient(
        self, task: Task[PerFedAvgConfig]
    ) -> Callable[[Sequence[Tensor], Inputs, Tensor], tuple[Tensor, list[Tensor]]]:
        """Return a function of parameters and a batch to the loss and its gradient, weight decay included."""
        decay = task.config.weight_decay
        # Entered anew for each pass: autocast keeps copies of weights, which change between two of them.
        value_of = self.in_precision(lambda x, y: label_loss(self.model(x), y))

        def gradient(parameters: Sequence[Tensor], x: Inputs, y: Tensor) -> tuple[Tensor, list[Tensor]]:
            value = value_of(x, y)
            slopes = torch.autograd.grad(value, parameters, allow_unused=True)
            return value.detach(), [
                torch.zeros_like(p) if slope is None else torch.add(slope, p.detach(), alpha=decay)
                for p, slope in zip(parameters, slopes, strict=True)
            ]

        return gradient

    def _draws(self, task: Task[PerFedAvgConfig]) -> Iterator[tuple[Any, ...]]:
        """Yield the batches of each step: B1, B2 and, hessian-free, B3."""
        config, count = task.config, len(self.train_batches)
        each, steps = 3 if config.meta_gradient == HESSIAN_FREE else 2, config.steps(count)
        if self.train_batches.free_sampler is not None:
            # Its sampler decides what is trained on.
            stream: Iterator[tuple[Inputs, Tensor]]
            stream = itertools.islice(endless_batches(self, task), each * steps)
        elif count:
            # B1 and B2 are the same with and without a B3.
            rows = draw_rows(count, config.batch_size, steps, task.generator("draws"))[:, :each]
            items = self.train_batches.ordered(
                config.batch_size, rows.flatten(), generator=task.generator("items")
            )
            stream = prepared(self, task, items)
        else:
            return
        for batches in zip(*[stream] * each, strict=True):
            yield tuple(itertools.chain(*batches))


@torch.no_grad()
def _put(parameters: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Give parameters values, in place."""
    for parameter, value in zip(parameters, values, strict=True):
        parameter.copy_(value)
