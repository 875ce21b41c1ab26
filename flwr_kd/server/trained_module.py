"""A module that a server trains over the rounds, with its optimiser and random numbers in the checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from flwr_kd.learning.weights import by_prefix, check_finite_weights, get_weights, load_weights, with_prefix
from flwr_kd.seeding import torch_generator

__all__ = ["TrainedModule"]

NDArray = npt.NDArray[Any]
ModuleT = TypeVar("ModuleT", bound=nn.Module)
_MODULE, _OPTIMIZER, _RATES, _GENERATOR = "module", "optimizer", "rates", "generator"


class TrainedModule(Generic[ModuleT]):
    """A module, the optimiser over it, and a generator, which a resumed run has as an uninterrupted one.

    Parameters
    ----------
    module : nn.Module
        As it is before round 1, on the device where it is trained.
    make_optimizer : callable
        ``make_optimizer(module)``: a fresh optimiser over its parameters. Learning rates are part of the state;
        other settings are not, and come from this function again.
    seed : int
        The run's; the generator's seed is derived from it.
    purpose : str
        Tells several modules of a strategy apart.

    Attributes
    ----------
    module : nn.Module
        In training mode only where its user has put it there.
    optimizer : Optimizer
        Fresh after :meth:`reset`.
    generator : torch.Generator
        On the CPU.

    Examples
    --------
    >>> def optimizer(module):
    ...     return torch.optim.Adam(module.parameters(), lr=0.1)
    >>> trained = TrainedModule(nn.Linear(2, 1), optimizer, seed=0)
    >>> for _ in range(2):
    ...     trained.module(torch.rand(4, 2, generator=trained.generator)).sum().backward()
    ...     trained.optimizer.step()
    >>> other = TrainedModule(nn.Linear(2, 1), optimizer, seed=1)
    >>> other.load_state_arrays(trained.state_arrays())
    >>> torch.equal(other.module.weight, trained.module.weight)
    True
    """

    def __init__(
        self,
        module: ModuleT,
        make_optimizer: Callable[[ModuleT], torch.optim.Optimizer],
        *,
        seed: int,
        purpose: str = "trained-module",
    ) -> None:
        self.module, self._make, self._seed, self._purpose = module, make_optimizer, seed, purpose
        self._first = get_weights(module)
        self.reset()

    def reset(self) -> None:
        """Begin anew: the first weights, a fresh optimiser and generator."""
        load_weights(self.module, self._first)
        self.optimizer = self._make(self.module)
        self.generator = torch_generator(self._seed, self._purpose)

    def scale_rates(self, factor: float) -> None:
        """Multiply the learning rates, for a schedule."""
        for group in self.optimizer.param_groups:
            group["lr"] *= factor

    def check_finite(self, what: str, *, option: str = "learning-rate") -> None:
        """Refuse weights, or values of the optimiser's, that are no longer finite.

        Raises
        ------
        FloatingPointError
            Its text begins with ``what``, and suggests a smaller ``option``.
        """
        check_finite_weights(self.module, what, option=option)
        values = [value for state in self.optimizer.state.values() for value in state.values()]
        finite = [torch.isfinite(value).all() for value in values if isinstance(value, Tensor)]
        if finite and not bool(torch.stack([one.to(finite[0].device) for one in finite]).all()):
            raise FloatingPointError(f"the optimiser of {what} is no longer finite: try a smaller {option}")

    def state_arrays(self) -> dict[str, NDArray]:
        """Return all that :meth:`load_state_arrays` needs, for a strategy's own ``state_arrays``."""
        state = with_prefix(_MODULE, get_weights(self.module))
        for number, values in self.optimizer.state_dict()["state"].items():
            for name, value in values.items():
                if value is not None:
                    state[f"{_OPTIMIZER}/{number}/{name}"] = _as_array(value)
        rates = [float(group["lr"]) for group in self.optimizer.param_groups]
        return {
            **state,
            _RATES: np.array(rates),
            _GENERATOR: self.generator.get_state().numpy(),
        }

    def load_state_arrays(self, state: Mapping[str, NDArray]) -> None:
        """Take :meth:`state_arrays` back; an empty state is that of :meth:`reset`.

        Raises
        ------
        ValueError
            If the state is of another module or optimiser. The module may then have changed.
        """
        self.reset()
        if not state:
            return
        parts = by_prefix({name: value for name, value in state.items() if "/" in name})
        try:
            self._load_module(parts.get(_MODULE, {}))
            self._load_optimizer(by_prefix(parts.get(_OPTIMIZER, {})), state[_RATES])
            self.generator.set_state(torch.from_numpy(np.array(state[_GENERATOR])))
        except (KeyError, RuntimeError, TypeError) as error:
            raise ValueError(f"the state of {self._purpose} is not this module's: {error}") from None

    def _load_module(self, weights: Mapping[str, NDArray]) -> None:
        expected = {name: value.shape for name, value in self._first.items()}
        if {name: value.shape for name, value in weights.items()} != expected:
            raise ValueError(f"the state of {self._purpose} has other arrays than {sorted(expected)}")
        load_weights(self.module, weights)

    def _load_optimizer(self, values: Mapping[str, Mapping[str, NDArray]], rates: NDArray) -> None:
        own = self.optimizer.state_dict()
        if len(rates) != len(own["param_groups"]):
            raise ValueError(f"the state of {self._purpose} has {len(rates)} learning rates")
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        state: dict[int, dict[str, Tensor]] = {}
        for number, named in values.items():
            shape = parameters[int(number)].shape if int(number) < len(parameters) else None
            state[int(number)] = {name: torch.from_numpy(np.array(value)) for name, value in named.items()}
            if any(value.shape not in (shape, torch.Size()) for value in state[int(number)].values()):
                raise ValueError(f"the state of {self._purpose} is of other parameters")
        groups = [
            {**group, "lr": float(rate)} for group, rate in zip(own["param_groups"], rates, strict=True)
        ]
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})


def _as_array(value: Any) -> NDArray:
    return value.detach().cpu().numpy().copy() if isinstance(value, Tensor) else np.array(value)
