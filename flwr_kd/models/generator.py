"""A conditional generator of samples, for servers that have no data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flwr_kd.models.checks import check_shape, check_size
from flwr_kd.models.initialisation import DrawFrom

__all__ = ["ConditionalGenerator", "build_generator"]

_CHANNELS = 32


class ConditionalGenerator(nn.Module):
    """A network that turns noise and a class into a sample; built by :func:`build_generator`.

    Attributes
    ----------
    latent_dim, num_classes : int
        Sizes of the noise and of the one-hot class, which are concatenated. With 0 classes it is not conditional.
    """

    def __init__(self, net: nn.Module, *, latent_dim: int, num_classes: int) -> None:
        super().__init__()
        self.net = net
        self.latent_dim, self.num_classes = latent_dim, num_classes

    def forward(self, z: Tensor, labels: Tensor | None = None) -> Tensor:
        """Return samples ``[B, ...]`` of noise ``[B, Z]`` and, where it is conditional, classes ``[B]``."""
        if labels is None or not self.num_classes:
            return cast(Tensor, self.net(z))
        # The factor gives the class the same norm as the noise, so that it has as much influence.
        one_hot = math.sqrt(self.latent_dim) * F.one_hot(labels, self.num_classes).to(z.dtype)
        return cast(Tensor, self.net(torch.cat([z, one_hot], dim=1)))


class _Resize(nn.Module):
    def __init__(self, height: int, width: int) -> None:
        super().__init__()
        self.size = (height, width)

    def forward(self, x: Tensor) -> Tensor:
        return F.interpolate(x, size=self.size, mode="nearest")


def build_generator(
    input_shape: Sequence[int], *, num_classes: int, latent_dim: int, seed: int
) -> ConditionalGenerator:
    """Build a generator with random weights that depend only on the arguments.

    For images ``(K, H, W)`` it has a ``Linear`` to maps of a quarter of the side and three 3×3 convolutions; the
    maps are enlarged before the second and the third. For any other shape it has a hidden layer of 256. A BatchNorm
    without parameters, after a tanh, normalises the outputs per channel (or per number) over the batch, as in DAFL
    (Chen et al., ICCV 2019): models get normalised data, and nothing else is known of the data.

    Parameters
    ----------
    input_shape : sequence of int
        Shape of one sample.
    num_classes : int
        C, at least 2; 0 for a generator of noise alone.
    latent_dim : int
        Size of the noise, at least 1.
    seed : int
        In ``[0, 2**63)``.

    Raises
    ------
    TypeError
        If a size or the seed is not an int.
    ValueError
        If a number is out of its range.

    Examples
    --------
    >>> generator = build_generator((1, 28, 28), num_classes=10, latent_dim=16, seed=0)
    >>> generator(torch.zeros(4, 16), torch.arange(4)).shape
    torch.Size([4, 1, 28, 28])
    """
    shape = check_shape("a generator", None, tuple(input_shape))
    check_size("num_classes", num_classes, 2 if num_classes else 0)
    check_size("latent_dim", latent_dim, 1)
    check_size("seed", seed, 0, 2**63 - 1)
    inputs = latent_dim + num_classes
    with torch.device("cpu"), DrawFrom(torch.Generator().manual_seed(seed)):
        net = _of_images(inputs, shape) if len(shape) == 3 else _of_numbers(inputs, shape)
    return ConditionalGenerator(net, latent_dim=latent_dim, num_classes=num_classes)


def _of_images(inputs: int, shape: Sequence[int]) -> nn.Sequential:
    channels, height, width = shape
    quarter = (math.ceil(height / 4), math.ceil(width / 4))
    half = (math.ceil(height / 2), math.ceil(width / 2))

    def block(before: int, after: int) -> list[nn.Module]:
        convolution = nn.Conv2d(before, after, 3, padding=1, bias=False)
        return [convolution, nn.BatchNorm2d(after), nn.LeakyReLU(0.2)]

    return nn.Sequential(
        *(nn.Linear(inputs, _CHANNELS * math.prod(quarter)), nn.Unflatten(1, (_CHANNELS, *quarter))),
        *(nn.BatchNorm2d(_CHANNELS), nn.LeakyReLU(0.2)),
        *(*block(_CHANNELS, _CHANNELS), _Resize(*half)),
        *(*block(_CHANNELS, _CHANNELS // 2), _Resize(height, width)),
        *(nn.Conv2d(_CHANNELS // 2, channels, 3, padding=1), nn.Tanh()),
        nn.BatchNorm2d(channels, affine=False),
    )


def _of_numbers(inputs: int, shape: Sequence[int]) -> nn.Sequential:
    size = math.prod(shape)
    return nn.Sequential(
        *(nn.Linear(inputs, 256), nn.BatchNorm1d(256), nn.LeakyReLU(0.2)),
        *(nn.Linear(256, size), nn.Tanh(), nn.BatchNorm1d(size, affine=False)),
        nn.Unflatten(1, tuple(shape)),
    )
