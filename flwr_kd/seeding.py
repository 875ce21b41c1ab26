"""Random generators derived from a seed and a purpose; the global ones are left alone.

Every random choice in flwr-kd comes from a generator that is derived from (seed, purpose, round, partition),
so that the order in which clients run, and in how many processes, cannot change a number.
"""

from __future__ import annotations

import hashlib
import operator
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn

__all__ = ["derive_seed", "forked_global_rng", "numpy_generator", "torch_generator"]

_LOCK = threading.RLock()


def derive_seed(seed: int, *purpose: int | str) -> int:
    """Return a 63-bit seed that depends on ``seed`` and on every part of ``purpose``.

    >>> derive_seed(0, "sample", 1) == derive_seed(0, "sample", 1) != derive_seed(0, "sample", 2)
    True
    """
    # repr(np.int64(1)) is not repr(1): plain numbers and texts first.
    parts = (str(part) if isinstance(part, str) else operator.index(part) for part in purpose)
    text = repr((int(seed), *parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


def torch_generator(seed: int, *purpose: int | str) -> torch.Generator:
    """Return a private CPU generator of torch for one purpose."""
    return torch.Generator().manual_seed(derive_seed(seed, *purpose))


def numpy_generator(seed: int, *purpose: int | str) -> np.random.Generator:
    """Return a private generator of numpy for one purpose."""
    return np.random.default_rng(derive_seed(seed, *purpose))


_SILENT_CODE = (
    "torch.nn.modules.",
    "torchvision.models.resnet",
    "torchvision.models.shufflenetv2",
    "flwr_kd.",
)


def _may_draw_from_global_rng(model: nn.Module) -> bool:
    """Say whether a layer draws from torch's global generator, or is code that might."""
    random_layers = (nn.modules.dropout._DropoutNd, nn.RReLU, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d)
    wrapped = getattr(model, "original", None)
    modules = [*model.modules(), *([wrapped] if isinstance(wrapped, nn.Module) else [])]
    return any(
        isinstance(m, random_layers)
        # Recurrent and attention layers drop out without a dropout layer inside.
        or (isinstance(m, nn.RNNBase | nn.MultiheadAttention) and m.dropout > 0)
        or not f"{type(m).__module__}.".startswith(_SILENT_CODE)
        for m in modules
    )


@contextmanager
def forked_global_rng(seed: int, model: nn.Module, device: torch.device) -> Iterator[None]:
    """Give layers that can only draw from torch's global generator (dropout) a state of their own.

    The caller's global state is put back at the end. All threads share the global generator, so models that
    may draw from it run one at a time: those with random layers, and those with a user's own layers. Where
    no layer can, nothing is done.
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
