"""pFedHN's client halves: train the parameters that were produced, and send what training took away."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor, nn

from flwr_kd.checks import ConfigError
from flwr_kd.client.client import KDClient
from flwr_kd.client.flower_mods import CLIPPING, active_mods
from flwr_kd.client.private_update import ZERO
from flwr_kd.client.stream import endless_batches
from flwr_kd.client.task import Answer, Task
from flwr_kd.learning.loop import fit, make_optimizer
from flwr_kd.learning.weights import check_finite_weights, size_of, with_prefix
from flwr_kd.models import count_parameters
from flwr_kd.models.feature import find_head

from .config import PFedHNConfig
from .functional import gradient_norm_clipped
from .messages import PRODUCED

NDArray = npt.NDArray[Any]
_OWN = "own"
"""The set of the client's state."""


class PFedHNClient(KDClient[PFedHNConfig]):
    """Trains the parameters that the hypernetwork produced for it, and sends the difference.

    Frozen parameters are those of the given model. Buffers, such as BatchNorm's statistics, are not produced: the
    client keeps its own between rounds. For parameters see :class:`flwr_kd.KDClient`.
    """

    config_class = PFedHNConfig
    takes_multi_label = True
    update_from = ZERO
    _slots: dict[str, Tensor]

    def kept_parameters(self) -> list[nn.Parameter]:
        """Return the trained parameters that stay at the client; none here."""
        return []

    def produced(self) -> dict[str, nn.Parameter]:
        """Return the trained parameters that the server produces, by their names; a shared one by its first."""
        named: dict[str, nn.Parameter] = {}
        known = {id(parameter) for parameter in self.kept_parameters()}
        for name, value in self.model.state_dict(keep_vars=True).items():
            if isinstance(value, nn.Parameter) and value.requires_grad and id(value) not in known:
                named[name] = value
                known.add(id(value))
        return named

    def own(self) -> dict[str, Tensor]:
        """Return what stays at the client and changes: buffers, and parameters that are kept."""
        kept = {id(parameter) for parameter in self.kept_parameters()}
        return {
            name: value
            for name, value in self.model.state_dict(keep_vars=True).items()
            if not isinstance(value, nn.Parameter) or id(value) in kept
        }

    def kept_bytes(self) -> int:
        """Return the size of that, with two numbers of the optimiser for each parameter that is kept."""
        kept = {str(i): parameter for i, parameter in enumerate(self.kept_parameters())}
        return size_of(self.own()) + 2 * size_of(kept)

    @torch.no_grad()
    def load(self, task: Task[PFedHNConfig]) -> None:
        """Load what the server produced, and what this client kept of its own.

        Raises
        ------
        PayloadError
            If number, names or shapes do not fit what this client trains.
        """
        received = self.named(task, task.arrays)
        for name, parameter in self.produced().items():
            parameter.copy_(torch.tensor(received[name]))
        self._slots = {}
        own = self.own()
        kept = self.kept(_OWN) if own else None
        for key, value in (kept or {}).items():
            kind, _, name = key.partition("/")
            if kind == "model":
                own[name].copy_(value)
            else:
                self._slots[name] = value

    def held_parameters(self, config: PFedHNConfig) -> int:
        """Return the parameters that were produced, and what training makes of them."""
        return 2 * count_parameters(self.model)

    def phase_train(self, task: Task[PFedHNConfig]) -> Answer:
        """Train for the round's batches, and return Δ = θ - θ̃ (algorithm 1).

        The accuracies are those of θ̃; that of θ, as it came, is the metric ``produced-accuracy``.

        Raises
        ------
        ConfigError
            If a mod of Flower's clips what is sent, which is a difference already.
        FloatingPointError
            If the loss or the weights are no longer finite.
        """
        mods = CLIPPING.intersection(active_mods())
        if mods:
            raise ConfigError(
                f"{min(mods)} clips the difference between the weights that a client sends and those that it "
                "received, and this method's clients send that difference itself: remove it, and set clip-norm"
            )
        self.load(task)
        before = {name: parameter.detach().clone() for name, parameter in self.produced().items()}
        measured = self.measure(task.config.batch_size)
        metrics = {} if measured is None else {PRODUCED: measured.accuracy}
        metrics["train-loss"] = self._train(task)
        check_finite_weights(self.model)
        metrics |= self.local_metrics(task.config.batch_size)
        self.keep()
        after = self.produced()
        return Answer(
            arrays=[(before[name] - after[name].detach()).cpu().numpy() for name in task.names],
            num_examples=len(self.train_batches),
            metrics=metrics,
        )

    def keep(self) -> None:
        """Keep what is this client's own until the next round."""
        tensors = with_prefix("model", self.own()) | with_prefix("optimizer", self._slots)
        if tensors:
            self.state.save(tensors, _OWN)

    def _train(self, task: Task[PFedHNConfig]) -> float:
        config, produced = task.config, list(self.produced().values())
        optimizer = make_optimizer(self.model, config, config.learning_rate_at(task.server_round))
        kept = _Slots(optimizer, self.kept_parameters())
        kept.load(self._slots)
        optimizer.register_step_pre_hook(lambda *_: gradient_norm_clipped(produced, config.clip_norm))
        steps = config.steps(len(self.train_batches))
        loss = fit(
            self.model,
            optimizer,
            lambda: islice(endless_batches(self, task), steps),
            self.in_precision(self.objective(task)),
            epochs=1,
        )
        self._slots = kept.tensors()
        return loss

    def named_arrays(self) -> dict[str, NDArray]:
        """Return the arrays that are exchanged: what the server produces."""
        return {
            name: parameter.detach().cpu().contiguous().numpy() for name, parameter in self.produced().items()
        }


