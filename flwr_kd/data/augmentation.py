"""Random views of training images, drawn from a generator that the caller owns."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from flwr_kd.checks import DataError, number

__all__ = ["AUGMENTATIONS", "augmentation", "random_affine"]

AUGMENTATIONS = ("none", "crop", "crop-flip")
"""Names that :func:`augmentation` accepts."""

Augment = Callable[[Tensor, torch.Generator], Tensor]


def augmentation(name: str) -> Augment | None:
    """Return ``augment(x, generator) -> x`` for images ``[B, K, H, W]``, or None for ``"none"``.

    Parameters
    ----------
    name : str
        ``"crop"``: pad by an eighth of the side (4 of 32, 1 of 8) with the edge's pixels, and crop at random.
        ``"crop-flip"``: crop, and mirror half of the images; not suitable for digits or letters.

    Raises
    ------
    DataError
        If the name is unknown. The returned function raises it for inputs other than images.

    Examples
    --------
    >>> view = augmentation("crop")
    >>> view(torch.ones(2, 1, 8, 8), torch.Generator().manual_seed(0)).shape
    torch.Size([2, 1, 8, 8])
    """
    if name not in AUGMENTATIONS:
        raise DataError(f"augment must be one of {', '.join(AUGMENTATIONS)}, not {name!r}")
    if name == "none":
        return None
    return _crop if name == "crop" else _crop_and_flip


def _crop(x: Tensor, generator: torch.Generator) -> Tensor:
    if x.ndim != 4:
        raise DataError(f"only images [B, K, H, W] can be cropped, not {list(x.shape)}")
    count, _, height, width = x.shape
    margin = max(1, min(height, width) // 8)
    moves = torch.randint(0, 2 * margin + 1, (2, count, 1), generator=generator).to(x.device)
    rows = (moves[0] + torch.arange(height, device=x.device))[:, :, None]
    columns = (moves[1] + torch.arange(width, device=x.device))[:, None, :]
    which = torch.arange(count, device=x.device)[:, None, None]
    padded = F.pad(x, (margin, margin, margin, margin), mode="replicate").movedim(1, -1)
    return padded[which, rows, columns].movedim(-1, 1)


def _crop_and_flip(x: Tensor, generator: torch.Generator) -> Tensor:
    x = _crop(x, generator)
    mirrored = torch.rand(len(x), generator=generator).to(x.device) < 0.5
    return torch.where(mirrored[:, None, None, None], x.flip(-1), x)


def random_affine(
    x: Tensor, generator: torch.Generator, *, degrees: float, scale: tuple[float, float]
) -> Tensor:
    """Rotate and scale each image by random numbers about its centre.

    Source: FedHyb, section 3.1, the views R_m. Pixels are interpolated (bilinear). Pixels outside the image repeat
    the nearest pixel of its edge.

    Parameters
    ----------
    x : Tensor
        Images ``[B, K, H, W]``. Inputs of another shape have no rotation, and are returned unchanged.
    generator : torch.Generator
        A generator on the CPU.
    degrees : float
        Largest angle, in [0, 180]. Angles are uniform in [-degrees, degrees].
    scale : tuple of float
        Smallest and largest factor, positive. Factors are uniform between them; above 1 the image is enlarged.

    Raises
    ------
    DataError
        If a number is out of its range.

    Examples
    --------
    >>> x = torch.rand(2, 1, 8, 8)
    >>> draw = torch.Generator().manual_seed(0)
    >>> torch.allclose(random_affine(x, draw, degrees=0, scale=(1, 1)), x, atol=1e-6)
    True
    """
    low, high = scale
    number("degrees", degrees, 0, 180, error=DataError)
    if not 0 < low <= high < math.inf:
        raise DataError(f"scale must be two positive finite numbers in order, not {scale!r}")
    if x.ndim != 4:
        return x
    angle, factor = torch.rand((2, len(x)), generator=generator, dtype=torch.float64)
    angle = (2 * angle - 1) * math.radians(degrees)
    factor = low + (high - low) * factor
    height, width = x.shape[2:]
    sine, cosine, zero = angle.sin() / factor, angle.cos() / factor, torch.zeros_like(angle)
    # Coordinates run from -1 to 1 along both sides, so that a rotation without the ratio of the sides would shear.
    rows = torch.stack(
        [
            torch.stack([cosine, sine * height / width, zero], dim=1),
            torch.stack([-sine * width / height, cosine, zero], dim=1),
        ],
        dim=1,
    )
    grid = F.affine_grid(rows.to(x), list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, mode="bilinear", padding_mode="border", align_corners=False)
