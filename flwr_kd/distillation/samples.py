"""Public samples for a distillation: how they are checked, read, tried on a model, and identified."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor, nn

from flwr_kd.checks import ConfigError
from flwr_kd.distillation.config import DistillationConfig
from flwr_kd.inputs import Inputs, is_finite, shape_text
from flwr_kd.learning.batches import Batches, DatasetError
from flwr_kd.learning.passes import pass_size
from flwr_kd.text import first_line

__all__ = [
    "batches_on",
    "check_all_present",
    "check_samples",
    "digest_of",
    "read_samples",
    "try_model",
]

_READ_SIZE = 256


def batches_on(
    samples: Batches, config: DistillationConfig, device: torch.device
) -> Callable[[], Iterator[Inputs]]:
    """Return a callable that yields all samples in order, in batches on a device."""
    return lambda: (x.to(device) for x, _ in samples.ordered(pass_size(device, config.batch_size)))


def check_all_present(targets: tuple[Tensor, ...], samples: Batches) -> None:
    """Refuse targets whose number is not that of the samples.

    Raises
    ------
    DatasetError
        If a ``collate_fn`` returned another number of samples than it was given.
    """
    if len(targets[0]) != len(samples):
        raise DatasetError(f"collate_fn returned {len(targets[0])} samples of {len(samples)}")


def check_samples(samples: Batches, what: str) -> None:
    """Refuse samples that cannot be used in a distillation.

    Raises
    ------
    DatasetError
        If there are none, or a loader's sampler has no fixed rows.
    """
    if not len(samples):
        raise DatasetError(f"{what} is empty: distillation needs at least one sample")
    if samples.free_sampler is not None:
        raise DatasetError(
            f"{what} must not be a loader whose sampler has no fixed rows ({samples.free_sampler}): each sample's "
            "targets are made once; give the data set, or a loader without that sampler"
        )


def read_samples(samples: Batches, what: str) -> Iterator[Inputs]:
    """Yield all samples in batches ``[B, ...]``, in their order, and refuse unusable ones.

    Raises
    ------
    DatasetError
        If samples do not fit into batches, have values that are not finite, or their number is not the data set's
        length. The text begins with ``what``.
    """
    count = 0
    try:
        for x, _ in samples.as_they_are().ordered(_READ_SIZE):
            count += len(x)
            if not is_finite(x):
                raise DatasetError(f"{what} has values that are not finite")
            yield x
    except (TypeError, RuntimeError) as error:  # PyTorch raises these where items cannot be stacked.
        raise DatasetError(f"{what} does not go into batches: {first_line(error)}") from None
    if count != len(samples):
        raise DatasetError(f"{what}'s collate_fn returned {count} samples of {len(samples)}")


@torch.no_grad()
def try_model(
    model: nn.Module,
    samples: Batches,
    device: torch.device,
    *,
    what: str,
    called: str,
    hint: Callable[[], str] | None = None,
) -> int:
    """Run a model on the first sample, in eval mode, and return the number of its classes.

    Parameters
    ----------
    model : nn.Module
        On the device.
    samples : Batches
        At least one.
    device : torch.device
        The model's.
    what, called : str
        Names of the samples and of the model in the error's text.
    hint : callable, optional
        Returns what the error adds if the model fails on the sample.

    Raises
    ------
    ConfigError
        If the model fails on the sample, or does not return logits ``[B, C]``.
    """
    x = samples.example().to(device)
    try:
        logits = model.eval()(x)
    except Exception as error:  # A user's module may raise anything on a shape that it does not take.
        text = f"{called} does not take {what} of shape {shape_text(x)}: {first_line(error)}"
        more = hint() if hint is not None else ""
        raise ConfigError("; ".join(part for part in (text, more) if part)) from None
    if not isinstance(logits, Tensor) or logits.ndim != 2 or len(logits) != 1:
        got = list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise ConfigError(f"{called} must return logits [B, C], got {got} of one sample")
    return int(logits.shape[1])


def digest_of(samples: Batches, what: str = "public_set") -> str:
    """Return the SHA-256 of samples in their order: names, dtypes, shapes and bytes of inputs, without labels.

    Parameters
    ----------
    samples : Batches
        At least one. Each is read once.
    what : str
        Name of the samples in errors.

    Raises
    ------
    DatasetError
        If samples do not fit into batches, have values that are not finite, or a dtype that NumPy does not have.

    Notes
    -----
    Digests are equal only if the samples are equal bit by bit: files, transforms and image decoders must be the
    same.
    """
    digest = hashlib.sha256()
    for x in read_samples(samples, what):
        parts = {"": x} if isinstance(x, Tensor) else {name: x[name] for name in sorted(x.keys())}
        columns = {f"{name} " if name else "": _as_rows(part, what) for name, part in parts.items()}
        for place in range(len(x)):
            for name, rows in columns.items():
                row = rows[place]
                digest.update(f"{name}{row.dtype} {list(row.shape)} ".encode())
                digest.update(row.tobytes())
    return digest.hexdigest()


def _as_rows(x: Tensor, what: str) -> npt.NDArray[Any]:
    try:
        return x.detach().cpu().contiguous().numpy()
    except TypeError:
        raise DatasetError(f"{what} must have inputs of a dtype that numpy has, got {x.dtype}") from None
