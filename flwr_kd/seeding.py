"""Random generators derived from a seed and a purpose. The global generators are neither read nor seeded.

Every random choice in flwr-kd comes from a generator that is derived from (seed, purpose, round, partition).
Therefore the order in which clients run, and the number of processes, cannot change a number.
"""

from __future__ import annotations

import hashlib
import operator
import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

__all__ = [
    "PrivateRandomness",
    "derive_seed",
    "forked_global_rng",
    "numpy_generator",
    "seed_of_state",
    "torch_generator",
]

_LOCK = threading.RLock()


def derive_seed(seed: int, *purpose: int | str) -> int:
    """Return a 63-bit seed that depends on ``seed`` and on every part of ``purpose``.

    >>> derive_seed(0, "sample", 1) == derive_seed(0, "sample", 1) != derive_seed(0, "sample", 2)
    True
    """
    # repr(np.int64(1)) differs from repr(1), so the parts become Python's numbers and strings first.
    parts = (str(part) if isinstance(part, str) else operator.index(part) for part in purpose)
    text = repr((int(seed), *parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


def torch_generator(seed: int, *purpose: int | str) -> torch.Generator:
    """Return a separate CPU generator of torch for one purpose."""
    return torch.Generator().manual_seed(derive_seed(seed, *purpose))


def numpy_generator(seed: int, *purpose: int | str) -> np.random.Generator:
    """Return a separate generator of NumPy for one purpose."""
    return np.random.default_rng(derive_seed(seed, *purpose))


def seed_of_state(generator: torch.Generator) -> int:
    """Return a seed that depends on a generator's state, which does not change.

    >>> seed_of_state(torch_generator(0, "order")) == seed_of_state(torch_generator(0, "order"))
    True
    """
    state = generator.get_state().numpy().tobytes()
    return int.from_bytes(hashlib.blake2b(state, digest_size=8).digest(), "big") >> 1


class PrivateRandomness:
    """Random numbers for a user's code that draws from the global generators, apart from everybody else's.

    Within :meth:`active` the global generators of torch (on the CPU), NumPy and Python have states of their own,
    which begin with the seed and go on from block to block. At the end of a block the caller's states are put back.
    All threads share the global generators, so one block runs at a time.

    Parameters
    ----------
    seed : int
        Any of :func:`derive_seed`.
    others : sequence of torch.Generator
        The user's own generators, for which the same holds.

    Examples
    --------
    >>> randomness = PrivateRandomness(0)
    >>> with randomness.active():
    ...     first = random.random()
    >>> with PrivateRandomness(0).active():
    ...     random.random() == first
    True
    """

    def __init__(self, seed: int, others: Sequence[torch.Generator] = ()) -> None:
        self._seed, self._others = seed, tuple(others)
        self._states: tuple[Any, ...] | None = None

    @contextmanager
    def active(self) -> Iterator[None]:
        """Let the global generators be these within the block."""
        with _LOCK:
            before = self._read()
            try:
                if self._states is None:
                    self._begin()
                else:
                    self._write(self._states)
                yield
            finally:
                self._states = self._read()
                self._write(before)

    def _begin(self) -> None:
        random.seed(derive_seed(self._seed, "python"))
        np.random.seed(derive_seed(self._seed, "numpy") % 2**32)  # noqa: NPY002
        for place, generator in enumerate(self._torch()):
            generator.manual_seed(derive_seed(self._seed, "torch", place))

    def _torch(self) -> tuple[torch.Generator, ...]:
        return (torch.default_generator, *self._others)

    def _read(self) -> tuple[Any, ...]:
        states = tuple(generator.get_state() for generator in self._torch())
        return random.getstate(), np.random.get_state(), states  # noqa: NPY002

    def _write(self, states: tuple[Any, ...]) -> None:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
        for generator, state in zip(self._torch(), states[2], strict=True):
            generator.set_state(state)


# Modules whose layers draw only in the layers that are named below.
_KNOWN_CODE = (
    "torch.nn.modules.",
    "torchvision.models.resnet",
    "torchvision.models.shufflenetv2",
    "flwr_kd.",
)


def _may_draw_from_global_rng(model: nn.Module) -> bool:
    """Return whether a layer draws from torch's global generator, or has unknown code that might."""
    random_layers = (nn.modules.dropout._DropoutNd, nn.RReLU, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d)
    wrapped = getattr(model, "original", None)
    modules = [*model.modules(), *([wrapped] if isinstance(wrapped, nn.Module) else [])]
    return any(
        isinstance(module, random_layers)
        # Recurrent and attention layers apply dropout without a dropout layer inside.
        or (isinstance(module, nn.RNNBase | nn.MultiheadAttention) and module.dropout > 0)
        or not f"{type(module).__module__}.".startswith(_KNOWN_CODE)
        for module in modules
    )


@contextmanager
def forked_global_rng(seed: int, model: nn.Module, device: torch.device) -> Iterator[None]:
    """Seed torch's global generator within the block, for layers that can only draw from it (dropout).

    The caller's global state is restored at the end. All threads share the global generator, so models that may
    draw from it run one at a time: those with random layers, and those with a user's own layers. For other models
    nothing is done.
    """
    if not _may_draw_from_global_rng(model):
        yield
        return
    devices = [device] if device.type == "cuda" else []
    with _LOCK, torch.random.fork_rng(devices=devices):
        torch.default_generator.manual_seed(derive_seed(seed, "layers"))
        if devices:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(derive_seed(seed, "layers"))
        yield
