"""Random generators derived from a seed and a purpose. The global generators are neither read nor seeded.

Every random choice in flwr-kd comes from a generator that is derived from (seed, purpose, round, partition).
Therefore the order in which clients run, and the number of processes, cannot change a number.
"""

from __future__ import annotations

import hashlib
import operator
import os
import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn

__all__ = [
    "derive_seed",
    "forked_global_rng",
    "may_draw_from_global_rng",
    "numpy_generator",
    "private_randomness",
    "seed_global_generators",
    "seed_of_state",
    "torch_generator",
]

_LOCK = threading.RLock()


def _make_lock() -> None:
    """Make a new lock in a forked process: the thread that may have held the old one is not there."""
    global _LOCK
    _LOCK = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_make_lock)


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


def seed_global_generators(seed: int, others: Sequence[torch.Generator] = ()) -> None:
    """Seed the global generators of torch (on the CPU), NumPy and Python, for a user's code that draws from them.

    Only in a process of its own, or within :func:`private_randomness`.
    """
    random.seed(derive_seed(seed, "python"))
    np.random.seed(derive_seed(seed, "numpy") % 2**32)  # noqa: NPY002
    for place, generator in enumerate((torch.default_generator, *others)):
        generator.manual_seed(derive_seed(seed, "torch", place))


@contextmanager
def private_randomness(seed: int, others: Sequence[torch.Generator] = ()) -> Iterator[None]:
    """Seed the global generators within the block; the caller's states are put back at its end.

    All threads share the global generators, so one block runs at a time.

    Parameters
    ----------
    seed : int
        Any of :func:`derive_seed`.
    others : sequence of torch.Generator
        The user's own generators, for which the same holds.

    Examples
    --------
    >>> with private_randomness(0):
    ...     first = random.random()
    >>> with private_randomness(0):
    ...     random.random() == first
    True
    """
    generators = (torch.default_generator, *others)
    with _LOCK:
        before = [generator.get_state() for generator in generators]
        of_numpy, of_python = np.random.get_state(), random.getstate()  # noqa: NPY002
        try:
            seed_global_generators(seed, others)
            yield
        finally:
            random.setstate(of_python)
            np.random.set_state(of_numpy)  # noqa: NPY002
            for generator, state in zip(generators, before, strict=True):
                generator.set_state(state)


# Modules whose layers draw only in the layers that are named below.
_KNOWN_CODE = (
    "torch.nn.modules.",
    "torchvision.models.resnet",
    "torchvision.models.shufflenetv2",
    "flwr_kd.",
)


def may_draw_from_global_rng(model: nn.Module) -> bool:
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
    if not may_draw_from_global_rng(model):
        yield
        return
    devices = [device] if device.type == "cuda" else []
    with _LOCK, torch.random.fork_rng(devices=devices):
        torch.default_generator.manual_seed(derive_seed(seed, "layers"))
        if devices:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(derive_seed(seed, "layers"))
        yield