class PFedHNPCClient(PFedHNClient):
    """pFedHN-PC: the classifier stays at the client, and what its optimiser remembers of it.

    The classifier begins as in the given model, and goes on from round to round. For parameters see
    :class:`flwr_kd.KDClient`.
    """

    def kept_parameters(self) -> list[nn.Parameter]:
        """Return the classifier's trained parameters.

        Raises
        ------
        ValueError
            If the model has ``features`` and ``classify`` of its own, and names no ``head``.
        """
        head = find_head(self.model)
        if head is None:
            raise ValueError(
                f"pfedhn-pc needs a model with a head, a module; {type(self.model).__name__} has none: give "
                "FeatureModel(extractor, head), or take pfedhn"
            )
        return [parameter for parameter in head.parameters() if parameter.requires_grad]


class _Slots:
    """What an optimiser remembers of some of its parameters, such as momentum."""

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]) -> None:
        chosen = {id(parameter) for parameter in parameters}
        self._optimizer = optimizer
        self._all = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._numbers = [number for number, parameter in enumerate(self._all) if id(parameter) in chosen]

    def tensors(self) -> dict[str, Tensor]:
        """Return it as named tensors."""
        state = self._optimizer.state_dict()["state"]
        return {
            f"{place}/{name}": value
            for place, number in enumerate(self._numbers)
            for name, value in state.get(number, {}).items()
            if isinstance(value, Tensor)
        }

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Take :meth:`tensors` back."""
        if not tensors:
            return
        state: dict[int, dict[str, Tensor]] = {}
        for key, value in tensors.items():
            place, _, name = key.partition("/")
            state.setdefault(self._numbers[int(place)], {})[name] = value
        if isinstance(self._optimizer, torch.optim.SGD):
            # PyTorch's fused step refuses momentum of some parameters only; zeros are the same as none.
            for number, parameter in enumerate(self._all):
                state.setdefault(number, {"momentum_buffer": torch.zeros_like(parameter)})
        self._optimizer.load_state_dict({**self._optimizer.state_dict(), "state": state})
