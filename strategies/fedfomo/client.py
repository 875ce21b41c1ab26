"""FedFomo's client half: a personal model, whose training begins with a mixture of what helps the client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from flwr_kd.client.client import KDClient
from flwr_kd.client.private_update import LAST
from flwr_kd.client.task import Answer, Task
from flwr_kd.learning.held_out import hold_out
from flwr_kd.learning.scores import label_loss
from flwr_kd.learning.weights import check_finite_weights, load_weights, size_of
from flwr_kd.models import count_parameters
from flwr_kd.seeding import torch_generator

from .config import FedFomoConfig
from .functional import helpfulness, mixture_weights
from .messages import CANDIDATES, Affinities, split

PREVIOUS = "previous"
"""The set of the client's state with which its last training began."""
State = Mapping[str, Tensor]


class FedFomoClient(KDClient[FedFomoConfig]):
    """Mixes its last two models and others' by their losses on its validation samples, and trains from there.

    The client keeps the model with which its last local training began, and the one with which it ended. A part of
    its training samples is never trained on. For parameters see :class:`flwr_kd.KDClient`.
    """

    config_class = FedFomoConfig
    takes_multi_label = True
    personal = True
    update_from = LAST

    def kept_bytes(self) -> int:
        """Return the size of both models."""
        return 2 * size_of(self.model.state_dict())

    def load(self, task: Task[FedFomoConfig]) -> None:
        """Load the client's own model of this run, else the server's first one, else keep the model as built."""
        if not self.load_own() and task.arrays and not task.extra.get(CANDIDATES):
            load_weights(self.model, self.named(task, task.arrays))

    def held_parameters(self, config: FedFomoConfig) -> int:
        """Return the parameters of the client's last two models and of the others' that it mixes."""
        return (2 + config.models) * count_parameters(self.model)

    def phase_train(self, task: Task[FedFomoConfig]) -> Answer:
        """Mix, train on all but the validation samples, and return the model and the others' affinities.

        Raises
        ------
        FloatingPointError
            If the loss or the weights are no longer finite. What the client keeps does not change.
        """
        rows, validation = self.parts(task)
        deltas = self.mix(task, validation)
        start = {name: tensor.detach().cpu().clone() for name, tensor in self.model.state_dict().items()}
        loss = self.train(task, self.objective(task), among=rows)
        check_finite_weights(self.model)
        self.state.save(start, PREVIOUS)
        self.keep()
        return Answer(
            arrays=self.arrays(task.names),
            payload=Affinities(np.array(deltas, dtype=np.float32)),
            num_examples=len(rows),
            metrics={"train-loss": loss, **self.local_metrics(task.config.batch_size)},
        )

    def parts(self, task: Task[FedFomoConfig]) -> tuple[Tensor, Tensor]:
        """Return the rows to train on, and those of the validation: the same in every round of a run."""
        generator = torch_generator(task.client_seed, "validation")
        return hold_out(len(self.train_batches), task.config.validation_share, generator)

    def mix(self, task: Task[FedFomoConfig], validation: Tensor) -> list[float]:
        """Load the model with which training begins, and return how much each model that came helps, ``[M]``.

        Without a model of an earlier training nothing is mixed, nor without validation samples, where training goes
        on from the client's own model.
        """
        candidates = split(task.arrays, int(task.extra.get(CANDIDATES, 0)))
        own, previous = self.kept(), self.kept(PREVIOUS)
        if own is None or previous is None or not len(validation):
            self.load(task)
            return [0.0] * len(candidates)
        models: list[State] = [previous, own]
        for arrays in candidates:
            named = self.named(task, arrays)
            models.append({name: torch.from_numpy(np.array(value)) for name, value in named.items()})
        losses, distances = self._weighed(task, models, validation)
        deltas = helpfulness(losses[0], losses[1:], distances[1:])
        weights = mixture_weights(deltas)
        if task.config.unhelped == "own" and not any(weights):
            weights[0] = 1.0
        # The buffers are those of the client's own model.
        self.model.load_state_dict(own)
        with torch.no_grad():
            for name, parameter in self._parameters().items():
                first = previous[name].double()
                moved = [
                    weight * (model[name] - first)
                    for weight, model in zip(weights, models[1:], strict=True)
                    if weight
                ]
                parameter.copy_(sum(moved, first))
        return deltas[1:]

    @torch.no_grad()
    def _weighed(
        self, task: Task[FedFomoConfig], models: Sequence[State], validation: Tensor
    ) -> tuple[list[float], list[float]]:
        """Return each model's validation loss with its own buffers, and its distance from the first."""
        losses, distances = [], []
        first: dict[str, Tensor] = {}
        for model in models:
            self.model.load_state_dict(model)
            losses.append(self._validation_loss(task, validation))
            parameters = self._parameters()
            first = first or {name: parameter.detach().clone() for name, parameter in parameters.items()}
            squares = [(p - first[name]).double().square().sum() for name, p in parameters.items()]
            distances.append(torch.stack(squares).sum().sqrt())
        # Fetched together: the host would wait for a GPU with each number.
        numbers: list[list[float]] = torch.stack(
            [torch.stack(losses).double(), torch.stack(distances)]
        ).tolist()
        return numbers[0], numbers[1]

    def _validation_loss(self, task: Task[FedFomoConfig], rows: Tensor) -> Tensor:
        """Return the mean cross-entropy on the validation samples, in eval mode and without augmentation."""
        self.model.eval()
        same = len(self.knowledge_batches) == len(self.train_batches)
        batches = self.knowledge_batches if same else self.train_batches
        total = torch.zeros((), device=self.device, dtype=self.dtype)
        generator = torch_generator(task.client_seed, "validation-items")
        for x, y in batches.ordered(task.config.batch_size, rows, generator=generator):
            total += label_loss(self.model(self.to_device(x)), self.to_device(y), reduction="sum")
        return total / len(rows)

    def _parameters(self) -> dict[str, nn.Parameter]:
        """Return the model's parameters by the names of its ``state_dict``, each once."""
        tensors = self.model.state_dict(keep_vars=True)
        named = {id(tensor): (name, tensor) for name, tensor in reversed(list(tensors.items()))}
        return {name: value for name, value in named.values() if isinstance(value, nn.Parameter)}
