"""Public samples for a distillation: how they are checked, read, tried on a model, and identified."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from flwr_kd.checks import ConfigError
from flwr_kd.config import DistillationConfig
from flwr_kd.learning.batches import Batches, DatasetError
from flwr_kd.text import first_line

__all__ = [
    "batches_on",
    "check_all_came",
    "check_samples",
    "digest_of",
    "pass_size",
    "read_samples",
    "try_model",
]


def batches_on(
    samples: Batches, config: DistillationConfig, device: torch.device
) -> Callable[[], Iterator[Tensor]]:
    """Return a callable that yields all samples in order, in batches on a device."""
    return lambda: (x.to(device) for x, _ in samples.ordered(pass_size(config)))


def check_all_came(targets: tuple[Tensor, ...], samples: Batches) -> None:
    """Refuse targets of another number of samples than there are.

    Raises
    ------
    DatasetError
        If a ``collate_fn`` returned more or fewer samples than it was given.
    """
    if len(targets[0]) != len(samples):
        raise DatasetError(f"collate_fn returned {len(targets[0])} samples of {len(samples)}")


def pass_size(config: DistillationConfig) -> int:
    """Return how many samples pass at once where nothing is learnt."""
    return max(config.batch_size, 256)


def check_samples(samples: Batches, what: str) -> None:
    """Refuse samples that cannot be distilled on.

    Raises
    ------
    DatasetError
        If there are none, or a loader's own sampler decides which there are.
    """
    if not len(samples):
        raise DatasetError(f"{what} is empty: distillation needs at least one sample")
    if samples.has_own_sampler:
        raise DatasetError(
            f"{what} must not be a loader with a sampler of its own: each sample's targets are made once"
        )


def read_samples(samples: Batches, what: str) -> Iterator[Tensor]:
    """Yield all samples in batches ``[B, ...]``, in their order, and refuse what cannot be used.

    Raises
    ------
    DatasetError
        If samples do not go into batches, have values that are not finite, or are more or fewer than there should
        be. The text begins with ``what``.
    """
    count = 0
    try:
        for x, _ in samples.ordered(256):
            count += len(x)
            if not bool(torch.isfinite(x).all()):
                raise DatasetError(f"{what} has values that are not finite")
            yield x
    except (TypeError, RuntimeError) as error:  # what torch raises where items make no batch
        raise DatasetError(f"{what} does not go into batches: {first_line(error)}") from None
    if count != len(samples):
        raise DatasetError(f"{what}'s collate_fn returned {count} samples of {len(samples)}")


@torch.no_grad()
def try_model(model: nn.Module, samples: Batches, device: torch.device, *, what: str, called: str) -> int:
    """Show a model the first sample, in eval mode, and return the number of its classes.

    Raises
    ------
    ConfigError
        If the model does not take it, or returns no logits ``[B, C]``. The text names both by ``called`` and
        ``what``.
    """
    x = samples.example().to(device)
    try:
        logits = model.eval()(x)
    except Exception as error:  # whatever a user's module raises on a shape that it does not take
        raise ConfigError(
            f"{called} does not take {what} of shape {list(x.shape[1:])}: {first_line(error)}"
        ) from None
    if not isinstance(logits, Tensor) or logits.ndim != 2 or len(logits) != 1:
        got = list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise ConfigError(f"{called} must return logits [B, C], got {got} of one sample")
    return int(logits.shape[1])


def digest_of(samples: Batches, what: str = "public_set") -> str:
    """Return the SHA-256 of samples in their order: their dtype, shape and bytes, without labels.

    Parameters
    ----------
    samples : Batches
        At least one. All are read, once.
    what : str
        What errors call them.

    Raises
    ------
    DatasetError
        If they do not go into batches, have values that are not finite, or are of a type that numpy has not.

    Notes
    -----
    Only sets that are equal to the last bit have the same one: files, transforms, and what decodes them must be
    alike.
    """
    found = hashlib.sha256()
    for x in read_samples(samples, what):
        try:
            rows = x.detach().cpu().contiguous().numpy()
        except TypeError:
            raise DatasetError(f"{what} must have inputs of a dtype that numpy has, got {x.dtype}") from None
        for row in rows:
            found.update(f"{row.dtype} {list(row.shape)} ".encode())
            found.update(row.tobytes())
    return found.hexdigest()
